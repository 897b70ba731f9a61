"""Norm reports as tables on the console."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import schema
from .compare import Comparison, figure_pairs
from .report import NormReport


if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LAYERS_SHOWN = 12
_COLUMNS = {
    "norm_mean": "norm",
    "update_ratio_mean": "update",
    "cosine_prev_mean": "cosine",
    "angle_mean_rad": "turn",
}
_LAYERS_TITLE = "Through the layers: norm |h|, update |dh|/|h|, cosine to the layer before, turn"
_STYLES = {"visual": "dark_orange", "text": "dodger_blue1"}


def print_report(report: NormReport | Comparison, console: Console | None = None) -> None:
    """Prints the verdict and the tables of one report, or of two side by side."""
    from rich.console import Console

    console = console or Console(highlight=False)
    if isinstance(report, Comparison):
        console.print(_pairs_table(report.reports))
        for label, data in report.reports.items():
            console.print()
            console.print(label, style="bold", markup=False)
            _print_verdict(data, console)
        return
    console.print(f"{report.data['model']}", style="bold", markup=False, soft_wrap=True)
    for table in _tables(report.data):
        console.print(table)
        console.print()
    _print_verdict(report.data, console)


def _print_verdict(data: dict[str, Any], console: Console) -> None:
    console.print(data["verdict"], markup=False)
    for sentence in data.get("not_found") or []:
        console.print(f"Not found: {sentence}", style="dim", markup=False)


def _tables(data: dict[str, Any]) -> Iterator[Table]:
    yield _interface_table(data)
    yield _layers_table(data)
    if schema.has(schema.attention(data, "text_to_visual_mass")):
        yield _attention_table(data)
    if schema.controls(data):
        yield _controls_table(data)
    if schema.gradients(data):
        yield _gradients_table(data)


def _table(title: str, first: str, *columns: str, caption: str | None = None) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right", style=_STYLES.get(column.split("\n")[-1]))
    return table


def _interface_table(data: dict[str, Any]) -> Table:
    T = data["text_embedding_norm"]
    caption = f"T {schema.number(T)}, mean norm of the text embeddings; ratio of inserted to T: {schema.number(data['ratio'], 3)}"
    table = _table("Norms where image and text meet", "", "mean", "std", "x T", "5%", "median", "95%", caption=caption)
    for part, figures in schema.interface(data).items():
        quantiles = figures.get("quantiles") or {}
        values = [figures["mean"], figures["std"], figures["mean"] / T]
        values += [quantiles.get(quantile) for quantile in ("0.05", "0.5", "0.95")]
        table.add_row(schema.INTERFACE_PARTS[part], *(schema.number(value) for value in values))
    return table


def _layers_table(data: dict[str, Any]) -> Table:
    shown, caption = _shown_layers(len(data["layers"]))
    measures = [measure for measure in _COLUMNS if measure in schema.layer_measures(data)]
    columns = [f"{_COLUMNS[measure]}\n{modality}" for measure in measures for modality in schema.MODALITIES]
    table = _table(_LAYERS_TITLE, "layer", *columns, caption=caption)
    values = [schema.series(data, modality, measure) for measure in measures for modality in schema.MODALITIES]
    for index in shown:
        table.add_row(str(index + 1), *(schema.number(column[index], 3) for column in values))
    return table


def _attention_table(data: dict[str, Any]) -> Table:
    shown, caption = _shown_layers(len(data["layers"]))
    table = _table("Attention", "layer", "from text to visual", "entropy (nats)", "if even", caption=caption)
    names = ("text_to_visual_mass", "visual_entropy", "visual_entropy_max")
    mass, entropy, even = (schema.attention(data, name) for name in names)
    for index in shown:
        share = "-" if mass[index] is None else f"{mass[index]:.1%}"
        table.add_row(str(index + 1), share, schema.number(entropy[index], 3), schema.number(even[index], 3))
    return table


def _shown_layers(count: int) -> tuple[list[int], str | None]:
    """Which layers the console shows, the first and the last always, and a caption where some are left out."""
    if count <= LAYERS_SHOWN:
        return list(range(count)), None
    shown = sorted({round(place * (count - 1) / (LAYERS_SHOWN - 1)) for place in range(LAYERS_SHOWN)})
    return shown, f"{len(shown)} of {count} layers; --json and --out give all"


def _controls_table(data: dict[str, Any]) -> Table:
    table = _table("Does the model look?", "instead of the image", "KL (nats)", "answers changed")
    for control, effect in schema.controls(data).items():
        table.add_row(schema.CONTROLS[control], schema.number(effect["kl_mean"], 3), f"{effect['top1_changed']:.0%}")
    return table


def _gradients_table(data: dict[str, Any]) -> Table:
    arms = schema.gradients(data)
    columns = [f"{words}, {name}" for name in map(schema.GWC_SETTINGS.get, arms) for words in ("norm", "share")]
    caption = "\n".join(f"{fact}: {value}" for fact, value in schema.gradient_facts(data).items())
    table = _table("Gradients before clipping", "part", *columns, caption=caption)
    for part in schema.gradient_parts(data):
        cells = []
        for arm in arms.values():
            share = arm["share"].get(part)
            cells += [schema.number(arm["grad_norm"].get(part), 3), "-" if share is None else f"{share:.1%}"]
        table.add_row(part, *cells)
    return table


def _pairs_table(reports: dict[str, dict[str, Any]]) -> Table:
    table = _table("Side by side", "", *reports, "factor")
    for name, pair in figure_pairs(reports).items():
        factor = "" if pair["factor"] is None else f"{schema.number(pair['factor'], 3)}x"
        table.add_row(name, schema.number(pair["first"]), schema.number(pair["second"]), factor)
    return table
