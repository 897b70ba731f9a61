"""Rates count what is supervised, what is an image and what is padding, and start anew after each reading."""

import pytest
import torch

from normalign.train_trl.throughput import Throughput


IMAGE = 9


def batch(padded=True):
    ids = torch.tensor([[IMAGE, IMAGE, 3, 4, 5], [0, 0, 3, 4, 5]])
    labels = torch.tensor([[-100, -100, -100, 4, 5], [-100, -100, -100, -100, 5]])
    return {"input_ids": ids, "labels": labels, **({"attention_mask": (ids != 0).long()} if padded else {})}


def test_rates_are_those_of_all_processes_since_the_last_reading():
    times = iter([10.0, 12.0, 15.0])
    counted = Throughput(IMAGE, 2, clock=lambda: next(times))
    counted.add(batch())
    counted.add(batch())
    figures = counted.figures(lambda sums: 3 * sums)
    assert figures == pytest.approx(
        {"supervised_tokens_per_second": 9.0, "images_per_second": 3.0, "padding_share": 0.2}
    )
    counted.add(batch())
    assert counted.figures(lambda sums: sums)["supervised_tokens_per_second"] == pytest.approx(1.0)
    assert counted.figures(lambda sums: sums) == {}


def test_without_a_mask_nothing_is_padding():
    counted = Throughput(IMAGE, 2)
    counted.add(batch(padded=False))
    assert counted.figures(lambda sums: sums)["padding_share"] == 0
