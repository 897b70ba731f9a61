"""Answers by greedy generation, and their exact-match accuracy, for any image-text-to-text model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configuration.errors import NormalignError
from .images import open_image


if TYPE_CHECKING:
    from PIL import Image
    from transformers import BatchFeature, PreTrainedModel, ProcessorMixin


def load_model(model: str | Path, dtype: str | None = None) -> tuple[PreTrainedModel, ProcessorMixin]:
    """A model in eval mode and its processor, from a folder or a Hub id; no code of the repository is run.

    Ours are loaded with the installed classes, others with transformers' own. Weights keep the format they are stored
    in, except that half precision becomes float32 where there is no GPU (a CPU is slow in it). The folder of a PEFT
    adapter gives its base model with the adapter merged into it, and the processor of the folder, or else the base's.

    Raises:
        NormalignError: there is no such model, it is not a vision-language model that transformers knows, a file of it is
            broken, or its processor has no chat template.
    """
    import torch

    from ..assembly.adapters import base_model_of, is_adapter, load_adapter
    from ..assembly.loading import load_processor, locate
    from ..assembly.pairing import check_pair
    from ..modeling.configuration_normalign_llava import NormAlignLlavaConfig

    adapter = Path(model).expanduser() if str(model).strip() and is_adapter(model) else None
    source = locate("The model", str(model)) if adapter is None else locate("The base model", base_model_of(adapter))
    if dtype is None:
        dtype = "auto" if torch.cuda.is_available() else torch.float32
    loaded = _load_whole(source, dtype)
    own_processor = adapter is not None and (adapter / "processor_config.json").is_file()
    processor = load_processor(adapter if own_processor else source)
    if adapter is not None:
        loaded = load_adapter(loaded, adapter).merge_and_unload()
    _refuse_without_chat_template(processor, str(adapter) if own_processor else source)
    if loaded.config.model_type == NormAlignLlavaConfig.model_type:
        check_pair(loaded, processor)
    if torch.cuda.is_available():
        loaded = loaded.to("cuda")
    return loaded.eval(), processor


def _load_whole(source: str, dtype) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    from ..assembly.loading import explained, quiet_transformers, refuse_missing_weights
    from ..modeling.configuration_normalign_llava import NormAlignLlavaConfig
    from ..modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration

    what = "The model"
    with explained(what, source):
        settings, _ = PretrainedConfig.get_config_dict(source)
    options = {"dtype": dtype, "output_loading_info": True}
    if settings.get("model_type") == NormAlignLlavaConfig.model_type:
        with explained(what, source), quiet_transformers():
            loaded, info = NormAlignLlavaForConditionalGeneration.from_pretrained(source, **options)
    else:
        _refuse_own_code(settings, source)
        with explained(what, source):
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            raise NormalignError(
                f"'{source}' is a model of type '{config.model_type}', which is not a vision-language model that "
                f"transformers knows. Give one such as LLaVA, or put a vision encoder and a language model together with "
                f"`normalign compose`."
            )
        with explained(what, source), quiet_transformers():
            loaded, info = AutoModelForImageTextToText.from_pretrained(source, config=config, **options)
    refuse_missing_weights(what, source, loaded, info)
    return loaded


def _refuse_own_code(settings: dict, source: str) -> None:
    from transformers import CONFIG_MAPPING

    if settings.get("auto_map") and settings.get("model_type") not in CONFIG_MAPPING:
        raise NormalignError(
            f"'{source}' is a model with code of its own, which is not run here. In Python, load it with "
            f"trust_remote_code=True and a pinned revision, and hand it on: inspect_model takes any model."
        )


def _refuse_without_chat_template(processor: ProcessorMixin, source: str) -> None:
    if not getattr(processor, "chat_template", None):
        raise NormalignError(
            f"The processor of '{source}' has no chat template, so a question cannot be put as the model was trained: there "
            f"is no chat_template.jinja, nor a chat_template in processor_config.json. Copy chat_template.jinja from where "
            f"the model was composed or trained, or from its repository."
        )


def question(text: str, images: int) -> list[dict[str, Any]]:
    """A conversation of one turn: so many images, then the text."""
    content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


def check_prompt(processor: ProcessorMixin, prompt: str) -> None:
    """Raises NormalignError if the prompt holds the token that stands for an image, which the processor would count."""
    token = getattr(processor, "image_token", None)
    if token and token in prompt:
        raise NormalignError(
            f"The prompt holds the text {token}, which stands for an image in this model. Leave it out: each image gets "
            f"its place before the prompt by itself."
        )


def chat_prompts(processor: ProcessorMixin, conversations: Sequence[list[dict[str, Any]]]) -> list[str]:
    """The text of each conversation up to where the model's turn begins, by the processor's chat template.

    Raises:
        NormalignError: a text holds the token that stands for an image.
    """
    for conversation in conversations:
        for message in conversation:
            parts = message["content"] if isinstance(message["content"], list) else [message["content"]]
            for part in parts:
                check_prompt(processor, part if isinstance(part, str) else part.get("text") or "")
    return [
        processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        for conversation in conversations
    ]


def batches_by_images(order: Sequence[int], images: Sequence[list[Image.Image]], batch_size: int) -> list[list[int]]:
    """`order` cut into batches, those with images first: processors disagree about rows with and without in one batch."""
    batches = []
    for with_images in (True, False):
        rows = [i for i in order if (len(images[i]) > 0) == with_images]
        batches += [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    return batches


def model_inputs(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    texts: list[str],
    images: Sequence[list[Image.Image]],
    *,
    padding_side: str,
    add_special_tokens: bool = False,
) -> BatchFeature:
    """Padded inputs of one batch on the model's device, pixels in the model's number format."""
    inputs = processor(
        text=texts,
        images=[image for some in images for image in some] or None,
        return_tensors="pt",
        padding=True,
        padding_side=padding_side,
        add_special_tokens=add_special_tokens,
    ).to(model.device)
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    return inputs


def generate_answers(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    conversations: Sequence[list[dict[str, Any]]],
    images: Sequence[list[Image.Image]],
    *,
    batch_size: int = 32,
    max_new_tokens: int = 32,
    stop: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Greedy answers to conversations that end with the user's turn.

    Args:
        conversations: message lists in the form of transformers' chat templates.
        images: the images of each conversation, in order; an empty list for text alone.
        stop: an answer ends before the first of these texts in it; the space it begins with does not count.
        progress: called with the number of conversations just answered.

    Returns:
        one answer each, in order, without special tokens and surrounding space. An error in a batch is raised, never
        turned into an empty answer.

    Raises:
        NormalignError: a text holds the token that stands for an image.
    """
    import torch
    from transformers import StoppingCriteriaList

    stop = [text for text in stop if text]
    prompts = chat_prompts(processor, conversations)
    answers: list[str | None] = [None] * len(conversations)
    for batch in batches_by_images(range(len(conversations)), images, batch_size):
        texts, pictures = [prompts[i] for i in batch], [images[i] for i in batch]
        inputs = model_inputs(model, processor, texts, pictures, padding_side="left")
        start = inputs["input_ids"].shape[1]
        options = {"stopping_criteria": StoppingCriteriaList([_stop_at(processor, stop, start)])} if stop else {}
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, **options)
        for i, text in zip(batch, processor.batch_decode(tokens[:, start:], skip_special_tokens=True), strict=True):
            answers[i] = cut_at(text, stop)
        if progress:
            progress(len(batch))
    return answers


