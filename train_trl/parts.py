"""The four parts of a vision-language model (vision, projector, norm, language): which weights they hold, which are trained."""

from __future__ import annotations

import copy
import logging
import re
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AutoModel

from ..configuration.errors import NormalignError
from .processes import size_of, whole_values


if TYPE_CHECKING:
    from rich.table import Table

    from .recipe import PartFigures, TuneSettings

logger = logging.getLogger(__name__)

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


def without_adapters(model: nn.Module) -> nn.Module:
    """The model itself, also where PEFT has wrapped it; its layers keep their adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def freeze(model: nn.Module, tune: TuneSettings) -> None:
    """Lets gradients reach the parts that are tuned, and no other; of an adapted part only its adapters.

    Encoder weights that no visual token depends on are left out too, and named: they would never get a gradient.

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
        state = getattr(tune, part)
        for name, parameter in parameters:
            # PEFT keeps the weights that a saved module started from beside those that are trained
            adapter, replaced = ".lora_" in name, ".original_module." in name
            parameter.requires_grad_(adapter if state == "lora" else state == "full" and not adapter and not replaced)
    if tune.vision == "full":
        unused = unused_vision_parameters(model)
        for _, parameter in unused:
            parameter.requires_grad_(False)
        if unused:
            logger.warning(
                f"{len(unused)} weights of the vision encoder ({sum(p.numel() for _, p in unused):,} values) lie behind the "
                f"layer that the visual tokens are taken from (vision_feature_layer "
                f"{model.config.vision_feature_layer}) and stay frozen: {_modules_of([name for name, _ in unused])}."
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise NormalignError(
            "Every part of the model is frozen: there is nothing to train. Set one of tune.* to 'full'."
        )


def split_groups(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    learning_rate: PartFigures,
    weight_decay: PartFigures,
    decayed: set[str],
) -> None:
    """Splits the parameter groups of a new optimizer, in place, so that each part has its own figures.

    Args:
        optimizer: one that has taken no step.
        model: whose parameters it holds.
        learning_rate, weight_decay: by part.
        decayed: names of the parameters that weight decay may touch.

    Raises:
        NormalignError: the optimizer has no learning rate of its own for each group.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        if "lr" not in group or any(id(parameter) not in names for parameter in group["params"]):
            raise NormalignError(
                f"The optimizer {type(optimizer).__name__} does not take figures for single parts. Give one learning_rate "
                f"and one weight_decay for all, or use adamw_torch or sgd."
            )
        for part in PARTS:
            for decays in (True, False):
                parameters = [
                    parameter
                    for parameter in group["params"]
                    if part_of(names[id(parameter)]) == part and (names[id(parameter)] in decayed) == decays
                ]
                if parameters:
                    rate, decay = learning_rate.of(part), weight_decay.of(part) if decays else 0.0
                    groups.append({**group, "params": parameters, "lr": rate, "weight_decay": decay})
    optimizer.param_groups[:] = groups


def unused_vision_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The encoder's weights that no visual token depends on, with their names in the whole model.

    With `vision_feature_layer` -2 these are the last layer, the final norm and a pooling head. They are found by one
    forward pass of the encoder's class without weights (on the meta device), so that nothing depends on its layout.
    """
    config = without_adapters(model).config
    vision = copy.deepcopy(config.vision_config)
    with torch.device("meta"):
        tower = AutoModel.from_config(vision, attn_implementation="eager").eval()
        size = vision.image_size if isinstance(vision.image_size, (list, tuple)) else (vision.image_size,) * 2
        states = tower(torch.empty(1, vision.num_channels, *size), output_hidden_states=True).hidden_states
    layers = config.vision_feature_layer
    reached = _leaves([states[layer] for layer in (layers if isinstance(layers, (list, tuple)) else [layers])])
    unused = {name for name, parameter in tower.named_parameters() if id(parameter) not in reached}
    # adapters put `base_layer` between a linear layer and its weight
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if part_of(name) == "vision" and name.split("vision_tower.", 1)[1].replace(".base_layer.", ".") in unused
    ]


def _leaves(outputs: list[torch.Tensor]) -> set[int]:
    """The ids of all parameters that the outputs' graph leads back to."""
    found, seen, stack = set(), set(), [output.grad_fn for output in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        stack += [before for before, _ in node.next_functions]
    return found


def _modules_of(names: list[str]) -> str:
    """The modules that weights belong to, a layer by its number: "encoder.layers.26, post_layernorm"."""
    found = []
    for name in names:
        inner = name.split("vision_tower.", 1)[1]
        layer = re.match(r".*?\.\d+(?=\.)", inner)
        module = layer.group() if layer else inner.rpartition(".")[0] or inner
        if module not in found:
            found.append(module)
    return ", ".join(found)


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


def training_table(model: nn.Module, learning_rate: PartFigures, title: str, attention: dict[str, str]) -> Table:
    """What is trained and what is frozen, with counts, and the state of the norm: T, gain (mean |g|) and mu."""
    from rich.table import Table

    norm = without_adapters(model).get_aligned_norm()
    caption = "no aligned norm"
    if norm is not None:
        T = model.config.aligned_norm["target_norm"]
        caption = (
            f"{norm.kind}: T {'not measured' if T is None else f'{T:.4g}'}, "
            f"gain {(mean_gain := whole_values(norm.weight).abs().mean().item()):.4g}, "
            f"GWC {f'on, mu {max(mean_gain, norm.gwc_floor):.4g}' if norm.gwc else 'off'}"
        )
    caption += f"; attention: {', '.join(f'{part} {name}' for part, name in attention.items())}"
    table = Table(
        title=title, caption=caption, title_justify="left", caption_justify="left", min_width=len(caption) + 1
    )
    for column, justify in (("part", "left"), ("state", "left"), ("parameters", "right"), ("learning rate", "right")):
        table.add_column(column, justify=justify)
    for part, parameters in parameters_by_part(model).items():
        trained = sum(size_of(parameter) for _, parameter in parameters if parameter.requires_grad)
        adapted = any(".lora_" in name for name, _ in parameters)
        state = "adapted" if trained and adapted else "trained" if trained else "frozen" if parameters else "absent"
        # an adapted layer counts once: neither its adapter nor the copy that PEFT keeps of a saved module adds to the model
        all_of_it = sum(
            size_of(p) for name, p in parameters if ".lora_" not in name and ".original_module." not in name
        )
        count = f"{all_of_it:,}" if trained in (0, all_of_it) else f"{trained:,} of {all_of_it:,}"
        table.add_row(part, state, count, f"{learning_rate.of(part):g}" if trained else "-")
    return table


def total_norm(tensors: list[torch.Tensor]) -> float:
    """L2 norm over all tensors, in float32 or wider; 0 for none."""
    if not tensors:
        return 0.0
    norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])).item()
