"""Chooses the held-out rows that a model answers while it trains (`eval_generation`): spread over kinds, always the same."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from ..configuration.errors import NormalignError
from ..evaluation.own_data import is_right, letter_of, way_of
from . import processes
from .data_sets import MalformedRow, _open, _opening, _Rows, _Source, check_source
from .images import name_of_row
from .output_folder import EVAL_ROWS_NAME
from .recipe import Recipe
from .row_check import RowReport, check_rows, first_bad, summary


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig, ProcessorMixin

logger = logging.getLogger(__name__)

_IMAGE_COLUMNS = ("image", "images")


@dataclass(frozen=True)
class EvalRow:
    """One held-out row without its question.

    Args:
        row, source: its number in its source, and the source's name.
        kind: under which its answer is counted.
        answer: the last words of the assistant in it.
        choices: the texts of which one is right, if the row names some; `answer` is then a letter.
        to_the_letter: whether nothing but `answer` itself is right, as for the built-in scenes.
        length: tokens of the whole row with its images, once it has been looked at.
    """

    row: int
    source: str
    kind: str
    answer: str
    choices: tuple[str, ...] = ()
    to_the_letter: bool = False
    length: int = 0

    @property
    def name(self) -> str:
        """`Row 3 of held_out.json`."""
        return name_of_row({"row": self.row, "source": self.source})

    def is_right(self, answer: str) -> bool:
        """Whether a model's answer is this row's."""
        return answer == self.answer if self.to_the_letter else is_right(answer, [self.answer], self.choices)


@dataclass(frozen=True)
class EvalRows:
    """The chosen rows, and the Dataset that reads their messages and images, undecoded, at the same places."""

    rows: list[EvalRow]
    dataset: Dataset

    def read(self, places: Sequence[int]) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
        """Of each place the turns up to the answer, and the row with the images of these turns."""
        return [_up_to_the_answer(row) for row in self.dataset.__getitems__(list(places))]


def load_eval_rows(recipe: Recipe) -> EvalRows | None:
    """The `eval_generation` held-out rows of a recipe, the same whenever it is called; None where the recipe has none.

    Each kind has as many rows as the others, as far as it has them. A row's kind is its `kind`; without one it is choice,
    yes_no or text, by its answer. All rows are read for that, without their images.

    Raises:
        NormalignError: the data are not there or have no row, or a row is no conversation with an answer, and
            `on_bad_row` is `error`.
        RecipeError: `eval_data` cannot be a data set.
    """
    if recipe.eval_generation is None:
        return None
    settings = recipe.held_out_source()
    check_source(settings, "eval_data")
    with _opening(settings.path or settings.name):
        source = _Source(settings, _open(settings, held_out=True))
    found, bad = _questions(source)
    if bad and recipe.on_bad_row == "error":
        raise NormalignError(
            f"{len(bad):,} of {len(source):,} held-out rows cannot be asked. The first: {bad[0]} Put them right, or leave "
            f"them out with --on_bad_row skip."
        )
    if bad and processes.is_first():
        logger.warning(f"{len(bad):,} held-out rows are left out (on_bad_row: skip). The first: {bad[0]}")
    if not found:
        raise NormalignError(f"The held-out data {source.name} have no row to answer. Name others by eval_data.")
    if recipe.eval_generation > len(found) and processes.is_first():
        logger.warning(
            f"eval_generation asks for {recipe.eval_generation:,} held-out rows, and {source.name} has {len(found):,}: all "
            f"of them are answered."
        )
    rows = [found[place] for place in chosen([row.kind for row in found], recipe.eval_generation, settings.seed)]
    return EvalRows(rows, _dataset(source, rows))


def chosen(kinds: Sequence[str], count: int, seed: int = 0) -> list[int]:
    """At most `count` places, in order: one of each kind in turn, drawn by `seed`, until there are enough."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, kind in enumerate(kinds):
        places[kind].append(place)
    for kind, some in places.items():
        Random(f"eval_generation {seed} {kind}").shuffle(some)
    left, taken = [places[kind] for kind in sorted(places)], []
    while left and len(taken) < count:
        taken += [some.pop() for some in left[: count - len(taken)]]
        left = [some for some in left if some]
    return sorted(taken)


def check_eval_rows(
    chosen_rows: EvalRows, processor: ProcessorMixin, recipe: Recipe, config: PreTrainedConfig
) -> RowReport:
    """Looks at the chosen rows as at those of the training; of several processes each looks at a share and hears of all."""
    return check_rows(chosen_rows.dataset, processor, recipe, progress=False, config=config)


