"""The slow, plain way to what an inspection measures: keep every tensor, then compute in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch


@dataclass
class Recorded:
    """What passed through a model in one forward pass, in float64."""

    before: list[torch.Tensor] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)
    encoder: list[torch.Tensor] = field(default_factory=list)
    projector: list[torch.Tensor] = field(default_factory=list)


def record(model, inputs, layers, encoder=None, projector=None) -> Recorded:
    """Runs the model and keeps what enters and leaves each layer, and what leaves encoder and projector."""
    kept = Recorded()

    def copy(tensor):
        return (tensor if torch.is_tensor(tensor) else tensor[0]).detach().clone().double()

    def keep_layer(module, args, kwargs, output):
        kept.before.append(copy(args[0] if args else kwargs["hidden_states"]))
        kept.after.append(copy(output))

    hooks = [layer.register_forward_hook(keep_layer, with_kwargs=True) for layer in layers]
    if encoder is not None:
        hooks.append(encoder.register_forward_pre_hook(lambda module, args: kept.encoder.append(copy(args[0]))))
    if projector is not None:
        hooks.append(projector.register_forward_hook(lambda module, args, output: kept.projector.append(copy(output))))
    try:
        with torch.no_grad():
            model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return kept


def layer_means(before: torch.Tensor, after: torch.Tensor, first: torch.Tensor) -> dict[str, float]:
    """The report's figures of one layer from its tokens, shape (tokens, hidden size), by their definitions."""
    cosine = torch.nn.functional.cosine_similarity
    update = after - before
    C, h = update.norm(dim=-1), before.norm(dim=-1)
    phi = cosine(before, update, dim=-1).clamp(-1, 1).arccos()
    return {
        "norm_mean": after.norm(dim=-1).mean().item(),
        "update_norm_mean": C.mean().item(),
        "cosine_prev_mean": cosine(before, after, dim=-1).mean().item(),
        "angle_mean_rad": cosine(before, after, dim=-1).clamp(-1, 1).arccos().mean().item(),
        "update_ratio_mean": (C / h).mean().item(),
        "cosine_first_mean": cosine(first, after, dim=-1).mean().item(),
        "angle_formula_mean_rad": torch.atan2(C * phi.sin(), h + C * phi.cos()).mean().item(),
        "isotropic_angle_rad": (C / h).arctan().mean().item(),
    }


def norm_figures(norms: torch.Tensor) -> dict:
    """Mean, std, count and quantiles (by rank) of norms."""
    ordered = norms.double().flatten().sort().values
    ranks = {q: int(float(q) * (len(ordered) - 1) + 0.5) for q in ("0.05", "0.25", "0.5", "0.75", "0.95")}
    return {
        "mean": ordered.mean().item(),
        "std": ordered.std(correction=0).item(),
        "count": len(ordered),
        "quantiles": {q: ordered[rank].item() for q, rank in ranks.items()},
    }


def attention_means(maps: torch.Tensor, visual: torch.Tensor, text: torch.Tensor) -> dict[str, float]:
    """The report's figures of one layer from its attention maps, (batch, heads, queries, keys), by loops."""
    masses, entropies, largest = [], [], []
    for sample in range(len(maps)):
        keys = visual[sample].nonzero().flatten().tolist()
        for query in text[sample].nonzero().flatten().tolist():
            rows = maps[sample, :, query, keys].double()
            seen = int((rows > 0).any(dim=0).sum())
            if not seen:
                continue
            largest.append(math.log(seen))
            for row in rows.tolist():
                masses.append(sum(row))
                if sum(row):
                    entropies.append(-sum(w / sum(row) * math.log(w / sum(row)) for w in row if w))
    return {
        "text_to_visual_mass": sum(masses) / len(masses),
        "visual_entropy": sum(entropies) / len(entropies),
        "visual_entropy_max": sum(largest) / len(largest),
    }
