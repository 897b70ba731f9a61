"""The four parts of a vision-language model (vision, projector, norm, language): which weights they hold, which are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..configuration.errors import NormalignError
from .processes import size_of, whole_values


if TYPE_CHECKING:
    from rich.table import Table

    from .recipe import PartFigures, TuneSettings

PARTS = ("vision", "projector", "norm", "language")


def part_of(name: str) -> str:
    """The part that a parameter or module belongs to, by its name in the whole model."""
    names = name.split(".")
    if "aligned_norm" in names:
        return "norm"
    if "multi_modal_projector" in names:
        return "projector"
    if "vision_tower" in names:
        return "vision"
    return "language"


def parameters_by_part(model: nn.Module) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """All parameters with their names, tied ones once, under the four parts (a model without a norm has none there)."""
    parts: dict[str, list[tuple[str, nn.Parameter]]] = {part: [] for part in PARTS}
    for name, parameter in model.named_parameters():
        parts[part_of(name)].append((name, parameter))
    return parts


def freeze(model: nn.Module, tune: TuneSettings) -> None:
    """Lets gradients reach the parts that are tuned, and no other.

    Raises:
        NormalignError: nothing is left to train, or the norm is to be trained although the model's config fixes it.
    """
    parts = parameters_by_part(model)
    if parts["norm"] and tune.norm == "full" and not model.config.aligned_norm["trainable"]:
        raise NormalignError(
            "tune.norm is 'full', but the model's aligned_norm.trainable is false: its gain is meant to stay. "
            "Write tune.norm: frozen, or compose the model with aligned_norm.trainable: true."
        )
    for part, parameters in parts.items():
        for _, parameter in parameters:
            parameter.requires_grad_(getattr(tune, part) == "full")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise NormalignError(
            "Every part of the model is frozen: there is nothing to train. Set one of tune.* to 'full'."
        )


def frozen_modules(model: nn.Module) -> list[nn.Module]:
    """The largest modules of which no parameter is trained; they stay in eval mode while the others train."""
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            found.append(module)
        else:
            for child in module.children():
                walk(child)

    walk(model)
    return found


def training_table(model: nn.Module, learning_rate: PartFigures, title: str) -> Table:
    """What is trained and what is frozen, with counts, and the state of the norm: T, gain (mean |g|) and mu."""
    from rich.table import Table

    norm = model.get_aligned_norm()
    caption = "no aligned norm"
    if norm is not None:
        T = model.config.aligned_norm["target_norm"]
        caption = (
            f"{norm.kind}: T {'not measured' if T is None else f'{T:.4g}'}, "
            f"gain {(mean_gain := whole_values(norm.weight).abs().mean().item()):.4g}, "
            f"GWC {f'on, mu {max(mean_gain, norm.gwc_floor):.4g}' if norm.gwc else 'off'}"
        )
    table = Table(
        title=title, caption=caption, title_justify="left", caption_justify="left", min_width=len(caption) + 1
    )
    for column, justify in (("part", "left"), ("state", "left"), ("parameters", "right"), ("learning rate", "right")):
        table.add_column(column, justify=justify)
    for part, parameters in parameters_by_part(model).items():
        trained = any(parameter.requires_grad for _, parameter in parameters)
        state = "trained" if trained else "frozen" if parameters else "absent"
        count = sum(size_of(parameter) for _, parameter in parameters)
        table.add_row(part, state, f"{count:,}", f"{learning_rate.of(part):g}" if trained else "-")
    return table


def total_norm(tensors: list[torch.Tensor]) -> float:
    """L2 norm over all tensors, in float32 or wider; 0 for none."""
    if not tensors:
        return 0.0
    norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])).item()
