"""Intervals for shares, means and paired differences, so that no figure is shown without how sure it is."""

from __future__ import annotations

import math
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


def share_interval(hits: int, n: int) -> Estimate:
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

    With `strata` (one name for each score) it is the plain mean of the strata's means, as in MMStar, and the standard error
    that of a stratified sample.

    Raises:
        ValueError: there are no scores.
    """
    values = np.asarray(scores, dtype=np.float64)
    if not len(values):
        raise ValueError("no scores have no mean")
    if strata is not None:
        names = sorted(set(strata), key=str)
        groups = [values[[stratum == name for stratum in strata]] for name in names]
        mean = float(np.mean([group.mean() for group in groups]))
        stderr = math.sqrt(sum(_stderr(group) ** 2 for group in groups)) / len(groups)
        return Estimate(mean, stderr, mean - Z95 * stderr, mean + Z95 * stderr, len(values))
    if np.isin(values, (0.0, 1.0)).all():
        return share_interval(int(values.sum()), len(values))
    mean, stderr = float(values.mean()), _stderr(values)
    return Estimate(mean, stderr, mean - Z95 * stderr, mean + Z95 * stderr, len(values))


def paired_interval(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """The mean of first - second over the same samples, with the normal 95% interval of paired differences.

    Raises:
        ValueError: there are no samples, or not the same number of each.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} scores cannot be paired with {len(second)}")
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    if not len(differences):
        raise ValueError("no pairs have no difference")
    mean, stderr = float(differences.mean()), _stderr(differences)
    return Estimate(mean, stderr, mean - Z95 * stderr, mean + Z95 * stderr, len(differences))


def _stderr(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0
