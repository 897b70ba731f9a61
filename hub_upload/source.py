"""What an export is made from: a model's folder or Hub id, or an adapter that is merged into its base model."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from PIL import Image

from ..assembly.adapters import base_model_of, load_adapter
from ..assembly.loading import explained, load_processor, quiet_transformers, read_config, refuse_missing_weights
from ..configuration.errors import NormalignError
from ..modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .origin import RECIPE_FILE


# The model classes that can be exported, by the model_type in config.json. A new family is one more line.
MODEL_CLASSES = {"normalign_llava": NormAlignLlavaForConditionalGeneration}


@dataclass(frozen=True)
class Source:
    """What is exported: a folder, and, where it holds a PEFT adapter, the adapter's base model."""

    folder: Path
    base: Path | None = None
    base_name: str | None = None

    @property
    def model(self) -> Path:
        """The folder with config.json."""
        return self.base or self.folder

    @property
    def folders(self) -> list[Path]:
        """All that is read, the nearest first."""
        return [self.folder, *([self.base] if self.base else [])]


def _source_folder(model_dir: str | os.PathLike, revision: str | None = None) -> Path:
    if not str(model_dir).strip():
        raise NormalignError("The model has no name: '' was given. Name the folder of a model, or its Hub id.")
    folder = Path(model_dir).expanduser()
    if folder.is_dir():
        return folder
    name = str(model_dir)
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        what = "is a file" if folder.exists() else "does not exist"
        raise NormalignError(f"{name} {what}. Name the folder of a trained or composed model, or its Hub id.")
    try:
        patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*", RECIPE_FILE]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, HFValidationError) as error:
        raise NormalignError(
            f"{name} is neither a local folder nor a model that can be had from the Hub now: "
            f"{str(error).splitlines()[0]} Check the name, the network and your access to it."
        ) from error


def open_source(model_dir: str | os.PathLike) -> Source:
    """The folder that is meant, and the base model's where it holds an adapter.

    Raises:
        NormalignError: one of them is not there, or it is not clear what is meant.
    """
    folder = _source_folder(model_dir)
    if not (folder / "adapter_config.json").is_file():
        return Source(folder)
    if (folder / "config.json").is_file():
        raise NormalignError(
            f"{model_dir} holds a whole model (config.json) and an adapter (adapter_config.json), so it is not clear which "
            f"is meant. Move one of them into a folder of its own and export that."
        )
    name = base_model_of(folder)
    revision = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("revision")
    try:
        return Source(folder, _source_folder(name, revision), name)
    except NormalignError as error:
        raise NormalignError(
            f"The adapter {model_dir} cannot be merged without its base model. {error} Where it has moved, write its place "
            f"into base_model_name_or_path in {folder / 'adapter_config.json'}."
        ) from error


def supported_model_type(source: Source, name: str) -> str:
    """The model_type of a folder, or of an adapter's base model, that can be exported.

    Raises:
        NormalignError: it has no config.json or no safetensors, is of another type, or is stored quantised.
    """
    folder = source.model
    name = name if source.base is None else f"The base model {source.base_name} of the adapter {name}"
    if not (folder / "config.json").exists():
        kinds = ("config.json", "adapter_config.json")
        found = [file for kind in kinds for file in folder.glob(f"checkpoint-*/{kind}")]
        newest = max(found, key=lambda file: file.stat().st_mtime, default=None)
        hint = f" The newest checkpoint in it is {newest.parent}: export that." if newest else ""
        raise NormalignError(
            f"{name} has no config.json, so it is not the folder of a model.{hint or ' Name the folder itself.'}"
        )
    config = read_config(folder)
    model_type = config.get("model_type")
    if model_type not in MODEL_CLASSES:
        raise NormalignError(
            f"{name} is a model of type {model_type!r}, and `normalign export` writes the type"
            f"{'s' if len(MODEL_CLASSES) > 1 else ''} {', '.join(map(repr, MODEL_CLASSES))} only. Insert the aligned "
            f"norm with `normalign graft` or build a model with `normalign compose`, train it, and export the result."
        )
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        merged = "" if source.base is None else ", and an adapter is merged into weights in a plain number format"
        raise NormalignError(
            f"{name} is stored quantised ({method or 'quantization_config'} in its config.json), and an export holds weights "
            f"in a plain number format{merged}. Name the model it was quantised from"
            f"{'' if source.base is None else ' in base_model_name_or_path of adapter_config.json'}; whoever loads the "
            f"export can quantise it then."
        )
    if not list(folder.glob("*.safetensors")):
        raise NormalignError(
            f"{name} has no .safetensors file. Weights as pickles are not read; a DeepSpeed checkpoint is turned into "
            f"safetensors by its zero_to_fp32.py with --safe_serialization."
        )
    return model_type


def load_source(model_class: type, source: Source):
    """The model in eval mode, in the number format it is stored in, and its processor; an adapter is merged in.

    Raises:
        NormalignError: weights or processor are missing or broken, there is no chat template, or the adapter does not fit
            or cannot be merged.
    """
    with explained("The model", str(source.model)), quiet_transformers():
        model, info = model_class.from_pretrained(source.model, dtype="auto", output_loading_info=True)
    refuse_missing_weights("The model", str(source.model), model, info)
    # an adapter that was saved without its processor has the base model's
    place = next((folder for folder in source.folders if (folder / "processor_config.json").is_file()), source.model)
    processor = load_processor(place)
    if not processor.chat_template:
        raise NormalignError(
            f"The processor of {place} has no chat template: there is no chat_template.jinja in the folder, nor a "
            f"chat_template in its processor_config.json, so nobody could ask the exported model as it was trained. Copy "
            f"chat_template.jinja from where the model was composed or trained, and export again."
        )
    model = model.eval() if source.base is None else _merged(model.eval(), source.folder, processor)
    return model, processor


@torch.no_grad()
def _merged(model, adapter: Path, processor):
    """The model with the adapter's weights in it, in the number formats that it has; it must compute what both did."""
    formats = {name: parameter.dtype for name, parameter in model.named_parameters()}
    inputs = sample_inputs(model, processor)
    adapted = load_adapter(model, adapter)
    if not hasattr(adapted, "merge_and_unload"):
        kind = adapted.active_peft_config.peft_type.value
        raise NormalignError(
            f"The adapter {adapter} is of PEFT's kind {kind}, which cannot be merged into a model's weights, so the two "
            f"cannot become one folder. Export a model trained with LoRA or another kind that changes weights."
        )
    expected = adapted(**inputs).logits
    with explained("The adapter", str(adapter)):
        merged = adapted.merge_and_unload(safe_merge=True)
    for name, parameter in merged.named_parameters():
        # PEFT keeps the parts it trains in float32
        parameter.data = parameter.data.to(formats[name])
    difference = (merged(**inputs).logits.double() - expected.double()).abs().max().item()
    # half precision rounds each merged weight once more
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.1
    if difference > tolerance * expected.double().abs().max().item():
        raise NormalignError(
            f"Merged into its base model, the adapter {adapter} gives other logits than beside it (by up to "
            f"{difference:.3g}), so it was not exported. That is so where an adapter changes one of two tied weights "
            f"(the embeddings and lm_head): train it without that one, or untie them in the base model first."
        )
    return merged


def sample_inputs(model, processor) -> dict[str, torch.Tensor]:
    """Inputs of the model for a small picture of noise and a short prompt, the same every time."""
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    inputs = processor(images=Image.fromarray(pixels), text=f"{processor.image_token}\n?", return_tensors="pt")
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    return dict(inputs)
