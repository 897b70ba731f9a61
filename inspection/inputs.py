"""Prompts and images as a model's inputs, and which of its tokens are visual, text or padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..configuration.errors import NormalignError


if TYPE_CHECKING:
    from PIL import Image
    from transformers import BatchFeature, PreTrainedModel, ProcessorMixin

    from .parts import Parts

MODALITIES = ("visual", "text")


def opened(images: Sequence[Image.Image | Callable[[], Image.Image]]) -> list[Image.Image]:
    """The images; one that is given as a function is opened now, so that hundreds need not lie in memory together."""
    return [image() if callable(image) else image for image in images]


def build_inputs(
    model: PreTrainedModel, processor: ProcessorMixin, samples: Sequence[tuple[str, list[Image.Image]]]
) -> BatchFeature:
    """A batch of prompts, each with its images before its text, on the model's device and in its number format.

    Prompts go through the processor's chat template where it has one; padding is on the side that the processor pads.
    """
    prompts = [_prompt_text(processor, prompt, len(images)) for prompt, images in samples]
    images = [opened(some) for _, some in samples]
    options: dict[str, Any] = {"padding": True} if len(samples) > 1 else {}
    if getattr(processor, "chat_template", None):
        options["add_special_tokens"] = False  # the template has written them
    try:
        inputs = processor(text=prompts, images=images if any(images) else None, return_tensors="pt", **options)
    except ValueError:
        if any(images):
            raise
        # PaliGemma's processor takes no prompt without an image; the tokenizer does
        inputs = processor.tokenizer(prompts, return_tensors="pt", return_token_type_ids=False, **options)
    inputs.pop("labels", None)  # PaliGemma's processor makes some, and the model would compute a loss
    inputs = inputs.to(model.device)
    for name, value in inputs.items():
        if torch.is_tensor(value) and value.is_floating_point():
            inputs[name] = value.to(model.dtype)
    return inputs


def modality_masks(parts: Parts, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Which tokens are visual and which are text, as two boolean tensors of shape (batch, tokens).

    Visual are the tokens whose embedding the model takes from the image; every other token is text, also those that
    mark where an image begins, except padding, which is in neither.

    Raises:
        NormalignError: there are no `input_ids` to tell them by.
    """
    ids = inputs.get("input_ids")
    if ids is None:
        raise NormalignError(
            f"{type(parts.model).__name__} was called without input_ids, so visual tokens cannot be told from text "
            f"tokens. Call it with input_ids rather than inputs_embeds."
        )
    visual = ids == parts.image_token_id
    for token in parts.visual_token_ids[1:]:
        visual = visual | (ids == token)
    attention = inputs.get("attention_mask")
    if attention is None:
        return {"visual": visual, "text": ~visual}
    # while generating, the attention mask also covers tokens that are in the cache
    seen = attention[:, -ids.shape[1] :].to(ids.device).bool()
    return {"visual": visual & seen, "text": ~visual & seen}


def _prompt_text(processor: ProcessorMixin, prompt: str, images: int) -> str:
    """The prompt in the processor's chat template, or behind one image token for each image."""
    if getattr(processor, "chat_template", None):
        content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": prompt}]
        conversation = [{"role": "user", "content": content}]
        return processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    token = getattr(processor, "boi_token", None) or getattr(processor, "image_token", "<image>")
    return getattr(token, "content", token) * images + prompt
