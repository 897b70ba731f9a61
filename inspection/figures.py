"""Figures of norm reports: one panel for each thing that was measured, for one report or several laid over each other."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import schema


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Reports = dict[str, dict[str, Any]]  # label -> report.json; the first is drawn solid, the others dashed

# each colour on white and on black; SVG figures change from one to the other with the page around them
_COLOURS = {
    "ink": ("#24292e", "#e3e6ea"),
    "faint": ("#d4d8dd", "#3c434b"),
    "visual": ("#d95f02", "#ff9a4d"),
    "text": ("#1f6fb4", "#6db5f2"),
    "third": ("#2a9d6f", "#58cf9d"),
    "fourth": ("#8e5bb5", "#c49ae6"),
    "fifth": ("#b8456b", "#f08fb0"),
}
INK, FAINT, VISUAL, TEXT, THIRD, FOURTH, FIFTH = (light for light, _ in _COLOURS.values())
_OF_MODALITY = {"visual": VISUAL, "text": TEXT}
_LINES = ("-", "--", ":", "-.")
_STYLE = {
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.grid.axis": "y",
    "grid.color": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "hatch.linewidth": 0.5,
    "svg.hashsalt": "normalign",
}
_SIZE = (4.6, 3.1)


@dataclass(frozen=True)
class Panel:
    """One figure: its title, a sentence that says how to read it, whether a report has it, and what draws it."""

    title: str
    caption: str
    measured: Callable[[dict[str, Any]], bool]
    draw: Callable[[Axes, Reports], None]
    alone: str = ""  # what the caption adds where one report is drawn, not two

    def caption_for(self, reports: int) -> str:
        """The caption of a figure that shows so many reports."""
        return f"{self.caption} {self.alone}".strip() if reports == 1 else self.caption


def measured_panels(reports: Reports) -> list[str]:
    """The names of the panels for which at least one report has figures."""
    return [name for name, panel in PANELS.items() if any(panel.measured(data) for data in reports.values())]


def draw_panel(name: str, reports: Reports) -> Figure:
    """One panel as a figure of its own."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=_SIZE)
        # fixed margins: panels line up on a page, and no time goes into finding a layout
        _draw(figure.add_axes((0.135, 0.15, 0.845, 0.76)), name, reports)
    return figure


def draw_measured(reports: Reports) -> dict[str, Figure]:
    """Every panel for which at least one report has figures, each as a figure of its own."""
    return {name: draw_panel(name, reports) for name in measured_panels(reports)}


