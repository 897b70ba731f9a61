"""What `normalign inspect` measured, for the card: a table of norms and turns, and their figure."""

import math
from dataclasses import dataclass
from pathlib import Path

from ..configuration.errors import NormalignError
from ..inspection import NormReport
from ..inspection.figures import draw_panels, measured_panels, save_png
from ..inspection.schema import INTERFACE_PARTS, interface, number, series


NORMS_FIGURE = "norms.png"
_PANELS = ("interface", "norms", "turns")


@dataclass
class NormTable:
    """What the card says of a report: rows of norms (part, mean, std, times T) and of turns, and the figure's text."""

    images: int
    text_norm: str
    rows: list[tuple[str, str, str, str]]
    turns: list[tuple[str, str, str]]
    verdict: str
    alt_text: str


def norm_table(report: NormReport, facts) -> NormTable:
    """The table of a report that is of this model.

    Args:
        report: what `normalign inspect` saved.
        facts: what `model_facts` read from the model that is exported.

    Raises:
        NormalignError: the report is of another model, by its text norm, number of layers, or norm and gain; says which.
    """
    data = report.data
    if differences := _differences(data, facts):
        raise NormalignError(
            f"The inspection report is of another model ('{report.label}'), or of this one at another time of its "
            f"training: {'; '.join(differences)}. Run `normalign inspect` on the very folder that is exported, with "
            f"--out, and name that folder."
        )
    try:
        T = data["text_embedding_norm"]
        rows = [
            (
                INTERFACE_PARTS[part],
                number(figures["mean"]),
                number(figures.get("std")),
                number(figures["mean"] / T, 3),
            )
            for part, figures in interface(data).items()
        ]
        turns = [
            (f"{modality} tokens", *(number(angles[place], 3) for place in (0, -1)))
            for modality in ("visual", "text")
            if (angles := series(data, modality, "angle_mean_rad"))
        ]
        inserted = number(data["interface"]["inserted"]["mean"])
        images, verdict = data["images"], " ".join(data["verdict"].split())
    except (KeyError, TypeError, AttributeError) as error:
        raise NormalignError(
            f"The inspection report lacks what the card shows ({error}). Write it again with `normalign inspect`."
        ) from error
    alt_text = (
        f"Norms where image and text meet and through the layers: visual tokens are inserted at a mean norm of "
        f"{inserted}, text tokens have {number(T)}"
    )
    return NormTable(images, number(T), rows, turns, verdict, alt_text)


def draw_norms(report: NormReport, path: Path) -> None:
    """Writes the figure as PNG: norms at the interface, norms and turns through the layers, as far as measured."""
    reports = {"this model": report.data}
    save_png(draw_panels([name for name in measured_panels(reports) if name in _PANELS], reports), path)


def _differences(data: dict, facts) -> list[str]:
    found = []
    T = data.get("text_embedding_norm")
    # Gemma multiplies embeddings by sqrt(width) behind the table, which a report sees and the table does not show
    expected = (facts.text_norm, facts.text_norm * math.sqrt(facts.hidden_size))
    if T is None or not any(math.isclose(T, value, rel_tol=0.01) for value in expected):
        found.append(f"its text embedding norm is {number(T)}, this model's {number(facts.text_norm)}")
    if (layers := len(data.get("layers") or [])) != facts.layers:
        found.append(f"it has {layers} layers, this model {facts.layers}")
    measured = data.get("aligned_norm") or {"kind": "none"}
    gain = measured.get("gain_abs_mean")
    if measured.get("kind") != facts.aligned_norm["kind"]:
        found.append(f"its norm is of kind {measured.get('kind')}, this model's of kind {facts.aligned_norm['kind']}")
    elif gain is not None and not math.isclose(gain, facts.gain_abs_mean, rel_tol=1e-5, abs_tol=1e-9):
        found.append(f"its gain has a mean absolute value of {gain:.8g}, this model's {facts.gain_abs_mean:.8g}")
    return found
