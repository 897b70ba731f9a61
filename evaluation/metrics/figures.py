"""What the metrics have in common: a look at what is given, and a share with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...configuration.errors import NormalignError
from ..intervals import share_interval


class Checked:
    """Stands before `evaluate.Metric` in a metric's bases: refuses what the library would turn into texts without a word."""

    def add_batch(self, *, predictions=None, references=None, **columns):
        """See `evaluate.Metric.add_batch`.

        Raises:
            NormalignError: there is no answer, an answer is no text, or there are not as many references as answers.
        """
        if predictions is None or references is None or isinstance(predictions, str) or isinstance(references, str):
            raise NormalignError(
                "Give predictions and references as lists, a text for each answer and its reference beside it."
            )
        if len(predictions) == 0:
            share([])
        refuse_other_length("references", references, predictions)
        for number, said in enumerate(predictions, start=1):
            if not isinstance(said, str):
                raise NormalignError(
                    f"Answer {number} is {said!r}, which is no text: predictions hold what the model said. Leave out rows "
                    f"that failed to run, and count them."
                )
        super().add_batch(predictions=predictions, references=references, **columns)


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
