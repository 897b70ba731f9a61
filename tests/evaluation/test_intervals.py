"""Intervals: Wilson's against its roots, coverage of the paired and stratified ones, and what has no interval."""

import math

import numpy as np
import pytest

from normalign.evaluation.intervals import Z95, mean_interval, paired_interval, share_interval


@pytest.mark.parametrize(("hits", "n"), [(0, 1), (1, 1), (3, 10), (0, 50), (50, 50), (4000, 10042)])
def test_wilson_bounds_are_the_shares_that_the_observed_one_is_z_standard_errors_from(hits, n):
    estimate = share_interval(hits, n)
    assert estimate.value == hits / n and estimate.n == n
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    for bound in {estimate.low, estimate.high} - {0.0, 1.0}:
        assert abs(hits / n - bound) == pytest.approx(Z95 * math.sqrt(bound * (1 - bound) / n), rel=1e-9)


def test_no_samples_and_impossible_counts_have_no_interval():
    for hits, n in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="no share"):
            share_interval(hits, n)
    with pytest.raises(ValueError, match="no mean"):
        mean_interval([])
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_interval([1.0], [1.0, 0.0])


def test_zeros_and_ones_get_wilsons_interval_and_other_scores_the_normal_one():
    assert mean_interval([1, 0, 0, 1]) == share_interval(2, 4)
    scores = [0.5, 0.25, 1.0]
    estimate = mean_interval(scores)
    stderr = np.std(scores, ddof=1) / math.sqrt(3)
    assert estimate.stderr == pytest.approx(stderr) and estimate.high == pytest.approx(np.mean(scores) + Z95 * stderr)


def test_strata_weigh_the_same_however_many_samples_they_hold():
    estimate = mean_interval([1, 1, 1, 0, 0, 1], ["a", "a", "a", "a", "b", "b"])
    assert estimate.value == pytest.approx((0.75 + 0.5) / 2)
    a, b = np.std([1, 1, 1, 0], ddof=1) / 2, np.std([0, 1], ddof=1) / math.sqrt(2)
    assert estimate.stderr == pytest.approx(math.hypot(a, b) / 2)


def test_the_paired_interval_is_narrow_where_two_models_differ_on_few_samples():
    rng = np.random.default_rng(0)
    first = rng.integers(0, 2, 400).astype(float)
    second = first.copy()
    second[:12] = 0
    paired = paired_interval(first, second)
    apart = math.hypot(mean_interval(first).stderr, mean_interval(second).stderr)
    assert paired.value == pytest.approx(np.mean(first) - np.mean(second))
    assert paired.stderr < apart / 3 and paired.low < paired.value < paired.high


def test_no_difference_in_few_samples_is_no_proof_of_none():
    few, many = paired_interval([1, 0, 1], [1, 0, 1]), paired_interval([1, 0] * 500, [1, 0] * 500)
    assert few.value == many.value == 0 and few.low == -few.high < -0.3
    assert -0.005 < many.low < 0 < many.high < 0.005
    stratified = mean_interval([0, 0, 0], ["a", "b", "c"])
    assert stratified.low == 0 and stratified.high == pytest.approx(share_interval(0, 3).high)


def test_agresti_and_mins_interval_covers_the_true_difference():
    """Matched pairs: both right, only the first, only the second, neither."""
    rng = np.random.default_rng(2)
    shares = [0.5, 0.2, 0.1, 0.2]
    covered = 0
    for _ in range(1000):
        cells = rng.choice(4, 80, p=shares)
        paired = paired_interval(np.isin(cells, (0, 1)).astype(float), np.isin(cells, (0, 2)).astype(float))
        covered += paired.low <= 0.1 <= paired.high
    assert 0.93 <= covered / 1000 <= 0.975


def test_paired_scores_that_are_no_zeros_and_ones_get_the_normal_interval():
    first, second = [0.5, 0.25, 1.0, 0.0], [0.25, 0.25, 0.5, 0.5]
    paired = paired_interval(first, second)
    differences = np.subtract(first, second)
    assert paired.stderr == pytest.approx(np.std(differences, ddof=1) / 2)
    assert paired.high - paired.value == pytest.approx(Z95 * paired.stderr)


def test_paired_strata_weigh_the_same():
    paired = paired_interval([1, 1, 1, 1, 0], [0, 0, 0, 0, 1], ["a", "a", "a", "a", "b"])
    assert paired.value == 0.0 and paired.low < 0 < paired.high


@pytest.mark.parametrize("share", [0.1, 0.5, 0.93])
def test_wilsons_interval_covers_the_true_share_about_95_times_in_100(share):
    draws = np.random.default_rng(1).binomial(200, share, 2000)
    bounds = [share_interval(int(hits), 200) for hits in draws]
    # the coverage of any interval for a share jumps about 0.95, for hits are whole numbers
    assert 0.93 <= np.mean([b.low <= share <= b.high for b in bounds]) <= 0.975
