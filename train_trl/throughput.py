"""Counts what a training run gets through: supervised tokens and images a second, and how much of it was padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch


class Throughput:
    """Sums over batches, on their device, and turns them into rates when a step is logged.

    Args:
        image_token: id of the image placeholder.
        tokens_per_image: how many placeholders stand for one image.
        clock: seconds, for tests.
    """

    def __init__(self, image_token: int, tokens_per_image: int, clock: Callable[[], float] = perf_counter):
        self._image_token, self._tokens_per_image, self._clock = image_token, tokens_per_image, clock
        self._sums: torch.Tensor | None = None
        self._since: float | None = None

    def add(self, inputs: dict[str, torch.Tensor]) -> None:
        """Counts a batch as it enters the model: `input_ids`, `labels` and, where rows are padded, `attention_mask`."""
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        real = torch.tensor(ids.numel(), device=ids.device) if mask is None else mask.sum()
        sums = torch.stack([(inputs["labels"] != -100).sum(), (ids == self._image_token).sum(), real]).double()
        sums = torch.cat([sums, sums.new_tensor([ids.numel()])])
        self._sums = sums if self._sums is None else self._sums + sums
        if self._since is None:
            self._since = self._clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time within does not count."""
        began = self._clock()
        try:
            yield
        finally:
            if self._since is not None:
                self._since += self._clock() - began

    def figures(self, sum_over_processes: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """The rates of all processes together since the last call, or since the first batch; starts anew."""
        if self._sums is None:
            return {}
        supervised, placeholders, real, places = sum_over_processes(self._sums).tolist()
        now = self._clock()
        seconds = max(now - self._since, 1e-9)
        self._sums, self._since = None, now
        return {
            "supervised_tokens_per_second": supervised / seconds,
            "images_per_second": placeholders / self._tokens_per_image / seconds,
            "padding_share": 1 - real / places,
        }
