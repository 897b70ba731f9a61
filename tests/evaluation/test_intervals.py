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
    assert paired.stderr < apart / 3


@pytest.mark.parametrize("share", [0.1, 0.5, 0.93])
def test_wilsons_interval_covers_the_true_share_about_95_times_in_100(share):
    draws = np.random.default_rng(1).binomial(200, share, 2000)
    bounds = [share_interval(int(hits), 200) for hits in draws]
    # the coverage of any interval for a share jumps about 0.95, for hits are whole numbers
    assert 0.93 <= np.mean([b.low <= share <= b.high for b in bounds]) <= 0.975
