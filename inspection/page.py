"""A report as one HTML page that needs nothing beside it: figures are inside, and it loads nothing from anywhere."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import schema
from .compare import figure_pairs


if TYPE_CHECKING:
    from matplotlib.figure import Figure


TEMPLATE = Path(__file__).parent / "page.html.jinja"
_SECTIONS = {
    "interface": ("Where image and text meet", ["interface"]),
    "layers": (
        "Through the layers",
        ["turns", "norms", "updates", "relative_updates", "cosine_prev", "cosine_first"],
    ),
    "attention": ("Attention", ["attention_mass", "attention_entropy"]),
    "controls": ("Does the model look?", ["controls"]),
    "gradients": ("Gradients", ["gradients"]),
}


def render_page(reports: dict[str, dict[str, Any]], figures: dict[str, Figure]) -> str:
    """One report, or two to compare, by label, and their figures by panel, as a self-contained HTML page."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = schema.number
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=" and ".join(reports),
        reports=reports,
        pairs=figure_pairs(reports) if len(reports) == 2 else None,
        sections={
            section: (words, [_embedded(name, figures[name], len(reports)) for name in names if name in figures])
            for section, (words, names) in _SECTIONS.items()
            if set(names) & set(figures)
        },
        layer_tables={label: _layer_table(data) for label, data in reports.items()},
        quantiles={
            label: all(part.get("quantiles") for part in schema.interface(data).values())
            for label, data in reports.items()
        },
        schema=schema,
    )


def _embedded(name: str, figure: Figure, reports: int) -> dict[str, str]:
    from .figures import PANELS, svg

    picture = base64.b64encode(svg(figure).encode()).decode()
    return {
        "title": PANELS[name].title,
        "caption": PANELS[name].caption_for(reports),
        "source": f"data:image/svg+xml;base64,{picture}",
    }


def _layer_table(data: dict[str, Any]) -> dict[str, Any]:
    """Columns (words, and the two modalities below them) and rows of figures, one a layer."""
    measures = schema.layer_measures(data)
    values = [schema.series(data, modality, measure) for measure in measures for modality in schema.MODALITIES]
    return {"measures": list(measures.values()), "rows": list(zip(*values, strict=True))}
