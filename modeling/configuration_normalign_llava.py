"""Configuration of a LLaVA model whose visual tokens enter the language model at the norm of text tokens."""

import difflib
import math

from transformers import LlavaConfig


ALIGNED_NORM_DEFAULTS = {
    "kind": "layernorm",
    "gain_init": "text",
    "target_norm": None,
    "eps": 1e-6,
    "trainable": True,
    "gwc": True,
    "gwc_floor": 1e-3,
}
_KINDS = ("layernorm", "rmsnorm", "scale", "none")


def _is_number(value, above: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > above


def complete_aligned_norm(settings: dict | None, base: dict | None = None) -> dict:
    """The `aligned_norm` block with every key present and checked; keys that are left out come from `base`.

    Keys: `kind` (layernorm, rmsnorm, scale, none), `gain_init` ("text" for T/sqrt(hidden_size), or a number),
    `target_norm` (the T that was used; None until it is measured), `eps`, `trainable`, `gwc`, `gwc_floor`.

    Raises:
        ValueError: names each unknown key and each value that does not fit.
    """
    settings = {} if settings is None else settings
    if not isinstance(settings, dict):
        raise ValueError(f"aligned_norm must be a block of settings (a dict), got {settings!r}.")
    unknown = sorted(set(settings) - set(ALIGNED_NORM_DEFAULTS))
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), ALIGNED_NORM_DEFAULTS, n=1)
        raise ValueError(
            f"Unknown key{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))} in aligned_norm. "
            f"{f'Did you mean {near[0]!r}? ' if near else ''}Known keys: {', '.join(ALIGNED_NORM_DEFAULTS)}."
        )
    full = {**ALIGNED_NORM_DEFAULTS, **(base or {}), **settings}
    checks = {
        "kind": (full["kind"] in _KINDS, f"one of {', '.join(_KINDS)}"),
        "gain_init": (full["gain_init"] == "text" or _is_number(full["gain_init"], 0), "'text' or a number above 0"),
        "target_norm": (full["target_norm"] is None or _is_number(full["target_norm"], 0), "null or a number above 0"),
        "eps": (_is_number(full["eps"], 0), "a number above 0"),
        "trainable": (isinstance(full["trainable"], bool), "true or false"),
        "gwc": (isinstance(full["gwc"], bool), "true or false"),
        "gwc_floor": (_is_number(full["gwc_floor"], 0), "a number above 0"),
    }
    for key, (fits, expected) in checks.items():
        if not fits:
            raise ValueError(f"aligned_norm.{key} must be {expected}, got {full[key]!r}.")
    return full


class NormAlignLlavaConfig(LlavaConfig):
    """A LlavaConfig with one more block, `aligned_norm` (see `complete_aligned_norm`).

    Assigning a block with some of the keys, also by `from_pretrained(..., aligned_norm={"gwc": False})`, changes these
    and keeps the others.

    Source of the method: arXiv 2512.08374.
    """

    model_type = "normalign_llava"
    _auto_class = "AutoConfig"

    def __init__(self, vision_config=None, text_config=None, aligned_norm: dict | None = None, **kwargs):
        kwargs.pop("auto_map", None)
        self.aligned_norm = aligned_norm
        super().__init__(vision_config=vision_config, text_config=text_config, **kwargs)
        # Plain names, never "repo--name": what is saved carries its own code files.
        model = "modeling_normalign_llava.NormAlignLlavaForConditionalGeneration"
        self.auto_map = {
            "AutoConfig": "configuration_normalign_llava.NormAlignLlavaConfig",
            "AutoModel": "modeling_normalign_llava.NormAlignLlavaModel",
            "AutoModelForImageTextToText": model,
            "AutoModelForVision2Seq": model,
            "AutoModelForMultimodalLM": model,
            "AutoModelForCausalLM": model,
        }

    def __setattr__(self, key, value):
        # transformers sets the keywords of from_pretrained as attributes, past the constructor
        if key == "aligned_norm":
            value = complete_aligned_norm(value, self.__dict__.get("aligned_norm"))
        super().__setattr__(key, value)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """As in transformers, which calls it on loading with trust; `pipeline` and `transformers serve` then know the model.

        Both look the model up in tables of names, where `register` of the auto classes enters nothing.
        """
        super().register_for_auto_class(auto_class)
        from transformers.models.auto import modeling_auto

        for task in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):  # 4.57 has no table of the second
            names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
            names[cls.model_type] = "NormAlignLlavaForConditionalGeneration"

    def save_pretrained(self, *args, **kwargs):
        """As in transformers; a block that was changed in place to something invalid is refused."""
        complete_aligned_norm(self.aligned_norm)
        return super().save_pretrained(*args, **kwargs)
