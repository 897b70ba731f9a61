"""Answers held-out rows by greedy generation while a recipe trains, and puts the accuracy into the log; trains on as if not."""

from __future__ import annotations

import logging
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed, nn
from transformers import TrainerCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import strtobool

from ..configuration.errors import NormalignError
from ..evaluation.batching import Failure, run_batched
from ..evaluation.generation import generate_answers
from ..evaluation.intervals import share_interval
from ..inspection.modes import eval_mode
from . import processes
from .eval_rows import EvalRows
from .images import open_images
from .recipe import Recipe


if TYPE_CHECKING:
    from transformers import ProcessorMixin

logger = logging.getLogger(__name__)

PREFIX = "eval_generation"
# Room for an answer that says more than it need: "The answer is B."
LEAST_NEW_TOKENS = 64
_SHOWN_FAILURES = 5


def refuse_shared_weights(recipe: Recipe) -> None:
    """Raises NormalignError where a recipe with `eval_generation` runs in a way in which no process has the whole model."""
    if recipe.eval_generation is None:
        return
    if strtobool(os.environ.get("ACCELERATE_USE_FSDP", "false")) or is_deepspeed_zero3_enabled():
        raise NormalignError(
            "eval_generation needs the whole model in each process, and FSDP2 and ZeRO-3 give each a share of the weights. "
            "Train with DDP or ZeRO-2 (configuration/accelerate/ddp.yaml, zero2.yaml), or leave eval_generation out, keep "
            "checkpoints with save_steps, and run `normalign evaluate` on them."
        )


class EvalGeneration:
    """Answers the chosen rows, shared out among the processes, and says how many answers are right.

    Args:
        processor: that of the model.
        rows: what is answered, with the lengths that `check_eval_rows` has found.
        limit: the most tokens that the language model takes; None is no limit.
        bfloat16: whether the training computes in bfloat16, as the answering then does.
    """

    def __init__(self, processor: ProcessorMixin, rows: EvalRows, limit: int | None = None, bfloat16: bool = False):
        self._processor, self.rows, self._limit, self._bfloat16 = processor, rows, limit, bfloat16
        answers = processor.tokenizer([row.answer for row in rows.rows], add_special_tokens=False)["input_ids"]
        # and the end of the turn
        self._answer_tokens = [len(ids) + 1 for ids in answers]
        # rows of like length in a batch, and in each process
        order = sorted(range(len(rows.rows)), key=lambda place: -rows.rows[place].length)
        rank = distributed.get_rank() if processes.count() > 1 else 0
        self._share = order[rank :: processes.count()]

    def measure(self, model: nn.Module) -> dict[str, float | int | None]:
        """What goes into the log, all keys beginning with `eval_generation/`; every process has to call this.

        `accuracy` with its 95% interval `low` to `high` (Wilson's; all null without an answer), `n` answers and `failed`
        rows over all, the same for each kind, and `seconds`. A row that raises is no answer: it is counted as failed, and
        named by a warning. Weights, gradients, the mode of each module and the random numbers are left as they were.
        """
        started = perf_counter()
        with eval_mode(model), _random_numbers_kept(), _with_cache(model), self._autocast(model):
            results = run_batched(self._share, lambda places: self._judged(model, places), batch_size="auto")
        outcomes = self._of_all_processes(dict(zip(self._share, results, strict=True)))
        figures = self._figures(outcomes)
        self._name_failures(outcomes)
        return {**figures, f"{PREFIX}/seconds": round(perf_counter() - started, 2)}

    def _autocast(self, model: nn.Module) -> AbstractContextManager:
        if not self._bfloat16:
            return nullcontext()
        return torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16)

    def _judged(self, model: nn.Module, places: list[int]) -> list[bool]:
        """Whether each row's answer is right."""
        if not self._fits(places):
            return [hit for place in places for hit in self._judged(model, [place])]
        asked = self.rows.read(places)
        answers = generate_answers(
            model,
            self._processor,
            [turns for turns, _ in asked],
            [open_images(row) for _, row in asked],
            batch_size=len(places),
            max_new_tokens=self._new_tokens(places),
        )
        return [self.rows.rows[place].is_right(answer) for place, answer in zip(places, answers, strict=True)]

    def _longest(self, places: Sequence[int]) -> tuple[int, int]:
        """Tokens of the longest question and of the longest right answer."""
        answer = max(self._answer_tokens[place] for place in places)
        return max(self.rows.rows[place].length - self._answer_tokens[place] for place in places), answer

    def _fits(self, places: Sequence[int]) -> bool:
        """Whether all may be given as many tokens as the longest answer has, without passing the model's limit."""
        return self._limit is None or len(places) == 1 or sum(self._longest(places)) <= self._limit

    def _new_tokens(self, places: Sequence[int]) -> int:
        question, answer = self._longest(places)
        room = LEAST_NEW_TOKENS if self._limit is None else min(LEAST_NEW_TOKENS, self._limit - question)
        return max(answer, room)

    def _of_all_processes(self, outcomes: dict[int, bool | Failure]) -> list[bool | Failure]:
        shares: list[dict[int, bool | Failure]] = [outcomes]
        if processes.count() > 1:
            shares *= processes.count()
            distributed.all_gather_object(shares, outcomes)
        together = {place: outcome for share in shares for place, outcome in share.items()}
        return [together[place] for place in range(len(self.rows.rows))]

    def _figures(self, outcomes: Sequence[bool | Failure]) -> dict[str, float | int | None]:
        by_kind: dict[str, list[bool | Failure]] = defaultdict(list)
        for row, outcome in zip(self.rows.rows, outcomes, strict=True):
            by_kind[row.kind].append(outcome)
        figures = _share_of(outcomes, PREFIX)
        for kind, some in sorted(by_kind.items()):
            figures |= _share_of(some, f"{PREFIX}/{kind}")
        return figures

    def _name_failures(self, outcomes: Sequence[bool | Failure]) -> None:
        failed = [
            f"{row.name}: {outcome}" for row, outcome in zip(self.rows.rows, outcomes) if isinstance(outcome, Failure)
        ]
        if failed and processes.is_first():
            more = len(failed) - _SHOWN_FAILURES
            shown = "; ".join(" ".join(line.split())[:300] for line in failed[:_SHOWN_FAILURES])
            logger.warning(
                f"eval_generation: {len(failed)} of {len(outcomes)} rows could not be answered and are counted as failed, not as "
                f"wrong. {shown}{f'; and {more} more' if more > 0 else ''}"
            )


