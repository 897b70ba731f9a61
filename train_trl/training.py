"""Runs a recipe: loads or composes the model, freezes what is not tuned, trains with TRL's SFTTrainer, saves a whole folder."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import ProcessorMixin, set_seed
from transformers.training_args import OptimizerNames
from trl import SFTConfig, SFTTrainer

from ..assembly.adapters import is_adapter, refuse_broken_adapter
from ..assembly.loading import explained, load_processor, locate, quiet_transformers, refuse_missing_weights
from ..assembly.saving import is_at_or_above, named_folder, write_parts
from ..configuration.backbones import resolve_backbone
from ..configuration.errors import NormalignError, RunStopped
from ..modeling.configuration_normalign_llava import NormAlignLlavaConfig, complete_aligned_norm
from ..modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .adapters import add_adapters, base_of, check_adapters, expected_keys, has_adapters, quantize_language_
from .callbacks import StageProgress, TrainLog
from .checkpoints import (
    BASE_NAME,
    RECIPE_NAME,
    StopOnSigterm,
    complete_folder,
    cut_log,
    find_resume,
    full_disk_explained,
    goes_on,
    save_finished,
    sealed,
    step_of,
    write_recipe,
)
from .parts import freeze, frozen_modules, training_table
from .recipe import ARMS, Recipe, RecipeError
from .recipe_reading import load_recipe


if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

logger = logging.getLogger(__name__)

LOG_NAME = "train_log.jsonl"
_ROWS_AT_ONCE = 256
# What a run leaves beside its checkpoints: weights, configs, the processor's files and the log.
_WRITTEN = ("*.safetensors", "*config.json", "*.index.json", LOG_NAME, "chat_template.jinja", "training_args.bin")
_WRITTEN += ("tokenizer.*", "*tokens*.json", "vocab.*", "merges.txt", RECIPE_NAME)
_CODE = {file.name for file in Path(inspect.getfile(NormAlignLlavaForConditionalGeneration)).parent.glob("*.py")}
# the newer name of the two; TRL would otherwise switch it on
_CHECKPOINTING = (
    "activation_checkpointing" if hasattr(SFTConfig, "activation_checkpointing") else "gradient_checkpointing"
)


def train_recipe(recipe_path: str | Path, overrides: Mapping[str, Any] | None = None) -> Path:
    """Trains what the recipe says; see `normalign.train_trl.train`."""
    recipe = load_recipe(recipe_path, overrides)
    try:
        check_settings(recipe)
    except RecipeError as error:
        raise RecipeError(f"{recipe_path}: {error}") from error
    return run(recipe)


def run(recipe: Recipe) -> Path:
    """Trains what the recipe says.

    Returns:
        `recipe.output_dir`, by then a complete model folder with code, processor and train_log.jsonl.

    Raises:
        NormalignError: the recipe, the model, the processor or a row of the data does not fit, `output_dir` is not
            empty, or the weights are not finite at the end (nothing is saved then).
    """
    trainer = train_in_memory(recipe)
    with full_disk_explained(recipe.output_dir):
        return save(trainer, recipe.output_dir)


def train_in_memory(
    recipe: Recipe, dataset: Dataset | None = None, callbacks: Sequence[transformers.TrainerCallback] = ()
) -> AlignedSFTTrainer:
    """Trains what the recipe says, up to the finished folder, which `save` writes.

    Args:
        dataset: the rows in place of the recipe's own.
        callbacks: more of them.
    """
    if tuple(int(number) for number in transformers.__version__.split(".")[:2]) < (5, 18):
        raise NormalignError(
            f"Training needs transformers 5.18 or newer, whose processors can mark the assistant's tokens; installed "
            f"is {transformers.__version__}. Run: pip install -U transformers"
        )
    check_settings(recipe)
    check_output(recipe)
    going_on = goes_on(recipe)
    resume = find_resume(recipe.output_dir) if going_on else None
    set_seed(recipe.seed)
    dataset = load_data(recipe) if dataset is None else dataset
    with loaded(recipe, dataset, going_on) as (model, processor, base):
        check_processor(processor)
        check_supervision(dataset, processor)
        if has_adapters(recipe):
            model = adapted(model, recipe)
        freeze(model, recipe.tune)
        trainer = build_trainer(model, processor, dataset, recipe)
        # an earlier run stays until the new one is ready to start
        clear_output(recipe)
        if trainer.is_world_process_zero():
            begin_folder(recipe, resume, base)
            _print_table(model, recipe)
    log = next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, TrainLog))
    with full_disk_explained(recipe.output_dir):
        try:
            with StopOnSigterm() as stop:
                for callback in (stop, *callbacks):
                    trainer.add_callback(callback)
                trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        finally:
            log.close()
        if stop.stopped_at is not None:
            raise RunStopped(
                f"Stopped by SIGTERM after step {stop.stopped_at} of {trainer.state.max_steps}; "
                f"{recipe.output_dir}/checkpoint-{stop.stopped_at} is written. Run the same command again to go on."
            )
        refuse_values_not_finite(model, recipe)
    return trainer


@contextmanager
def loaded(
    recipe: Recipe, dataset: Dataset, going_on: bool
) -> Iterator[tuple[nn.Module, ProcessorMixin, Path | None]]:
    """The model, its processor, and where the model stands that an adapter needs and no other folder holds.

    A composed model that gets an adapter is written beside `output_dir`, to be moved into it when the run begins; a run
    that is gone on with has it there already.
    """
    own = Path(recipe.output_dir) / BASE_NAME
    composes = recipe.compose is not None and has_adapters(recipe)
    if composes and going_on and own.is_dir():
        yield *load_or_compose(dataclasses.replace(recipe, compose=None, model=str(own)), dataset), None
        return
    model, processor = load_or_compose(recipe, dataset)
    if not composes or not _is_first_process():
        yield model, processor, None
        return
    parent = own.resolve().parent.parent
    parent.mkdir(parents=True, exist_ok=True)
    with full_disk_explained(parent), TemporaryDirectory(prefix=f".{own.parent.name}.", dir=parent) as work:
        base = Path(work) / BASE_NAME
        write_parts(model, processor, base)
        yield model, processor, base


def adapted(model: nn.Module, recipe: Recipe) -> nn.Module:
    """The model with the recipe's adapters, its language model in 4 bits where the recipe says so."""
    start = Path(recipe.output_dir) / BASE_NAME if recipe.compose is not None else recipe.start_folder()
    if recipe.quantization is not None:
        quantize_language_(model)
    return add_adapters(model, recipe, str(start.absolute()) if recipe.compose is not None else base_of(start))


