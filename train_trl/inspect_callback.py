"""Watches the norms of a model while it trains: inspects it every N steps on the same rows and draws the evolution."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import ProcessorMixin, TrainerCallback

from ..configuration.errors import NormalignError
from ..inspection import inspect_model
from ..inspection.figures import draw_evolution, save_png
from ..inspection.measure import NotFiniteError


logger = logging.getLogger(__name__)


class InspectCallback(TrainerCallback):
    """Inspects the model before the first step, every `every` steps, and after the last.

    Writes `folder/evolution.jsonl`, one object {step, report} a measurement (report as in report.json), and draws
    `folder/evolution.png` anew each time. The model is left as it was: weights, gradients, the mode of each module and
    the random numbers of the training are those of a run without the callback.

    Args:
        processor: that of the model.
        rows: what to look at, in TRL's form (`messages`, `images`); the user's text is the prompt.
        every: optimizer steps between two measurements.
        folder: where to write; made when missing. A resumed training goes on with the file.
        options: `attention`, `controls`, or what else `inspect_model` takes.

    Raises:
        NormalignError: `every` is less than 1, there is no row, or a row has no image or no text of the user.
    """

    def __init__(
        self,
        processor: ProcessorMixin,
        rows: Sequence[dict[str, Any]],
        folder: str | Path,
        every: int = 100,
        **options: Any,
    ):
        if every < 1:
            raise NormalignError(f"InspectCallback measures every N steps, N at least 1: got {every}.")
        if not rows:
            raise NormalignError("InspectCallback has no row to look at.")
        self.folder, self.every = Path(folder), every
        self._processor, self._options = processor, options
        self._prompts = [_prompt(number, row) for number, row in enumerate(rows)]
        self._images = [list(row["images"]) for row in rows]
        self._measured: dict[int, dict[str, Any]] = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Measures the start, or reads what was measured before the step at which training resumes."""
        if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
            raise NormalignError(
                "InspectCallback needs the whole model in one process, which FSDP and DeepSpeed split up. Save "
                "checkpoints instead (save_steps) and run `normalign inspect` on them."
            )
        self._measured = self._read_until(state.global_step) if state.global_step else {}
        self._measure(model, state)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Measures every `every` steps."""
        if state.global_step % self.every == 0:
            self._measure(model, state)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        """Measures the end."""
        self._measure(model, state)

    @property
    def path(self) -> Path:
        """The file of the measurements."""
        return self.folder / "evolution.jsonl"

    def _measure(self, model: nn.Module, state) -> None:
        if state.global_step in self._measured or not state.is_world_process_zero:
            return
        try:
            report = inspect_model(model, self._processor, self._images, self._prompts, **self._options)
        except NotFiniteError as error:
            # a watcher does not end what it watches
            logger.warning(f"Step {state.global_step} was not measured. {error}")
            return
        self._measured[state.global_step] = report.to_dict()
        self._write()

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"step": step, "report": report}) for step, report in self._measured.items()]
        # whole or as it was, so that a killed run can go on
        whole = self.path.with_suffix(".partial")
        whole.write_text("\n".join(lines) + "\n", encoding="utf-8")
        whole.replace(self.path)
        figure = draw_evolution(list(self._measured), list(self._measured.values()))
        save_png(figure, self.folder / "evolution.png")

    def _read_until(self, step: int) -> dict[int, dict[str, Any]]:
        if not self.path.is_file():
            return {}
        records = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        return {record["step"]: record["report"] for record in records if record["step"] <= step}


def _prompt(number: int, row: dict[str, Any]) -> str:
    """The text of the user's first turn."""
    content = next((message["content"] for message in row["messages"] if message["role"] == "user"), "")
    if not isinstance(content, str):
        content = "\n".join(part["text"] for part in content if part.get("type") == "text")
    if not content or not row["images"]:
        raise NormalignError(
            f"Row {number} for InspectCallback has no {'text of the user' if row['images'] else 'image'}. Norms of visual "
            f"and text tokens are compared, so that each row needs both."
        )
    return content
