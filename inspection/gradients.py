"""What one backward on given answers sends to each part of a model, with Global Weight Compensation and without."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..configuration.errors import NormalignError
from .inputs import build_inputs
from .modes import eval_mode


if TYPE_CHECKING:
    from PIL import Image
    from torch import nn
    from transformers import PreTrainedModel, ProcessorMixin

    from .parts import Parts

    Sample = tuple[str, list[Image.Image]]

PARTS = ("vision", "projector", "norm", "language")


def gradient_report(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    parts: Parts,
    samples: Sequence[Sample],
    answers: Sequence[str],
    max_grad_norm: float = 1.0,
    *,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Gradient norms per part, as if every part were trained, of the mean loss over the answers' tokens.

    Memory holds the gradients of the whole model, once for a single sample, twice for more. `.grad`, `requires_grad`,
    the mode and the norm's `gwc` are afterwards what they were, also after an exception.

    Args:
        samples: prompts with their images; each answer is put behind its prompt, with the end-of-text token.
        max_grad_norm: the limit of the global gradient norm to which a trainer would clip; 0 for none.
        progress: called with 1 after each backward (one a sample; two where there is an aligned norm).

    Returns:
        `gwc_on` (None without an aligned norm) and `gwc_off`, each with `grad_norm` and `share` per part; `mu` and
        `predicted_factor` 1/mu, by which GWC multiplies every gradient before the norm; `measured_factor` of vision
        encoder and projector; `clip` with `max_grad_norm`, `factor_on` and `factor_off`. A part that the model lacks
        is None; weights that belong to no part are summed up as `other`, which stands there only where it is needed.

    Raises:
        NormalignError: the numbers of samples and answers differ, or an answer is empty.

    Source: arXiv 2512.08374, section 4.2.
    """
    if not samples or len(samples) != len(answers) or not all(answers):
        raise NormalignError(
            f"Gradients need an answer that is not empty for each sample: got {len(samples)} samples and "
            f"{sum(map(bool, answers))} such answers."
        )
    by_part = parameters_by_part(parts)
    norm = parts.aligned_norm
    arms = {"gwc_off": False} if norm is None else {"gwc_on": True, "gwc_off": False}
    norms: dict[str, dict[str, float | None]] = {}
    # without dropout the two passes are alike
    with eval_mode(model), _all_trainable(by_part), _switched_back(norm):
        for arm, gwc in arms.items():
            if norm is not None:
                norm.gwc = gwc
            if gwc:
                mu = norm.mu.item()
            norms[arm] = _grad_norms(model, processor, parts, by_part, samples, answers, progress)
    return {
        "gwc_on": _arm(norms.get("gwc_on")),
        "gwc_off": _arm(norms["gwc_off"]),
        "mu": None if norm is None else mu,
        "predicted_factor": None if norm is None else 1 / mu,
        "measured_factor": None if norm is None else measured_factor(norms["gwc_on"], norms["gwc_off"]),
        "clip": {
            "max_grad_norm": max_grad_norm,
            "factor_on": None if norm is None else clip_factor(norms["gwc_on"], max_grad_norm),
            "factor_off": clip_factor(norms["gwc_off"], max_grad_norm),
        },
    }


def clip_factor(grad_norms: Mapping[str, float | None], max_grad_norm: float) -> float:
    """The factor at which `torch.nn.utils.clip_grad_norm_` would leave the gradients; 1 for a limit of 0 (no clipping)."""
    total = math.hypot(*(norm for norm in grad_norms.values() if norm is not None))
    return min(1.0, max_grad_norm / (total + 1e-6)) if max_grad_norm else 1.0


def budget_shares(grad_norms: Mapping[str, float | None]) -> dict[str, float | None]:
    """Share of each part in the squared global norm, which is what clipping limits; they add up to 1."""
    total = math.fsum(norm**2 for norm in grad_norms.values() if norm is not None)
    return {part: None if norm is None else norm**2 / total if total else 0.0 for part, norm in grad_norms.items()}


def measured_factor(on: Mapping[str, float | None], off: Mapping[str, float | None]) -> dict[str, float | None]:
    """Gradient norm with GWC over that without, for the parts before the norm; None where there is no gradient."""
    return {part: on[part] / off[part] if on[part] and off[part] else None for part in ("vision", "projector")}


