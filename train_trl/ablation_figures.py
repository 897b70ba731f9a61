"""The figures of an ablation, from its summary alone: one colour an arm, means with intervals, a dot for each run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..inspection.figures import FAINT, FIFTH, FOURTH, INK, TEXT, THIRD, VISUAL, style
from .ablation_summary import question_kinds


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Summary = dict[str, Any]

_COLOURS = {"none": INK, "default": FOURTH, "aligned": TEXT, "aligned_gwc": VISUAL, "rms": THIRD, "scale": FIFTH}
_PARTS = ("vision", "projector", "norm", "language")
_SIZE = (4.8, 3.4)
_LEGEND_COLUMNS = 4


@dataclass(frozen=True)
class Panel:
    """One figure: title, a sentence that says how to read it, and what draws it."""

    title: str
    caption: str
    draw: Callable[[Axes, Summary], None]
    left: float = 0.16  # margin, as a share of the width


def draw_ablation(summary: Summary) -> dict[str, Figure]:
    """Every panel for which the summary has figures, by name."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figures = {}
    for name, panel in PANELS.items():
        with style():
            figure = Figure(figsize=_SIZE)
            # fixed margins: panels line up on a page, and no time goes into finding a layout
            bottom = 0.19 + 0.06 * math.ceil(len(summary["arms"]) / _LEGEND_COLUMNS)
            axes = figure.add_axes((panel.left, bottom, 0.98 - panel.left, 0.92 - bottom))
            panel.draw(axes, summary)
            if not axes.has_data():
                continue
            axes.set_title(panel.title)
            arms = [Line2D([], [], color=_COLOURS[arm], marker="o", label=arm) for arm in summary["arms"]]
            figure.legend(handles=arms, loc="lower center", ncols=_LEGEND_COLUMNS)
            figures[name] = figure
    return figures


# --- one point an arm


def _points(axes: Axes, place: float, figures: dict[str, Any], arm: str, filled: bool = True) -> None:
    """The runs as small dots, their mean as a large one, and its interval."""
    colour, values = _COLOURS[arm], figures["values"]
    if filled:
        axes.plot([place] * len(values), values, linestyle="", marker="o", markersize=3.5, color=colour, alpha=0.45)
    error = None if figures["low"] is None else _error(figures)
    face = colour if filled else "none"
    axes.errorbar(
        place,
        figures["mean"],
        error,
        color=colour,
        marker="o",
        markersize=6,
        markerfacecolor=face,
        linewidth=1.6,
        capsize=3,
    )


def _error(figures: dict[str, Any]) -> list[list[float]]:
    return [[figures["mean"] - figures["low"]], [figures["high"] - figures["mean"]]]


def _places(arms: Sequence[str], group: int) -> Iterator[tuple[float, str]]:
    """Where each arm stands beside the middle of its group."""
    width = min(0.16, 0.8 / len(arms))
    for index, arm in enumerate(arms):
        yield group + (index - (len(arms) - 1) / 2) * width, arm


def _grouped(axes: Axes, summary: Summary, groups: dict[str, str]) -> None:
    """Groups (measure and words) along the axis, the arms that have the measure side by side in each."""
    for group, measure in enumerate(groups):
        for place, arm in _places(list(summary["arms"]), group):
            if figures := summary["arms"][arm]["measures"].get(measure):
                _points(axes, place, figures, arm)
    axes.set_xticks(range(len(groups)), list(groups.values()))
    axes.set_xlim(-0.6, len(groups) - 0.4)


def _accuracy(axes: Axes, summary: Summary) -> None:
    arms = list(summary["arms"])
    by_seed = zip(*[summary["arms"][arm]["accuracy"]["values"] for arm in arms])
    for values in by_seed:
        axes.plot(range(len(arms)), values, color=FAINT, linewidth=1, zorder=1)
    for place, arm in enumerate(arms):
        _points(axes, place, summary["arms"][arm]["accuracy"], arm)
    axes.set_xticks(range(len(arms)), arms, fontsize=9 if len(arms) < 5 else 8)
    axes.set(ylabel="share of answers right", xlim=(-0.5, len(arms) - 0.5))
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -0.02), min(high, 1.02))


