"""What the figures of a report say, in words: is there a norm gap, where does it arise, what does it do, what closes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


GAP = 2.0  # visual tokens more than twice, or less than half, as long as text tokens
FIRST_LAYER_LAG = 0.5  # in the first layer visual tokens turn less than half as far as text tokens
LAG = 0.75  # through all layers they turn less than three quarters as far
BLIND = 0.01  # nats by which the next token's distribution moves at most when a model hardly looks
TINY = 1e-12


def verdict(data: Mapping[str, Any], hidden_size: int) -> tuple[str, dict[str, Any]]:
    """The verdict on a report and the figures behind it.

    Args:
        data: a report's dictionary. `aligned_norm`, true for a model that has one, may be missing; so may every part of
            `interface` but `inserted`, the layers, the controls and the gradients.
        hidden_size: the language model's width D.

    Returns:
        sentences, and a dictionary of what they rest on: `gap`, `ratio`, `factors` and `arises_in` (see
        `norm_factors`), `turns` (see `turns`), `T`, `gain` T/sqrt(D) and `needs_realignment`.

    Source: arXiv 2512.08374, sections 3 and 4.1. That scaling norms down without training breaks a finished model was
    found by later work on SmolVLM2 and Qwen3-VL.
    """
    T, ratio = data["text_embedding_norm"], data["ratio"]
    gap = not 1 / GAP <= ratio <= GAP
    factors = norm_factors(data)
    figures = {
        "gap": gap,
        "ratio": ratio,
        "factors": factors,
        "arises_in": arises_in(factors, ratio, bool(data.get("aligned_norm"))) if gap else [],
        "turns": turns(data),
        "T": T,
        "gain": T / math.sqrt(hidden_size),
        "needs_realignment": gap,
    }
    sentences = [
        _gap_sentence(data, figures),
        _origin_sentence(data, figures),
        _turn_sentence(figures["turns"]),
        _advice_sentence(data, figures),
        _control_sentence(data.get("controls")),
        _gradient_sentence(data.get("gradients")),
    ]
    return " ".join(sentence for sentence in sentences if sentence), figures


def norm_factors(data: Mapping[str, Any]) -> dict[str, float | None]:
    """By how much each step on the way multiplies the norm, so that the product of what is known is the ratio.

    `vision_encoder` over T, `projector` over the vision encoder (over T where the encoder is unknown) and
    `behind_projector`: the inserted tokens over the projector's. None for a step that was not measured.
    """
    steps = {"vision_encoder": "vision_encoder", "projector": "projector", "behind_projector": "inserted"}
    factors: dict[str, float | None] = {}
    last = data["text_embedding_norm"]
    for step, part in steps.items():
        measured = data["interface"].get(part)
        factors[step] = measured["mean"] / last if measured and last else None
        last = measured["mean"] if measured else last
    return factors


def arises_in(factors: Mapping[str, float | None], ratio: float, aligned_norm: bool) -> list[str]:
    """The steps that make the gap: each that makes tokens twice as long (as short), else the one that does most.

    Behind an aligned norm only the norm counts: whatever enters it leaves at the length that its gain sets.
    """
    if aligned_norm:
        return ["aligned_norm"]
    direction = 1 if ratio > 1 else -1
    logs = {step: direction * math.log(factor) for step, factor in factors.items() if factor}
    makers = [step for step, log in logs.items() if log >= math.log(GAP)]
    return makers or [max(logs, key=logs.get)]


def turns(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """How far visual tokens turn against text tokens, in the first layer and through all; None without layers.

    Keys: `first_layer` (visual and text, rad), `first_layer_ratio`, `ratio` (visual over text, turns added up over the
    layers), `layers_behind` (turn less than half as far as text tokens), `layers`, `update_size_ratio` (|dh| of visual
    over that of text tokens in the first layer) and `lags`.
    """
    layers = [layer for layer in data.get("layers") or () if layer.get("visual") and layer.get("text")]
    if not layers:
        return None
    visual, text = ([layer[modality]["angle_mean_rad"] for layer in layers] for modality in ("visual", "text"))
    first, whole = _ratio(visual[0], text[0]), _ratio(sum(visual), sum(text))
    updates = [layers[0][modality]["update_norm_mean"] for modality in ("visual", "text")]
    return {
        "first_layer": {"visual": visual[0], "text": text[0]},
        "first_layer_ratio": first,
        "ratio": whole,
        "layers_behind": sum(a < FIRST_LAYER_LAG * b for a, b in zip(visual, text)),
        "layers": len(layers),
        "update_size_ratio": _ratio(*updates),
        "lags": first < FIRST_LAYER_LAG or whole < LAG,
    }


def _ratio(a: float, b: float) -> float:
    return (a + TINY) / (b + TINY)  # 1 where nothing moves at all


def _gap_sentence(data: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    ratio = f"{figures['ratio']:.3g}" if figures["gap"] else f"{figures['ratio']:.2f}"
    return (
        f"{'Norm gap' if figures['gap'] else 'No norm gap'}: visual tokens enter the language model at {ratio} times the "
        f"norm of text tokens ({data['interface']['inserted']['mean']:.3g} against T = {figures['T']:.3g})."
    )


def _origin_sentence(data: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    if data.get("aligned_norm"):
        if figures["gap"]:
            return "It arises in the aligned norm, whose gain does not fit T."
        projector = data["interface"].get("projector")
        aligned = projector and not 1 / GAP <= projector["mean"] / figures["T"] <= GAP
        return f"The aligned norm brings them there from {projector['mean']:.3g}." if aligned else ""
    if not figures["gap"]:
        return ""
    factors = figures["factors"]
    words = {
        "vision_encoder": "the vision encoder ({:.3g} times T)",
        "projector": f"the projector ({{:.3g}} times {'the encoder' if factors['vision_encoder'] else 'T'})",
        "behind_projector": "what stands behind the projector (times {:.3g})",
    }
    makers = [words[step].format(factors[step]) for step in figures["arises_in"]]
    others = [
        words[step].format(factor)
        for step, factor in factors.items()
        if factor and step not in figures["arises_in"] and (step != "behind_projector" or abs(factor - 1) > 0.05)
        # what does a good part of it is not denied
        if math.log(factor) / math.log(figures["ratio"]) < 1 / 3
    ]
    return f"It arises in {' and in '.join(makers)}{', not in ' + ' or in '.join(others) if others else ''}."


def _turn_sentence(turned: Mapping[str, Any] | None) -> str:
    if turned is None:
        return ""
    first = turned["first_layer"]
    start = "Visual tokens lag behind" if turned["lags"] else "Visual tokens do not lag behind"
    if turned["lags"] and turned["ratio"] >= LAG:
        start += " at the start, not on the whole"
    return (
        f"{start}: in the first layer they turn by {first['visual']:.3f} rad where text tokens turn by "
        f"{first['text']:.3f} (with updates {turned['update_size_ratio']:.2f} times as large), and through all "
        f"{turned['layers']} layers {turned['ratio']:.2f} times as far."
    )


def _advice_sentence(data: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    if not figures["gap"]:
        return "There is nothing to align."
    how = (
        "start the gain of its norm anew"
        if data.get("aligned_norm")
        else "put a LayerNorm behind the projector and start its gain"
    )
    return (
        f"Aligning would {how} at T/sqrt(D) = {figures['gain']:.4g} (T = {figures['T']:.4g}); a finished model then "
        f"needs re-alignment training, for its layers know visual tokens at the norm they have now."
    )


def _control_sentence(controls: Mapping[str, Any] | None) -> str:
    words = {
        "black": "a black image",
        "none": "no image",
        "other": "another image",
        "position_sensitivity_index": "its visual tokens shuffled",
    }
    measured = {name: controls[name] for name in words if controls.get(name)} if controls else {}
    if not measured:
        return ""
    shown = ", ".join(
        f"{effect['top1_changed']:.0%} of cases with {words[name]} (KL {effect['kl_mean']:.2g} nats)"
        for name, effect in measured.items()
    )
    images = [measured[name] for name in ("black", "other") if name in measured]
    blind = images and all(effect["kl_mean"] < BLIND and not effect["top1_changed"] for effect in images)
    return f"{'The model hardly looks at its image. ' if blind else ''}The likeliest next token changes in {shown}."


def _gradient_sentence(gradients: Mapping[str, Any] | None) -> str:
    if not gradients:
        return ""
    off = _share_before_norm(gradients["gwc_off"])
    if not gradients.get("gwc_on"):
        return f"Vision encoder and projector take {off:.1%} of the clipping budget."
    measured = " and ".join(
        dict.fromkeys(f"{factor:.3g}" for factor in gradients["measured_factor"].values() if factor)
    )
    return (
        f"GWC multiplies the gradients before the norm by {measured or 'nothing that was measured'} (1/mu is "
        f"{gradients['predicted_factor']:.3g}): vision encoder and projector take "
        f"{_share_before_norm(gradients['gwc_on']):.1%} of the clipping budget with it, {off:.1%} without."
    )


def _share_before_norm(arm: Mapping[str, Any]) -> float:
    return sum(arm["share"][part] or 0 for part in ("vision", "projector"))
