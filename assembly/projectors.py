"""Puts the projector of a saved LLaVA checkpoint into a composed model."""

import json
import logging
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.utils import cached_file

from ..configuration.errors import NormalignError
from ..modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .loading import explained, locate


logger = logging.getLogger(__name__)

_PREFIX = "multi_modal_projector."


def load_projector_(model: NormAlignLlavaForConditionalGeneration, name: str) -> bool:
    """Copies the projector's weights from a checkpoint, with its aligned norm where both have one.

    Args:
        name: folder or Hub id of a LLaVA checkpoint (safetensors).

    Returns:
        whether the checkpoint had an aligned norm, so that the gain is the trained one.

    Raises:
        NormalignError: names each weight that is in one and not in the other, and both shapes where they differ.
    """
    source = locate("The projector", name)
    saved = _projector_weights(source)
    projector = model.model.multi_modal_projector
    expected = dict(projector.named_parameters())
    has_norm = any(key.startswith("aligned_norm.") for key in saved)
    if not has_norm:
        expected = {key: value for key, value in expected.items() if not key.startswith("aligned_norm.")}
    problems = [f"{key} is missing from it" for key in sorted(expected.keys() - saved.keys())]
    problems += [f"{key} has no place in the model" for key in sorted(saved.keys() - expected.keys())]
    problems += [
        f"{key} is {tuple(saved[key].shape)} in it and {tuple(expected[key].shape)} in the model"
        for key in sorted(expected.keys() & saved.keys())
        if saved[key].shape != expected[key].shape
    ]
    if problems:
        config = model.config
        raise NormalignError(
            f"The projector of '{source}' does not fit: {'; '.join(problems)}. The model goes from a vision encoder of width "
            f"{config.vision_config.hidden_size} to a language model of width {config.text_config.hidden_size} through two "
            f"linear layers{' with bias' if config.multimodal_projector_bias else ''}, with the norm "
            f"'{config.aligned_norm['kind']}'. Give a projector trained between the same two, or none for a new one."
        )
    with torch.no_grad():
        for key, parameter in expected.items():
            parameter.copy_(saved[key])
    logger.info("Projector taken from %s, %s its norm.", source, "with" if has_norm else "which has no norm; not")
    return has_norm


def _projector_weights(source: str) -> dict[str, torch.Tensor]:
    weights = {}
    with explained("The projector", source):
        for file in _weight_files(source):
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 (not a dict)
                    if _PREFIX in key:
                        weights[key.split(_PREFIX, 1)[1]] = tensors.get_tensor(key)
    if not weights:
        raise NormalignError(
            f"'{source}' has no projector: none of its weights is named {_PREFIX}*. Give the folder or Hub id of a LLaVA "
            f"model."
        )
    return weights


def _weight_files(source: str) -> list[str]:
    index = cached_file(source, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is None:
        return [cached_file(source, "model.safetensors")]
    shards = json.loads(Path(index).read_text())["weight_map"]
    return [cached_file(source, shard) for shard in sorted({file for key, file in shards.items() if _PREFIX in key})]