def _by_kind(axes: Axes, summary: Summary) -> None:
    kinds = question_kinds(summary)
    _grouped(axes, summary, {f"accuracy/{kind}": kind for kind in kinds})
    axes.set(ylabel="share of answers right", ylim=(-0.02, 1.02))


def _differences(axes: Axes, summary: Summary) -> None:
    first, *others = summary["arms"]
    rows = {"accuracy": "all questions", **{f"accuracy/{kind}": kind for kind in question_kinds(summary)}}
    rows["text_only_accuracy"] = "text alone"
    for row, measure in enumerate(rows):
        for place, arm in _places(others, row) if others else ():
            if pair := summary["paired"][arm][first].get(measure):
                error = None if pair["low"] is None else _error(pair)
                axes.errorbar(
                    pair["mean"], place, xerr=error, color=_COLOURS[arm], marker="o", markersize=5, capsize=2.5
                )
    if others:
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_yticks(range(len(rows)), list(rows.values()))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x")
        axes.locator_params(axis="x", nbins=6)
        axes.set(xlabel=f"accuracy minus that of {first}")


# --- curves


def _curve(name: str, unit: str, log: bool = False) -> Callable[[Axes, Summary], None]:
    def draw(axes: Axes, summary: Summary) -> None:
        curves = {arm: figures["curves"].get(name) for arm, figures in summary["arms"].items()}
        measured = {arm: points for arm, points in curves.items() if points}
        if not measured:
            return
        for arm, points in measured.items():
            steps = [point["step"] for point in points]
            means = [point["mean"] for point in points]
            axes.plot(steps, means, color=_COLOURS[arm], marker="o" if len(steps) < 4 else None)
            if points[0]["low"] is not None:
                low, high = ([point[end] for point in points] for end in ("low", "high"))
                axes.fill_between(steps, low, high, color=_COLOURS[arm], alpha=0.15, linewidth=0)
        _limit(axes, [point["mean"] for points in measured.values() for point in points], name, log)
        _stages(axes, summary)
        axes.set(xlabel="optimizer steps, all stages", ylabel=unit)

    return draw


def _stages(axes: Axes, summary: Summary) -> None:
    """A dotted line where a stage ends and the next begins."""
    done = 0
    for stage in summary["stages"][:-1]:
        done += stage["steps"]
        axes.axvline(done, color=INK, linestyle=":", linewidth=1)


def _limit(axes: Axes, means: Sequence[float], name: str, log: bool) -> None:
    """The range of the means, and of the intervals only as far as they stay near it and possible."""
    if _log_if_wide(axes, means, log):
        return
    low, high = axes.get_ylim()
    axes.set_ylim(
        max(low, -0.02 if "accuracy" in name else 0), min(high, 1.02 if "accuracy" in name else 2 * max(means))
    )


def _log_if_wide(axes: Axes, values: Sequence[float], wanted: bool = True, factor: float = 10) -> bool:
    """A logarithmic scale where the means span more than `factor`; whether it was set."""
    positive = [value for value in values if value > 0]
    wide = wanted and bool(positive) and max(positive) > factor * min(positive)
    if wide:
        axes.set_yscale("log", nonpositive="clip")
        axes.set_ylim(min(positive) / 2, max(positive) * 2)
    return wide


def _turns(axes: Axes, summary: Summary) -> None:
    for arm, figures in summary["arms"].items():
        for when, line, alpha in (("before", "--", 0.6), ("after", "-", 1)):
            turns = figures["turns"][when]
            ratios = [visual["mean"] / text["mean"] for visual, text in zip(turns["visual"], turns["text"])]
            layers = range(1, len(ratios) + 1)
            axes.plot(layers, ratios, color=_COLOURS[arm], linestyle=line, marker="o", alpha=alpha)
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="layer", ylabel="turn, visual / text", ylim=(0, None))


# --- training


