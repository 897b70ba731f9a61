"""The front door: `from normalign import ...` gives the public names of all rooms, loaded when first used."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import AutoModelForImageTextToText as AutoModelForVision2Seq

    from .assembly import compose, graft
    from .hub_upload import export, push, verify
    from .inspection import inspect_model
    from .modeling.aligned_norm import AlignedNorm, text_embedding_norm
    from .modeling.configuration_normalign_llava import NormAlignLlavaConfig
    from .modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration, NormAlignLlavaModel

__version__ = "0.1.0"

# In a checkout the rooms are folders beside this one. Python started there finds this folder before an installed normalign.
_checkout = Path(__file__).parents[1]
if (_checkout / "setup.cfg").is_file() and (_checkout / "modeling").is_dir():
    __path__.append(str(_checkout))

_HOMES = {
    "AlignedNorm": ".modeling.aligned_norm",
    "text_embedding_norm": ".modeling.aligned_norm",
    "NormAlignLlavaConfig": ".modeling.configuration_normalign_llava",
    "NormAlignLlavaModel": ".modeling.modeling_normalign_llava",
    "NormAlignLlavaForConditionalGeneration": ".modeling.modeling_normalign_llava",
    "compose": ".assembly",
    "graft": ".assembly",
    "inspect_model": ".inspection",
    "export": ".hub_upload",
    "push": ".hub_upload",
    "verify": ".hub_upload",
}

__all__ = [
    "AlignedNorm",
    "AutoModelForVision2Seq",
    "NormAlignLlavaConfig",
    "NormAlignLlavaForConditionalGeneration",
    "NormAlignLlavaModel",
    "compose",
    "export",
    "graft",
    "inspect_model",
    "push",
    "text_embedding_norm",
    "verify",
]


def __getattr__(name: str):
    if name == "AutoModelForVision2Seq":
        return _auto_model_for_vision2seq()
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _auto_model_for_vision2seq():
    """transformers' own class on 4.x; on 5.x, which has dropped it, its successor for images and text."""
    import transformers

    if transformers.__version__.startswith("4."):
        return transformers.AutoModelForVision2Seq
    return transformers.AutoModelForImageTextToText
