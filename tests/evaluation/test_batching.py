"""Batches that shrink when memory runs out, and failures that stand only where they belong."""

import gc
import threading
import time
import weakref

import pytest
import torch

from normalign.configuration.errors import NormalignError, RunStopped
from normalign.evaluation.batching import Failure, run_batched


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Doubling:
    """Doubles numbers; runs out of memory where a batch's numbers add up to more than `room`, and fails on `bad` ones."""

    def __init__(self, room=10**9, bad=()):
        self.room, self.bad, self.sizes = room, bad, []

    def __call__(self, numbers):
        self.sizes.append(len(numbers))
        if sum(numbers) > self.room:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        for number in numbers:
            if number in self.bad:
                raise ValueError(f"{number} is bad")
        return [2 * number for number in numbers]


@pytest.mark.parametrize("size", [1, 3, 10, 64])
def test_results_come_in_order_in_batches_of_the_size(size):
    run, calls = Doubling(), []
    results = run_batched(range(10), run, batch_size=size, done=lambda *call: calls.append(call))
    assert results == [2 * n for n in range(10)]
    assert run.sizes == [size] * (10 // size) + [10 % size] * (10 % size > 0)
    assert [i for indices, _ in calls for i in indices] == list(range(10))
    assert [value for _, values in calls for value in values] == results
    assert [len(indices) for indices, _ in calls] == run.sizes


def test_nothing_is_run_for_no_items():
    run = Doubling()
    assert run_batched([], run, batch_size="auto") == [] and run.sizes == []


def test_the_size_halves_when_memory_runs_out_and_what_is_done_is_not_run_again():
    seen = []
    run = Doubling(room=3)

    def watched(numbers):
        result = run(numbers)
        seen.extend(numbers)
        return result

    assert run_batched([1] * 4 + [0] * 8, watched, batch_size=8) == [2] * 4 + [0] * 8
    assert run.sizes == [8, 4, 2, 2, 2, 2, 2, 2]
    assert len(seen) == 12


def test_an_item_that_does_not_fit_alone_fails_and_the_rest_keep_the_largest_size_that_worked():
    run = Doubling(room=50)
    results = run_batched([1] * 9 + [100] + [1] * 10, run, batch_size=4)
    assert results[9] == Failure("OutOfMemoryError", OUT_OF_MEMORY)
    assert results[:9] + results[10:] == [2] * 19
    assert run.sizes == [4, 4, 4, 2, 1, 1, 4, 4, 2]


def test_an_item_that_does_not_fit_first_of_all_leaves_the_size_as_it_was():
    run = Doubling(room=50)
    assert run_batched([100] + [1] * 8, run, batch_size=4)[1:] == [2] * 8
    assert run.sizes == [4, 2, 1, 4, 4]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_a_cpu_without_memory_is_told_from_other_errors(error):
    def run(items):
        if len(items) > 2:
            raise error
        return items

    sizes = []
    assert run_batched("abcde", run, batch_size=4, done=lambda i, _: sizes.append(len(i))) == list("abcde")
    assert sizes == [2, 2, 1]


def test_the_batch_that_ran_out_of_memory_is_let_go_before_it_is_tried_again():
    held = []

    class Activation:
        pass

    def run(items):
        gc.collect()
        assert all(reference() is None for reference in held)
        activation = Activation()
        held.append(weakref.ref(activation))
        if len(items) > 1:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return items

    assert run_batched([1, 2, 3, 4], run, batch_size=4) == [1, 2, 3, 4]


def test_only_the_items_that_fail_by_themselves_are_failures():
    run, calls = Doubling(bad=(5, 6)), []
    results = run_batched(range(12), run, batch_size=4, done=lambda *call: calls.append(call))
    failures = {i: result for i, result in enumerate(results) if isinstance(result, Failure)}
    assert failures == {5: Failure("ValueError", "5 is bad"), 6: Failure("ValueError", "6 is bad")}
    assert [results[i] for i in range(12) if i not in failures] == [2 * i for i in range(12) if i not in failures]
    # the items of the failed batch alone, and the size stays
    assert run.sizes == [4, 4, 1, 1, 1, 1, 4]
    assert [indices for indices, _ in calls] == [[0, 1, 2, 3], [4], [5], [6], [7], [8, 9, 10, 11]]
    assert calls[2][1] == [failures[5]]


def test_an_item_that_failed_alone_is_not_run_twice():
    run = Doubling(bad=(1,))
    assert run_batched([1, 2], run, batch_size=1) == [Failure("ValueError", "1 is bad"), 4]
    assert run.sizes == [1, 1]


def test_a_failure_reads_as_one_line_of_type_and_text():
    assert str(Failure("ValueError", "5 is bad")) == "ValueError: 5 is bad"
    assert str(Failure("StopIteration", "")) == "StopIteration"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RunStopped])