def without_bad_eval_rows(chosen_rows: EvalRows, report: RowReport, recipe: Recipe) -> EvalRows:
    """The rows that can be answered, with their lengths, by the recipe's `on_bad_row`.

    Raises:
        NormalignError: a row is bad and `on_bad_row` is `error`, or all are.
    """
    bad = {row.index for row in report.bad}
    if bad and (recipe.on_bad_row == "error" or len(bad) == len(chosen_rows.rows)):
        raise NormalignError(
            f"The held-out rows of eval_generation: {summary(report)} Put them right, or leave them out with --on_bad_row "
            f"skip, which needs one good row.{first_bad(report)}"
        )
    if bad and processes.is_first():
        logger.warning(
            f"The held-out rows of eval_generation: {summary(report)} They are left out (on_bad_row: skip)."
            f"{first_bad(report)}"
        )
    good = [place for place in range(len(chosen_rows.rows)) if place not in bad]
    rows = [replace(chosen_rows.rows[place], length=report.lengths[place]) for place in good]
    return EvalRows(rows, chosen_rows.dataset.select(good))


def note_eval_rows(chosen_rows: EvalRows, folder: str | Path) -> None:
    """Writes which rows are answered into a run's folder, as eval_generation_rows.json."""
    kept = ("row", "source", "kind", "answer")
    rows = [{key: getattr(row, key) for key in kept} for row in chosen_rows.rows]
    (Path(folder) / EVAL_ROWS_NAME).write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _questions(source: _Source) -> tuple[list[EvalRow], list[str]]:
    """Every row that can be asked, and what is wrong with each other one."""
    rows = source.rows
    if hasattr(rows, "column_names"):
        rows = rows.remove_columns([name for name in _IMAGE_COLUMNS if name in rows.column_names])
    found, bad = [], []
    for number in range(len(rows)):
        raw = rows[number]
        raw = raw if isinstance(raw, bytes) else raw.to_pylist()[0]
        try:
            found.append(_question(source, raw, number))
        except NormalignError as error:
            bad.append(str(error))
    return found, bad


def _question(source: _Source, raw: Any, number: int) -> EvalRow:
    """What is asked of a row, and its right answer.

    Raises:
        NormalignError: it is no conversation, has no answer, or its `choices` are none or do not hold it.
    """
    row = source.formed(raw, number)
    raw = json.loads(raw) if isinstance(raw, bytes) else raw
    place = _place_of_answer(row["messages"])
    answer = "" if place is None else _text(row["messages"][place])
    if not answer:
        raise MalformedRow(row, "it has no answer of the assistant.")
    choices = _choices(raw, row)
    if choices:
        answer = letter_of(answer, choices, name_of_row(row))
    kind = " ".join(str(raw.get("kind") or "").split())
    return EvalRow(
        row=number,
        source=source.name,
        kind=kind or way_of([answer], choices),
        answer=answer,
        choices=choices,
        to_the_letter=source.kind == "digit_scenes",
    )


def _choices(raw: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, ...]:
    choices = raw.get("choices") or ()
    if not choices:
        return ()
    if not isinstance(choices, list) or not 1 < len(choices) <= 26 or not all(isinstance(one, str) for one in choices):
        raise MalformedRow(row, "its 'choices' are no list of 2 to 26 texts.")
    return tuple(one.strip() for one in choices)


def _place_of_answer(messages: Sequence[Mapping[str, Any]]) -> int | None:
    return next((at for at in reversed(range(len(messages))) if messages[at]["role"] == "assistant"), None)


def _text(message: Mapping[str, Any]) -> str:
    return "".join(part.get("text") or "" for part in message["content"]).strip()


def _up_to_the_answer(row: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    turns = row["messages"][: _place_of_answer(row["messages"])]
    images = sum(part["type"] == "image" for turn in turns for part in turn["content"])
    return turns, {**row, "images": row["images"][:images]}


def _dataset(source: _Source, rows: Sequence[EvalRow]) -> Dataset:
    import datasets

    numbers = {"origin": [0] * len(rows), "row": [row.row for row in rows]}
    features = datasets.Features({"origin": datasets.Value("int32"), "row": datasets.Value("int64")})
    return datasets.Dataset.from_dict(numbers, features=features).with_transform(_Rows([source]))