def parameters_by_part(parts: Parts) -> dict[str, list[nn.Parameter] | None]:
    """Parameters that can have a gradient, tied ones once, by part; a part that the model lacks is None.

    Weights outside all parts (such as the vector that ends a row of visual tokens) come under `other`.
    """
    model = parts.model
    head = model.get_output_embeddings()
    # inner parts first: some families keep the projector inside the vision encoder
    owners = {
        "norm": [parts.aligned_norm],
        "projector": [parts.projector],
        "vision": [parts.vision_encoder],
        "language": [parts.decoder, parts.embeddings, head],
        "other": [model],
    }
    taken: set[int] = set()
    found: dict[str, list[nn.Parameter] | None] = {}
    for part, modules in owners.items():
        present = [module for module in modules if module is not None]
        mine = [parameter for module in present for parameter in module.parameters() if parameter.is_floating_point()]
        mine = list({id(parameter): parameter for parameter in mine if id(parameter) not in taken}.values())
        taken.update(map(id, mine))
        found[part] = mine if present else None
    order = [*PARTS, "other"] if found["other"] else PARTS
    return {part: found[part] for part in order}


def answer_inputs(
    model: PreTrainedModel, processor: ProcessorMixin, parts: Parts, sample: Sample, answer: str
) -> tuple[dict[str, Any], torch.Tensor]:
    """Inputs of one prompt with its answer behind it, and the answer's token ids, (answer tokens,)."""
    inputs = dict(build_inputs(model, processor, [sample]))
    tokenizer = getattr(processor, "tokenizer", processor)
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    prompt = inputs["input_ids"]
    behind = torch.tensor([[*ids, *end]], dtype=prompt.dtype, device=prompt.device)
    visual = prompt == parts.image_token_id
    for name, values in inputs.items():
        if torch.is_tensor(values) and values.shape == prompt.shape:
            inputs[name] = torch.cat([values, _continued(name, values, visual, behind)], dim=1)
    return inputs, behind[0]


def _continued(name: str, values: torch.Tensor, visual: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """What stands behind the prompt in an input that has one value per token."""
    if name == "input_ids":
        return answer
    if not name.endswith("token_type_ids"):
        return torch.ones_like(answer, dtype=values.dtype)
    # token types either mark images, and an answer is text (0), or they mark what is to be learnt (1), as in PaliGemma
    marks_targets = bool(visual.any()) and not bool(values[visual].any())
    return torch.full_like(answer, int(marks_targets), dtype=values.dtype)


def _grad_norms(model, processor, parts, by_part, samples, answers, progress) -> dict[str, float | None]:
    parameters = [parameter for group in by_part.values() for parameter in group or ()]
    sums: list[torch.Tensor | None] = [None] * len(parameters)
    tokens = 0
    for sample, answer in zip(samples, answers):
        inputs, targets = answer_inputs(model, processor, parts, sample, answer)
        tokens += targets.numel()
        # not backward(): .grad may hold a trainer's gradients
        gradients = torch.autograd.grad(_summed_loss(model, inputs, targets), parameters, allow_unused=True)
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                sums[i] = gradient if sums[i] is None else sums[i].add_(gradient)
        if progress:
            progress(1)
    remaining = iter(sums)
    return {
        part: None if group is None else _total_norm([next(remaining) for _ in group]) / tokens
        for part, group in by_part.items()
    }


def _summed_loss(model: PreTrainedModel, inputs: Mapping[str, Any], targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the answer's tokens, summed, in float32 or wider."""
    count = targets.numel()
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": count + 1} if keeps else {}
    with torch.enable_grad():
        logits = model(**inputs, use_cache=False, **options).logits[0, -count - 1 : -1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.nn.functional.cross_entropy(logits, targets.to(logits.device), reduction="sum")


def _total_norm(tensors: Iterable[torch.Tensor | None]) -> float:
    squares = [
        torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).item()
        for x in tensors
        if x is not None
    ]
    return math.hypot(*squares)


def _arm(grad_norms: dict[str, float | None] | None) -> dict[str, dict[str, float | None]] | None:
    return grad_norms and {"grad_norm": grad_norms, "share": budget_shares(grad_norms)}


@contextmanager
def _all_trainable(by_part: Mapping[str, list[nn.Parameter] | None]) -> Iterator[None]:
    parameters = [parameter for group in by_part.values() for parameter in group or ()]
    wanted = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, flag in zip(parameters, wanted):
            parameter.requires_grad_(flag)


@contextmanager
def _switched_back(norm: nn.Module | None) -> Iterator[None]:
    gwc = getattr(norm, "gwc", None)
    try:
        yield
    finally:
        if norm is not None:
            norm.gwc = gwc
