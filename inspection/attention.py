"""How much text tokens attend to visual tokens, and how widely they spread that attention, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from .parts import Parts


def visual_attention(
    weights: torch.Tensor, visual: torch.Tensor, text: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention from the text queries of one sample to its visual keys.

    Args:
        weights: attention after the softmax, (heads, sequence, sequence), rows are queries.
        visual, text: boolean masks, (sequence,).

    Returns:
        for each text query that can see a visual token (its weight on one is not zero in some head): the mass that each
        head gives to visual tokens, (heads, queries), 0 to 1; the entropy in nats of that attention over the visual
        tokens alone, (heads, queries), NaN where a head gives them nothing; and the number of visual tokens that the
        query sees, (queries,), whose logarithm is the largest entropy there can be.
    """
    seen = weights[:, text][:, :, visual]
    seen = seen.to(torch.promote_types(seen.dtype, torch.float32))
    visible = (seen > 0).any(dim=0).sum(dim=-1)
    seen, visible = seen[:, visible > 0], visible[visible > 0]
    mass = seen.sum(dim=-1)
    entropy = torch.special.entr(seen / mass.unsqueeze(-1)).sum(dim=-1)
    return mass, entropy, visible


@dataclass
class AttentionSums:
    """Sums of `visual_attention` over samples; means are over heads and text queries that see visual tokens."""

    queries: int = 0
    heads_and_queries: int = 0
    spread: int = 0
    mass: float = 0.0
    entropy: float = 0.0
    entropy_max: float = 0.0

    def add(self, weights: torch.Tensor, visual: torch.Tensor, text: torch.Tensor) -> None:
        """Adds a batch: weights (batch, heads, sequence, sequence), masks (batch, sequence)."""
        for sample, visual_keys, text_queries in zip(weights, visual, text):
            mass, entropy, visible = visual_attention(sample, visual_keys, text_queries)
            spread = ~entropy.isnan()
            self.queries += visible.numel()
            self.heads_and_queries += mass.numel()
            self.spread += int(spread.sum())
            self.mass += mass.sum().item()
            self.entropy += entropy[spread].sum().item()
            self.entropy_max += visible.float().log().sum().item()

    def to_dict(self) -> dict[str, float] | None:
        """The means, or None when no text query saw a visual token."""
        if not self.queries:
            return None
        return {
            "text_to_visual_mass": self.mass / self.heads_and_queries,
            "visual_entropy": self.entropy / self.spread,
            "visual_entropy_max": self.entropy_max / self.queries,
        }


def attention_by_layer(
    model: PreTrainedModel, parts: Parts, inputs: Mapping[str, Any], masks: Mapping[str, torch.Tensor]
) -> list[dict[str, float] | None]:
    """`attention_over_batches` of one batch."""
    return attention_over_batches(model, parts, [(inputs, masks)])


def attention_over_batches(
    model: PreTrainedModel,
    parts: Parts,
    batches: Iterable[tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]],
) -> list[dict[str, float] | None]:
    """One forward pass a batch with eager attention, which alone has weights to look at.

    A layer's weights are summed up as soon as it has computed them and are not kept.

    Args:
        batches: model inputs and their masks `visual` and `text`, (batch, sequence); padding is in neither.

    Returns:
        for each layer of the decoder `text_to_visual_mass`, `visual_entropy` and `visual_entropy_max` (nats), means
        over heads and text queries that can see visual tokens; None for a layer that has no attention weights (linear
        attention) or where no text token sees a visual one.
    """
    sums = [AttentionSums() for _ in parts.layers]
    with eager_attention(model, parts.vision_encoder):
        for inputs, masks in batches:
            with _summed_up(parts.layers, sums, masks), torch.no_grad():
                model(**inputs, use_cache=False)
    return [layer.to_dict() for layer in sums]


@contextmanager
def eager_attention(model: PreTrainedModel, except_for: nn.Module | None = None) -> Iterator[None]:
    """Eager attention inside; afterwards, also after an exception, every part has the one that it had before.

    Args:
        except_for: a module that keeps its own throughout: the vision encoder, whose maps would only cost memory.
    """
    before = {id(config): (config, config._attn_implementation) for config in _configs(model)}
    spared = {id(config) for config in _own_configs(except_for)} if except_for is not None else set()
    spared -= {id(model.config), id(model.config.get_text_config())}
    try:
        model.set_attn_implementation("eager")
        _put_back(before[key] for key in spared & before.keys())
        yield
    finally:
        _put_back(before.values())


def _put_back(implementations: Iterable[tuple[PretrainedConfig, str | None]]) -> None:
    for config, implementation in implementations:
        # the public setter would also set the configs inside, which have a value of their own
        config._attn_implementation_internal = implementation


def _configs(model: PreTrainedModel) -> Iterator[PretrainedConfig]:
    """The configs of the model and of its parts: those that hang in its config, and copies that only a part holds."""
    waiting = [model.config, *_own_configs(model)]
    while waiting:
        config = waiting.pop()
        if config is not None and hasattr(config, "_attn_implementation"):
            yield config
            waiting += [getattr(config, key, None) for key in config.sub_configs]


def _own_configs(module: nn.Module) -> list[PretrainedConfig]:
    from transformers import PreTrainedModel

    return [part.config for part in module.modules() if isinstance(part, PreTrainedModel)]


@contextmanager
def _summed_up(
    layers: Iterable[nn.Module], sums: Iterable[AttentionSums], masks: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Adds the attention weights that pass through each layer to its sums; the hooks are always removed."""

    def hook_for(layer_sums: AttentionSums):
        def hook(module, args, output):
            weights = _attention_weights(output, masks["visual"].shape)
            if weights is not None:
                layer_sums.add(weights, masks["visual"].to(weights.device), masks["text"].to(weights.device))

        return hook

    hooks = [
        part.register_forward_hook(hook_for(layer_sums))
        for layer, layer_sums in zip(layers, sums)
        for part in layer.children()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _attention_weights(output: Any, batch_and_sequence: tuple[int, int]) -> torch.Tensor | None:
    """The weights that an attention module returns behind its output, told by their shape, not by a module's name."""
    if not isinstance(output, tuple) or len(output) < 2 or not torch.is_tensor(output[1]):
        return None
    batch, sequence = batch_and_sequence
    weights = output[1]
    fits = weights.dim() == 4 and (weights.shape[0], *weights.shape[2:]) == (batch, sequence, sequence)
    return weights if fits else None
