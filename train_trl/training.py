"""Runs a recipe: loads or composes the model, freezes what is not tuned, trains with TRL's SFTTrainer, saves a whole folder."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import ProcessorMixin, set_seed
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, unset_hf_deepspeed_config
from transformers.training_args import OptimizerNames
from transformers.utils import strtobool
from trl import SFTConfig, SFTTrainer

from ..assembly.loading import explained, load_processor, locate, quiet_transformers, refuse_missing_weights
from ..assembly.saving import is_at_or_above, named_folder, write_parts
from ..configuration.backbones import resolve_backbone
from ..configuration.errors import NormalignError
from ..modeling.configuration_normalign_llava import NormAlignLlavaConfig, complete_aligned_norm
from ..modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from . import processes
from .callbacks import StageProgress, TrainLog
from .parts import freeze, frozen_modules, training_table
from .recipe import ARMS, Recipe, RecipeError
from .recipe_reading import load_recipe


if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

LOG_NAME = "train_log.jsonl"
_ROWS_AT_ONCE = 256
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


def run(recipe: Recipe) -> Path:
    """Trains what the recipe says.

    Returns:
        `recipe.output_dir`, by then a complete model folder with code, processor and train_log.jsonl.

    Raises:
        NormalignError: the recipe, the model, the processor or a row of the data does not fit, `output_dir` is not
            empty, or the weights are not finite at the end (nothing is saved then).
    """
    if tuple(int(number) for number in transformers.__version__.split(".")[:2]) < (5, 18):
        raise NormalignError(
            f"Training needs transformers 5.18 or newer, whose processors can mark the assistant's tokens; installed "
            f"is {transformers.__version__}. Run: pip install -U transformers"
        )
    check_settings(recipe)
    # joins the other processes, and tells transformers to share out what it loads under ZeRO-3
    arguments = training_arguments(recipe)
    with processes.agreement():
        check_output(recipe)
        set_seed(recipe.seed)
        dataset = load_data(recipe)
    with start_of_run(recipe, dataset, arguments) as (model, processor), processes.agreement():
        check_processor(processor)
        check_supervision(dataset, processor)
        freeze(model, recipe.tune)
    trainer = build_trainer(model, processor, dataset, recipe, arguments)
    # an earlier run stays until the new one is ready to start
    with processes.agreement():
        clear_output(recipe)
    _print_table(model, recipe)
    log = next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, TrainLog))
    try:
        trainer.train()
    finally:
        log.close()
    with processes.agreement():
        refuse_values_not_finite(model, recipe)
    return save(trainer, recipe.output_dir)


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
    if not processes.is_first() or not folder.exists() or not any(folder.iterdir()):
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
    if not recipe.overwrite or not processes.is_first() or not folder.exists():
        return
    for path in sorted(folder.iterdir(), key=lambda path: path.name == LOG_NAME):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _is_of_a_run(path: Path) -> bool:
    if path.is_dir():
        return re.fullmatch(r"checkpoint-\d+", path.name) is not None
    return path.name in _CODE or any(path.match(pattern) for pattern in _WRITTEN)


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
def start_of_run(recipe: Recipe, dataset: Dataset, arguments: SFTConfig) -> Iterator[tuple[nn.Module, ProcessorMixin]]:
    """The model and processor to train, the same in all processes; see `load_or_compose`.

    Of several processes, the first of each machine composes, and all load what it has written beside `output_dir`: a
    model that is shared out over processes while it is loaded (ZeRO-3, FSDP) cannot be put together from parts.
    """
    if recipe.compose is None or processes.count() == 1:
        yield load_or_compose(recipe, dataset)
        return
    with processes.folder_of_this_machine(beside=recipe.output_dir) as folder:
        with processes.agreement(), _held_whole(arguments):
            if processes.is_first_of_machine():
                write_parts(*load_or_compose(recipe, dataset), folder)
        yield load_or_compose(dataclasses.replace(recipe, compose=None, model=str(folder)), dataset)


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
    """TRL's SFTTrainer; frozen parts stay in eval mode, every process runs every part, and no model card is made up."""

    _frozen: list[nn.Module] | None = None

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
        if self.model.training:
            if self._frozen is None:
                self._frozen = frozen_modules(self.model)
            for module in self._frozen:
                module.eval()
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _save(self, output_dir=None, state_dict=None):
        """As in TRL; what is gathered from all processes has tied weights twice, and a model folder has them once."""
        if state_dict and not hasattr(self.model, "peft_config"):
            tied = getattr(self.model, "all_tied_weights_keys", {})
            state_dict = {name: value for name, value in state_dict.items() if name not in tied}
        with processes.own_class(self.model):
            super()._save(output_dir, state_dict)

    def create_model_card(self, *args, **kwargs):
        """Writes none: TRL's says "fine-tuned version of [None]" and shows text generation."""


