"""Inspects a vision-language model: one forward pass for each image, and on request attention, controls, gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..configuration.errors import NormalignError
from .inputs import build_inputs, modality_masks
from .parts import find_parts
from .record import record_norms


if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedModel, ProcessorMixin

    from .report import NormReport

SCHEMA = 1
DEFAULT_PROMPT = "Describe the image."


def inspect_model(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    images: Sequence[Image.Image | list[Image.Image]],
    prompts: Sequence[str] | None = None,
    *,
    attention: bool = False,
    controls: bool = False,
    gradients: bool = False,
    answers: Sequence[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> NormReport:
    """Measures one forward pass for each image (with prompt i, the only prompt, or a plain one).

    Norms are L2 norms over the hidden size; angles are in radians between a token's hidden state before and after a
    layer. Padding is never counted. Statistics are kept running, so that memory does not grow with the number of
    images. The model's weights and mode are left as they were.

    Args:
        images: one image for each prompt, or a list of images for a prompt about several.
        attention: also measure attention from text to visual tokens; slower, with memory for one layer's full map.
        controls: also compare the next-token distribution with those for a black, no, and another image.
        gradients: also run one backward pass on `answers`, with GWC on and off.
        answers: what the model should say to each prompt; needed for `gradients`.
        progress: called with the number of samples just measured.

    Raises:
        NormalignError: no image, a number of prompts or answers that does not fit, or a part of the model that is
            needed and cannot be found.

    Source: arXiv 2512.08374, sections 3.1-3.3.
    """
    from .report import NormReport
    from .verdict import verdict

    samples = _samples(images, prompts)
    if gradients and (answers is None or len(answers) != len(samples)):
        got = "none" if answers is None else len(answers)
        raise NormalignError(f"Gradients need one answer for each image: got {got} for {len(samples)} images.")
    parts = find_parts(model)
    was_training = model.training
    model.eval()
    try:
        data, by_layer = _measure(model, processor, samples, attention, progress)
        if controls:
            from .controls import control_effects

            data["controls"] = control_effects(model, processor, parts, samples)
        if gradients:
            from .gradients import gradient_report

            data["gradients"] = gradient_report(model, processor, parts, samples, list(answers))
    finally:
        model.train(was_training)
    for layer, figures in zip(data["layers"], by_layer):
        layer["attention"] = figures
    data["verdict"], data["verdict_figures"] = verdict(data, parts.hidden_size)
    return NormReport(data)


def _samples(
    images: Sequence[Image.Image | list[Image.Image]], prompts: Sequence[str] | None
) -> list[tuple[str, list[Image.Image]]]:
    """Each prompt with its images."""
    if not images:
        raise NormalignError("There is nothing to inspect: give at least one image.")
    prompts = [prompts] if isinstance(prompts, str) else list(prompts or [DEFAULT_PROMPT])
    if len(prompts) not in (1, len(images)):
        raise NormalignError(f"Give one prompt, or one for each image: got {len(prompts)} for {len(images)} images.")
    prompts = prompts * len(images) if len(prompts) == 1 else prompts
    return [
        (prompt, list(some) if isinstance(some, (list, tuple)) else [some]) for prompt, some in zip(prompts, images)
    ]


def _measure(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    samples: list[tuple[str, list[Image.Image]]],
    attention: bool,
    progress: Callable[[int], None] | None,
) -> tuple[dict[str, Any], list[dict[str, float] | None]]:
    """The report's data but for controls, gradients and verdict, and the attention of each layer."""
    parts = find_parts(model)
    maps = []
    with record_norms(model) as recorder:
        for sample in samples:
            inputs = build_inputs(model, processor, [sample])
            with torch.inference_mode():
                model(**inputs, use_cache=False)
            if progress:
                progress(1)
    if attention:
        from .attention import attention_by_layer

        for sample in samples:
            inputs = build_inputs(model, processor, [sample])
            maps.append(attention_by_layer(model, parts, inputs, modality_masks(parts, inputs)))
    data = {
        "schema": SCHEMA,
        "model": str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
        "images": sum(len(images) for _, images in samples),
        "prompts": len(samples),
        **recorder.to_dict(),
        "controls": None,
        "gradients": None,
    }
    return data, _mean_of_layers(maps, len(parts.layers))


def _mean_of_layers(maps: list[list[dict[str, float]]], layers: int) -> list[dict[str, float] | None]:
    """For each layer the mean over samples of each figure; None where attention was not measured."""
    if not maps:
        return [None] * layers
    return [
        {name: sum(sample[index][name] for sample in maps) / len(maps) for name in maps[0][index]}
        for index in range(layers)
    ]
