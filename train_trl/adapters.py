"""Puts PEFT's adapters on the parts whose `tune` is `lora`, and holds a frozen language model in 4 bits (QLoRA)."""

from __future__ import annotations

import difflib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from .parts import unused_vision_parameters
from .recipe import Recipe, RecipeError


if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

# Saved whole with every adapter, trained or not: adapters of one model then go together (the norm is its last layer).
SAVED_WHOLE = ["multi_modal_projector"]


def has_adapters(recipe: Recipe) -> bool:
    """Whether a part is tuned by adapters, so that the run leaves an adapter and not a whole model."""
    return "lora" in (recipe.tune.vision, recipe.tune.language)


def check_adapters(recipe: Recipe) -> None:
    """Looks at the recipe's keys for adapters and quantization, before anything is loaded.

    Raises:
        RecipeError: keys that do not go together, or a package that is missing.
    """
    full = [part for part in ("vision", "language") if getattr(recipe.tune, part) == "full"]
    if has_adapters(recipe) and full:
        raise RecipeError(
            f"tune.{full[0]}: full does not go with an adapter, which holds the projector and the norm whole and nothing "
            f"else. Write tune.{full[0]}: lora or frozen, or train without lora."
        )
    if recipe.quantization is None:
        return
    if recipe.tune.language != "lora":
        raise RecipeError(
            f"quantization: {recipe.quantization} needs tune.language: lora, got {recipe.tune.language}: weights in 4 bits "
            f"cannot be trained themselves. Write tune.language: lora, or leave quantization out."
        )
    if find_spec("bitsandbytes") is None:
        raise RecipeError(
            f"quantization: {recipe.quantization} needs the extra 'quant': pip install 'normalign[quant]'."
        )


def linear_layers(model: nn.Module, part: str) -> list[str]:
    """The names of the linear layers of `vision` or `language` that an adapter can learn on.

    Never lm_head, and in the encoder none behind the layer that the visual tokens are taken from.
    """
    unused = {name for name, _ in unused_vision_parameters(model)} if part == "vision" else set()
    below = {"vision": ".vision_tower.", "language": ".language_model."}[part]
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and below in f".{name}" and f"{name}.weight" not in unused
    ]


def target_layers(model: nn.Module, recipe: Recipe) -> list[str]:
    """The exact names of the layers that get an adapter.

    Raises:
        RecipeError: a target is no linear layer of its part (a container such as self_attn, lm_head, or a name that is
            not there). The right names are listed.
    """
    chosen = []
    for part in ("vision", "language"):
        if getattr(recipe.tune, part) != "lora":
            continue
        names, wanted = linear_layers(model, part), getattr(recipe.lora, f"{part}_targets")
        last_names = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
        if not names:
            raise RecipeError(
                f"tune.{part}: lora finds no linear layer in the {type(model).__name__}'s {part} part. Write tune.{part}: "
                f"frozen or full."
            )
        for target in wanted or ():
            if target not in last_names:
                raise RecipeError(_unknown_target(model, part, target, last_names))
        chosen += [name for name in names if wanted is None or name.rpartition(".")[2] in wanted]
    if not chosen:
        raise RecipeError("lora: the lists of targets are empty. Name layers, or write null for all of a part.")
    return chosen


def _unknown_target(model: nn.Module, part: str, target: str, last_names: list[str]) -> str:
    modules = {name.rpartition(".")[2]: module for name, module in model.named_modules()}
    if target in modules and not isinstance(modules[target], nn.Linear):
        inner = [name for name, module in modules[target].named_modules() if isinstance(module, nn.Linear)]
        what = f"is a container ({type(modules[target]).__name__})"
        if inside := sorted({name.rpartition(".")[2] for name in inner} & set(last_names)):
            what += f", which holds {', '.join(inside)}"
    elif target in modules:
        what = f"is no layer of the {part} part that an adapter goes on"
    else:
        near = difflib.get_close_matches(target, last_names, n=1)
        what = "is no layer of the model" + (f"; did you mean {near[0]}?" if near else "")
    return f"lora.{part}_targets: {target} {what.rstrip('?')}{'?' if what.endswith('?') else '.'} Linear layers there are {', '.join(last_names)}."


def add_adapters(model: PreTrainedModel, recipe: Recipe, base: str) -> PeftModel:
    """PEFT's LoRA on the layers of `target_layers`; projector and norm are saved whole. `freeze` says what is trained.

    Args:
        base: the folder or Hub id of `model` as it is now; written into the adapter's config.
    """
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.lora.rank,
        lora_alpha=recipe.lora.alpha,
        lora_dropout=recipe.lora.dropout,
        target_modules=target_layers(model, recipe),
        modules_to_save=SAVED_WHOLE,
    )
    # PEFT asks the model whether its Linear4bit layers are to get adapters of their own kind
    quantized = recipe.quantization is not None
    if quantized:
        model.is_loaded_in_4bit = True
    adapted = get_peft_model(model, settings)
    if quantized:
        # for TRL the mark means to cast all that is trained to bfloat16, the norm too
        del model.is_loaded_in_4bit
    adapted.peft_config[adapted.active_adapter].base_model_name_or_path = base
    return adapted


def base_of(start: str) -> str:
    """How an adapter names the model it was trained on: a folder by its whole path, a Hub id as it is."""
    folder = Path(start).expanduser()
    return str(folder.resolve()) if folder.is_dir() else start


def quantize_language_(model: nn.Module, device: torch.device | None = None) -> int:
    """Packs the linear layers of the language model in 4 bits (nf4, double quantization); all else stays as it is.

    Args:
        device: where the layers are to be; None is this process's GPU, or the CPU where there is none.

    Returns:
        how many layers were packed.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    if device is None:
        gpu = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    names = linear_layers(model, "language")
    for name in names:
        parent, _, last = name.rpartition(".")
        layer = model.get_submodule(name)
        packed = Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=torch.bfloat16 if device.type == "cuda" else layer.weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        # else a forward in eval mode would lay the weights out anew on some CPUs, for good, with scales in bfloat16
        packed.support_avx512bf16_for_cpu = False
        packed.weight = Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4").to(device)
        packed.bias = None if layer.bias is None else nn.Parameter(layer.bias.data.to(device), requires_grad=False)
        setattr(model.get_submodule(parent), last, packed)
    return len(names)


def expected_keys(model: nn.Module) -> list[str]:
    """The names under which PEFT saves the weights of the adapter."""
    from peft.utils import get_peft_model_state_dict

    return sorted(get_peft_model_state_dict(model, save_embedding_layers=False))