def cut_at(text: str, stop: Sequence[str]) -> str:
    """`text` without surrounding space, up to the first of `stop` in it."""
    text = text.strip()
    return text[: min((text.index(end) for end in stop if end in text), default=None)].strip()


def _stop_at(processor: ProcessorMixin, stop: list[str], start: int) -> Callable:
    """Ends each row's generation where one of the texts has come up behind its first visible character.

    transformers' own stop strings also count what the prompt ends with: a model whose turn begins on a new line, and who
    begins with one more, would be stopped at an empty line before it has said anything.
    """
    import torch

    # a token stands for a byte at least, so that a text of n bytes lies within the last n tokens and the one it ends in
    window = 1 + max(len(text.encode()) for text in stop)
    begun: dict[int, bool] = {}

    def stopped(tokens: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        texts = processor.batch_decode(tokens[:, start:][:, -window:], skip_special_tokens=True)
        ends = []
        for row, text in enumerate(texts):
            text = text if begun.get(row) else text.lstrip()
            begun[row] = begun.get(row, False) or bool(text)
            ends.append(any(end in text for end in stop))
        return torch.tensor(ends, device=tokens.device)

    return stopped


def answer(model: str, prompt: str, images: Sequence[str | Path] = (), max_new_tokens: int = 128) -> str:
    """One answer of the model (folder or Hub id) to a prompt about image files."""
    pictures = [open_image(path) for path in images]
    loaded, processor = load_model(model)
    return generate_answers(
        loaded, processor, [question(prompt, len(images))], [pictures], max_new_tokens=max_new_tokens
    )[0]


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
