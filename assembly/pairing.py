"""The number of visual tokens, counted in one place, and the check that a processor and a model agree on it."""

import torch
from PIL import Image
from transformers import LlavaProcessor, PreTrainedModel

from ..configuration.errors import NormalignError


def visual_token_count(
    height: int, width: int, patch_size: int, num_additional_image_tokens: int, vision_feature_select_strategy: str
) -> int:
    """Visual tokens of one image of height x width pixels, as both LLaVA's processor and its model count them.

    `num_additional_image_tokens` are class token and registers; the strategy "default" leaves out the first token,
    "full" none.
    """
    tokens = (height // patch_size) * (width // patch_size) + num_additional_image_tokens
    return tokens - 1 if vision_feature_select_strategy == "default" else tokens


def check_pair(model: PreTrainedModel, processor: LlavaProcessor) -> int:
    """Runs one blank image through both and returns the number of visual tokens of an image.

    Raises:
        NormalignError: a field that the count needs is missing from the processor, the two disagree on the image token or
            on the select strategy, the processor and its tokenizer have different chat templates, or the processor writes another number of placeholders than the model has visual tokens.
    """
    fields = ("patch_size", "num_additional_image_tokens", "vision_feature_select_strategy")
    missing = [name for name in fields if getattr(processor, name, None) is None]
    if missing:
        raise NormalignError(
            f"The processor lacks {' and '.join(missing)}, so it cannot count the visual tokens of an image. Set "
            f"{'it' if len(missing) == 1 else 'them'} in processor_config.json (the model's config says patch_size "
            f"{getattr(model.config.vision_config, 'patch_size', None)}, vision_feature_select_strategy "
            f"'{model.config.vision_feature_select_strategy}')."
        )
    for name, ours, theirs in (
        ("image token id", processor.image_token_id, model.config.image_token_id),
        (fields[2], processor.vision_feature_select_strategy, model.config.vision_feature_select_strategy),
    ):
        if ours != theirs:
            raise NormalignError(
                f"Processor and model do not fit: the {name} is {ours!r} in the processor and {theirs!r} in the model's "
                f"config. Use the processor that was saved with the model."
            )
    templates = {processor.chat_template, getattr(processor.tokenizer, "chat_template", None)} - {None}
    if len(templates) > 1:
        raise NormalignError(
            "The processor and its tokenizer have different chat templates, so prompts would depend on which of the two a "
            "tool uses. Set processor.tokenizer.chat_template = processor.chat_template, and save the processor again."
        )
    inputs = processor(images=Image.new("RGB", (64, 64)), text=processor.image_token, return_tensors="pt")
    pixels = inputs["pixel_values"]
    placeholders = int((inputs["input_ids"] == processor.image_token_id).sum())
    expected = visual_token_count(*pixels.shape[-2:], *(getattr(processor, name) for name in fields))
    features = visual_tokens(model, pixels).shape[1]
    if not placeholders == expected == features == model.config.image_seq_length:
        raise NormalignError(
            f"Processor and model do not fit: the processor writes {placeholders} placeholders for an image, its fields "
            f"({', '.join(f'{name} {getattr(processor, name)}' for name in fields)}) say {expected}, the model makes "
            f"{features} visual tokens, and image_seq_length in its config is {model.config.image_seq_length}. Use the "
            f"processor that was saved with the model."
        )
    return features


@torch.no_grad()
def visual_tokens(model: PreTrainedModel, pixel_values: torch.Tensor) -> torch.Tensor:
    """The visual tokens as they enter the language model, of shape (images, tokens, hidden size)."""
    embeddings = model.get_input_embeddings().weight
    features = model.get_image_features(pixel_values=pixel_values.to(embeddings.device, model.dtype))
    # transformers 5 returns an output object, transformers 4 the features themselves
    features = getattr(features, "pooler_output", features)
    return torch.stack(list(features))
