"""Runs a list through a callable in batches that shrink when memory runs out, and says which items fail by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from ..configuration.errors import NormalignError, RunStopped


T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Failure:
    """What stands in the place of a result whose item raised when it was run alone.

    Attributes:
        type: the name of the error's class.
        text: the error's message.
    """

    type: str
    text: str

    def __str__(self) -> str:
        return f"{self.type}: {self.text}" if self.text else self.type


def run_batched(
    items: Sequence[T],
    run: Callable[[list[T]], list[R]],
    *,
    batch_size: int | Literal["auto"],
    done: Callable[[list[int], list[R | Failure]], None] | None = None,
) -> list[R | Failure]:
    """Results of all items, in order.

    A batch that runs out of memory is tried again at half the size, and the batches behind it have that size too. An
    item that does not fit alone becomes a Failure; what follows has the largest size that has worked so far. A batch
    that raises any other error is run again item by item, so that the error stands only where it belongs.

    Args:
        run: takes a list of items and gives one result for each.
        batch_size: the largest batch; "auto" starts at 64 on CUDA and at 8 on a CPU.
        done: called after each batch, and each item that was run alone, with the indices and the results of it; what it
            raises is raised.

    Raises:
        NormalignError: `batch_size` is neither "auto" nor a whole number from 1.
        ValueError: `run` gave more or fewer results than it got items.
        KeyboardInterrupt, RunStopped: the run was stopped; they are no failures of an item.
    """
    start = size = _first_size(batch_size)
    largest = 0
    results: list[R | Failure] = []
    while len(results) < len(items):
        batch = list(items[len(results) : len(results) + size])
        outcome = _attempt(run, batch)
        if isinstance(outcome, _Failed) and outcome.memory:
            if len(batch) > 1:
                size = (len(batch) + 1) // 2
                continue
            size = largest or start
        if not isinstance(outcome, _Failed):
            largest = max(largest, len(batch))
        elif len(batch) > 1:
            for item in batch:
                _keep(results, _as_results(_attempt(run, [item])), done)
            continue
        _keep(results, _as_results(outcome), done)
    return results


def _first_size(batch_size: int | str) -> int:
    if batch_size == "auto":
        import torch

        return 64 if torch.cuda.is_available() else 8
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise NormalignError(f"The batch size is {batch_size!r}; give 'auto' or a whole number of at least 1.")
    return batch_size


@dataclass(frozen=True)
class _Failed:
    failure: Failure
    memory: bool


def _attempt(run: Callable[[list[T]], list[R]], batch: list[T]) -> list[R] | _Failed:
    """The batch's results, or what it failed of; the error itself is let go, since its frames hold the batch's tensors."""
    try:
        results = list(run(batch))
    except RunStopped:
        raise
    except Exception as error:
        failed = _Failed(Failure(type(error).__name__, str(error)), _out_of_memory(error))
    else:
        if len(results) != len(batch):
            raise ValueError(f"{len(batch)} items were run, and {len(results)} results came back")
        return results
    if failed.memory:
        from accelerate.utils.memory import clear_device_cache

        clear_device_cache(garbage_collection=True)
    return failed


def _out_of_memory(error: Exception) -> bool:
    from accelerate.utils.memory import should_reduce_batch_size

    return isinstance(error, MemoryError) or should_reduce_batch_size(error)


def _as_results(outcome: list[R] | _Failed) -> list[R | Failure]:
    return [outcome.failure] if isinstance(outcome, _Failed) else outcome


def _keep(results: list, new: list, done: Callable[[list[int], list], None] | None) -> None:
    first = len(results)
    results += new
    if done:
        done(list(range(first, len(results))), new)
