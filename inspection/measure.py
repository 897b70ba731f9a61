"""Inspects a vision-language model: one forward pass for each image, and on request attention, controls, gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..configuration.errors import NormalignError
from .inputs import build_inputs, modality_masks
from .modes import eval_mode
from .parts import Parts, find_parts
from .record import record_norms


if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedModel, ProcessorMixin

    from .report import NormReport


class NotFiniteError(NormalignError):
    """The model yields NaN or infinity, so there is nothing to measure; the message says where first."""


SCHEMA = 1
DEFAULT_PROMPT = "Describe the image."
# called with what is being measured, how many samples are done, and of how many
Progress = Callable[[str, int, int], None]
Sample = tuple[str, "list[Image.Image]"]


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
    progress: Progress | None = None,
) -> NormReport:
    """Measures one forward pass for each image (with prompt i, the only prompt, or a plain one).

    Norms are L2 norms over the hidden size; angles are in radians between a token's hidden state before and after a
    layer. Padding is never counted. Statistics are kept running, so that memory does not grow with the number of
    images. The model's weights and mode are left as they were.

    Args:
        images: one image for each prompt, or a list of images for a prompt about several. An image may be a function
            that opens it, which is called when it is needed, so that hundreds need not lie in memory together.
        attention: also measure attention from text to visual tokens: one more pass, with eager attention.
        controls: also compare the next-token distribution with those for a black, no, and another image, and for
            shuffled visual tokens.
        gradients: also run a backward pass on `answers`, with GWC on and off.
        answers: what the model should say to each prompt; needed for `gradients`.
        progress: called as `progress("norms", 3, 8)` after each sample; the other stages are "attention", "controls"
            and "gradients".

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
        raise NormalignError(f"Gradients need one answer for each prompt: got {got} for {len(samples)} prompts.")
    parts = find_parts(model)
    # a compiled graph runs without the hooks that were put on after it was made
    with torch.compiler.set_stance("force_eager"), eval_mode(model):
        data = _norms(model, processor, parts, samples, progress)
        if attention:
            _add_attention(data, model, processor, parts, samples, progress)
        if controls:
            from .controls import control_effects

            step = _step(progress, "controls", len(samples))
            data["controls"] = control_effects(model, processor, parts, samples, progress=step)
        if gradients:
            from .gradients import gradient_report

            passes = len(samples) * (1 if parts.aligned_norm is None else 2)
            step = _step(progress, "gradients", passes)
            data["gradients"] = gradient_report(model, processor, parts, samples, list(answers), progress=step)
    data["not_found"] = list(parts.not_found)
    data["verdict"], data["verdict_figures"] = verdict(data, parts.hidden_size)
    return NormReport(data)


def _samples(images: Sequence[Image.Image | list[Image.Image]], prompts: Sequence[str] | None) -> list[Sample]:
    """Each prompt with its images."""
    if not images:
        raise NormalignError("There is nothing to inspect: give at least one image.")
    prompts = [prompts] if isinstance(prompts, str) else list(prompts or [DEFAULT_PROMPT])
    if len(prompts) not in (1, len(images)):
        raise NormalignError(f"Give one prompt, or one for each image: got {len(prompts)} for {len(images)} images.")
    prompts = prompts * len(images) if len(prompts) == 1 else prompts
    groups = [list(some) if isinstance(some, (list, tuple)) else [some] for some in images]
    return list(zip(prompts, groups))


def _step(progress: Progress | None, stage: str, total: int) -> Callable[[int], None]:
    """Counts what is done of a stage and passes it on."""
    done = 0

    def step(count: int = 1) -> None:
        nonlocal done
        done += count
        if progress:
            progress(stage, done, total)

    return step


def _norms(
    model: PreTrainedModel, processor: ProcessorMixin, parts: Parts, samples: list[Sample], progress: Progress | None
) -> dict[str, Any]:
    """The report of what hooks record while each sample passes through the model."""
    step = _step(progress, "norms", len(samples))
    with record_norms(model, parts) as recorder, torch.no_grad():
        for sample in samples:
            model(**build_inputs(model, processor, [sample]), use_cache=False)
            step()
    recorded = recorder.to_dict()
    _refuse_not_finite(recorded, type(parts.model).__name__)
    data = {
        "schema": SCHEMA,
        "model": str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
        "images": sum(len(images) for _, images in samples),
        "prompts": len(samples),
        **recorded,
        "aligned_norm": _aligned_norm(parts),
        "controls": None,
        "gradients": None,
    }
    for layer in data["layers"]:
        layer["attention"] = None
    return data


def _refuse_not_finite(recorded: dict[str, Any], name: str) -> None:
    """Raises NotFiniteError with the first place, on the way through the model, whose mean is not a finite number."""
    way = [(part.replace("_", " "), figures) for part, figures in recorded["interface"].items() if figures]
    for number, layer in enumerate(recorded["layers"], 1):
        way += [(f"the {modality} tokens of layer {number}", figures) for modality, figures in layer.items()]
    for place, figures in way:
        if not all(math.isfinite(value) for value in figures.values() if isinstance(value, (int, float))):
            raise NotFiniteError(
                f"{name} gives values that are not finite (NaN or infinite), first at: {place}. There is nothing to "
                f"measure. Check the weights there (a diverged training leaves such), and the number format: float16 "
                f"overflows where bfloat16 and float32 do not."
            )


def _aligned_norm(parts: Parts) -> dict[str, Any] | None:
    """How the aligned norm is set, or None for a model that has none."""
    norm = parts.aligned_norm
    if norm is None:
        return None
    return {"kind": norm.kind, "gain_abs_mean": norm.weight.detach().float().abs().mean().item(), "gwc": norm.gwc}


def _add_attention(
    data: dict[str, Any],
    model: PreTrainedModel,
    processor: ProcessorMixin,
    parts: Parts,
    samples: list[Sample],
    progress: Progress | None,
) -> None:
    """Puts the attention of each layer beside its norms."""
    from .attention import attention_over_batches

    step = _step(progress, "attention", len(samples))

    def batches():
        for sample in samples:
            inputs = build_inputs(model, processor, [sample])
            yield inputs, modality_masks(parts, inputs)
            step()

    for layer, figures in zip(data["layers"], attention_over_batches(model, parts, batches())):
        layer["attention"] = figures
