"""What the metrics have in common: a share with its interval, and a look at lists that go along with the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...configuration.errors import NormalignError
from ..intervals import share_interval


def share(right: Sequence[bool], name: str = "accuracy") -> dict[str, Any]:
    """The share of answers that are right, its 95% interval (Wilson's) from `low` to `high`, and how many they are.

    Raises:
        NormalignError: there is no answer.
    """
    if not right:
        raise NormalignError("There are no answers to score: predictions and references are empty.")
    found = share_interval(sum(right), len(right))
    return {name: found.value, "low": found.low, "high": found.high, "n": found.n}


def refuse_other_length(what: str, given: Sequence, answers: Sequence) -> None:
    """Raises NormalignError unless `given`, called `what`, has an entry for each of the answers."""
    if len(given) != len(answers):
        raise NormalignError(
            f"{what} has {len(given)} entries, but there are {len(answers)} answers: give one for each."
        )
