"""The page of an ablation, made from its summary.json alone: one HTML file that needs nothing, and Markdown with pictures."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..inspection.schema import number
from .ablation_summary import (
    MEASURE_WORDS,
    good_direction,
    higher,
    question_kinds,
    sentences,
    signed,
    verdict,
    with_interval,
)


Summary = dict[str, Any]

_TEMPLATES = Path(__file__).parent
_CLAIMS = {
    "a": "Are projected tokens much longer than text?",
    "b": "Do they turn more slowly?",
    "c": "Does a start at the norm of text help?",
    "d": "Does the default gain get going?",
    "e": "Does GWC feed what a small gain starves?",
}
_SECTIONS = {
    "Accuracy": ["accuracy", "accuracy_by_kind", "differences"],
    "On the way": ["curve_accuracy", "curve_question_loss", "curve_caption_loss", "curve_text_only_loss"],
    "Gain and norms": ["gain", "projected_norm", "ratio", "turns"],
    "Gradients, clipping and updates": ["grad_norm", "update", "clipping"],
}


@dataclass(frozen=True)
class Table:
    """A table of words: `rows` have a cell for each of `head`."""

    title: str
    head: list[str]
    rows: list[list[str]]
    caption: str = ""


def write_page(summary: Summary, out: Path) -> Path:
    """Writes ablation.html and ablation.md with figures/*.png into the folder `out`.

    Args:
        summary: the content of summary.json.
        out: a folder; it is made where there is none.

    Returns:
        the HTML page.
    """
    from ..inspection.figures import save_png, svg
    from .ablation_figures import PANELS, draw_ablation

    out = Path(out)
    pictures = out / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    drawn = draw_ablation(summary)
    embedded = {}
    for name, figure in drawn.items():
        save_png(figure, pictures / f"{name}.png")
        embedded[name] = f"data:image/svg+xml;base64,{base64.b64encode(svg(figure).encode()).decode()}"
    frame, claims = _by_claim(sentences(summary))
    content = {
        "arms": list(summary["arms"]),
        "frame": frame,
        "claims": claims,
        "sections": {
            section: {
                "figures": {name: PANELS[name] for name in names if name in drawn},
                "tables": [table for table in _tables(summary, section) if table.rows],
            }
            for section, names in _SECTIONS.items()
        },
        "settings": json.dumps(summary["settings"]),
        "stages": ", then ".join(f"{stage['stage']} ({number(stage['steps'])} steps)" for stage in summary["stages"]),
    }
    page = out / "ablation.html"
    page.write_text(_render("ablation_page.html.jinja", True, {**content, "pictures": embedded}), encoding="utf-8")
    pictured = {name: f"figures/{name}.png" for name in drawn}
    markdown = _render("ablation_page.md.jinja", False, {**content, "pictures": pictured})
    (out / "ablation.md").write_text(markdown, encoding="utf-8")
    return page


def _render(template: str, autoescape: bool, content: dict[str, Any]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=autoescape, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((_TEMPLATES / template).read_text(encoding="utf-8")).render(content)


def _by_claim(said: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The sentences on the whole, and those on each claim under its question."""
    marks = {f"({letter}) ": question for letter, question in _CLAIMS.items()}
    claims = {
        question: [text.removeprefix(mark) for text in said if text.startswith(mark)]
        for mark, question in marks.items()
    }
    return [text for text in said if not text.startswith(tuple(marks))], claims


# --- tables


def _tables(summary: Summary, section: str) -> list[Table]:
    return {
        "Accuracy": lambda: [_at_the_end(summary), _differences(summary)],
        "On the way": lambda: [_after_stages(summary), _steps_to(summary)],
        "Gain and norms": lambda: [_gains(summary), _norms(summary)],
        "Gradients, clipping and updates": lambda: [_training(summary)],
    }[section]()


def _by_arm(summary: Summary, title: str, measures: dict[str, str], caption: str = "") -> Table:
    """Measures down, arms across; a measure that no arm has is left out."""
    arms = summary["arms"]
    rows = [
        [words, *(_cell(arm["measures"].get(measure)) for arm in arms.values())]
        for measure, words in measures.items()
        if any(measure in arm["measures"] for arm in arms.values())
    ]
    return Table(title, ["", *arms], rows, caption)


def _cell(figures: dict[str, Any] | None, show: Callable[[float], str] = lambda value: number(value, 3)) -> str:
    return "-" if figures is None else with_interval(figures, show)


def _held_out_words(summary: Summary) -> dict[str, str]:
    kinds = question_kinds(summary)
    words = {measure: text for measure, text in MEASURE_WORDS.items() if not measure.startswith("area/")}
    return {
        **words,
        **{f"accuracy/{kind}": f"accuracy, {kind}" for kind in kinds},
        **{f"loss/{kind}": f"loss, {kind}" for kind in kinds},
    }


def _at_the_end(summary: Summary) -> Table:
    note = "Losses are nats a token. In brackets the 95% t-interval over seeds; with few seeds it may pass what is possible."
    return _by_arm(summary, "At the end, on held-out rows", _held_out_words(summary), note)


def _differences(summary: Summary) -> Table:
    pairs = {
        f"{arm} against {other}": pair for arm, others in summary["paired"].items() for other, pair in others.items()
    }
    words = {**MEASURE_WORDS, **_held_out_words(summary)}
    rows = [
        [text, *(_judged(pair[measure], measure) for pair in pairs.values())]
        for measure, text in words.items()
        if all(measure in pair for pair in pairs.values())
    ]
    return Table(
        "Differences, seed by seed",
        ["", *pairs],
        rows if pairs else [],
        "Mean of the differences, in brackets its 95% t-interval. Many comparisons, not corrected for being many.",
    )


def _judged(pair: dict[str, Any], measure: str) -> str:
    judged = verdict(pair, good_direction(measure))
    judged = f", {judged}" if judged in ("better", "worse") else ""
    return f"{with_interval(pair, signed)}, {higher(pair)}{judged}"


def _after_stages(summary: Summary) -> Table:
    measures = {
        f"after/{stage['stage']}/{measure}": f"{words}, after {stage['stage']}"
        for stage in summary["stages"]
        for measure, words in MEASURE_WORDS.items()
    }
    areas = {measure: words for measure, words in MEASURE_WORDS.items() if measure.startswith("area/")}
    note = "On the smaller set of held-out rows that the curves are measured on. Over the whole training: the curve's mean height."
    return _by_arm(summary, "After each stage", {**measures, **areas}, note)


def _steps_to(summary: Summary) -> Table:
    arms = summary["arms"].values()
    names = {"accuracy": "accuracy on questions of", "caption_loss": "loss on captions of"}
    rows = [
        [f"{words} {level}", *(_reached(arm["steps_to"][measure][level]) for arm in arms)]
        for measure, words in names.items()
        for level in next(iter(arms))["steps_to"][measure]
    ]
    note = (
        "Steps over all stages until a measurement first showed it: median over all seeds, where one that never did counts "
        "as later than any other, so that there is none where half or fewer did; in brackets how many did."
    )
    return Table("Steps to reach a level", ["", *summary["arms"]], rows, note)


def _reached(steps: dict[str, Any]) -> str:
    if steps["median"] is None:
        shown = "no median" if steps["reached"] else "never"
    else:
        shown = f"{steps['median']:g}"
    return f"{shown} ({steps['reached']} of {steps['of']})"


def _gains(summary: Summary) -> Table:
    rows = [
        [
            arm,
            *(_cell(figures["measures"][f"gain/{name}"], number) for name in ("start", "end", "end_l2")),
            _cell(figures["measures"]["gain/movement"], lambda share: f"{number(100 * share, 3)}%"),
        ]
        for arm, figures in summary["arms"].items()
        if "gain/start" in figures["measures"]
    ]
    head = ["", "mean |gain|, start", "mean |gain|, end", "L2, end", "moved, of its length"]
    return Table("Gain of the norm", head, rows, "The figures of the paper's Table 5, here after all stages.")


def _norms(summary: Summary) -> Table:
    words = {
        "projected_norm": "norm of projected tokens",
        "projected_ratio": "projected over text",
        "inserted_norm": "norm of inserted tokens",
        "ratio": "inserted over text",
        "text_norm": "norm of text embeddings",
        "turn_ratio": "turns, visual over text",
    }
    when = {"before": "start", "after": "end"}
    measures = {f"{key}/{end}": f"{text}, {when[end]}" for key, text in words.items() for end in when}
    return _by_arm(summary, "Norms and turns", measures, "Measured on 16 held-out scenes before and after training.")


def _training(summary: Summary) -> Table:
    keys = {"clip_factor": "clipping factor", "clip_factor_without_gwc": "clipping factor, had GWC been off"}
    for part in ("vision", "projector", "norm", "language"):
        keys |= {f"grad_norm/{part}": f"gradient norm, {part}", f"update/{part}": f"relative update, {part}"}
    measures = {
        f"{stage['stage']}/{key}": f"{words}, {stage['stage']}"
        for stage in summary["stages"]
        for key, words in keys.items()
    }
    return _by_arm(
        summary, "In training", measures, "Means over the logged steps. Gradient norms are those before clipping."
    )