def build_trainer(
    model: nn.Module,
    processor: ProcessorMixin,
    dataset: Dataset,
    recipe: Recipe,
    arguments: SFTConfig | None = None,
) -> AlignedSFTTrainer:
    """TRL's trainer with the recipe's figures (or `arguments` made of them before), the log and the progress bar.

    Raises:
        NormalignError: the processor does not do, or the batch cannot be split over processes and accumulation.
    """
    check_processor(processor)
    trainer = AlignedSFTTrainer(
        model=model,
        args=arguments or training_arguments(recipe),
        train_dataset=dataset,
        processing_class=processor,
    )
    if strtobool(os.environ.get("ACCELERATE_USE_FSDP", "false")) and not trainer.is_fsdp_enabled:
        raise NormalignError(
            "FSDP was asked for, but accelerate shards a model on GPUs alone and would train without it. On the CPU use "
            "configuration/accelerate/cpu.yaml."
        )
    trainer.remove_callback(transformers.ProgressCallback)
    trainer.add_callback(StageProgress(recipe.name))
    trainer.add_callback(TrainLog(Path(recipe.output_dir) / LOG_NAME, model, recipe.name))
    return trainer


def training_arguments(recipe: Recipe) -> SFTConfig:
    """The recipe in TRL's words."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    per_device, accumulation = batch_of_a_process(recipe, world)
    gpu = torch.cuda.is_available()
    deepspeed = strtobool(os.environ.get("ACCELERATE_USE_DEEPSPEED", "false"))
    auto_bf16 = recipe.precision == "auto" and gpu and torch.cuda.is_bf16_supported()
    bf16 = auto_bf16 or recipe.precision == "bfloat16"
    arguments = SFTConfig(
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
        # DeepSpeed's own bf16 would hold the weights in bfloat16; autocast, as without it, leaves them in float32
        bf16=bf16 and not deepspeed,
        # accelerate has DeepSpeed on the CPU only where it is told of gloo, and not that this is a CPU
        use_cpu=not gpu and not deepspeed,
        ddp_backend="gloo" if world > 1 and not gpu else None,
        ddp_find_unused_parameters=False,
        **{_CHECKPOINTING: False},
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
        save_total_limit=recipe.save_total_limit,
        report_to="none",
    )
    if deepspeed and bf16:
        arguments.deepspeed_plugin.deepspeed_config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        arguments.deepspeed_plugin.set_deepspeed_weakref()
    return arguments


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
    with processes.agreement():
        if processes.is_first():
            processes.refuse_empty_tensors(output_dir)
    return Path(output_dir)


def _print_table(model: nn.Module, recipe: Recipe) -> None:
    from rich.console import Console

    start = recipe.start_folder() or f"{recipe.compose.vision} + {recipe.compose.text}"
    # every process gathers the norm, one prints
    table = training_table(model, recipe.learning_rate, f"{recipe.name}: {start}")
    if processes.is_first():
        Console().print(table)
