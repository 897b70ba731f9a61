"""What a run starts from: the model and its processor, loaded or composed, with adapters where the recipe has them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from transformers import ProcessorMixin
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, unset_hf_deepspeed_config
from trl import SFTConfig

from ..assembly.adapters import is_adapter
from ..assembly.loading import explained, load_processor, locate, quiet_transformers, refuse_missing_weights
from ..assembly.saving import write_parts
from ..configuration.errors import NormalignError
from ..modeling.configuration_normalign_llava import NormAlignLlavaConfig
from ..modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from . import processes
from .adapters import add_adapters, base_of, has_adapters, quantize_language_
from .checkpoints import (
    BASE_NAME,
    full_disk_explained,
)
from .data_sets import MalformedRow
from .images import open_images
from .recipe import ARMS, Recipe


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from torch import nn


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
