"""Runs a list through a callable in batches that shrink when memory runs out, and says which items fail by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

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
    prepare: Callable[[T], Any] | None = None,
    done: Callable[[list[int], list[R | Failure]], None] | None = None,
) -> list[R | Failure]:
    """Results of all items, in order.

    A batch that runs out of memory is tried again at half the size, and the batches behind it have that size too. An
    item that does not fit alone becomes a Failure; what follows has the largest size that has worked so far. A batch
    that raises any other error is run again item by item, so that the error stands only where it belongs.

    Args:
        run: takes a list of items, or of what `prepare` made of them, and gives one result for each.
        prepare: called for each item in one other thread, for a batch while the one before it is run; so images are read
            from disk and decoded while the model computes. What it raises counts as raised by `run`.
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
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare")
    ready = _Prepared(items, prepare, thread)
    try:
        while len(results) < len(items):
            first, count = len(results), min(size, len(items) - len(results))
            outcome = _attempt(run, ready, first, count)
            if isinstance(outcome, _Failed) and outcome.memory:
                if count > 1:
                    size = (count + 1) // 2
                    continue
                size = largest or start
            if not isinstance(outcome, _Failed):
                largest = max(largest, count)
            elif count > 1:
                for i in range(first, first + count):
                    _keep(results, _as_results(_attempt(run, ready, i, 1)), done)
                continue
            _keep(results, _as_results(outcome), done)
    finally:
        thread.shutdown(cancel_futures=True)
    return results


class _Prepared:
    """The items as `run` takes them; with `prepare`, what it makes of those that are run and of as many behind them."""

    def __init__(self, items: Sequence[T], prepare: Callable[[T], Any] | None, thread: ThreadPoolExecutor) -> None:
        self.items, self.prepare, self.thread = items, prepare, thread
        self.futures: dict[int, Future] = {}

    def take(self, first: int, count: int) -> list:
        if self.prepare is None:
            return list(self.items[first : first + count])
        for i in [i for i in self.futures if i < first]:
            del self.futures[i]
        for i in range(first, min(first + 2 * count, len(self.items))):
            # what failed is tried again, since another batch may have left it too little memory
            if i not in self.futures or (self.futures[i].done() and self.futures[i].exception()):
                self.futures[i] = self.thread.submit(self.prepare, self.items[i])
        return [self.futures[i].result() for i in range(first, first + count)]


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


def _attempt(run: Callable[[list], list[R]], prepared: _Prepared, first: int, count: int) -> list[R] | _Failed:
    """The results of `count` items, or what it failed of; the error itself is let go, since its frames hold the batch's tensors."""
    try:
        results = list(run(prepared.take(first, count)))
    except RunStopped:
        raise
    except Exception as error:
        failed = _Failed(Failure(type(error).__name__, str(error)), _out_of_memory(error))
    else:
        if len(results) != count:
            raise ValueError(f"{count} items were run, and {len(results)} results came back")
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
