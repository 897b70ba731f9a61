"""Looks at every row before the first step: its images, its tokens, its conversation; and does about bad rows what is asked."""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..assembly.pairing import visual_token_count
from ..configuration.errors import NormalignError
from .data_sets import MalformedRow
from .images import name_of_row, open_images
from .recipe import Recipe


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedConfig, ProcessorMixin

logger = logging.getLogger(__name__)

KINDS = (
    "malformed",
    "missing image",
    "broken image",
    "placeholders",
    "placeholder in an answer",
    "no supervised token",
    "too long",
)
"""What can be wrong with a row; of several things the first is told."""

_ROWS_AT_ONCE = 64
_OF_A_STREAM = 1000
_SHOWN = 10


@dataclass
class BadRow:
    """A row that cannot be trained on: its place in the data set, its number in its source, and what is wrong."""

    index: int
    row: int | None
    source: str | None
    kind: str
    reason: str


@dataclass
class RowReport:
    """What a look at the rows found.

    Args:
        rows: how many were looked at; of a stream only its first.
        bad: those that cannot be trained on.
        lengths: tokens of each row with its images, 0 for a bad row whose tokens were not counted.
        whole: False if these were only the first rows of a stream.
    """

    rows: int = 0
    bad: list[BadRow] = field(default_factory=list)
    lengths: array = field(default_factory=lambda: array("l"))
    seconds: float = 0.0
    max_length: int | None = None
    whole: bool = True

    @property
    def kinds(self) -> dict[str, int]:
        """How many rows are bad in which way."""
        counts = Counter(bad.kind for bad in self.bad)
        return {kind: counts[kind] for kind in KINDS if kind in counts}

    def with_held_out(self, report: RowReport) -> RowReport:
        """This report with that of held-out rows behind it."""
        bad = self.bad + [replace(row, index=self.rows + row.index) for row in report.bad]
        return replace(
            self,
            rows=self.rows + report.rows,
            bad=bad,
            lengths=self.lengths + report.lengths,
            seconds=self.seconds + report.seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """For `--json`: the counts, and all bad rows."""
        return {
            "rows": self.rows,
            "good": self.rows - len(self.bad),
            "kinds": self.kinds,
            "bad": [vars(bad) for bad in self.bad],
            "longest": max(self.lengths, default=0),
            "max_length": self.max_length,
            "whole": self.whole,
            "seconds": round(self.seconds, 2),
            "rows_per_second": round(self.rows / max(self.seconds, 1e-9), 1),
        }

    def show(self) -> None:
        """Prints a line with the counts and the rate, and a table of bad rows by kind."""
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console, figures = Console(highlight=False), self.to_dict()
        console.print(
            f"{self.rows:,} rows looked at{'' if self.whole else ' (the first of a stream)'}, {figures['good']:,} good, "
            f"{len(self.bad):,} bad; {figures['rows_per_second']:,} rows a second. Longest row: {figures['longest']:,} "
            f"tokens; limit: {'none' if self.max_length is None else f'{self.max_length:,}'}.",
            soft_wrap=True,
        )
        if not self.bad:
            return
        table = Table("kind", "rows", "the first of them")
        for kind, count in self.kinds.items():
            first = [bad.reason for bad in self.bad if bad.kind == kind][:3]
            table.add_row(kind, f"{count:,}", "\n".join(escape(shortened(reason, 300)) for reason in first))
        console.print(table)


def shortened(text: str, most: int) -> str:
    """`text` in one line of at most `most` letters."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 4]} ..."


class RowChecker:
    """Says what is wrong with a row.

    Args:
        processor: with a chat template that marks the assistant's tokens.
        max_length: the most tokens of a row, with its images; None is no limit.
    """

    def __init__(self, processor: ProcessorMixin, max_length: int | None):
        self.processor, self.max_length = processor, max_length
        self.tokens_of_an_image = tokens_of_an_image(processor)

    def images(self, row: dict[str, Any]) -> tuple[str, str] | None:
        """Kind and reason if an image of the row is missing or broken."""
        try:
            open_images(row)
        except NormalignError as error:
            missing = isinstance(error.__cause__, FileNotFoundError)
            return ("missing image" if missing else "broken image"), str(error)
        return None

    def texts(self, rows: list[dict[str, Any]]) -> list[tuple[int, tuple[str, str] | None]]:
        """Of each row the length in tokens, and kind and reason if they cannot be trained on."""
        return [self._judged(row, tokens) for row, tokens in zip(rows, self._tokens(rows))]

    def _tokens(self, rows: list[dict[str, Any]]) -> list[tuple[list[int], list[int]] | str]:
        """Token ids and assistant masks; or a text, where the chat template refuses a row."""
        try:
            tokens = self.processor.tokenizer.apply_chat_template(
                [row["messages"] for row in rows],
                chat_template=self.processor.chat_template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        # a template raises what it likes, and stops all rows of the call
        except Exception as error:
            return (
                [f"its chat template refuses it: {error}"] if len(rows) == 1 else [self._tokens([r])[0] for r in rows]
            )
        return list(zip(tokens["input_ids"], tokens["assistant_masks"]))

    def _judged(self, row: dict[str, Any], tokens) -> tuple[int, tuple[str, str] | None]:
        where = name_of_row(row)
        if not row["messages"]:
            return 0, ("malformed", f"{where} has no turns: its dialogue is empty.")
        if isinstance(tokens, str):
            return 0, ("malformed", f"{where} is malformed: {tokens}")
        ids, mask = tokens
        image, images = self.processor.image_token_id, len(row["images"] or ())
        marks = ids.count(image)
        length = len(ids) + marks * (self.tokens_of_an_image - 1)
        supervised = [token for token, marked in zip(ids, mask) if marked]
        reads = f"It reads: {str(row['messages'])[:300]}"
        if image in supervised:
            return length, (
                "placeholder in an answer",
                f"{where} has an image placeholder within the assistant's answer, where the loss would see it. {reads}",
            )
        if marks != images:
            return length, (
                "placeholders",
                f"{where} has {images} image{'' if images == 1 else 's'}, but {marks} image placeholder"
                f"{'' if marks == 1 else 's'} in its text. {reads}",
            )
        if not supervised or not any(map(_says_something, row["messages"])):
            what = "missing" if not supervised else "empty"
            return length, (
                "no supervised token",
                f"{where} has no assistant token to learn from: its answer is {what}. {reads}",
            )
        if self.max_length is not None and length > self.max_length:
            return length, (
                "too long",
                f"{where} has {length} tokens ({marks} image{'' if marks == 1 else 's'} of {self.tokens_of_an_image} "
                f"each), more than max_length {self.max_length}. Rows are never cut: shorten it, raise max_length, or "
                f"leave such rows out with on_bad_row: skip.",
            )
        return length, None


def _says_something(message: dict[str, Any]) -> bool:
    """Whether it is the assistant's, and not empty."""
    if message["role"] != "assistant":
        return False
    content = message["content"]
    return bool(content.strip() if isinstance(content, str) else "".join(p.get("text") or "" for p in content).strip())


def tokens_of_an_image(processor: ProcessorMixin) -> int:
    """How many tokens a processor of fixed image size writes for an image."""
    from PIL import Image

    pixels = processor.image_processor(images=Image.new("RGB", (64, 64)), return_tensors="pt")["pixel_values"]
    fields = ("patch_size", "num_additional_image_tokens", "vision_feature_select_strategy")
    return visual_token_count(*pixels.shape[-2:], *(getattr(processor, name) for name in fields))


def longest_row(recipe: Recipe, config: PreTrainedConfig | None) -> int | None:
    """The most tokens of a row: the recipe's `max_length`, or else the language model's `max_position_embeddings`."""
    if recipe.max_length is not None or config is None:
        return recipe.max_length
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_rows(
    dataset: Dataset | IterableDataset,
    processor: ProcessorMixin,
    recipe: Recipe,
    progress: bool = True,
    config: PreTrainedConfig | None = None,
) -> RowReport:
    """Looks at every row, or at the first thousand of a stream; each image is opened once and let go.

    Images are decoded by `recipe.dataloader_workers` threads (at least one); a few dozen rows are held at a time.

    Args:
        dataset: rows as `load_data` gives them.
        progress: show a bar on stderr.
        config: the model's, which knows the longest row where the recipe does not.
    """
    import datasets

    report = RowReport(max_length=longest_row(recipe, config))
    checker = RowChecker(processor, report.max_length)
    report.whole = isinstance(dataset, datasets.Dataset)
    # each process of a run looks at its share; a stream's first rows are few
    rank, processes = (int(os.environ.get(name, one)) for name, one in (("RANK", 0), ("WORLD_SIZE", 1)))
    share = range(rank, len(dataset), processes) if report.whole else None
    total = len(share) if report.whole else None
    started = time.monotonic()
    with (
        _bar("rows looked at", total, progress and rank == 0) as advance,
        ThreadPoolExecutor(max(1, recipe.dataloader_workers)) as threads,
    ):
        for batch in _batches(dataset, share):
            _look(checker, batch, report, threads)
            advance(len(batch))
    if report.whole and processes > 1:
        _put_together_(report, rank, processes)
    report.seconds = time.monotonic() - started
    return report


def _put_together_(report: RowReport, rank: int, processes: int) -> None:
    """Makes of the reports of all processes' shares one that is the same in each."""
    import torch
    from accelerate import PartialState

    for bad in report.bad:
        bad.index = rank + bad.index * processes
    PartialState(cpu=not torch.cuda.is_available())
    shares: list[Any] = [None] * processes
    torch.distributed.all_gather_object(shares, (report.bad, report.lengths))
    report.bad = sorted((bad for some, _ in shares for bad in some), key=lambda bad: bad.index)
    report.rows = sum(len(lengths) for _, lengths in shares)
    report.lengths = array("l", [0]) * report.rows
    for first, (_, lengths) in enumerate(shares):
        report.lengths[first::processes] = lengths


def _batches(dataset: Dataset | IterableDataset, share: range | None) -> Iterator[list[dict[str, Any]]]:
    """The rows of a Dataset that `share` numbers, or the first of a stream, some at a time."""
    if share is not None:
        for start in range(0, len(share), _ROWS_AT_ONCE):
            yield _read(dataset, share[start : start + _ROWS_AT_ONCE])
        return
    rows = islice(dataset, _OF_A_STREAM)
    while batch := list(islice(rows, _ROWS_AT_ONCE)):
        yield batch


def _read(dataset: Dataset, indices: range) -> list[dict[str, Any]]:
    try:
        return dataset.__getitems__(list(indices))
    except MalformedRow as error:
        if len(indices) == 1:
            return [{"problem": str(error), "row": error.row, "source": error.source}]
    return [row for place in range(len(indices)) for row in _read(dataset, indices[place : place + 1])]


def _look(checker: RowChecker, batch: list[dict[str, Any]], report: RowReport, threads: ThreadPoolExecutor) -> None:
    """Adds what a batch of rows shows to the report."""
    readable = [row for row in batch if not row.get("problem")]
    broken = threads.map(checker.images, readable)
    # the tokens are counted while the threads decode
    texts = checker.texts(readable) if readable else []
    found = zip(texts, broken)
    for row in batch:
        length, problem = 0, ("malformed", row.get("problem"))
        if not row.get("problem"):
            (length, of_text), of_images = next(found)
            problem = of_text if of_text and of_text[0] == "malformed" else of_images or of_text
        if problem is not None:
            report.bad.append(BadRow(report.rows, row.get("row"), row.get("source"), *problem))
        report.lengths.append(length)
        report.rows += 1


@contextmanager
def _bar(what: str, total: int | None, shown: bool):
    """A progress bar on stderr: call it with how many more are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bars:
        task = bars.add_task(what, total=total)
        yield lambda count: bars.advance(task, count)


def without_bad_rows(
    dataset: Dataset | IterableDataset, report: RowReport, processor: ProcessorMixin, recipe: Recipe
) -> Dataset | IterableDataset:
    """The data set that may be trained on, by the recipe's `on_bad_row`.

    A Dataset gets a column `length`, the tokens of each row with its images. The rows of a stream are looked at as they come,
    for as long as it runs; with `skip` their images are decoded for that once more.

    Raises:
        NormalignError: a row is bad and `on_bad_row` is `error`, or all are.
    """
    import datasets

    if report.bad and recipe.on_bad_row == "error":
        raise NormalignError(
            f"{summary(report)} Put them right, or leave them out with --on_bad_row skip; `normalign train RECIPE --check "
            f"--json` lists all of them.{first_bad(report)}"
        )
    if len(report.bad) == report.rows:
        none = "There are no rows to train on." if not report.rows else summary(report)
        raise NormalignError(f"{none} So nothing is left to train on.{first_bad(report)}")
    if report.bad:
        logger.warning("%s They are left out (on_bad_row: skip).%s", summary(report), first_bad(report))
    if not isinstance(dataset, datasets.Dataset):
        return dataset.filter(_StreamFilter(RowChecker(processor, report.max_length), recipe.on_bad_row))
    dataset = dataset.add_column("length", list(report.lengths), feature=datasets.Value("int64"))
    if report.bad:
        bad = {row.index for row in report.bad}
        dataset = dataset.select([index for index in range(len(dataset)) if index not in bad])
    return dataset


class _StreamFilter:
    """Keeps the good rows of a stream; names each that is left out, with a count."""

    def __init__(self, checker: RowChecker, policy: str):
        self.checker, self.policy, self.left_out = checker, policy, 0

    def __call__(self, row: dict[str, Any]) -> bool:
        problem = ("malformed", row["problem"]) if row.get("problem") else self.checker.texts([row])[0][1]
        if problem is None and self.policy == "skip":
            # where a broken image stops the run, the collator's own look at it is enough
            problem = self.checker.images(row)
        if problem is None:
            return True
        if self.policy == "error":
            raise NormalignError(f"{problem[1]} To leave such rows out, set on_bad_row: skip.")
        self.left_out += 1
        logger.warning("Left out (%s, number %d of this reader): %s", problem[0], self.left_out, problem[1])
        return False


def summary(report: RowReport) -> str:
    """`3 of 100 rows cannot be trained on: 2 broken image, 1 too long.`"""
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.kinds.items())
    scope = f"{report.rows:,} rows" if report.whole else f"the first {report.rows:,} rows of the stream"
    return f"{len(report.bad):,} of {scope} cannot be trained on: {kinds}."


def first_bad(report: RowReport) -> str:
    """The first ten bad rows with what is wrong, a line each."""
    more = len(report.bad) - _SHOWN
    reasons = [shortened(bad.reason, 400) for bad in report.bad[:_SHOWN]]
    return "".join(f"\n  - {line}" for line in [*reasons, *([f"and {more:,} more"] if more > 0 else [])])
