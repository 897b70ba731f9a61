"""Runs a recipe: loads or composes the model, freezes what is not tuned, trains with TRL's SFTTrainer, saves a whole folder."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import ProcessorMixin, TrainerCallback, set_seed
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, unset_hf_deepspeed_config
from transformers.training_args import OptimizerNames
from transformers.utils import strtobool
from trl import SFTConfig, SFTTrainer

from ..assembly.adapters import is_adapter, refuse_broken_adapter
from ..assembly.licenses import is_license_file
from ..assembly.loading import explained, load_processor, locate, quiet_transformers, refuse_missing_weights
from ..assembly.saving import is_at_or_above, named_folder, write_parts
from ..configuration.backbones import resolve_backbone
from ..configuration.errors import NormalignError, RunStopped
from ..modeling.configuration_normalign_llava import NormAlignLlavaConfig, complete_aligned_norm
from ..modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from . import processes
from .adapters import add_adapters, base_of, check_adapters, expected_keys, has_adapters, quantize_language_
from .attention import set_attention
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
    is_finished,
    save_finished,
    sealed,
    step_of,
    write_recipe,
)
from .collators import PaddedCollator, PaddingFreeCollator, prepare_padding_free
from .data_sets import MalformedRow, load_data
from .images import open_images
from .length_groups import LengthGroups, row_lengths
from .not_finite import refuse_loss_not_finite
from .parts import freeze, frozen_modules, split_groups, training_table, without_adapters
from .recipe import ARMS, PartFigures, Recipe, RecipeError
from .recipe_reading import load_recipe
from .row_check import RowReport, check_rows, without_bad_rows
from .throughput import Throughput
from .vision_cache import fill_cache, read_from_cache, without_decoding


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from torch import nn

logger = logging.getLogger(__name__)

MakeCallbacks = Callable[["nn.Module", ProcessorMixin], list[TrainerCallback]]

LOG_NAME = "train_log.jsonl"
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
        going_on = goes_on(recipe)
        resume = find_resume(recipe.output_dir) if going_on else None
        set_seed(recipe.seed)
        dataset = load_data(recipe) if dataset is None else dataset
    with loaded(recipe, dataset, going_on, arguments) as (model, processor, base):
        with processes.agreement():
            check_processor(processor)
        # each process looks at a share of the rows and hears of all
        report = check_rows(dataset, processor, recipe, config=model.config)
        dataset = without_bad_rows(dataset, report, processor, recipe)
        if has_adapters(recipe):
            model = adapted(model, recipe)
        with processes.agreement():
            freeze(model, recipe.tune)
            bare, half = without_adapters(model), uses_bfloat16(recipe)
            attention = set_attention(bare, recipe.attn_implementation, half_precision=half)
        trainer = build_trainer(model, processor, dataset, recipe, arguments)
        more = callbacks(model, processor) if callbacks else []
        # an earlier run stays until the new one is ready to start
        with processes.agreement():
            clear_output(recipe)
            if processes.is_first():
                begin_folder(recipe, resume, base)
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


@contextmanager
def loaded(
    recipe: Recipe, dataset: Dataset, going_on: bool, arguments: SFTConfig
) -> Iterator[tuple[nn.Module, ProcessorMixin, Path | None]]:
    """The model, its processor, and where the model stands that an adapter needs and no other folder holds.

    A composed model that gets an adapter is written beside `output_dir`, to be moved into it when the run begins; a run
    that is gone on with has it there already. Of several processes, the first of each machine composes, and all load what
    it has written there: a model that is shared out over processes while it is loaded (ZeRO-3, FSDP) cannot be put
    together from parts.
    """
    own = Path(recipe.output_dir) / BASE_NAME
    kept = recipe.compose is not None and has_adapters(recipe)
    if kept and going_on and own.is_dir():
        yield *load_or_compose(dataclasses.replace(recipe, compose=None, model=str(own)), dataset), None
    elif recipe.compose is not None and processes.count() > 1:
        with processes.folder_of_this_machine(beside=recipe.output_dir) as folder:
            base = folder / BASE_NAME
            with processes.agreement(), _held_whole(arguments):
                if processes.is_first_of_machine():
                    write_parts(*load_or_compose(recipe, dataset), base)
            start = dataclasses.replace(recipe, compose=None, model=str(base))
            yield *load_or_compose(start, dataset), base if kept and processes.is_first() else None
    elif kept:
        parent = own.resolve().parent.parent
        parent.mkdir(parents=True, exist_ok=True)
        with full_disk_explained(parent), TemporaryDirectory(prefix=f".{own.parent.name}.", dir=parent) as work:
            model, processor = load_or_compose(recipe, dataset)
            base = Path(work) / BASE_NAME
            write_parts(model, processor, base)
            yield model, processor, base
    else:
        yield *load_or_compose(recipe, dataset), None


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


def check_recipe(recipe_path: str | Path, overrides: Mapping[str, Any] | None = None) -> RowReport:
    """Looks at the rows that a recipe would train on; see `normalign.train_trl.check`."""
    recipe = _checked_recipe(recipe_path, overrides)
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
    if not processes.is_first() or not folder.exists() or not any(folder.iterdir()):
        return
    if not recipe.overwrite:
        what = " (it holds a finished run)" if (folder / LOG_NAME).is_file() and is_finished(folder) else ""
        raise NormalignError(
            f"output_dir {folder} is not empty{what}, and a run does not mix with what is there. Name another folder with "
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
    if not recipe.overwrite or not processes.is_first() or not folder.exists():
        return
    for path in sorted(folder.iterdir(), key=lambda path: path.name == LOG_NAME):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _is_of_a_run(path: Path) -> bool:
    if path.is_dir():
        # `runs` is TensorBoard's
        return re.fullmatch(rf"checkpoint-\d+|runs|{BASE_NAME}|\.finished\.partial", path.name) is not None
    return path.name in _CODE or is_license_file(path.name) or any(path.match(pattern) for pattern in _WRITTEN)


def refuse_values_not_finite(model: nn.Module, recipe: Recipe) -> None:
    """Raises NormalignError with the first weight that is NaN or infinite."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(processes.local_values(parameter)).all():
            raise NormalignError(
                f"After the last step of {recipe.name} the weight {name} holds values that are not finite, so the model is "
                f"of no use and was not saved. Lower learning_rate (it is {recipe.learning_rate.all:g}) or max_grad_norm (it is "
                f"{recipe.max_grad_norm:g}), and look at the last lines of {Path(recipe.output_dir) / LOG_NAME}."
            )


