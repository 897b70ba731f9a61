"""The names in report.json, the words for them, and how figures, tables and pages read what may not have been measured."""

from __future__ import annotations

import math
from typing import Any


SCHEMA = 1
MODALITIES = ("visual", "text")
QUANTILES = ("0.05", "0.25", "0.5", "0.75", "0.95")
INTERFACE_PARTS = {
    "vision_encoder": "vision encoder",
    "projector": "projector",
    "inserted": "inserted",
    "text_tokens": "text tokens",
}
LAYER_MEASURES = {
    "norm_mean": "norm",
    "update_norm_mean": "update",
    "update_ratio_mean": "update / norm",
    "cosine_prev_mean": "cosine to previous",
    "cosine_first_mean": "cosine to first",
    "angle_mean_rad": "turn (rad)",
    "angle_formula_mean_rad": "turn by formula (rad)",
    "isotropic_angle_rad": "turn if orthogonal (rad)",
}
CONTROLS = {
    "black": "black image",
    "none": "no image",
    "other": "another image",
    "position_sensitivity_index": "visual tokens shuffled",
}
GRADIENT_PARTS = ("vision", "projector", "norm", "language", "other")
GWC_SETTINGS = {"gwc_off": "GWC off", "gwc_on": "GWC on"}


def interface(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The parts of the interface that were measured, in the order in which a token passes them."""
    measured = data.get("interface") or {}
    return {part: measured[part] for part in INTERFACE_PARTS if measured.get(part)}


def series(data: dict[str, Any], modality: str, measure: str) -> list[float | None]:
    """One measure of one modality, layer by layer; None where it was not measured."""
    return [(layer.get(modality) or {}).get(measure) for layer in data.get("layers") or []]


def attention(data: dict[str, Any], measure: str) -> list[float | None]:
    """One measure of attention, layer by layer; None where it was not measured."""
    return [(layer.get("attention") or {}).get(measure) for layer in data.get("layers") or []]


def controls(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The controls that were measured, in a fixed order."""
    measured = data.get("controls") or {}
    return {control: measured[control] for control in CONTROLS if measured.get(control)}


def gradients(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The gradients without and with GWC (a model without an aligned norm has the first alone)."""
    measured = data.get("gradients") or {}
    return {setting: measured[setting] for setting in GWC_SETTINGS if measured.get(setting)}


def gradient_parts(data: dict[str, Any]) -> list[str]:
    """The parts of the model that have gradients."""
    found = gradients(data).values()
    return [part for part in GRADIENT_PARTS if any(arm["grad_norm"].get(part) is not None for arm in found)]


def gradient_facts(data: dict[str, Any]) -> dict[str, str]:
    """What else is known of the gradients, in words: mu, what it predicts, what was measured, the clipping."""
    measured = data.get("gradients") or {}
    facts = {}
    if measured.get("mu") is not None:
        facts["mu"] = number(measured["mu"])
        facts["predicted factor before the norm, 1/mu"] = number(measured["predicted_factor"])
        factors = measured.get("measured_factor") or {}
        known = [f"{part} {number(factor)}" for part, factor in factors.items() if factor is not None]
        facts["measured factor"] = ", ".join(known) or "-"
    if clip := measured.get("clip"):
        factors = [
            f"{number(clip[key], 3)} with {GWC_SETTINGS[name]}"
            for name, key in (("gwc_off", "factor_off"), ("gwc_on", "factor_on"))
            if clip.get(key) is not None
        ]
        facts[f"clipping at {number(clip['max_grad_norm'])} leaves a factor of"] = ", ".join(factors)
    return facts


def layer_measures(*reports: dict[str, Any]) -> dict[str, str]:
    """The measures through the layers, with their words, that at least one of the reports has."""
    return {
        measure: words
        for measure, words in LAYER_MEASURES.items()
        if any(has(series(data, modality, measure)) for data in reports for modality in MODALITIES)
    }


def has(values: list[float | None]) -> bool:
    """Whether anything was measured at all."""
    return any(value is not None for value in values)


def flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one with dotted keys; lists become words."""
    rows = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            rows.update(flat(value, f"{prefix}{key}."))
        else:
            rows[f"{prefix}{key}"] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return rows


def number(value: Any, digits: int = 4) -> str:
    """A figure as tables show it: `digits` significant figures, no exponent where it can be read without, - for none."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 10**digits - 0.5 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    shown = f"{value:#.{digits}g}".rstrip(".")
    return shown if "e" not in shown else f"{value:.{digits - 1}e}"
