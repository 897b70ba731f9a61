"""Runs a recipe: loads or composes the model, freezes what is not tuned, trains with TRL's SFTTrainer, saves a whole folder."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import ProcessorMixin, TrainerCallback, set_seed
from transformers.training_args import OptimizerNames
from trl import SFTConfig, SFTTrainer

from ..assembly.loading import explained, load_processor, locate, quiet_transformers, refuse_missing_weights
from ..assembly.saving import is_at_or_above, named_folder
from ..configuration.backbones import resolve_backbone
from ..configuration.errors import NormalignError
from ..modeling.configuration_normalign_llava import NormAlignLlavaConfig, complete_aligned_norm
from ..modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .attention import set_attention
from .callbacks import StageProgress, TrainLog
from .collators import PaddedCollator, PaddingFreeCollator, prepare_padding_free
from .data_sets import MalformedRow, load_data
from .images import open_images
from .length_groups import LengthGroups, row_lengths
from .not_finite import refuse_loss_not_finite
from .parts import freeze, frozen_modules, split_groups, training_table
from .recipe import ARMS, PartFigures, Recipe, RecipeError
from .recipe_reading import load_recipe
from .row_check import RowReport, check_rows, without_bad_rows
from .throughput import Throughput
from .vision_cache import fill_cache, read_from_cache, without_decoding


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from torch import nn

LOG_NAME = "train_log.jsonl"
# What a run leaves beside its checkpoints: weights, configs, the processor's files and the log.
_WRITTEN = ("*.safetensors", "*config.json", "*.index.json", LOG_NAME, "chat_template.jinja", "training_args.bin")
_WRITTEN += ("tokenizer.*", "*tokens*.json", "vocab.*", "merges.txt")
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


def run(recipe: Recipe, callbacks: Callable[[nn.Module, ProcessorMixin], list[TrainerCallback]] | None = None) -> Path:
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
    check_version()
    check_settings(recipe)
    check_output(recipe)
    set_seed(recipe.seed)
    dataset = load_data(recipe)
    model, processor = load_or_compose(recipe, dataset)
    check_processor(processor)
    report = check_rows(dataset, processor, recipe, config=model.config)
    dataset = without_bad_rows(dataset, report, processor, recipe)
    freeze(model, recipe.tune)
    attention = set_attention(model, recipe.attn_implementation, half_precision=uses_bfloat16(recipe))
    trainer = build_trainer(model, processor, dataset, recipe)
    for callback in callbacks(model, processor) if callbacks else ():
        trainer.add_callback(callback)
    # an earlier run stays until the new one is ready to start
    clear_output(recipe)
    if trainer.is_world_process_zero():
        _print_table(model, recipe, attention)
    log = next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, TrainLog))
    try:
        trainer.train()
    finally:
        log.close()
    refuse_values_not_finite(model, recipe)
    return save(trainer, recipe.output_dir)


def check_recipe(recipe_path: str | Path, overrides: Mapping[str, Any] | None = None) -> RowReport:
    """Looks at the rows that a recipe would train on; see `normalign.train_trl.check`."""
    recipe = load_recipe(recipe_path, overrides)
    check_version()
    dataset = load_data(recipe)
    if recipe.compose is not None:
        model, processor = load_or_compose(recipe, dataset)
        config = model.config
    else:
        start = locate("The model", recipe.start_folder())
        with explained("The model", start):
            config = NormAlignLlavaConfig.from_pretrained(start)
        processor = load_processor(start)
    check_processor(processor)
    return check_rows(dataset, processor, recipe, config=config)


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
    if recipe.compose is not None:
        try:
            complete_aligned_norm(recipe.compose.aligned_norm)
        except ValueError as error:
            raise RecipeError(f"compose: {error}") from error


def check_output(recipe: Recipe) -> None:
    """Makes sure that the run gets a folder of its own: a new or empty one, or one that `clear_output` may empty.

    Raises:
        NormalignError: the folder holds what the run starts from, is not empty, or is no earlier run's.
    """
    folder = named_folder(recipe.output_dir)
    starts = [recipe.compose.vision, recipe.compose.text] if recipe.compose else [recipe.start_folder()]
    for start in (Path(resolve_backbone(start)).expanduser() for start in starts):
        if start.is_dir() and is_at_or_above(folder, start):
            raise NormalignError(
                f"output_dir {folder} holds the model that the run starts from ({start}), which would be lost. Name "
                f"another folder with --output_dir."
            )
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
        # `runs` is TensorBoard's
        return re.fullmatch(r"checkpoint-\d+|runs", path.name) is not None
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


def load_or_compose(recipe: Recipe, dataset: Dataset | IterableDataset) -> tuple[nn.Module, ProcessorMixin]:
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
    start = locate("The model", recipe.start_folder())
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
    own = getattr(processor.tokenizer, "chat_template", None)
    if own and own != processor.chat_template:
        raise NormalignError(
            "The processor and its tokenizer have different chat templates, so prompts would depend on which of the two a "
            "tool uses. Set processor.tokenizer.chat_template = processor.chat_template, and save the processor again."
        )


def first_images(dataset: Dataset | IterableDataset, count: int = 16) -> list[Any]:
    """The first `count` images of the data, or those of its first hundred rows where they are fewer."""
    images, rows = [], iter(dataset)
    for _ in range(100):
        try:
            row = next(rows, None)
            if row is None or len(images) >= count:
                break
            images += open_images(row)
        except MalformedRow:
            break  # the check of the rows, which comes next, names it
        except NormalignError:
            continue
    return images[:count]


class AlignedSFTTrainer(SFTTrainer):
    """TRL's SFTTrainer; frozen parts stay in eval mode, and no model card is made up."""

    _frozen: list[nn.Module] | None = None
    figures_by_part: tuple[PartFigures, PartFigures] | None = None
    """Learning rates and weight decays, where they are not the same for all parts."""
    throughput: Throughput | None = None
    row_sampler: LengthGroups | None = None

    def _get_train_sampler(self, train_dataset=None):
        """Rows of like length together, where the recipe says so."""
        return super()._get_train_sampler(train_dataset) if self.row_sampler is None else self.row_sampler

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """As in TRL; `training_step` has put the whole model into training mode just before."""
        if self.model.training:
            if self._frozen is None:
                self._frozen = frozen_modules(self.model)
            for module in self._frozen:
                module.eval()
        if self.model.training and self.throughput is not None:
            self.throughput.add(inputs)
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.model.training and not return_outputs and not torch.isfinite(loss):
            refuse_loss_not_finite(self.model, inputs, loss, self.state.global_step + 1, [])
        if self.model.training and not return_outputs and not loss.requires_grad:
            # a batch without images teaches nothing where the language model is frozen: its gradient is zero
            loss = loss + sum(p.sum() * 0 for p in self.model.parameters() if p.requires_grad)
        return loss

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """The trainer's optimizer, its parameter groups split by part where the recipe has figures for single parts."""
        new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if new and self.figures_by_part:
            model = self.model if model is None else model
            split_groups(optimizer, model, *self.figures_by_part, decayed=set(self.get_decay_parameter_names(model)))
        return optimizer

    def create_model_card(self, *args, **kwargs):
        """Writes none: TRL's says "fine-tuned version of [None]" and shows text generation."""