@contextmanager
def _held_whole(arguments: SFTConfig) -> Iterator[None]:
    """Within, a model is loaded in full by the process that asks for it, also under ZeRO-3."""
    if arguments.deepspeed_plugin is None:
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        arguments.deepspeed_plugin.set_deepspeed_weakref()


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
    if is_deepspeed_zero3_enabled():
        # transformers would save the weights under names that they did not have
        model._weight_conversions = None
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
    """TRL's SFTTrainer; frozen parts stay in eval mode, every process runs every part, checkpoints are sealed."""

    _frozen: list[nn.Module] | None = None
    recipe: Recipe
    adapter_keys: list[str] | None = None
    figures_by_part: tuple[PartFigures, PartFigures] | None = None
    """Learning rates and weight decays, where they are not the same for all parts."""
    throughput: Throughput | None = None
    row_sampler: LengthGroups | None = None

    def _get_train_sampler(self, train_dataset=None):
        """Rows of like length together, where the recipe says so."""
        return super()._get_train_sampler(train_dataset) if self.row_sampler is None else self.row_sampler

    def train(self, *args, **kwargs):
        """As in TRL; the norm stays in float32 under FSDP2, and a batch without images does not hold up the others."""
        vision_path = processes.VisionPath(self.model)
        try:
            with processes.norm_in_float32():
                return super().train(*args, **kwargs)
        finally:
            vision_path.remove()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """As in TRL; `training_step` has put the whole model into training mode just before."""
        rows = inputs.pop("rows", [])
        if self.model.training:
            if self._frozen is None:
                self._frozen = frozen_modules(self.model)
            for module in self._frozen:
                module.eval()
        if self.model.training and self.throughput is not None:
            self.throughput.add(inputs)
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.model.training and not return_outputs and not torch.isfinite(loss):
            refuse_loss_not_finite(self.model, inputs, loss, self.state.global_step + 1, rows)
        return loss

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """The trainer's optimizer, its parameter groups split by part where the recipe has figures for single parts."""
        new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if new and self.figures_by_part:
            model = self.model if model is None else model
            split_groups(optimizer, model, *self.figures_by_part, decayed=set(self.get_decay_parameter_names(model)))
        return optimizer

    def _save(self, output_dir=None, state_dict=None):
        """As in transformers; the recipe is added, and an adapter looked at.

        What is gathered from all processes has tied weights twice, and a model folder has them once.
        """
        if state_dict and not hasattr(self.model, "peft_config"):
            tied = getattr(self.model, "all_tied_weights_keys", {})
            state_dict = {name: value for name, value in state_dict.items() if name not in tied}
        with processes.own_class(self.model):
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

    def _init_training_state(self, max_steps, *args, **kwargs):
        """As in transformers, which takes all steps of a streamed run for its first epoch when it goes on with one."""
        epochs, batches = super()._init_training_state(max_steps, *args, **kwargs)
        if not hasattr(self.train_dataset, "__len__") and self.state.epoch:
            epochs = int(self.state.epoch)
            batches = round((self.state.epoch - epochs) * max_steps * self.args.gradient_accumulation_steps)
        return epochs, batches

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


