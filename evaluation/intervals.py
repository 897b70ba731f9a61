"""Intervals for shares, means and paired differences, so that no figure is shown without how sure it is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np


Z95 = 1.959963984540054


class Estimate(NamedTuple):
    """A value with its standard error, its 95% interval from `low` to `high`, and the number of samples behind it."""

    value: float
    stderr: float
    low: float
    high: float
    n: int


def share_interval(hits: float, n: float) -> Estimate:
    """The share hits / n with Wilson's 95% interval, which holds for few samples and at 0 and 1 too.

    Source: E. B. Wilson, Probable Inference, the Law of Succession, and Statistical Inference, JASA 22 (1927).

    Raises:
        ValueError: there are no samples, or more hits than samples.
    """
    if not 0 <= hits <= n or n == 0:
        raise ValueError(f"{hits} hits among {n} samples have no share")
    share, spread = hits / n, Z95**2 / n
    middle = (share + spread / 2) / (1 + spread)
    half = Z95 / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    # rounding must not push the interval past the share at 0 and 1
    low, high = (0.0 if hits == 0 else middle - half), (1.0 if hits == n else middle + half)
    return Estimate(share, math.sqrt(share * (1 - share) / max(1, n - 1)), low, high, n)


def mean_interval(scores: Sequence[float], strata: Sequence[Hashable] | None = None) -> Estimate:
    """The mean with its 95% interval: Wilson's where all scores are 0 or 1, else the normal one.

    With `strata` (one name for each score) it is the plain mean of the strata's means, as in MM-Star; the standard error is
    that of a stratified sample, and Wilson's interval that of as many samples as would give equal weights the same variance.

    Raises:
        ValueError: there are no scores.
    """
    values = np.asarray(scores, dtype=np.float64)
    if not len(values):
        raise ValueError("no scores have no mean")
    weights = _weights(len(values), strata)
    mean, stderr = _mean(values, strata), _stderr(values, strata)
    if _are_shares(values):
        effective = 1 / float(weights @ weights)
        wilson = share_interval(mean * effective, effective)
        return Estimate(mean, stderr, wilson.low, wilson.high, len(values))
    return Estimate(mean, stderr, mean - Z95 * stderr, mean + Z95 * stderr, len(values))


def paired_interval(
    first: Sequence[float], second: Sequence[float], strata: Sequence[Hashable] | None = None
) -> Estimate:
    """The mean of first - second over the same samples, with the 95% interval of paired differences.

    Where all scores are 0 or 1 it is Agresti and Min's, which stays open where the two differ nowhere; else the normal one.
    `strata` as in `mean_interval`.

    Source: A. Agresti and Y. Min, Simple improved confidence intervals for comparing matched proportions, Statistics in
    Medicine 24 (2005): half a sample is added to each cell of the table of two by two.

    Raises:
        ValueError: there are no samples, or not the same number of each.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} scores cannot be paired with {len(second)}")
    one, two = (np.asarray(scores, dtype=np.float64) for scores in (first, second))
    if not len(one):
        raise ValueError("no pairs have no difference")
    weights = _weights(len(one), strata)
    mean, stderr = _mean(one - two, strata), _stderr(one - two, strata)
    if not (_are_shares(one) and _are_shares(two)):
        return Estimate(mean, stderr, mean - Z95 * stderr, mean + Z95 * stderr, len(one))
    effective = 1 / float(weights @ weights)
    more, less = (float(weights @ (one > two)) * effective + 0.5, float(weights @ (one < two)) * effective + 0.5)
    n = effective + 2
    middle = (more - less) / n
    half = Z95 / n * math.sqrt(more + less - (more - less) ** 2 / n)
    return Estimate(mean, stderr, max(-1.0, middle - half), min(1.0, middle + half), len(one))


def _are_shares(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _weights(n: int, strata: Sequence[Hashable] | None) -> np.ndarray:
    """What each sample counts in the mean; together 1."""
    if strata is None:
        return np.full(n, 1 / n)
    sizes = Counter(strata)
    return np.array([1 / (len(sizes) * sizes[stratum]) for stratum in strata])


def _mean(values: np.ndarray, strata: Sequence[Hashable] | None) -> float:
    if strata is None:
        return float(values.mean())
    return float(np.mean([group.mean() for group in _groups(values, strata)]))


def _groups(values: np.ndarray, strata: Sequence[Hashable]) -> list[np.ndarray]:
    return [values[[stratum == name for stratum in strata]] for name in dict.fromkeys(strata)]


def _stderr(values: np.ndarray, strata: Sequence[Hashable] | None) -> float:
    if strata is not None:
        groups = _groups(values, strata)
        return math.sqrt(sum(_stderr(group, None) ** 2 for group in groups)) / len(groups)
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0
