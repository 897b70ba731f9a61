"""Loads a PEFT adapter onto its base model and makes sure that all of it arrived."""

from __future__ import annotations

import json
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
        model: the base model, which is changed.
        folder: what PEFT's save_pretrained wrote: adapter_config.json and adapter_model.safetensors.
        is_trainable: whether training goes on; else everything is frozen.

    Raises:
        NormalignError: the folder is no adapter, a weight that its config promises is not in it (LoRA, or the projector
            and norm of `modules_to_save`), or one of its weights has no place in this model. Names counts and keys.
    """
    from peft import PeftConfig, get_peft_model
    from peft.utils import get_peft_model_state_dict

    folder = Path(folder).expanduser()
    weights = folder / "adapter_model.safetensors"
    for file in (folder / "adapter_config.json", weights):
        if not file.is_file():
            raise NormalignError(f"{folder} is not the folder of an adapter: it has no {file.name}.")
    with explained("The adapter", str(folder)):
        with safe_open(weights, framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = not is_trainable
        adapted = get_peft_model(model, config)
    expected = {key: tuple(value.shape) for key, value in get_peft_model_state_dict(adapted).items()}
    missing, left_over = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    empty = sorted(key for key, shape in shapes.items() if 0 in shape)
    problems = [
        f"{len(keys)} {words} ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})"
        for keys, words in (
            (missing, "of its weights are missing and would be random or stay those of the base model"),
            (left_over, "of its weights have no place in the model"),
            (empty, "of its weights are empty"),
        )
        if keys
    ]
    if problems:
        base = config.base_model_name_or_path
        raise NormalignError(
            f"The adapter {folder} does not fit: {'; '.join(problems)}; {len(expected.keys() & shapes.keys())} fit. It was "
            f"trained on {base!r}: load it onto that model, and save it with PEFT's save_pretrained."
        )
    with explained("The adapter", str(folder)):
        adapted.load_adapter(str(folder), adapted.active_adapter, is_trainable=is_trainable)
    return adapted if is_trainable else adapted.eval()


def is_adapter(folder: str | Path) -> bool:
    """Whether this is the folder of a PEFT adapter, not of a whole model."""
    folder = Path(folder).expanduser()
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def base_model_of(folder: str | Path) -> str:
    """Folder or Hub id of the model that an adapter was trained on; a relative folder is sought beside the adapter too.

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
    if not Path(base).is_absolute() and not Path(base).is_dir() and (folder / base).is_dir():
        return str(folder / base)
    return base
