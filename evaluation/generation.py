"""Answers by greedy generation, and their exact-match accuracy, for any image-text-to-text model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configuration.errors import NormalignError


if TYPE_CHECKING:
    from PIL import Image
    from transformers import PretrainedConfig, PreTrainedModel, ProcessorMixin


def load_model(model: str | Path, dtype: str | None = None) -> tuple[PreTrainedModel, ProcessorMixin]:
    """A model in eval mode and its processor, from a folder or a Hub id; no code of the repository is run.

    Ours are loaded with the installed classes, others with transformers' own. Weights keep the format they are stored
    in, except that half precision becomes float32 where there is no GPU (a CPU is slow in it).

    Raises:
        NormalignError: there is no such model, or it is not a vision-language model that transformers knows.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from ..assembly.loading import load_processor, locate
    from ..assembly.pairing import check_pair
    from ..modeling.configuration_normalign_llava import NormAlignLlavaConfig
    from ..modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration

    source = locate("The model", str(model))
    if dtype is None:
        dtype = "auto" if torch.cuda.is_available() else torch.float32
    try:
        settings, _ = NormAlignLlavaConfig.get_config_dict(source)
        if settings.get("model_type") == NormAlignLlavaConfig.model_type:
            loaded = NormAlignLlavaForConditionalGeneration.from_pretrained(source, dtype=dtype)
        else:
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
            _check_takes_images(source, config)
            loaded = AutoModelForImageTextToText.from_pretrained(source, config=config, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            reason = (
                "its type is not one that transformers knows, and code of its own is not run here. In Python, load it "
                "with trust_remote_code=True and a pinned revision, and hand it on: inspect_model takes any model."
            )
        raise NormalignError(f"'{source}' cannot be loaded as a vision-language model: {reason}") from error
    processor = load_processor(source)
    if loaded.config.model_type == NormAlignLlavaConfig.model_type:
        check_pair(loaded, processor)
    if torch.cuda.is_available():
        loaded = loaded.to("cuda")
    return loaded.eval(), processor


def _check_takes_images(source: str, config: PretrainedConfig) -> None:
    """In the place of transformers' message, which lists every model that does."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise NormalignError(
            f"'{source}' is a model of type {config.model_type}, which does not take images and text together. A language "
            f"model gets a vision encoder with `normalign compose`."
        )


def open_image(path: str | Path) -> Image.Image:
    """An image file as RGB: turned as its EXIF data says, transparency laid on white.

    Raises:
        NormalignError: the file is missing, or no image that can be read.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            picture = ImageOps.exif_transpose(file)
            if picture.has_transparency_data:
                picture = picture.convert("RGBA")
                return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
            return picture.convert("RGB")
    except (OSError, Image.DecompressionBombError, SyntaxError) as error:
        raise NormalignError(f"The image {path} cannot be read: {error}") from error


def generate_answers(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    conversations: Sequence[list[dict[str, Any]]],
    images: Sequence[list[Image.Image]],
    *,
    batch_size: int = 32,
    max_new_tokens: int = 32,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Greedy answers to conversations that end with the user's turn.

    Args:
        conversations: message lists in the form of transformers' chat templates.
        images: the images of each conversation, in order; an empty list for text alone.
        progress: called with the number of conversations just answered.

    Returns:
        one answer each, in order, without special tokens and surrounding space. An error in a batch is raised, never
        turned into an empty answer.
    """
    import torch

    answers: list[str | None] = [None] * len(conversations)
    # rows with and without images take separate batches: processors disagree about mixing them
    order = sorted(range(len(conversations)), key=lambda i: len(images[i]) == 0)
    with_image = sum(len(some) > 0 for some in images)
    starts = [*range(0, with_image, batch_size), *range(with_image, len(order), batch_size)]
    for start in starts:
        stop = min(start + batch_size, with_image if start < with_image else len(order))
        batch = order[start:stop]
        prompts = [
            processor.apply_chat_template(conversations[i], add_generation_prompt=True, tokenize=False) for i in batch
        ]
        inputs = processor(
            text=prompts,
            images=[image for i in batch for image in images[i]] or None,
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
        ).to(model.device)
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        texts = processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for i, text in zip(batch, texts, strict=True):
            answers[i] = text.strip()
        if progress:
            progress(len(batch))
    return answers


def answer(model: str, prompt: str, images: Sequence[str | Path] = (), max_new_tokens: int = 128) -> str:
    """One answer of the model (folder or Hub id) to a prompt about image files."""
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": prompt}]
    pictures = [open_image(path) for path in images]
    loaded, processor = load_model(model)
    conversation = [{"role": "user", "content": content}]
    return generate_answers(loaded, processor, [conversation], [pictures], max_new_tokens=max_new_tokens)[0]


def answer_rows(
    model: PreTrainedModel, processor: ProcessorMixin, rows: Sequence[dict[str, Any]], **options
) -> list[str]:
    """Answers to rows in TRL's form (`messages`, `images`); the assistant's last message is left out of the prompt."""
    return generate_answers(
        model, processor, [row["messages"][:-1] for row in rows], [row["images"] for row in rows], **options
    )


def exact_match(
    rows: Sequence[dict[str, Any]], answers: Sequence[str], by: str = "kind"
) -> tuple[float, dict[str, float]]:
    """Share of answers that equal `row["answer"]` to the letter: over all rows, and for each value of `row[by]`."""
    right: dict[str, list[bool]] = defaultdict(list)
    for row, given in zip(rows, answers, strict=True):
        right[row[by]].append(given == row["answer"])
    every = [hit for hits in right.values() for hit in hits]
    return sum(every) / len(every), {name: sum(hits) / len(hits) for name, hits in sorted(right.items())}
