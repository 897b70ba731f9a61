"""A model's mode while it is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards each module has its own mode back, also frozen ones that a trainer keeps in eval."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
