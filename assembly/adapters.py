"""Loads a PEFT adapter onto its base model and makes sure that all of it arrived."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from ..configuration.errors import NormalignError
from .loading import explained


if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def load_adapter(model: PreTrainedModel, folder: str | Path, is_trainable: bool = False) -> PeftModel:
    """Puts the adapter in `folder` onto `model`; PEFT's own loading only warns of LoRA weights that do not match.

    Args:
        model: the base model, which is changed; or one with an adapter, beside which this one is put and made active
            under its folder's name.
        folder: what PEFT's save_pretrained wrote: adapter_config.json and adapter_model.safetensors.
        is_trainable: whether training goes on; else everything is frozen.

    Raises:
        NormalignError: the folder is no adapter, a weight that its config promises is not in it (LoRA, or the projector
            and norm of `modules_to_save`), one of its weights has no place in this model, or it saves other modules
            whole than an adapter that is there. Names counts and keys.
    """
    from peft import PeftConfig, get_peft_model
    from peft.utils import get_peft_model_state_dict

    folder = Path(folder).expanduser()
    weights = folder / "adapter_model.safetensors"
    for file in (folder / "adapter_config.json", weights):
        if not file.is_file():
            raise NormalignError(f"{folder} is not the folder of an adapter: it has no {file.name}.")
    with explained("The adapter", str(folder)):
        shapes = _shapes(weights)
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = not is_trainable
        adapted, name = model, "default"
        if hasattr(model, "peft_config"):
            name = folder.resolve().name.replace(".", "_")
            _refuse_other_set(model, folder, config.modules_to_save)
            model.add_adapter(name, config)
            model.set_adapter(name)
        else:
            adapted = get_peft_model(model, config)
    expected = get_peft_model_state_dict(adapted, adapter_name=name).keys()
    if problems := _what_does_not_fit(expected, shapes):
        base = config.base_model_name_or_path
        raise NormalignError(
            f"The adapter {folder} does not fit: {'; '.join(problems)}; {len(expected & shapes.keys())} fit. It was "
            f"trained on {base!r}: load it onto that model, and save it with PEFT's save_pretrained."
        )
    with explained("The adapter", str(folder)):
        adapted.load_adapter(str(folder), name, is_trainable=is_trainable)
    return adapted if is_trainable else adapted.eval()


def _refuse_other_set(model: PeftModel, folder: Path, saved_whole: list[str] | None) -> None:
    """Raises NormalignError if a further adapter saves other modules whole than those that are there."""
    for name, config in model.peft_config.items():
        there, here = set(config.modules_to_save or ()), set(saved_whole or ())
        if there != here:
            raise NormalignError(
                f"The adapter {folder} cannot be put beside the adapter '{name}': it saves "
                f"{', '.join(sorted(here)) or 'no module'} whole, the other one {', '.join(sorted(there)) or 'none'} "
                f"(modules_to_save). Load it onto a fresh base model, or merge the first one by `normalign export`."
            )


def _what_does_not_fit(expected: Collection[str], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """What is wrong with a file's weights (name: shape) beside the names that are expected, in words."""
    missing, left_over = sorted(set(expected) - shapes.keys()), sorted(shapes.keys() - set(expected))
    empty = sorted(key for key, shape in shapes.items() if 0 in shape)
    return [
        f"{len(keys)} {words} ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})"
        for keys, words in (
            (missing, "of its weights are missing and would be random or stay those of the base model"),
            (left_over, "of its weights have no place in the model"),
            (empty, "of its weights are empty"),
        )
        if keys
    ]


def refuse_broken_adapter(folder: str | Path, expected: Collection[str]) -> None:
    """Looks at an adapter that was just saved, at the names and shapes in its file.

    Args:
        expected: the names that PEFT saves for the model (`get_peft_model_state_dict`).

    Raises:
        NormalignError: the file is not there or cannot be read, or weights are missing or empty.
    """
    weights = Path(folder) / "adapter_model.safetensors"
    if not weights.is_file():
        raise NormalignError(f"The adapter was not saved: there is no {weights}.")
    with explained("The adapter that was just saved", str(folder)):
        shapes = _shapes(weights)
    if problems := _what_does_not_fit(expected, shapes):
        raise NormalignError(
            f"The adapter that was just saved in {folder} is broken: {'; '.join(problems)}. The run stops here, so that "
            f"nobody takes it for a result. With DeepSpeed ZeRO-3 set stage3_gather_16bit_weights_on_model_save: true."
        )


def _shapes(weights: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(weights, framework="pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def is_adapter(folder: str | Path) -> bool:
    """Whether this is the folder of a PEFT adapter, not of a whole model."""
    folder = Path(folder).expanduser()
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def base_model_of(folder: str | Path) -> str:
    """Folder or Hub id of the model that an adapter was trained on; a folder that is not there is sought beside the adapter.

    Raises:
        NormalignError: adapter_config.json cannot be read, or does not say it.
    """
    folder = Path(folder).expanduser()
    file = folder / "adapter_config.json"
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise NormalignError(
            f"The adapter's file {file} is broken or does not name its base model. Copy or download it again, or write "
            f"the base model into base_model_name_or_path."
        ) from error
    if not isinstance(base, str) or not base.strip():
        raise NormalignError(
            f"The adapter's file {file} does not name its base model. Write the folder or Hub id of the model that it was "
            f"trained on into base_model_name_or_path."
        )
    if Path(base).is_dir():
        return base
    if not Path(base).is_absolute() and (folder / base).is_dir():
        return str(folder / base)
    # a run keeps the base that it composed beside its adapter; the whole may have been moved since
    beside = [place / Path(base).name for place in (folder, folder.parent) if Path(base).is_absolute()]
    return next((str(place) for place in beside if (place / "config.json").is_file()), base)