def test_a_run_that_is_stopped_stops(error):
    def run(items):
        raise error("stop")

    with pytest.raises(error):
        run_batched([1, 2], run, batch_size=2)


def test_an_error_of_done_is_raised():
    def done(indices, results):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_batched([1, 2], Doubling(), batch_size=2, done=done)


def test_a_run_that_loses_results_is_refused():
    with pytest.raises(ValueError, match="2 items were run, and 1 results"):
        run_batched([1, 2], lambda items: items[:1], batch_size=2)


def test_the_next_batch_is_prepared_in_a_thread_while_one_runs():
    ahead, threads = threading.Event(), []

    def prepare(number):
        threads.append(threading.current_thread())
        if number == 3:
            ahead.set()
        return 10 * number

    def run(prepared):
        assert ahead.wait(timeout=30)
        return prepared

    assert run_batched(range(6), run, batch_size=2, prepare=prepare) == [0, 10, 20, 30, 40, 50]
    assert len(set(threads)) == 1 and threads[0] is not threading.current_thread() and len(threads) == 6


def test_no_more_than_two_batches_are_held_prepared():
    class Picture:
        pass

    alive = weakref.WeakSet()
    most = 0

    def prepare(number):
        picture = Picture()
        alive.add(picture)
        return picture

    def run(pictures):
        nonlocal most
        gc.collect()
        most = max(most, len(alive))
        return [0 for _ in pictures]

    run_batched(range(40), run, batch_size=4, prepare=prepare)
    assert 4 <= most <= 8


@pytest.mark.parametrize("broken", [0, 3, 5, 9])
def test_what_cannot_be_prepared_fails_alone(broken):
    def prepare(number):
        if number == broken:
            raise OSError(f"{number} cannot be read")
        return number

    results = run_batched(range(10), Doubling(), batch_size=4, prepare=prepare)
    assert results[broken] == Failure("OSError", f"{broken} cannot be read")
    assert [results[i] for i in range(10) if i != broken] == [2 * i for i in range(10) if i != broken]


def test_preparing_that_runs_out_of_memory_is_tried_again_in_a_smaller_batch():
    tries = []

    def prepare(number):
        tries.append(number)
        if number == 2 and tries.count(2) == 1:
            raise MemoryError
        return number

    run = Doubling()
    assert run_batched(range(4), run, batch_size=4, prepare=prepare) == [0, 2, 4, 6]
    assert run.sizes == [2, 2] and tries.count(2) == 2 and tries.count(0) == 1


def test_nothing_more_is_prepared_once_a_run_is_stopped():
    prepared = []

    def run(items):
        raise RunStopped("stop")

    with pytest.raises(RunStopped):
        run_batched(range(100), run, batch_size=2, prepare=prepared.append)
    count = len(prepared)
    assert count <= 4
    time.sleep(0.1)
    assert len(prepared) == count


@pytest.mark.parametrize(("cuda", "size"), [(True, 64), (False, 8)])
def test_auto_starts_at_what_the_device_is_good_for(monkeypatch, cuda, size):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    run = Doubling()
    run_batched([0] * 70, run, batch_size="auto")
    assert run.sizes[0] == size


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "big", None])
def test_a_batch_size_that_is_none_is_refused(size):
    with pytest.raises(NormalignError, match="whole number of at least 1"):
        run_batched([1], Doubling(), batch_size=size)
