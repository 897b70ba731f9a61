"""Two norm reports side by side: two models, or one before and after training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configuration.errors import NormalignError
from . import schema
from .report import NormReport, save_page_and_figures, write_json


if TYPE_CHECKING:
    from matplotlib.figure import Figure


# bounded figures, of which one does not say "three times as much"
_WITHOUT_FACTOR = ("cosine", "attention", "changed")


@dataclass
class Comparison:
    """Two reports by label, the first being what the second is measured against."""

    reports: dict[str, dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Keys: schema, labels, figures (see `figure_pairs`), layers (each measure as [first, second]), reports."""
        first, second = self.reports.values()
        return {
            "schema": schema.SCHEMA,
            "labels": list(self.reports),
            "figures": figure_pairs(self.reports),
            "layers": [
                {
                    modality: {
                        measure: [_at(schema.series(data, modality, measure), index) for data in (first, second)]
                        for measure in schema.layer_measures(first, second)
                    }
                    for modality in schema.MODALITIES
                }
                for index in range(max(len(first["layers"]), len(second["layers"])))
            ],
            "reports": [first, second],
        }

    def plot(self, *names: str) -> Figure:
        """The panels of both reports laid over each other, the second dashed or pale."""
        from .figures import draw_panels, measured_panels

        return draw_panels(names or measured_panels(self.reports), self.reports)

    def save(self, folder: str | Path) -> Path:
        """Writes comparison.json, comparison.html and figures/*.png into the folder, which is made; returns the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(self.to_dict(), folder / "comparison.json")
        save_page_and_figures(self.reports, folder / "comparison.html")
        return folder


def compare_reports(
    first: NormReport | dict[str, Any],
    second: NormReport | dict[str, Any],
    labels: tuple[str, str] | None = None,
) -> Comparison:
    """Lays two reports side by side.

    Args:
        labels: what to call them; by default the models' names, with "first" and "second" behind equal ones.

    Raises:
        NormalignError: the two labels are the same.
    """
    reports = [report if isinstance(report, NormReport) else NormReport(report) for report in (first, second)]
    if labels is None:
        labels = tuple(report.label for report in reports)
        if labels[0] == labels[1]:
            labels = f"{labels[0]}, first", f"{labels[1]}, second"
    if len(set(labels)) != 2:
        raise NormalignError(f"Two reports need two different labels, got {labels}.")
    return Comparison({label: report.data for label, report in zip(labels, reports, strict=True)})


def key_figures(data: dict[str, Any]) -> dict[str, float | None]:
    """The figures that tell two models apart, by the words that tables use."""
    figures: dict[str, float | None] = {"T, mean norm of text embeddings": data["text_embedding_norm"]}
    for part, figure in schema.interface(data).items():
        figures[f"mean norm, {schema.INTERFACE_PARTS[part]}"] = figure["mean"]
    figures["ratio, inserted / T"] = data["ratio"]
    for modality in schema.MODALITIES:
        turns = schema.series(data, modality, "angle_mean_rad")
        figures[f"turn in the first layer (rad), {modality}"] = _at(turns, 0)
        figures[f"turn in a layer, mean (rad), {modality}"] = _mean(turns)
        first = schema.series(data, modality, "cosine_first_mean")
        if schema.has(first):
            figures[f"cosine of last layer to first, {modality}"] = first[-1]
    mass = schema.attention(data, "text_to_visual_mass")
    if schema.has(mass):
        figures["attention from text to visual, mean"] = _mean(mass)
    for control, effect in schema.controls(data).items():
        figures[f"{schema.CONTROLS[control]}, KL (nats)"] = effect["kl_mean"]
        figures[f"{schema.CONTROLS[control]}, answers changed"] = effect["top1_changed"]
    return figures


def figure_pairs(reports: dict[str, dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Each key figure as `first`, `second`, and `factor` (second / first; None for cosines and shares)."""
    first, second = (key_figures(data) for data in reports.values())
    pairs = {}
    for name in {**first, **second}:
        one, other = first.get(name), second.get(name)
        comparable = one and other is not None and not any(word in name for word in _WITHOUT_FACTOR)
        pairs[name] = {"first": one, "second": other, "factor": other / one if comparable else None}
    return pairs


def _at(values: list[float | None], index: int) -> float | None:
    return values[index] if index < len(values) else None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