def build_trainer(
    model: nn.Module,
    processor: ProcessorMixin,
    dataset: Dataset | IterableDataset,
    recipe: Recipe,
    arguments: SFTConfig | None = None,
) -> AlignedSFTTrainer:
    """TRL's trainer with the recipe's figures (or `arguments` made of them before), the log and the progress bar.

    Raises:
        NormalignError: the processor does not do, the batch cannot be split over processes and accumulation, the language
            model does not do for `padding_free`, or the encoder's outputs cannot be cached.
    """
    check_processor(processor)
    arguments = arguments or training_arguments(recipe)
    collator = PaddedCollator(processor, assistant_only_loss=True)
    if recipe.batching == "padding_free":
        boundaries = prepare_padding_free(without_adapters(model))
        collator = PaddingFreeCollator(processor, assistant_only_loss=True, boundaries=boundaries)
    if recipe.cache_vision_features:
        dataset = without_decoding(dataset)
        folder = recipe.cache_dir or Path(recipe.output_dir).parent / "vision_cache"
        collator.vision_cache = fill_cache(without_adapters(model), processor, dataset, folder, uses_bfloat16(recipe))
        read_from_cache(without_adapters(model), collator.vision_cache)
    trainer = AlignedSFTTrainer(model=model, args=arguments, train_dataset=dataset, processing_class=processor)
    collator.name_rows = True
    # not as an argument: TRL then leaves out that model and tokenizer agree on the padding token
    trainer.data_collator = collator
    if recipe.group_by_length:
        trainer.row_sampler = LengthGroups(row_lengths(dataset, processor), recipe.batch_size, recipe.seed)
    figures = (recipe.learning_rate, recipe.weight_decay)
    if any(len(figure.given()) > 1 for figure in figures):
        trainer.figures_by_part = figures
    trainer.recipe = recipe
    trainer.adapter_keys = expected_keys(model) if has_adapters(recipe) else None
    if strtobool(os.environ.get("ACCELERATE_USE_FSDP", "false")) and not trainer.is_fsdp_enabled:
        raise NormalignError(
            "FSDP was asked for, but accelerate shards a model on GPUs alone and would train without it. On the CPU use "
            "configuration/accelerate/cpu.yaml."
        )
    trainer.remove_callback(transformers.ProgressCallback)
    trainer.add_callback(StageProgress(recipe.name))
    trainer.throughput = Throughput(model.config.image_token_id, model.config.image_seq_length)
    rates = partial(trainer.throughput.figures, partial(trainer.accelerator.reduce, reduction="sum"))
    log = TrainLog(Path(recipe.output_dir) / LOG_NAME, model, recipe.name, rates)
    trainer.callback_handler.callbacks.insert(0, log)
    return trainer


def training_arguments(recipe: Recipe) -> SFTConfig:
    """The recipe in TRL's words."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    per_device, accumulation = batch_of_a_process(recipe, world)
    gpu = torch.cuda.is_available()
    deepspeed, bf16 = strtobool(os.environ.get("ACCELERATE_USE_DEEPSPEED", "false")), uses_bfloat16(recipe)
    arguments = SFTConfig(
        output_dir=recipe.output_dir,
        per_device_train_batch_size=per_device,
        # for those who evaluate with this trainer: the loss alone, logits are large
        per_device_eval_batch_size=per_device,
        prediction_loss_only=True,
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
        # DeepSpeed's own bf16 would hold the weights in bfloat16; autocast, as without it, leaves them in float32
        bf16=bf16 and not deepspeed,
        # accelerate has DeepSpeed on the CPU only where it is told of gloo, and not that this is a CPU
        use_cpu=not gpu and not deepspeed,
        ddp_backend="gloo" if world > 1 and not gpu else None,
        ddp_find_unused_parameters=False,
        **{_CHECKPOINTING: recipe.gradient_checkpointing, f"{_CHECKPOINTING}_kwargs": {"use_reentrant": False}},
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
        report_to=recipe.report_to or "none",
    )
    if deepspeed and bf16:
        arguments.deepspeed_plugin.deepspeed_config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        arguments.deepspeed_plugin.set_deepspeed_weakref()
    return arguments


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
    """Saves model or adapter, code, processor, chat template, recipe; `output_dir` has all of it at once or nothing."""
    return save_finished(trainer, output_dir)


def _print_table(model: nn.Module, recipe: Recipe, attention: dict[str, str]) -> None:
    from rich.console import Console

    start = recipe.start_folder() or f"{recipe.compose.vision} + {recipe.compose.text}"
    # every process gathers the norm, one prints
    table = training_table(model, recipe.learning_rate, f"{recipe.name}: {start}", attention)
    if processes.is_first():
        Console().print(table)
