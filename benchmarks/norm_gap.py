"""Draws the picture of the front page: norms and turns of visual and text tokens, without and with the aligned norm.

    python benchmarks/norm_gap.py

Composes the mini backbones twice, with the norm `none` and with the aligned norm, before any training, and measures both
with `inspect_model` on the same held-out scenes. Writes benchmarks/results/norm_gap.json and docs/images/norm_gap.png.
"""

import json
from pathlib import Path

from matplotlib.figure import Figure
from record import machine, versions

from normalign import compose, inspect_model
from normalign.train_trl.digit_scenes import digit_scene_rows


ROOT = Path(__file__).resolve().parents[1]
SCENES = 32
ARMS = {"no norm": {"kind": "none"}, "aligned norm": {"kind": "layernorm"}}
COLOURS = {"visual": "#d95f02", "text": "#1f6fb4"}


def measure() -> dict:
    """The report of each arm, on the same scenes and the same projector."""
    rows = digit_scene_rows(SCENES, seed=2, split="test", text_only_share=0)
    reports = {}
    for arm, settings in ARMS.items():
        model, processor = compose("mini-vision", "mini-language", settings, seed=0)
        pictures, questions = [row["images"][0] for row in rows], [row["question"] for row in rows]
        reports[arm] = inspect_model(model, processor, pictures, questions).to_dict()
    return reports


def draw(reports: dict) -> Figure:
    """Two panels: norms where the two kinds of tokens meet, and how far each layer turns them."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    norms, *turns = figure.subplots(1, 3, width_ratios=[1.2, 1, 1])
    none, aligned = reports["no norm"], reports["aligned norm"]
    bars = {
        "vision\nencoder": (none["interface"]["vision_encoder"]["mean"], "visual"),
        "projector": (none["interface"]["projector"]["mean"], "visual"),
        "aligned\nnorm": (aligned["interface"]["inserted"]["mean"], "visual"),
        "text": (none["text_embedding_norm"], "text"),
    }
    drawn = norms.bar(
        list(bars), [height for height, _ in bars.values()], color=[COLOURS[kind] for _, kind in bars.values()]
    )
    norms.bar_label(drawn, fmt="%.3g")
    norms.set(title="Mean norm of a token", yscale="log", ylim=(0.1, 200))
    highest = max(
        layer[kind]["angle_mean_rad"] for report in reports.values() for layer in report["layers"] for kind in COLOURS
    )
    for axis, (arm, report) in zip(turns, reports.items(), strict=True):
        layers = range(1, len(report["layers"]) + 1)
        for kind, colour in COLOURS.items():
            angles = [layer[kind]["angle_mean_rad"] for layer in report["layers"]]
            axis.plot(layers, angles, color=colour, marker="o", label=f"{kind} tokens")
        axis.set(title=f"Turn made by each layer, {arm}", xlabel="layer", xticks=list(layers), ylim=(0, 1.1 * highest))
    turns[0].set_ylabel("angle (rad)")
    turns[0].legend()
    for axis in (norms, *turns):
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(10)
    return figure


def main() -> None:
    """Measures, records and draws."""
    reports = measure()
    result = ROOT / "benchmarks" / "results" / "norm_gap.json"
    result.write_text(json.dumps({"machine": machine(), "versions": versions(), "reports": reports}, indent=2) + "\n")
    picture = ROOT / "docs" / "images" / "norm_gap.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(reports).savefig(picture, dpi=110)
    print(f"written to {result} and {picture}")


if __name__ == "__main__":
    main()