def draw_panels(names: Sequence[str], reports: Reports, columns: int = 3) -> Figure:
    """Several panels in one figure, row by row."""
    from matplotlib.figure import Figure

    columns = min(columns, len(names))
    rows = math.ceil(len(names) / columns)
    with style():
        figure = Figure(figsize=(columns * _SIZE[0], rows * _SIZE[1]), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, name in zip(grid, names):
            _draw(axes, name, reports)
        for axes in grid[len(names) :]:
            axes.remove()
    return figure


def draw_evolution(steps: Sequence[int], reports: Sequence[dict[str, Any]]) -> Figure:
    """How training changes a model: norms at the interface, the first layer's turn, and all layers' turns over time."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(13, 3.6), layout="constrained")
        norms, turns, layers = figure.subplots(1, 3)
        for part, colour in (("projector", THIRD), ("inserted", VISUAL)):
            means = [(data["interface"].get(part) or {}).get("mean") for data in reports]
            if schema.has(means):
                norms.plot(steps, _numbers(means), color=colour, marker="o", label=f"visual tokens, {part}")
        norms.plot(steps, [data["text_embedding_norm"] for data in reports], color=TEXT, marker="o", label="text, T")
        _log_if_wide(norms)
        norms.set(title="Norms at the interface", xlabel="step", ylabel="L2 norm")
        for modality, colour in _OF_MODALITY.items():
            by_step = [schema.series(data, modality, "angle_mean_rad") for data in reports]
            turns.plot(steps, _numbers([angles[0] for angles in by_step]), color=colour, marker="o", label=modality)
            for index, angles in enumerate(by_step):
                age = (index + 1) / len(by_step)
                label = {0: f"{modality}, step {steps[0]}", len(by_step) - 1: f"{modality}, step {steps[-1]}"}
                numbers = range(1, len(angles) + 1)
                options = {"alpha": 0.2 + 0.8 * age, "label": label.get(index)}
                layers.plot(numbers, _numbers(angles), color=colour, **options)
        turns.set(title="Turn made by the first layer", xlabel="step", ylabel="angle (rad)", ylim=(0, None))
        layers.set(title="Turn made by each layer, pale: early", xlabel="layer", ylim=(0, None))
        for axes in (norms, turns, layers):
            axes.legend()
            axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def save_png(figure: Figure, path: Any) -> None:
    """Writes a figure as PNG on white."""
    with style():
        figure.savefig(path, dpi=140)


def svg(figure: Figure) -> str:
    """A figure as SVG without background, sharp at every size, whose colours follow a dark page."""
    drawn = io.StringIO()
    with style():
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    picture = drawn.getvalue()
    rules = [":root{", "@media (prefers-color-scheme: dark){:root{"]
    for name, (light, dark) in _COLOURS.items():
        picture = picture.replace(light, f"var(--{name})")
        rules[0] += f"--{name}:{light};"
        rules[1] += f"--{name}:{dark};"
    # the size is the page's to choose
    picture = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", picture))
    return picture.replace("<defs>", f"<style>{rules[0]}}} {rules[1]}}}}}</style><defs>", 1)


@contextmanager
def style():
    """The house style of figures, for what is drawn and saved within."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def _draw(axes: Axes, name: str, reports: Reports) -> None:
    panel = PANELS[name]
    panel.draw(axes, {label: data for label, data in reports.items() if panel.measured(data)})
    axes.set_title(panel.title)
    handles, _ = axes.get_legend_handles_labels()
    if len(handles) > 1:
        axes.legend(ncols=2 if len(handles) > 3 else 1)


def _numbers(values: Sequence[float | None]) -> list[float]:
    """For matplotlib, which leaves a gap at nan."""
    return [math.nan if value is None else value for value in values]


def _log_if_wide(axes: Axes, factor: float = 20) -> None:
    """A logarithmic scale where the drawn values span more than `factor`; else one that starts at zero."""
    heights = [float(y) for line in axes.lines for y in line.get_ydata(orig=False)]
    heights += [bar.get_height() for bar in axes.patches]
    positive = [height for height in heights if math.isfinite(height) and height > 0]
    if positive and max(positive) > factor * min(positive):
        axes.set_yscale("log")
        axes.set_ylim(min(positive) / 2, max(positive) * 3)
    elif positive:
        axes.set_ylim(0, max(positive) * 1.25)


def _suffix(label: str, reports: Reports) -> str:
    return f", {label}" if len(reports) > 1 else ""


def _interface(axes: Axes, reports: Reports) -> None:
    parts = [part for part in schema.INTERFACE_PARTS if any(part in schema.interface(d) for d in reports.values())]
    width = 0.8 / len(reports)
    for index, (label, data) in enumerate(reports.items()):
        for part, figures in schema.interface(data).items():
            middle = parts.index(part) + (index - (len(reports) - 1) / 2) * width
            colour = TEXT if part == "text_tokens" else VISUAL
            axes.bar(middle, figures["mean"], width * 0.92, color=colour, alpha=1 if index == 0 else 0.55)
            _spread(axes, middle, figures)
            axes.annotate(
                schema.number(figures["mean"], 3),
                (middle, max(figures["mean"], (figures.get("quantiles") or {}).get("0.95", 0))),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=8 if len(reports) == 1 else 7,
            )
        line = {"color": INK, "linewidth": 1, "linestyle": "--" if index == 0 else ":"}
        T = axes.axhline(data["text_embedding_norm"], **line)
        T.set_label(f"T{_suffix(label, reports)}")
    _log_if_wide(axes)
    axes.set(ylabel="L2 norm", xticks=range(len(parts)))
    axes.set_xticklabels([schema.INTERFACE_PARTS[part].replace(" ", "\n") for part in parts])


def _spread(axes: Axes, middle: float, figures: dict[str, Any]) -> None:
    """5-95% as a thin line, 25-75% as a thick one; the standard deviation where no quantiles are known."""
    quantiles = figures.get("quantiles")
    if quantiles:
        for low, high, width in (("0.05", "0.95", 1.2), ("0.25", "0.75", 4)):
            axes.plot(
                [middle] * 2, [quantiles[low], quantiles[high]], color=INK, linewidth=width, solid_capstyle="butt"
            )
    elif figures.get("std"):
        axes.errorbar(middle, figures["mean"], yerr=figures["std"], color=INK, capsize=3, linewidth=1.2)


def _by_layer(measure: str, unit: str) -> Callable[[Axes, Reports], None]:
    def draw(axes: Axes, reports: Reports) -> None:
        for index, (label, data) in enumerate(reports.items()):
            for modality, colour in _OF_MODALITY.items():
                name = f"{modality}{_suffix(label, reports)}"
                _line(axes, schema.series(data, modality, measure), index, color=colour, label=name)
        if measure.startswith("cosine"):
            axes.set_ylim(min(0, axes.get_ylim()[0]), 1.05)
        else:
            _log_if_wide(axes)
        axes.set_ylabel(unit)

    return draw


def _line(axes: Axes, values: list[float | None], index: int, **options: Any) -> None:
    if schema.has(values):
        numbers = range(1, len(values) + 1)
        options = {"linestyle": _LINES[index % len(_LINES)], "marker": "o" if len(values) <= 16 else None, **options}
        axes.plot(numbers, _numbers(values), **options)
    axes.set_xlabel("layer")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _turns(axes: Axes, reports: Reports) -> None:
    for index, (label, data) in enumerate(reports.items()):
        for modality, colour in _OF_MODALITY.items():
            name = f"{modality}{_suffix(label, reports)}"
            _line(axes, schema.series(data, modality, "angle_mean_rad"), index, color=colour, label=name)
    if len(reports) == 1:
        for modality, colour in _OF_MODALITY.items():
            _references(axes, data, modality, colour)
    axes.set(ylabel="angle (rad)", ylim=(0, axes.get_ylim()[1] * 1.35))


def _references(axes: Axes, data: dict[str, Any], modality: str, colour: str) -> None:
    """The angle by the formula, as crosses, and that of an update at a right angle, dotted."""
    reference = schema.series(data, modality, "isotropic_angle_rad")
    options = {"color": colour, "linestyle": ":", "marker": None, "linewidth": 1.1}
    _line(axes, reference, 0, label=f"{modality}, if orthogonal", **options)
    formula = schema.series(data, modality, "angle_formula_mean_rad")
    options = {"color": INK, "linestyle": "", "marker": "+", "markersize": 6, "markeredgewidth": 0.8}
    _line(axes, formula, 0, label="by formula" if modality == "text" else None, **options)


def _attention_mass(axes: Axes, reports: Reports) -> None:
    for index, (label, data) in enumerate(reports.items()):
        mass = schema.attention(data, "text_to_visual_mass")
        _line(axes, mass, index, color=VISUAL, label=label)
    axes.set(ylabel="share of attention", ylim=(0, max(axes.get_ylim()[1], 0.05) * 1.1))


def _attention_entropy(axes: Axes, reports: Reports) -> None:
    for index, (label, data) in enumerate(reports.items()):
        name = "entropy" if len(reports) == 1 else label
        _line(axes, schema.attention(data, "visual_entropy"), index, color=VISUAL, label=name)
        options = {"color": INK, "linestyle": ":", "linewidth": 1.1, "marker": None}
        name = "even over all" if index == 0 else None
        _line(axes, schema.attention(data, "visual_entropy_max"), index, label=name, **options)
    axes.set(ylabel="nats", ylim=(0, axes.get_ylim()[1] * 1.2))


def _controls(axes: Axes, reports: Reports) -> None:
    names = [name for name in schema.CONTROLS if any(name in schema.controls(data) for data in reports.values())]
    width = 0.8 / len(reports)
    for index, (label, data) in enumerate(reports.items()):
        found = schema.controls(data)
        middles = [names.index(name) + (index - (len(reports) - 1) / 2) * width for name in found]
        heights = [figures["kl_mean"] for figures in found.values()]
        bars = axes.bar(middles, heights, width * 0.92, color=VISUAL, alpha=1 if index == 0 else 0.55, label=label)
        axes.bar_label(bars, [f"{figures['top1_changed']:.0%}" for figures in found.values()], fontsize=8, padding=2)
    axes.set(ylabel="KL (nats); above: answer changed", xticks=range(len(names)))
    axes.set_xticklabels([schema.CONTROLS[name].replace(" ", "\n", 1) for name in names])
    axes.set_ylim(0, axes.get_ylim()[1] * 1.12)


def _gradients(axes: Axes, reports: Reports) -> None:
    bars = [
        (f"{setting.replace('gwc_', 'GWC ')}{_suffix(label, reports)}", figures["grad_norm"], index, setting)
        for index, (label, data) in enumerate(reports.items())
        for setting, figures in schema.gradients(data).items()
    ]
    width = 0.8 / len(bars)
    for place, (name, norms, index, setting) in enumerate(bars):
        parts = [part for part in schema.GRADIENT_PARTS if norms.get(part)]
        middles = [schema.GRADIENT_PARTS.index(part) + (place - (len(bars) - 1) / 2) * width for part in parts]
        colour = THIRD if setting == "gwc_on" else FOURTH
        heights = [norms[part] for part in parts]
        drawn = axes.bar(middles, heights, width * 0.92, color=colour, alpha=1 if index == 0 else 0.55, label=name)
        axes.bar_label(drawn, [schema.number(height, 2) for height in heights], fontsize=7, padding=2)
    _log_if_wide(axes)
    axes.set(ylabel="L2 norm", xticks=range(len(schema.GRADIENT_PARTS)))
    axes.set_xticklabels(schema.GRADIENT_PARTS)


def _has(measure: str) -> Callable[[dict[str, Any]], bool]:
    return lambda data: any(schema.has(schema.series(data, modality, measure)) for modality in schema.MODALITIES)


PANELS: dict[str, Panel] = {
    "interface": Panel(
        "Norms where image and text meet",
        "Mean L2 norm of a token at each stage; thick line: middle half of the tokens, thin line: 5% to 95%; dashed: T, the "
        "mean norm of the text embeddings.",
        lambda data: bool(schema.interface(data)),
        _interface,
    ),
    "norms": Panel(
        "Hidden-state norm after each layer",
        "How long tokens are on their way through the language model.",
        _has("norm_mean"),
        _by_layer("norm_mean", "L2 norm"),
    ),
    "updates": Panel(
        "Size of each layer's update",
        "What a layer adds to a token, |dh|. In a Pre-Norm model it hardly depends on the token's own norm.",
        _has("update_norm_mean"),
        _by_layer("update_norm_mean", "|dh|"),
    ),
    "relative_updates": Panel(
        "Update against the token's norm",
        "|dh| / |h|: a small ratio means that the layer can hardly move the token.",
        _has("update_ratio_mean"),
        _by_layer("update_ratio_mean", "|dh| / |h|"),
    ),
    "turns": Panel(
        "Turn made by each layer",
        "Angle between a token before and after the layer.",
        _has("angle_mean_rad"),
        _turns,
        "Crosses: the same by the formula from |dh|, |h| and the angle between them. Dotted: the turn if the update stood "
        "at a right angle to the token.",
    ),
    "cosine_prev": Panel(
        "Cosine to the previous layer",
        "Near 1: the layer has left the token as it was.",
        _has("cosine_prev_mean"),
        _by_layer("cosine_prev_mean", "cosine"),
    ),
    "cosine_first": Panel(
        "Cosine to the first layer's input",
        "How much of what came in is still there. Visual tokens that lag behind stay near 1 for longer.",
        _has("cosine_first_mean"),
        _by_layer("cosine_first_mean", "cosine"),
    ),
    "attention_mass": Panel(
        "Attention from text to visual tokens",
        "Share of the attention of text tokens that goes to visual tokens, mean over heads.",
        lambda data: schema.has(schema.attention(data, "text_to_visual_mass")),
        _attention_mass,
    ),
    "attention_entropy": Panel(
        "Spread of the attention over visual tokens",
        "Entropy of that attention; dotted: spread evenly over all visual tokens, that is, it looks nowhere in particular.",
        lambda data: schema.has(schema.attention(data, "visual_entropy")),
        _attention_entropy,
    ),
    "controls": Panel(
        "Does the model look?",
        "How far the distribution of the answer's first token moves when the image is taken away or its tokens are "
        "shuffled. Bars near zero: the model does not use the image.",
        lambda data: bool(schema.controls(data)),
        _controls,
    ),
    "gradients": Panel(
        "Gradient norm by part of the model",
        "One backward pass on the given answers, before clipping, with Global Weight Compensation (GWC) on and off.",
        lambda data: bool(schema.gradients(data)),
        _gradients,
    ),
}
