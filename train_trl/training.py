"""Runs a recipe: loads or composes the model, freezes what is not tuned, trains with TRL's SFTTrainer, saves a whole folder."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import ProcessorMixin, TrainerCallback, set_seed
from transformers.training_args import OptimizerNames
from trl import SFTTrainer

from ..assembly.loading import explained, load_processor, locate
from ..configuration.errors import NormalignError, RunStopped
from ..modeling.configuration_normalign_llava import NormAlignLlavaConfig, complete_aligned_norm
from . import processes
from .adapters import check_adapters, has_adapters
from .attention import set_attention
from .callbacks import TrainLog
from .checkpoints import (
    StopOnSigterm,
    find_resume,
    full_disk_explained,
    goes_on,
    save_finished,
)
from .data_sets import load_data
from .eval_generation import EvalGeneration, EvalGenerationCallback, refuse_shared_weights
from .eval_rows import EvalRows, check_eval_rows, load_eval_rows, note_eval_rows, without_bad_eval_rows
from .output_folder import LOG_NAME, begin_folder, check_output, clear_output
from .parts import freeze, training_table, without_adapters
from .recipe import Recipe, RecipeError
from .recipe_reading import load_recipe
from .row_check import RowReport, check_rows, longest_row, without_bad_rows
from .start import adapted, check_processor, load_or_compose, loaded
from .trainer import AlignedSFTTrainer, build_trainer, training_arguments, uses_bfloat16


if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

MakeCallbacks = Callable[["nn.Module", ProcessorMixin], list[TrainerCallback]]


def train_recipe(recipe_path: str | Path, overrides: Mapping[str, Any] | None = None) -> Path:
    """Trains what the recipe says; see `normalign.train_trl.train`."""
    return run(_checked_recipe(recipe_path, overrides))


def _checked_recipe(recipe_path: str | Path, overrides: Mapping[str, Any] | None) -> Recipe:
    recipe = load_recipe(recipe_path, overrides)
    try:
        check_settings(recipe)
    except RecipeError as error:
        raise RecipeError(f"{recipe_path}: {error}") from error
    return recipe


def run(recipe: Recipe, callbacks: MakeCallbacks | None = None) -> Path:
    """Trains what the recipe says.

    Args:
        recipe: what to do.
        callbacks: makes further callbacks for the trainer, from the model as it starts and its processor.

    Returns:
        `recipe.output_dir`, by then a complete model folder with code, processor and train_log.jsonl.

    Raises:
        NormalignError: the recipe, the model, the processor or a row of the data does not fit, `output_dir` is not
            empty, or the weights are not finite at the end (nothing is saved then).
    """
    trainer = train_in_memory(recipe, callbacks=callbacks)
    with full_disk_explained(recipe.output_dir):
        return save(trainer, recipe.output_dir)


def train_in_memory(
    recipe: Recipe, dataset: Dataset | None = None, callbacks: MakeCallbacks | None = None
) -> AlignedSFTTrainer:
    """Trains what the recipe says, up to the finished folder, which `save` writes.

    Args:
        recipe: what to do.
        dataset: the rows in place of the recipe's own.
        callbacks: makes further callbacks for the trainer, from the model as it starts and its processor.
    """
    check_version()
    check_settings(recipe)
    # joins the other processes, and tells transformers to share out what it loads under ZeRO-3
    arguments = training_arguments(recipe)
    with processes.agreement():
        check_output(recipe)
        refuse_shared_weights(recipe)
        going_on = goes_on(recipe)
        resume = find_resume(recipe.output_dir) if going_on else None
        set_seed(recipe.seed)
        dataset = load_data(recipe) if dataset is None else dataset
        eval_rows = load_eval_rows(recipe)
    with loaded(recipe, dataset, going_on, arguments) as (model, processor, base):
        with processes.agreement():
            check_processor(processor)
        # each process looks at a share of the rows and hears of all
        report = check_rows(dataset, processor, recipe, config=model.config)
        dataset = without_bad_rows(dataset, report, processor, recipe)
        if eval_rows is not None:
            report = check_eval_rows(eval_rows, processor, recipe, model.config)
            eval_rows = without_bad_eval_rows(eval_rows, report, recipe)
        if has_adapters(recipe):
            model = adapted(model, recipe)
        with processes.agreement():
            freeze(model, recipe.tune)
            bare, half = without_adapters(model), uses_bfloat16(recipe)
            attention = set_attention(bare, recipe.attn_implementation, half_precision=half)
        trainer = build_trainer(model, processor, dataset, recipe, arguments)
        if eval_rows is not None:
            evaluate_while_training(trainer, eval_rows, recipe)
        more = callbacks(model, processor) if callbacks else []
        # an earlier run stays until the new one is ready to start
        with processes.agreement():
            clear_output(recipe)
            if processes.is_first():
                begin_folder(recipe, resume, base)
                if eval_rows is not None:
                    note_eval_rows(eval_rows, recipe.output_dir)
        _print_table(model, recipe, attention)
    log = next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, TrainLog))
    with full_disk_explained(recipe.output_dir):
        try:
            with StopOnSigterm() as stop:
                for callback in (stop, *more):
                    trainer.add_callback(callback)
                trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        finally:
            log.close()
        if stop.stopped_at is not None:
            raise RunStopped(
                f"Stopped by SIGTERM after step {stop.stopped_at} of {trainer.state.max_steps}; "
                f"{recipe.output_dir}/checkpoint-{stop.stopped_at} is written. Run the same command again to go on."
            )
        with processes.agreement():
            refuse_values_not_finite(model, recipe)
    return trainer


def check_recipe(recipe_path: str | Path, overrides: Mapping[str, Any] | None = None) -> RowReport:
    """Looks at the rows that a recipe would train on; see `normalign.train_trl.check`."""
    recipe = _checked_recipe(recipe_path, overrides)
    check_version()
    dataset = load_data(recipe)
    eval_rows = load_eval_rows(recipe)
    if recipe.compose is not None:
        model, processor = load_or_compose(recipe, dataset)
        config = model.config
    else:
        start = locate("The model", recipe.start_folder())
        with explained("The model", start):
            config = NormAlignLlavaConfig.from_pretrained(start)
        processor = load_processor(start)
    check_processor(processor)
    report = check_rows(dataset, processor, recipe, config=config)
    return report if eval_rows is None else report.with_held_out(check_eval_rows(eval_rows, processor, recipe, config))


def evaluate_while_training(trainer: AlignedSFTTrainer, eval_rows: EvalRows, recipe: Recipe) -> None:
    """Has the trainer answer held-out rows as the recipe says, and log the accuracy."""
    log = next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, TrainLog))
    evaluation = EvalGeneration(
        trainer.processing_class, eval_rows, longest_row(recipe, trainer.model.config), uses_bfloat16(recipe)
    )
    trainer.add_callback(EvalGenerationCallback(evaluation, recipe.eval_steps, log.add, trainer.throughput.paused))


def check_version() -> None:
    """Raises NormalignError where transformers is too old to train with."""
    if tuple(int(number) for number in transformers.__version__.split(".")[:2]) < (5, 18):
        raise NormalignError(
            f"Training needs transformers 5.18 or newer, whose processors can mark the assistant's tokens; installed "
            f"is {transformers.__version__}. Run: pip install -U transformers"
        )


def check_settings(recipe: Recipe) -> None:
    """Looks at what `load_recipe`, which does without torch, cannot know: the optimizer's name and the norm's block.

    Raises:
        RecipeError: names the key, and the nearest right values.
    """
    optimizers = [name.value for name in OptimizerNames]
    if recipe.optimizer not in optimizers:
        near = [name for name in optimizers if recipe.optimizer and name.startswith(recipe.optimizer)]
        near = near or difflib.get_close_matches(recipe.optimizer, optimizers, cutoff=0.4) or ["adamw_torch", "sgd"]
        raise RecipeError(
            f"There is no optimizer {recipe.optimizer!r}. Near it are {', '.join(near[:3])}; transformers' OptimizerNames has "
            f"all {len(optimizers)}."
        )
    if re.search("8bit|paged|bnb", recipe.optimizer) and find_spec("bitsandbytes") is None:
        raise RecipeError(
            f"The optimizer {recipe.optimizer!r} needs the extra 'quant': pip install 'normalign[quant]'."
        )
    for package in recipe.report_to:
        if find_spec(package) is None:
            raise RecipeError(f"report_to names {package}, which is not installed: pip install {package}")
    check_adapters(recipe)
    if recipe.compose is not None:
        try:
            complete_aligned_norm(recipe.compose.aligned_norm)
        except ValueError as error:
            raise RecipeError(f"compose: {error}") from error


def refuse_values_not_finite(model: nn.Module, recipe: Recipe) -> None:
    """Raises NormalignError with the first weight that is NaN or infinite."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(processes.local_values(parameter)).all():
            raise NormalignError(
                f"After the last step of {recipe.name} the weight {name} holds values that are not finite, so the model is "
                f"of no use and was not saved. Lower learning_rate (it is {recipe.learning_rate.all:g}) or max_grad_norm (it is "
                f"{recipe.max_grad_norm:g}), and look at the last lines of {Path(recipe.output_dir) / LOG_NAME}."
            )


def save(trainer: SFTTrainer, output_dir: str | Path) -> Path:
    """Saves model or adapter, code, processor, chat template, recipe; `output_dir` has all of it at once or nothing."""
    return save_finished(trainer, output_dir)


def _print_table(model: nn.Module, recipe: Recipe, attention: dict[str, str]) -> None:
    from rich.console import Console

    start = recipe.start_folder() or f"{recipe.compose.vision} + {recipe.compose.text}"
    # every process gathers the norm, one prints
    table = training_table(model, recipe.learning_rate, f"{recipe.name}: {start}", attention)
    if processes.is_first():
        Console().print(table)
