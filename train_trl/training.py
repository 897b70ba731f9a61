"""Runs a recipe: loads or composes the model, freezes what is not tuned, trains with TRL's SFTTrainer, saves a whole folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import ProcessorMixin, set_seed
from trl import SFTConfig, SFTTrainer

from ..assembly.loading import load_processor
from ..configuration.errors import NormalignError
from ..modeling.configuration_normalign_llava import NormAlignLlavaConfig
from ..modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .callbacks import StageProgress, TrainLog
from .parts import freeze, frozen_modules, training_table
from .recipe import ARMS, Recipe, load_recipe


if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

_ROWS_AT_ONCE = 256
# the newer name of the two; TRL would otherwise switch it on
_CHECKPOINTING = (
    "activation_checkpointing" if hasattr(SFTConfig, "activation_checkpointing") else "gradient_checkpointing"
)


def train_recipe(recipe_path: str | Path, overrides: Mapping[str, Any] | None = None) -> Path:
    """Trains what the recipe says; see `normalign.train_trl.train`."""
    return run(load_recipe(recipe_path, overrides))


def run(recipe: Recipe) -> Path:
    """Trains what the recipe says.

    Returns:
        `recipe.output_dir`, by then a complete model folder with code, processor and train_log.jsonl.

    Raises:
        NormalignError: the recipe, the model, the processor or a row of the data does not fit.
    """
    if tuple(int(number) for number in transformers.__version__.split(".")[:2]) < (5, 18):
        raise NormalignError(
            f"Training needs transformers 5.18 or newer, whose processors can mark the assistant's tokens; installed "
            f"is {transformers.__version__}. Run: pip install -U transformers"
        )
    set_seed(recipe.seed)
    dataset = load_data(recipe)
    model, processor = load_or_compose(recipe, dataset)
    check_processor(processor)
    check_supervision(dataset, processor)
    freeze(model, recipe.tune)
    trainer = build_trainer(model, processor, dataset, recipe)
    if trainer.is_world_process_zero():
        _print_table(model, recipe)
    log = next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, TrainLog))
    try:
        trainer.train()
    finally:
        log.close()
    return save(trainer, recipe.output_dir)


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
    found = NormAlignLlavaConfig.get_config_dict(start)[0].get("model_type")
    if found != "normalign_llava":
        raise NormalignError(
            f"{start} is a model of type {found!r}; training needs a normalign_llava model. An existing LLaVA is "
            f"converted by `normalign graft`, two backbones are put together by a recipe's `compose` block."
        )
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
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
    return digit_scenes_dataset(data.rows, seed=data.seed, split="train", stage=data.stage)


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
    """TRL's SFTTrainer; frozen parts stay in eval mode, and no model card is made up."""

    _frozen: list[nn.Module] | None = None

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
    trainer.remove_callback(transformers.ProgressCallback)
    trainer.add_callback(StageProgress(recipe.name))
    trainer.add_callback(TrainLog(Path(recipe.output_dir) / "train_log.jsonl", model, recipe.name))
    return trainer


def training_arguments(recipe: Recipe) -> SFTConfig:
    """The recipe in TRL's words."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    parts = processes * recipe.gradient_accumulation
    if recipe.batch_size % parts:
        raise NormalignError(
            f"batch_size {recipe.batch_size} cannot be split evenly over {processes} processes and "
            f"{recipe.gradient_accumulation} accumulation steps. Choose a multiple of {parts}."
        )
    gpu = torch.cuda.is_available()
    auto_bf16 = recipe.precision == "auto" and gpu and torch.cuda.is_bf16_supported()
    return SFTConfig(
        output_dir=recipe.output_dir,
        per_device_train_batch_size=recipe.batch_size // parts,
        gradient_accumulation_steps=recipe.gradient_accumulation,
        num_train_epochs=recipe.epochs,
        max_steps=recipe.max_steps or -1,
        optim=recipe.optimizer,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        lr_scheduler_type=recipe.schedule,
        warmup_steps=recipe.warmup,
        max_grad_norm=recipe.max_grad_norm,
        seed=recipe.seed,
        bf16=auto_bf16 or recipe.precision == "bfloat16",
        use_cpu=not gpu,
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


def save(trainer: SFTTrainer, output_dir: str | Path) -> Path:
    """Saves model, code, processor, chat template and generation config; nothing that names this machine."""
    trainer.save_model(str(output_dir))
    if trainer.is_world_process_zero():
        (Path(output_dir) / "training_args.bin").unlink(missing_ok=True)
    return Path(output_dir)


def _print_table(model: nn.Module, recipe: Recipe) -> None:
    from rich.console import Console

    start = recipe.start_folder() or f"{recipe.compose.vision} + {recipe.compose.text}"
    Console().print(training_table(model, recipe.learning_rate, f"{recipe.name}: {start}"))
