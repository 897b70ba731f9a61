"""Chooses how attention is computed in a training run: FlashAttention where it can be had, else PyTorch's sdpa, part by part."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from transformers.utils import is_flash_attn_2_available

from ..configuration.errors import NormalignError


if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLASH = "flash_attention_2"


def set_attention(model: PreTrainedModel, wanted: str, half_precision: bool) -> dict[str, str]:
    """Sets the attention of encoder and language model, in place.

    Args:
        model: one of ours.
        wanted: `auto`, or a name that transformers knows (sdpa, eager, flash_attention_2, flex_attention, ...).
        half_precision: whether the run computes in bfloat16 or float16, without which there is no FlashAttention.

    Returns:
        what each part (`vision`, `language`) uses.

    Raises:
        NormalignError: FlashAttention was asked for by name and cannot be had here, or a part does not know the name.
    """
    parts = {"vision": model.base_model.vision_tower, "language": model.base_model.language_model}
    if wanted.startswith("flash_attention"):
        _refuse_flash_where_it_cannot_be(wanted, half_precision)
    chosen = {}
    for part, module in parts.items():
        name = wanted
        if wanted == "auto":
            name = _best(module, half_precision)
        try:
            module.set_attn_implementation(name)
        except (ValueError, ImportError, RuntimeError) as error:
            raise NormalignError(
                f"attn_implementation {name!r} does not work for the {part} part ({type(module).__name__}): "
                f"{str(error).splitlines()[0]} Write attn_implementation: auto, sdpa or eager."
            ) from error
        chosen[part] = module.config._attn_implementation
    return chosen


def _best(module: PreTrainedModel, half_precision: bool) -> str:
    # with `kernels` installed transformers takes the Hub's build under the same name
    flash = torch.cuda.is_available() and half_precision and (is_flash_attn_2_available() or find_spec("kernels"))
    if flash and getattr(module, "_supports_flash_attn", False):
        return FLASH
    return "sdpa" if module._supports_sdpa else "eager"


def _refuse_flash_where_it_cannot_be(wanted: str, half_precision: bool) -> None:
    if not torch.cuda.is_available():
        raise NormalignError(
            f"attn_implementation {wanted!r} needs a GPU that PyTorch can use, and there is none here. Write "
            f"attn_implementation: auto, which takes sdpa then."
        )
    if not half_precision:
        raise NormalignError(
            f"attn_implementation {wanted!r} computes in bfloat16 alone. Write precision: bfloat16 (or auto, on a GPU that "
            f"has it), or attn_implementation: sdpa."
        )
    if wanted == FLASH and not is_flash_attn_2_available() and find_spec("kernels") is None:
        raise NormalignError(
            "FlashAttention is not installed: pip install 'normalign[flash]', or pip install kernels for the Hub's build."
        )
