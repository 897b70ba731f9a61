"""TRL's SFTTrainer as a recipe has it: its arguments, collator, order of rows and callbacks."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from transformers import ProcessorMixin
from transformers.utils import strtobool
from trl import SFTConfig, SFTTrainer

from ..assembly.adapters import refuse_broken_adapter
from ..configuration.errors import NormalignError
from . import processes
from .adapters import expected_keys, has_adapters
from .callbacks import StageProgress, TrainLog
from .checkpoints import (
    complete_folder,
    sealed,
)
from .collators import PaddedCollator, PaddingFreeCollator, prepare_padding_free
from .length_groups import LengthGroups, row_lengths
from .not_finite import refuse_loss_not_finite
from .output_folder import LOG_NAME
from .parts import freeze, frozen_modules, split_groups, without_adapters
from .recipe import PartFigures, Recipe
from .start import check_processor
from .throughput import Throughput
from .vision_cache import fill_cache, read_from_cache, without_decoding


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from torch import nn


# the newer name of the two; TRL would otherwise switch it on
_CHECKPOINTING = (
    "activation_checkpointing" if hasattr(SFTConfig, "activation_checkpointing") else "gradient_checkpointing"
)


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
