"""Metrics for the `evaluate` library, as local modules: by import, or `evaluate.load(metric_path("pope"))` with no network.

`evaluate` copies such a file out of the package before it runs it; that is why these files alone import normalign by name.
"""

from __future__ import annotations

from pathlib import Path

from ...configuration.errors import NormalignError


METRICS = ("multiple_choice", "ocrbench", "pope", "vqa_exact_match")


def metric_path(name: str) -> str:
    """The file that `evaluate.load` takes for one of METRICS.

    Raises:
        NormalignError: there is no metric of that name.
    """
    if name not in METRICS:
        raise NormalignError(f"There is no metric {name!r} in normalign; there are {', '.join(METRICS)}.")
    return str(Path(__file__).with_name(f"{name}.py"))