def begin_folder(recipe: Recipe, resume: Path | None, base: Path | None) -> None:
    """Makes `output_dir` ready: the recipe, an adapter's base, and a log that ends where the run goes on."""
    folder = Path(recipe.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if base is not None:
        shutil.rmtree(folder / BASE_NAME, ignore_errors=True)
        shutil.move(base, folder / BASE_NAME)
    write_recipe(recipe, folder)
    cut_log(folder / LOG_NAME, 0 if resume is None else step_of(resume))
    if resume is not None:
        logger.warning(f"{recipe.name} goes on from {resume}.")


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
    check_adapters(recipe)
    if recipe.compose is not None:
        try:
            complete_aligned_norm(recipe.compose.aligned_norm)
        except ValueError as error:
            raise RecipeError(f"compose: {error}") from error


def check_output(recipe: Recipe) -> None:
    """Makes sure that the run gets a folder of its own: a new or empty one, or one that `clear_output` may empty.

    Raises:
        NormalignError: the folder holds what the run starts from, is not empty, is no earlier run's, or holds an
            unfinished run of another recipe.
    """
    folder = named_folder(recipe.output_dir)
    starts = [recipe.compose.vision, recipe.compose.text] if recipe.compose else [recipe.start_folder()]
    for start in (Path(resolve_backbone(start)).expanduser() for start in starts):
        if start.is_dir() and is_at_or_above(folder, start):
            raise NormalignError(
                f"output_dir {folder} holds the model that the run starts from ({start}), which would be lost. Name "
                f"another folder with --output_dir."
            )
    if goes_on(recipe):
        return
    # of the processes of one run, the first may have begun to write already
    if not _is_first_process() or not folder.exists() or not any(folder.iterdir()):
        return
    if not recipe.overwrite:
        raise NormalignError(
            f"output_dir {folder} is not empty, and a run does not mix with what is there. Name another folder with "
            f"--output_dir, or have an earlier run in it replaced with --overwrite true."
        )
    if not (folder / LOG_NAME).is_file():
        raise NormalignError(
            f"output_dir {folder} has no {LOG_NAME}, so it is not the folder of an earlier run and is not replaced. Name "
            f"another one with --output_dir."
        )
    strange = sorted(path.name for path in folder.iterdir() if not _is_of_a_run(path))
    if strange:
        raise NormalignError(
            f"output_dir {folder} is not replaced, because it holds {', '.join(strange[:3])}, which training does not write. "
            f"Move that away, or name another folder with --output_dir."
        )


def clear_output(recipe: Recipe) -> None:
    """Empties the folder of an earlier run, where `check_output` has found that it is one; its log goes last."""
    folder = Path(recipe.output_dir)
    if not recipe.overwrite or not _is_first_process() or not folder.exists():
        return
    for path in sorted(folder.iterdir(), key=lambda path: path.name == LOG_NAME):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _is_first_process() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def _is_of_a_run(path: Path) -> bool:
    if path.is_dir():
        return re.fullmatch(rf"checkpoint-\d+|{BASE_NAME}|\.finished\.partial", path.name) is not None
    return path.name in _CODE or any(path.match(pattern) for pattern in _WRITTEN)


def refuse_values_not_finite(model: nn.Module, recipe: Recipe) -> None:
    """Raises NormalignError with the first weight that is NaN or infinite."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise NormalignError(
                f"After the last step of {recipe.name} the weight {name} holds values that are not finite, so the model is "
                f"of no use and was not saved. Lower learning_rate (it is {recipe.learning_rate.all:g}) or max_grad_norm (it is "
                f"{recipe.max_grad_norm:g}), and look at the last lines of {Path(recipe.output_dir) / LOG_NAME}."
            )


def load_or_compose(recipe: Recipe, dataset: Dataset) -> tuple[nn.Module, ProcessorMixin]:
    """The model in float32 and its processor, from two backbones or from the folder or Hub id to go on from.

    The factor of kind `scale`, which does not normalise, starts from the projected tokens of the first images.

    Raises:
        NormalignError: the folder holds another kind of model, another arm than the recipe names, or no processor.
    """
    if recipe.compose is not None:
        from ..assembly.compose import compose

        block = recipe.compose
        return compose(
            block.vision,
            block.text,
            aligned_norm=block.aligned_norm,
            vision_feature_layer=block.vision_feature_layer,
            dtype=torch.float32,
            seed=recipe.seed if block.seed is None else block.seed,
            calibration_images=first_images(dataset) if block.aligned_norm.get("kind") == "scale" else None,
        )
    start = recipe.start_folder()
    if is_adapter(start):
        raise NormalignError(
            f"{start} holds an adapter, not a whole model, and a run does not put an adapter on an adapter. Merge it "
            f"(normalign export {start} --out DIR), and go on from DIR."
        )
    start = locate("The model", start)
    with explained("The model", start):
        found = NormAlignLlavaConfig.get_config_dict(start)[0].get("model_type")
    if found != "normalign_llava":
        raise NormalignError(
            f"{start} is a model of type {found!r}; training needs a normalign_llava model. An existing LLaVA is "
            f"converted by `normalign graft`, two backbones are put together by a recipe's `compose` block."
        )
    # transformers would print a table of the weights that are checked below
    with explained("The model", start), quiet_transformers():
        model, info = NormAlignLlavaForConditionalGeneration.from_pretrained(
            start, dtype=torch.float32, output_loading_info=True
        )
    refuse_missing_weights("The model", start, model, info)
    settings = model.config.aligned_norm
    for key, value in ARMS.get(recipe.arm, {}).items():
        if settings[key] != value:
            raise NormalignError(
                f"The recipe's arm {recipe.arm!r} means aligned_norm.{key}: {value!r}, but the model in {start} has "
                f"{settings[key]!r}. A model keeps the arm it was composed with."
            )
    return model, load_processor(start)


def check_processor(processor: Any) -> None:
    """Raises NormalignError where TRL would train without images or without knowing the assistant's tokens."""
    if not isinstance(processor, ProcessorMixin):
        raise NormalignError(
            f"Training needs the model's processor (image processor and tokenizer together), but got a bare "
            f"{type(processor).__name__}, with which TRL would train on text alone. Load it by "
            f"AutoProcessor.from_pretrained; a folder that lacks processor_config.json was not saved as a whole."
        )
    if not processor.chat_template or not re.search(r"\{%-?\s*generation\b", str(processor.chat_template)):
        raise NormalignError(
            "The processor's chat template does not mark the assistant's words with {% generation %} ... "
            "{% endgeneration %}, so the loss cannot be kept to them. `normalign compose` writes such a template."
        )


def load_data(recipe: Recipe) -> Dataset:
    """The rows that the recipe trains on, in TRL's conversational form (`messages`, `images`)."""
    from .digit_scenes import digit_scenes_dataset

    data = recipe.data
    return digit_scenes_dataset(data.rows or 1000, seed=data.seed, split="train", stage=data.stage)


def first_images(dataset: Dataset, count: int = 16) -> list[Any]:
    """The first `count` images of the data, or those of its first hundred rows where they are fewer."""
    return [image for row in dataset.select(range(min(len(dataset), 100))) for image in row["images"]][:count]


def check_supervision(dataset: Dataset, processor: ProcessorMixin) -> None:
    """Looks at every row before the first step, without decoding images.

    Raises:
        NormalignError: a row has no token that the loss sees, or an image placeholder among them (the row is named).
    """
    messages = dataset.select_columns("messages")
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        rows = messages[start : start + _ROWS_AT_ONCE]["messages"]
        tokens = processor.tokenizer.apply_chat_template(
            rows,
            chat_template=processor.chat_template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        for offset, (ids, mask) in enumerate(zip(tokens["input_ids"], tokens["assistant_masks"])):
            supervised = [token for token, marked in zip(ids, mask) if marked]
            if not supervised:
                problem = "has no assistant token to learn from: its answer is missing"
            elif processor.image_token_id in supervised:
                problem = "has an image placeholder within the assistant's answer, where the loss would see it"
            else:
                continue
            raise NormalignError(f"Row {start + offset} of the data {problem}. It reads: {str(rows[offset])[:300]}")


class AlignedSFTTrainer(SFTTrainer):
    """TRL's SFTTrainer; frozen parts stay in eval mode, checkpoints are sealed, and no model card is made up."""

    _frozen: list[nn.Module] | None = None
    recipe: Recipe
    adapter_keys: list[str] | None = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """As in TRL; `training_step` has put the whole model into training mode just before."""
        if self.model.training:
            if self._frozen is None:
                self._frozen = frozen_modules(self.model)
            for module in self._frozen:
                module.eval()
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.model.training and not return_outputs and not loss.requires_grad:
            # a batch without images teaches nothing where the language model is frozen: its gradient is zero
            loss = loss + sum(p.sum() * 0 for p in self.model.parameters() if p.requires_grad)
        return loss

    def _save(self, output_dir=None, state_dict=None):
        """As in transformers; the recipe is added, and an adapter looked at."""
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            complete_folder(Path(output_dir), self.recipe)
            if self.adapter_keys is not None:
                refuse_broken_adapter(output_dir, self.adapter_keys)

    def _save_checkpoint(self, model, trial):
        """As in transformers; sealed when it is whole, and only then are older ones removed."""
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        with sealed(checkpoint, self, self.recipe.save_total_limit):
            super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """As in transformers; PEFT would have the whole adapter trained, also what the recipe freezes."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.adapter_keys is not None:
            freeze(self.model, self.recipe.tune)

    def _run_epoch(self, *args, **kwargs):
        """As in transformers, which would train a step more where the last checkpoint is that of the last step."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _issue_warnings_after_load(self, load_result):
        """Refuses what transformers warns of: a checkpoint of other weights than the model's."""
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        wrong = sorted({*load_result.missing_keys} - tied) + sorted(load_result.unexpected_keys)
        if wrong:
            raise NormalignError(
                f"The checkpoint does not fit the model: {len(wrong)} weights are missing in it or have no place "
                f"({', '.join(wrong[:3])}). It was written by another version of transformers or of the model."
            )

    def create_model_card(self, *args, **kwargs):
        """Writes none: TRL's says "fine-tuned version of [None]" and shows text generation."""


def build_trainer(model: nn.Module, processor: ProcessorMixin, dataset: Dataset, recipe: Recipe) -> AlignedSFTTrainer:
    """TRL's trainer with the recipe's figures, the log and the progress bar.

    Raises:
        NormalignError: the processor does not do, or the batch cannot be split over processes and accumulation.
    """
    check_processor(processor)
    trainer = AlignedSFTTrainer(
        model=model, args=training_arguments(recipe), train_dataset=dataset, processing_class=processor
    )
    trainer.recipe = recipe
    trainer.adapter_keys = expected_keys(model) if has_adapters(recipe) else None
    trainer.remove_callback(transformers.ProgressCallback)
    trainer.add_callback(StageProgress(recipe.name))
    trainer.add_callback(TrainLog(Path(recipe.output_dir) / LOG_NAME, model, recipe.name))
    return trainer


def training_arguments(recipe: Recipe) -> SFTConfig:
    """The recipe in TRL's words."""
    per_device, accumulation = batch_of_a_process(recipe, int(os.environ.get("WORLD_SIZE", 1)))
    gpu = torch.cuda.is_available()
    auto_bf16 = recipe.precision == "auto" and gpu and torch.cuda.is_bf16_supported()
    return SFTConfig(
        output_dir=recipe.output_dir,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=recipe.epochs,
        max_steps=recipe.max_steps or -1,
        optim=recipe.optimizer,
        learning_rate=recipe.learning_rate.all,
        weight_decay=recipe.weight_decay.all,
        lr_scheduler_type=recipe.schedule,
        warmup_steps=recipe.warmup,
        max_grad_norm=recipe.max_grad_norm,
        seed=recipe.seed,
        bf16=auto_bf16 or recipe.precision == "bfloat16",
        use_cpu=not gpu,
        **{_CHECKPOINTING: recipe.gradient_checkpointing, f"{_CHECKPOINTING}_kwargs": {"use_reentrant": False}},
        assistant_only_loss=True,
        max_length=None,
        packing=False,
        remove_unused_columns=True,
        dataloader_num_workers=recipe.dataloader_workers,
        dataloader_pin_memory=gpu,
        logging_steps=recipe.logging_steps,
        logging_nan_inf_filter=False,
        save_strategy="no" if recipe.save_steps is None else "steps",
        save_steps=recipe.save_steps or 500,
        report_to="none",
    )


def batch_of_a_process(recipe: Recipe, processes: int) -> tuple[int, int]:
    """Rows that one process takes at once, and accumulation steps, for the recipe's global batch.

    Raises:
        NormalignError: the batch cannot be split evenly.
    """
    if recipe.per_device_batch_size is not None:
        at_once = processes * recipe.per_device_batch_size
        accumulation, rest = divmod(recipe.batch_size, at_once)
        if rest or recipe.gradient_accumulation not in (None, accumulation):
            raise NormalignError(
                f"batch_size {recipe.batch_size} is not {processes} processes times per_device_batch_size "
                f"{recipe.per_device_batch_size} times "
                f"{recipe.gradient_accumulation or 'a whole number of'} accumulation steps. Change one of them."
            )
        return recipe.per_device_batch_size, accumulation
    accumulation = recipe.gradient_accumulation or 1
    parts = processes * accumulation
    if recipe.batch_size % parts:
        raise NormalignError(
            f"batch_size {recipe.batch_size} cannot be split evenly over {processes} processes and "
            f"{accumulation} accumulation steps. Choose a multiple of {parts}."
        )
    return recipe.batch_size // parts, accumulation


def save(trainer: SFTTrainer, output_dir: str | Path) -> Path:
    """Saves model or adapter, code, processor, chat template, recipe; `output_dir` has all of it at once or nothing."""
    return save_finished(trainer, output_dir)


def _print_table(model: nn.Module, recipe: Recipe) -> None:
    from rich.console import Console

    start = recipe.start_folder() or f"{recipe.compose.vision} + {recipe.compose.text}"
    Console().print(training_table(model, recipe.learning_rate, f"{recipe.name}: {start}"))
