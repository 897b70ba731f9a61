"""The result of an inspection: a dictionary with fixed keys, saved as JSON, figures and a page that opens offline."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configuration.errors import NormalignError
from .schema import SCHEMA


if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_FILE = "report.json"


@dataclass
class NormReport:
    """Norms where image and text meet and on their way through the layers; see `inspect_model` for the measures."""

    data: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The report as docs/inspection.md describes it, schema 1; None stands for what is not a finite number."""
        return finite(self.data)

    def plot(self, *names: str) -> Figure:
        """All that was measured as panels of one figure, or only those named (see `figures.PANELS`).

        Raises:
            NormalignError: there is no panel of that name, or the report lacks what it shows.
        """
        from .figures import draw_panels, measured_panels

        reports = {self.label: self.data}
        measured = measured_panels(reports)
        if unknown := [name for name in names if name not in measured]:
            raise NormalignError(
                f"This report has no figure {', '.join(unknown)}. It has: {', '.join(measured)}. Attention, controls and "
                f"gradients are measured only when asked for."
            )
        return draw_panels(names or measured, reports)

    def save(self, folder: str | Path) -> Path:
        """Writes report.json, report.html and figures/*.png into the folder, which is made; returns the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(self.to_dict(), folder / REPORT_FILE)
        save_page_and_figures({self.label: self.data}, folder / "report.html")
        return folder

    @classmethod
    def load(cls, path: str | Path) -> NormReport:
        """A report that was saved, from its folder or its report.json.

        Raises:
            NormalignError: there is none, or it is not of this schema.
        """
        path = Path(path)
        path = path / REPORT_FILE if path.is_dir() else path
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise NormalignError(f"{path} cannot be read as a norm report: {error}") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else None
            raise NormalignError(
                f"{path} is no norm report of schema {SCHEMA} (found: {found}). `normalign inspect` writes one."
            )
        return cls(data)

    @property
    def label(self) -> str:
        """What figures and tables call the model: the last part of its folder or id."""
        return Path(str(self.data["model"])).name or str(self.data["model"])


def save_page_and_figures(reports: dict[str, dict[str, Any]], page: Path) -> None:
    """Writes the page, and beside it figures/NAME.png, one a panel; figures of an earlier report go."""
    from .figures import PANELS, draw_measured, save_png
    from .page import render_page

    figures = draw_measured(reports)
    page.write_text(render_page(reports, figures), encoding="utf-8")
    folder = page.parent / "figures"
    folder.mkdir(exist_ok=True)
    for name in PANELS:
        path = folder / f"{name}.png"
        if name in figures:
            save_png(figures[name], path)
        else:
            path.unlink(missing_ok=True)


def write_json(data: dict[str, Any], path: Path) -> None:
    """Writes JSON that every reader takes, which has no inf and no nan."""
    path.write_text(json.dumps(finite(data), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def finite(value: Any) -> Any:
    """The same with None for inf and nan, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
