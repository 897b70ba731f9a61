"""Records, while a vision-language model runs, the norms and turns of its visual and text tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..configuration.errors import NormalignError
from ..modeling.aligned_norm import text_embedding_norm


if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedModel, ProcessorMixin

    from .report import NormReport

SCHEMA = 1
MODALITIES = ("visual", "text")


@dataclass
class Moments:
    """Count, sum and sum of squares of numbers that are seen once: mean and standard deviation without keeping them."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: torch.Tensor) -> None:
        values = values.double()
        self.count += values.numel()
        self.total += values.sum().item()
        self.squares += values.square().sum().item()

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def std(self) -> float:
        return max(self.squares / self.count - self.mean**2, 0.0) ** 0.5


@dataclass
class _Layer:
    """What one layer does to the tokens of one modality."""

    norm: Moments = field(default_factory=Moments)
    update: Moments = field(default_factory=Moments)
    cosine: Moments = field(default_factory=Moments)
    angle: Moments = field(default_factory=Moments)

    def add(self, before: torch.Tensor, after: torch.Tensor) -> None:
        before, after = before.double(), after.double()
        cosine = torch.nn.functional.cosine_similarity(before, after, dim=-1)
        # 2 * atan2 keeps its accuracy for the small turns of tokens with a large norm, where acos loses it
        unit = [torch.nn.functional.normalize(side, dim=-1) for side in (before, after)]
        angle = 2 * torch.atan2((unit[1] - unit[0]).norm(dim=-1), (unit[1] + unit[0]).norm(dim=-1))
        self.norm.add(after.norm(dim=-1))
        self.update.add((after - before).norm(dim=-1))
        self.cosine.add(cosine)
        self.angle.add(angle)

    def to_dict(self) -> dict[str, float]:
        return {
            "norm_mean": self.norm.mean,
            "update_norm_mean": self.update.mean,
            "cosine_prev_mean": self.cosine.mean,
            "angle_mean_rad": self.angle.mean,
        }


def inspect_model(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    images: Sequence[Image.Image],
    prompts: Sequence[str] | None = None,
) -> NormReport:
    """Measures one forward pass for each image (with prompt i, the only prompt, or a plain one).

    Norms are L2 norms over the hidden size; angles are in radians between a token's hidden state before and after a
    layer. Padding is never counted. The model's weights and mode are left as they were.

    Raises:
        NormalignError: no image, a number of prompts that does not fit, or a part of the model that cannot be found.

    Source: arXiv 2512.08374, sections 3.1-3.3.
    """
    from .report import NormReport

    if not images:
        raise NormalignError("There is nothing to inspect: give at least one image.")
    prompts = list(prompts or ["Describe the image."])
    if len(prompts) not in (1, len(images)):
        raise NormalignError(f"Give one prompt, or one for each image: got {len(prompts)} for {len(images)} images.")
    prompts = prompts * len(images) if len(prompts) == 1 else prompts
    projector, layers, image_token = _parts(model)
    stats = {part: Moments() for part in ("vision_encoder", "projector", "inserted")}
    per_layer = [{modality: _Layer() for modality in MODALITIES} for _ in layers]
    was_training = model.training
    model.eval()
    try:
        for image, prompt in zip(images, prompts):
            conversation = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}]
            text = processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
            inputs = processor(text=[text], images=[image], return_tensors="pt", add_special_tokens=False)
            inputs = inputs.to(model.device)
            inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
            visual = inputs["input_ids"] == image_token
            masks = {"visual": visual, "text": inputs["attention_mask"].bool() & ~visual}
            _record(model, inputs, masks, projector, layers, stats, per_layer)
    finally:
        model.train(was_training)
    T = text_embedding_norm(model.get_input_embeddings())
    interface = {part: {"mean": moments.mean, "std": moments.std} for part, moments in stats.items()}
    data = {
        "schema": SCHEMA,
        "model": str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
        "images": len(images),
        "text_embedding_norm": T,
        "interface": interface,
        "ratio": interface["inserted"]["mean"] / T,
        "layers": [{modality: layer[modality].to_dict() for modality in MODALITIES} for layer in per_layer],
    }
    data["verdict"] = _verdict(data, model.config.get_text_config().hidden_size)
    return NormReport(data)


def _parts(model: PreTrainedModel) -> tuple[torch.nn.Module, list[torch.nn.Module], int]:
    """The projector, the decoder's layers and the id of the image token."""
    image_token = getattr(model.config, "image_token_id", None)
    decoder = model.get_decoder()
    projector = getattr(getattr(model, "model", model), "multi_modal_projector", None)
    layers = getattr(decoder, "layers", None)
    missing = [
        name
        for name, part in (
            ("config.image_token_id", image_token),
            ("a projector named multi_modal_projector", projector),
            ("decoder layers (get_decoder().layers)", layers),
        )
        if part is None
    ]
    if missing:
        raise NormalignError(
            f"{type(model).__name__} cannot be inspected: it lacks {', '.join(missing)}. Models of the LLaVA family "
            f"have them."
        )
    return projector, list(layers), image_token


def _record(model, inputs, masks, projector, layers, stats, per_layer) -> None:
    """One forward pass with hooks that keep sums only and are always removed."""
    aligned_norm = getattr(projector, "aligned_norm", None)

    def norms(part):
        return lambda tensor: stats[part].add(tensor.detach().float().norm(dim=-1))

    def layer_hook(index):
        def hook(module, args, kwargs, output):
            before = args[0] if args else kwargs["hidden_states"]
            after = output if torch.is_tensor(output) else output[0]
            for modality, mask in masks.items():
                per_layer[index][modality].add(before[mask], after[mask])

        return hook

    hooks = [
        projector.register_forward_pre_hook(lambda module, args: norms("vision_encoder")(args[0])),
        projector.register_forward_hook(lambda module, args, output: norms("inserted")(output)),
        (aligned_norm or projector).register_forward_hook(
            lambda module, args, output: norms("projector")(args[0] if aligned_norm is not None else output)
        ),
        *(layer.register_forward_hook(layer_hook(i), with_kwargs=True) for i, layer in enumerate(layers)),
    ]
    try:
        with torch.inference_mode():
            model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


def _verdict(data: dict, hidden_size: int) -> str:
    """What the figures say, in words."""
    T, ratio = data["text_embedding_norm"], data["ratio"]
    first = data["layers"][0]
    turns = first["visual"]["angle_mean_rad"], first["text"]["angle_mean_rad"]
    if 0.5 <= ratio <= 2:
        gap = f"No norm gap: visual tokens enter at {ratio:.2f} times the text norm {T:.3g}."
    else:
        gap = (
            f"Norm gap: visual tokens enter at {ratio:.3g} times the text norm {T:.3g} (vision encoder "
            f"{data['interface']['vision_encoder']['mean']:.3g}, projector {data['interface']['projector']['mean']:.3g}). "
            f"Aligning would start a LayerNorm's gain at {T / hidden_size**0.5:.4g}; a finished model then needs "
            f"re-alignment training."
        )
    return f"{gap} In the first layer visual tokens turn by {turns[0]:.3f} rad, text tokens by {turns[1]:.3f} rad."
