"""The result of an inspection: a dictionary with fixed keys, saved as JSON with a figure beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class NormReport:
    """Norms at the interface and through the layers; see `inspect_model` for the measures."""

    data: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Keys: schema, model, images, text_embedding_norm, interface, ratio, layers, verdict."""
        return self.data

    def plot(self) -> Figure:
        """Norms at the interface, hidden-state norms by layer, turn per layer by modality."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 3.6), layout="constrained")
        bars, norms, turns = figure.subplots(1, 3)
        labels = ["vision\nencoder", "projector", "inserted", "text"]
        heights = [self.data["interface"][part]["mean"] for part in ("vision_encoder", "projector", "inserted")]
        spread = [self.data["interface"][part]["std"] for part in ("vision_encoder", "projector", "inserted")]
        bars.bar(labels[:3], heights, yerr=spread, color="tab:orange", capsize=3)
        bars.bar(labels[3:], [self.data["text_embedding_norm"]], color="tab:blue")
        bars.set(title="Mean norm at the interface", ylabel="L2 norm")
        layers = range(1, len(self.data["layers"]) + 1)
        for modality, colour in (("visual", "tab:orange"), ("text", "tab:blue")):
            by_layer = [layer[modality] for layer in self.data["layers"]]
            options = {"color": colour, "marker": "o", "label": f"{modality} tokens"}
            norms.plot(layers, [layer["norm_mean"] for layer in by_layer], **options)
            turns.plot(layers, [layer["angle_mean_rad"] for layer in by_layer], **options)
        norms.set(title="Hidden-state norm after each layer", xlabel="layer", ylabel="L2 norm")
        turns.set(title="Turn made by each layer", xlabel="layer", ylabel="angle (rad)", ylim=(0, None))
        norms.legend()
        for axis in (norms, turns):
            axis.xaxis.get_major_locator().set_params(integer=True)
        return figure

    def save(self, folder: str | Path) -> Path:
        """Writes report.json and norms.png into the folder, which is made; returns the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(self.data, indent=2) + "\n")
        self.plot().savefig(folder / "norms.png", dpi=120)
        return folder