class EvalGenerationCallback(TrainerCallback):
    """Has the rows answered every so many steps, and after the last one.

    Args:
        evaluation: what answers.
        every: optimizer steps between two evaluations; None is after the last step alone.
        note: gets the figures of `EvalGeneration.measure`, before the step is logged.
        paused: within it, the clock of the training's rates stands still.
    """

    def __init__(
        self,
        evaluation: EvalGeneration,
        every: int | None,
        note: Callable[[dict[str, float | int | None]], None],
        paused: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self.evaluation, self._every, self._note, self._paused = evaluation, every, note, paused

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Evaluates, where it is the turn of this step."""
        due = self._every is not None and state.global_step % self._every == 0
        if due or state.global_step == state.max_steps:
            with self._paused():
                self._note(self.evaluation.measure(model))


def line_of(figures: dict[str, Any]) -> str | None:
    """The figures of an evaluation in one line of text; None where there is none among the figures of a step."""
    if f"{PREFIX}/n" not in figures:
        return None
    kinds = [key.removeprefix(f"{PREFIX}/").removesuffix("/n") for key in figures if key.endswith("/n")]
    kinds = [kind for kind in kinds if f"{PREFIX}/{kind}/failed" in figures]
    parts = [_in_words(figures, PREFIX), *(f"{kind} {_in_words(figures, f'{PREFIX}/{kind}')}" for kind in kinds)]
    return "eval_generation  " + "  ".join(parts)


def _in_words(figures: dict[str, Any], prefix: str) -> str:
    accuracy, low, high = (figures.get(f"{prefix}/{key}") for key in ("accuracy", "low", "high"))
    failed = figures[f"{prefix}/failed"]
    words = (
        "none answered"
        if accuracy is None
        else f"{accuracy:.1%} ({low:.1%} to {high:.1%}) of {figures[f'{prefix}/n']}"
    )
    return f"{words}, {failed} failed" if failed else words


def _share_of(outcomes: Sequence[bool | Failure], prefix: str) -> dict[str, float | int | None]:
    hits = [outcome for outcome in outcomes if not isinstance(outcome, Failure)]
    found = dict.fromkeys(("accuracy", "low", "high"))
    if hits:
        share = share_interval(sum(hits), len(hits))
        found = {"accuracy": share.value, "low": share.low, "high": share.high}
    found |= {"n": len(hits), "failed": len(outcomes) - len(hits)}
    return {f"{prefix}/{key}": value for key, value in found.items()}


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """What is drawn within changes nothing of what is drawn afterwards."""
    own, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpy)


@contextmanager
def _with_cache(model: nn.Module) -> Iterator[None]:
    """Within, answers are generated with the cache of keys and values, which a training switches off."""
    settings = model.generation_config
    before = settings.use_cache
    settings.use_cache = True
    try:
        yield
    finally:
        settings.use_cache = before
