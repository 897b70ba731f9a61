"""Stops a run at the first loss that is NaN or infinite, before it reaches the weights, and says where it arose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..configuration.errors import NormalignError
from . import processes


def refuse_loss_not_finite(
    model: nn.Module, inputs: dict[str, Any], loss: torch.Tensor, step: int, rows: Sequence[str]
) -> None:
    """Looks for the first module whose output is not finite, by one more forward pass of the same batch, and raises.

    Args:
        model: as it computed the loss.
        inputs: the batch.
        loss: what came of it.
        step: the step that was being computed, from 1.
        rows: the names of the batch's rows, as far as known.

    Raises:
        NormalignError: always.
    """
    named = f" In the batch: {', '.join(rows[:16])}{' ...' if len(rows) > 16 else ''}." if rows else ""
    if processes.count() > 1:
        # a further look would wait for the other processes, which are not looking
        raise NormalignError(
            f"The loss became {loss.item()} in step {step}, in one of {processes.count()} processes.{named} The last "
            f"checkpoint is as it was. Run the same rows with one process to learn which module it comes from, or lower the learning rate."
        )
    bad = [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]
    if bad:
        raise NormalignError(
            f"The loss became {loss.item()} in step {step}, because the weight {bad[0]} is not finite: it was so at the "
            f"start, or the step before has broken it. Go on from an earlier checkpoint with a lower learning rate."
        )
    where = _first_module(model, inputs)
    raise NormalignError(
        f"The loss became {loss.item()} in step {step}: {where}.{named} The weights were not touched by it, and the last "
        f"checkpoint is as it was. Lower the learning rate, use bfloat16 or float32 in place of float16, or look at these rows."
    )


def _first_module(model: nn.Module, inputs: dict[str, Any]) -> str:
    for key, value in inputs.items():
        if torch.is_tensor(value) and value.is_floating_point() and not torch.isfinite(value).all():
            return f"the batch's {key} are not finite"
    found: list[str] = []
    handles = []
    for name, module in model.named_modules():
        if not list(module.children()):
            handles.append(module.register_forward_hook(_look(name, found)))
    try:
        with torch.no_grad():
            model(**{key: value for key, value in inputs.items() if key != "labels"})
    finally:
        for handle in handles:
            handle.remove()
    return f"{found[0]} is the first module whose output is not finite" if found else "every module's output is finite"


def _look(name: str, found: list[str]):
    def hook(module: nn.Module, args: tuple, output: Any) -> None:
        tensors = output if isinstance(output, tuple | list) else [output]
        if any(torch.is_tensor(x) and x.is_floating_point() and not torch.isfinite(x).all() for x in tensors):
            found.append(name)

    return hook
