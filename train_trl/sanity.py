"""Overfits eight rows of a recipe's data and says at which stage their answers are lost: training, saving, merging, or seeing."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ..assembly.adapters import base_model_of, load_adapter
from ..assembly.loading import load_processor
from ..assembly.saving import write_parts
from ..configuration.errors import NormalignError
from ..evaluation.generation import answer_rows, load_model
from .adapters import has_adapters
from .images import open_images
from .recipe import Recipe


if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

ROWS = 8
# A loss a token with which training is not what breaks.
LEARNED = 0.05
# The share of the rows that must be answered to the letter.
MOST = 0.75


class _StopWhenLearned(TrainerCallback):
    """Stops at a loss with which no greedy answer to the rows can be wrong.

    A token that is not the most probable one has a loss of ln 2 or more; so there is none where the losses of all tokens
    together, which are a batch, are below that.
    """

    def __init__(self, processor: ProcessorMixin, rows: Any) -> None:
        answers = processor.tokenizer([_answer(row) for row in rows], add_special_tokens=False)["input_ids"]
        tokens = sum(len(ids) + 1 for ids in answers)  # and the end of the turn
        self._enough = min(LEARNED, math.log(2) / tokens)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and logs.get("loss", self._enough) < self._enough:
            control.should_training_stop = True
        return control


def sanity_check(recipe: Recipe, steps: int = 200) -> dict[str, Any]:
    """Trains as the recipe says, on its first eight rows with images, until it knows them; nothing is kept.

    Args:
        steps: where to give up.

    Returns:
        `loss_start`, `loss_end`, `steps`; for each stage the share of the rows that are answered to the letter: `in_memory`,
        `reloaded` (from the saved folder), `merged` (adapters alone), `black_images` with its `chance`, the best that can
        be done from the questions alone; `broken` (the first stage that fails, or None) and `verdict`, a paragraph.

    Raises:
        NormalignError: the recipe does not run, or its first rows have no image or no answer.
    """
    from .training import load_data, train_in_memory

    with TemporaryDirectory(prefix="normalign-sanity-") as work:
        data = recipe.data if recipe.data.mixture else dataclasses.replace(recipe.data, rows=recipe.data.rows or 1000)
        rows = _first_rows(load_data(dataclasses.replace(recipe, data=data)))
        small = dataclasses.replace(
            recipe,
            output_dir=str(Path(work) / "run"),
            # the former stage's folder is sought beside the recipe's own output_dir
            model=recipe.start_folder() if recipe.compose is None else None,
            from_stage=None,
            batch_size=len(rows),
            per_device_batch_size=None,
            gradient_accumulation=None,
            max_steps=steps,
            warmup=0.0,
            schedule="constant",
            logging_steps=5,
            save_steps=None,
            eval_generation=None,
            eval_steps=None,
            eval_data=None,
            cache_vision_features=False,
            report_to=[],
            resume="never",
        )
        trainer = train_in_memory(small, rows, lambda model, processor: [_StopWhenLearned(processor, rows)])
        losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
        result = {"rows": len(rows), "steps": trainer.state.global_step}
        result |= {"loss_start": losses[0], "loss_end": losses[-1]}
        result |= _answers_by_stage(trainer, rows, Path(work))
    result["broken"], result["verdict"] = _verdict(result, recipe)
    return result


def _first_rows(dataset: Any) -> Any:
    from datasets import Dataset

    rows = []
    for row in dataset:
        if row.get("images") and row["messages"][-1]["role"] == "assistant" and _answer(row):
            rows.append({"messages": row["messages"], "images": open_images(row)})
        if len(rows) == ROWS:
            break
    if not rows:
        raise NormalignError("The recipe's data have no row with an image and an answer, so there is nothing to try.")
    return Dataset.from_list(rows)


def _answer(row: dict[str, Any]) -> str:
    return _text(row["messages"][-1])


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content.strip()
    return "".join(part.get("text") or "" for part in content).strip()


def _answers_by_stage(trainer: Any, rows: Any, work: Path) -> dict[str, float]:
    processor = trainer.processing_class
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    shares = {"in_memory": _share(model, processor, rows)}
    shares["black_images"] = _share(model, processor, _blackened(rows))
    shares["chance"] = _chance(rows)
    trainer.save_model(str(work / "saved"))
    if not has_adapters(trainer.recipe):
        return shares | {"reloaded": _share(*load_model(work / "saved"), rows)}
    base, processor = load_model(base_model_of(work / "saved"))
    adapted = load_adapter(base, work / "saved")
    shares["reloaded"] = _share(adapted, load_processor(work / "saved"), rows)
    write_parts(adapted.merge_and_unload(), processor, work / "merged")
    return shares | {"merged": _share(*load_model(work / "merged"), rows)}


def _share(model: PreTrainedModel, processor: ProcessorMixin, rows: Any) -> float:
    """The share of rows that are answered to the letter."""
    wanted = [_answer(row) for row in rows]
    longest = max(len(ids) for ids in processor.tokenizer(wanted)["input_ids"])
    answers = answer_rows(model, processor, list(rows), max_new_tokens=longest + 4)
    return sum(answer == right for answer, right in zip(answers, wanted)) / len(wanted)


def _blackened(rows: Any) -> list[dict[str, Any]]:
    from PIL import Image

    return [{**row, "images": [Image.new("RGB", image.size) for image in row["images"]]} for row in rows]


def _chance(rows: Any) -> float:
    """The share that the commonest answer to each question is right for."""
    answers: dict[str, list[str]] = {}
    for row in rows:
        answers.setdefault(json.dumps([_text(message) for message in row["messages"][:-1]]), []).append(_answer(row))
    return sum(max(map(same.count, same)) for same in answers.values()) / len(rows)


def _verdict(result: dict[str, Any], recipe: Recipe) -> tuple[str | None, str]:
    """The first stage that fails, and what to make of it."""
    if result["loss_end"] >= LEARNED and result["in_memory"] < MOST:
        return "training", (
            f"The recipe does not learn {result['rows']} rows in {result['steps']} steps: the loss went from "
            f"{result['loss_start']:.3g} to {result['loss_end']:.3g}. Raise learning_rate (it is {recipe.learning_rate.all:g}), or "
            f"tune more of the model."
        )
    if result["in_memory"] < MOST:
        return "in_memory", (
            f"The loss is near zero ({result['loss_end']:.3g}), but the model that was trained answers {result['in_memory']:.0%} of "
            f"its own rows: what is generated is not asked as it was taught. Look at the chat template, its generation "
            f"markers and the end-of-turn token."
        )
    for stage, what in (("reloaded", "saving and loading"), ("merged", "merging the adapter")):
        if stage in result and result[stage] < result["in_memory"]:
            return stage, (
                f"The model in memory answers {result['in_memory']:.0%} of its rows, after {what} it is {result[stage]:.0%}: weights "
                f"are lost or changed there."
            )
    if result["chance"] == 1:
        return None, (
            "All stages agree. Whether the pictures are used cannot be told: the questions alone tell the answers of "
            "these rows."
        )
    if result["black_images"] > result["chance"]:
        return "images", (
            f"With black pictures the model still answers {result['black_images']:.0%}, more than the {result['chance']:.0%} that "
            f"the questions alone allow: the pictures' answers reach it another way."
        )
    return None, (
        f"All stages agree: {result['in_memory']:.0%} of the rows in memory and from the saved folder, "
        f"{result['black_images']:.0%} with black pictures, where {result['chance']:.0%} is chance."
    )