def _by_part(key: str, unit: str) -> Callable[[Axes, Summary], None]:
    def draw(axes: Axes, summary: Summary) -> None:
        measures = {
            f"{stage['stage']}/{key}/{part}": f"{part}\n{stage['stage']}"
            for part in _PARTS
            for stage in summary["stages"]
        }
        means = {
            measure: [arm["measures"][measure]["mean"] for arm in summary["arms"].values()] for measure in measures
        }
        trained = {measure: words for measure, words in measures.items() if max(means[measure]) > 0}
        for group, measure in enumerate(trained):
            for place, arm in _places(list(summary["arms"]), group):
                figures = summary["arms"][arm]["measures"][measure]
                if figures["mean"] > 0:  # zero: this arm has no such part
                    _points(axes, place, figures, arm)
        axes.set_xticks(range(len(trained)), list(trained.values()))
        axes.set_ylabel(unit)
        if not _log_if_wide(axes, [value for measure in trained for value in means[measure]], factor=5):
            axes.set_ylim(bottom=0)

    return draw


def _clipping(axes: Axes, summary: Summary) -> None:
    stages = [stage["stage"] for stage in summary["stages"]]
    _grouped(axes, summary, {f"{stage}/clip_factor": stage for stage in stages})
    for group, stage in enumerate(stages):
        for place, arm in _places(list(summary["arms"]), group):
            if without := summary["arms"][arm]["measures"].get(f"{stage}/clip_factor_without_gwc"):
                _points(axes, place + 0.05, without, arm, filled=False)
    axes.set(ylabel="factor (1: not clipped)", ylim=(0, 1.05))


PANELS = {
    "accuracy": Panel(
        "Accuracy on questions",
        "Large dots: mean over seeds with its 95% interval; small dots: the runs; faint lines: the same seed.",
        _accuracy,
    ),
    "accuracy_by_kind": Panel(
        "Accuracy by kind of question", "Mean over seeds with its 95% interval, and the runs as small dots.", _by_kind
    ),
    "differences": Panel(
        "Differences of accuracy, seed by seed",
        "Mean of the differences with its 95% interval. An interval that holds 0 shows no difference.",
        _differences,
        left=0.2,
    ),
    "curve_accuracy": Panel(
        "Accuracy on questions, on the way",
        "Mean and 95% interval over seeds. Dotted: the next stage begins.",
        _curve("accuracy", "share of answers right"),
    ),
    "curve_question_loss": Panel(
        "Loss on questions, on the way",
        "Nats a token of the answers; mean and 95% interval over seeds.",
        _curve("question_loss", "nats a token", log=True),
    ),
    "curve_caption_loss": Panel(
        "Loss on captions, on the way",
        "Nats a token of the captions; mean and 95% interval over seeds.",
        _curve("caption_loss", "nats a token", log=True),
    ),
    "curve_text_only_loss": Panel(
        "Loss on text alone, on the way",
        "Questions without a picture, with the scene told in words; mean and 95% interval over seeds.",
        _curve("text_only_loss", "nats a token", log=True),
    ),
    "gain": Panel(
        "Gain of the norm",
        "Mean |gain| in training; mean and 95% interval over seeds. The arm none has no gain.",
        _curve("gain_abs_mean", "mean |gain|", log=True),
    ),
    "projected_norm": Panel(
        "Norm of projected tokens",
        "Mean L2 norm of visual tokens before the aligned norm, in training batches.",
        _curve("projected_norm", "L2 norm", log=True),
    ),
    "ratio": Panel(
        "Norm of visual over text tokens",
        "Where both enter the language model, in training batches. At 1 they are alike.",
        _curve("ratio", "ratio", log=True),
    ),
    "turns": Panel(
        "Turns of visual over text tokens, by layer",
        "Angle that a layer turns a token by, means over seeds. Dashed: before training; solid: after it.",
        _turns,
    ),
    "grad_norm": Panel(
        "Gradient norm by part",
        "Before clipping, mean over the logged steps of a stage; parts that are frozen are left out.",
        _by_part("grad_norm", "L2 norm"),
    ),
    "update": Panel(
        "Relative update by part",
        "How far one optimizer step moves the weights, |dW| / |W|; mean over the logged steps of a stage.",
        _by_part("update", "|dW| / |W|"),
    ),
    "clipping": Panel(
        "Clipping factor",
        "What clipping left of the gradients, mean over the logged steps. Open: what it would have left without GWC.",
        _clipping,
    ),
}