def build_trainer(
    model: nn.Module, processor: ProcessorMixin, dataset: Dataset | IterableDataset, recipe: Recipe
) -> AlignedSFTTrainer:
    """TRL's trainer with the recipe's figures, the log and the progress bar.

    Raises:
        NormalignError: the processor does not do, the batch cannot be split over processes and accumulation, the language
            model does not do for `padding_free`, or the encoder's outputs cannot be cached.
    """
    check_processor(processor)
    arguments = training_arguments(recipe)
    collator = PaddedCollator(processor, assistant_only_loss=True)
    if recipe.batching == "padding_free":
        boundaries = prepare_padding_free(model)
        collator = PaddingFreeCollator(processor, assistant_only_loss=True, boundaries=boundaries)
    if recipe.cache_vision_features:
        dataset = without_decoding(dataset)
        folder = recipe.cache_dir or Path(recipe.output_dir).parent / "vision_cache"
        collator.vision_cache = fill_cache(model, processor, dataset, folder, arguments.bf16)
        read_from_cache(model, collator.vision_cache)
    trainer = AlignedSFTTrainer(model=model, args=arguments, train_dataset=dataset, processing_class=processor)
    # not as an argument: TRL then leaves out that model and tokenizer agree on the padding token
    trainer.data_collator = collator
    if recipe.group_by_length:
        trainer.row_sampler = LengthGroups(row_lengths(dataset, processor), recipe.batch_size, recipe.seed)
    figures = (recipe.learning_rate, recipe.weight_decay)
    if any(len(figure.given()) > 1 for figure in figures):
        trainer.figures_by_part = figures
    trainer.remove_callback(transformers.ProgressCallback)
    trainer.add_callback(StageProgress(recipe.name))
    trainer.throughput = Throughput(model.config.image_token_id, model.config.image_seq_length)
    rates = partial(trainer.throughput.figures, partial(trainer.accelerator.reduce, reduction="sum"))
    log = TrainLog(Path(recipe.output_dir) / LOG_NAME, model, recipe.name, rates)
    trainer.callback_handler.callbacks.insert(0, log)
    return trainer


def training_arguments(recipe: Recipe) -> SFTConfig:
    """The recipe in TRL's words."""
    per_device, accumulation = batch_of_a_process(recipe, int(os.environ.get("WORLD_SIZE", 1)))
    gpu = torch.cuda.is_available()
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
        bf16=uses_bfloat16(recipe),
        use_cpu=not gpu,
        **{_CHECKPOINTING: recipe.gradient_checkpointing},
        assistant_only_loss=True,
        max_length=None,
        packing=False,
        remove_unused_columns=False,  # rows are read from columns that only number them
        dataloader_num_workers=recipe.dataloader_workers,
        dataloader_pin_memory=gpu,
        logging_steps=recipe.logging_steps,
        logging_nan_inf_filter=False,
        save_strategy="no" if recipe.save_steps is None else "steps",
        save_steps=recipe.save_steps or 500,
        save_total_limit=recipe.save_total_limit,
        report_to=recipe.report_to or "none",
    )


def uses_bfloat16(recipe: Recipe) -> bool:
    """Whether the run computes in bfloat16."""
    if recipe.precision == "auto":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return recipe.precision == "bfloat16"


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
    """Saves model, code, processor, chat template and generation config; nothing that names this machine."""
    trainer.save_model(str(output_dir))
    if trainer.is_world_process_zero():
        (Path(output_dir) / "training_args.bin").unlink(missing_ok=True)
    return Path(output_dir)


def _print_table(model: nn.Module, recipe: Recipe, attention: dict[str, str]) -> None:
    from rich.console import Console

    start = recipe.start_folder() or f"{recipe.compose.vision} + {recipe.compose.text}"
    Console().print(training_table(model, recipe.learning_rate, f"{recipe.name}: {start}", attention))
