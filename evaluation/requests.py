"""What is asked of a model for one row, and what its answers score: the interface between data, model and results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol


if TYPE_CHECKING:
    from PIL import Image


Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Request:
    """One row's question.

    `images` opens the images when the row's turn comes, so that a benchmark's images are never all in memory.
    `instances` are lm-eval's own requests, one for each choice; they are empty where the answer is generated.
    """

    id: str
    text: str
    images: Callable[[], list[Image.Image]] = list
    instances: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Unit:
    """What counts once in a score: a row, or several that count together, with a score from 0 to 1 and its stratum."""

    rows: tuple[str, ...]
    score: float
    stratum: Hashable = None


@dataclass
class Scores:
    """What the answers to a task score.

    `value` is the harness's own figure from 0 to 1; `units` what it is the mean of; `other` further figures of the task;
    `kinds` the scores of the units of each kind, where a task has kinds; `parsed` what was read out of each answer by our rules, where the task has such; `extracted` the score by these rules;
    `targets` the right answers; `errors` the rows that the harness could not score.
    """

    value: float | None
    units: list[Unit] = field(default_factory=list)
    other: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, list[float]] = field(default_factory=dict)
    targets: dict[str, Any] = field(default_factory=dict)
    parsed: dict[str, str | None] = field(default_factory=dict)
    extracted: float | None = None
    errors: dict[str, str] = field(default_factory=dict)


class Task(Protocol):
    """A benchmark, or a file of one's own, ready to be asked and scored."""

    name: str
    metric: str
    generates: bool  # or else log-likelihoods are asked for
    has_images: bool
    max_new_tokens: int
    stop: Sequence[str]
    about: dict[str, Any]  # harness, its version, the task's version, data set, split

    def requests(self) -> list[Request]: ...

    def score(self, answers: dict[str, Any]) -> Scores: ...
