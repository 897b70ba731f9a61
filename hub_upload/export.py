"""Writes a trained model as a flat folder that loads without normalign: weights, code, processor, model card."""

import ast
import inspect
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from PIL import Image

from ..assembly.loading import explained, load_processor, quiet_transformers, read_config, refuse_missing_weights
from ..assembly.saving import check_target, named_folder, write_parts, written_in_full
from ..configuration.errors import NormalignError
from ..modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .both_generations import write_for_both_generations
from .card_check import check_card
from .model_card import CARD_MARK, model_card, model_facts


# The model classes that can be exported, by the model_type in config.json. A new family is one more line.
MODEL_CLASSES = {"normalign_llava": NormAlignLlavaForConditionalGeneration}

_SHIPPED_SUFFIXES = {".safetensors", ".json", ".jinja", ".txt", ".model", ".py", ".md"}
# What the loaders of a local folder leave in the JSON files; no key of these means anything to another machine.
_LOCAL_KEYS = {"_name_or_path", "name_or_path", "is_local", "local_files_only", "cache_dir", "_commit_hash"}
_LOCAL_KEYS |= {"tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file"}


def export(
    model_dir: str | os.PathLike,
    out: str | os.PathLike,
    *,
    overwrite: bool = False,
    results: dict | None = None,
    base_model: str | list[str] | None = None,
    license: str | None = None,
) -> Path:
    """Writes `model_dir` to the flat, self-contained folder `out`, ready for the Hub, for transformers 4.57 and 5 alike.

    The folder holds safetensors weights (sharded by transformers' default), the model's Python files as they are in
    this package, config, processor, generation config and README.md, and no training state, pickle or local path. It
    is written beside `out` and renamed when its weights are found to give bit for bit the source's logits.

    Args:
        model_dir: a checkpoint of training or a composed model, as a local folder or a Hub id.
        out: the folder to write. An earlier export there is replaced.
        overwrite: also replace a folder with other files; one with sub-folders is never replaced.
        results: the content of a results.json of `normalign demo` or `normalign evaluate`, for the card.
        base_model: Hub ids of the models it was built from; None reads `composed_from` in the config.
        license: the license id for the card; None leaves it to the base models, and says so.

    Returns:
        `out`.

    Raises:
        NormalignError: `model_dir` cannot be exported, `out` may not be replaced, or the written folder is not right.
    """
    out = named_folder(out)
    source = _source_folder(model_dir)
    model_class = MODEL_CLASSES[_supported_model_type(source, str(model_dir))]
    check_target(out, sources=[source], overwrite=overwrite, earlier=_is_earlier_export)
    with written_in_full(out) as folder:
        model, processor = _load_source(model_class, source)
        expected = _logits(model, _sample_inputs(model, processor))
        expected_ids = _sample_ids(processor)
        code = code_files(model_class)
        _write(model, processor, folder, code)
        facts = model_facts(model)
        del model
        model_card(facts, code, results=results, base_model=base_model, license=license).save(folder / "README.md")
        _check_card(folder / "README.md")
        _check_files(folder, code, source)
        _check_weights(model_class, folder, expected)
        _check_tokenizer(folder, expected_ids)
    return out


def code_files(model_class: type) -> list[Path]:
    """The Python files that a model needs on the Hub: its own and every sibling it imports, in order of name."""
    start = Path(inspect.getfile(model_class))
    found, to_read = {start}, [start]
    while to_read:
        file = to_read.pop()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                sibling = file.parent / f"{node.module}.py"
                if sibling not in found:
                    found.add(sibling)
                    to_read.append(sibling)
    return sorted(found)


# --- what goes in


def _source_folder(model_dir: str | os.PathLike) -> Path:
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
        patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, HFValidationError) as error:
        raise NormalignError(
            f"{name} is neither a local folder nor a model that can be had from the Hub now: "
            f"{str(error).splitlines()[0]} Check the name, the network and your access to it."
        ) from error


def _supported_model_type(source: Path, name: str) -> str:
    """The model_type of a folder that can be exported."""
    if (source / "adapter_config.json").exists():
        raise NormalignError(
            f"{name} holds a PEFT adapter, which `normalign export` does not merge yet. Merge it into its base model "
            f"first, `PeftModel.from_pretrained(base, '{name}').merge_and_unload().save_pretrained('merged')`, save "
            f"the processor into the same folder, and export that."
        )
    if not (source / "config.json").exists():
        checkpoints = sorted(source.glob("checkpoint-*/config.json"), key=lambda file: file.stat().st_mtime)
        hint = f" The newest checkpoint in it is {checkpoints[-1].parent}: export that." if checkpoints else ""
        raise NormalignError(
            f"{name} has no config.json, so it is not the folder of a model.{hint or ' Name the folder itself.'}"
        )
    model_type = read_config(source).get("model_type")
    if model_type not in MODEL_CLASSES:
        raise NormalignError(
            f"{name} is a model of type {model_type!r}, and `normalign export` writes the type"
            f"{'s' if len(MODEL_CLASSES) > 1 else ''} {', '.join(map(repr, MODEL_CLASSES))} only. Insert the aligned "
            f"norm with `normalign graft` or build a model with `normalign compose`, train it, and export the result."
        )
    if not list(source.glob("*.safetensors")):
        raise NormalignError(
            f"{name} has no .safetensors file. Weights as pickles are not read; a DeepSpeed checkpoint is turned into "
            f"safetensors by its zero_to_fp32.py with --safe_serialization."
        )
    return model_type


def _load_source(model_class: type, source: Path):
    with explained("The model", str(source)), quiet_transformers():
        model, info = model_class.from_pretrained(source, dtype="auto", output_loading_info=True)
    refuse_missing_weights("The model", str(source), model, info)
    processor = load_processor(source)
    if not processor.chat_template:
        raise NormalignError(
            f"The processor of {source} has no chat template: there is no chat_template.jinja in the folder, nor a "
            f"chat_template in its processor_config.json, so nobody could ask the exported model as it was trained. Copy "
            f"chat_template.jinja from where the model was composed or trained, and export again."
        )
    return model.eval(), processor


# --- where it goes


def _is_earlier_export(folder: Path) -> bool:
    files = [file for file in folder.iterdir() if file.is_file() and not file.name.startswith(".")]
    card = folder / "README.md"
    return (
        card.exists()
        and CARD_MARK in card.read_text(encoding="utf-8", errors="replace")
        and all(file.suffix in _SHIPPED_SUFFIXES for file in files)
    )


# --- what is written


def _write(model, processor, folder: Path, code: list[Path]) -> None:
    _forget_where_it_came_from(model.config)
    _give_no_token_type_ids(processor.tokenizer)
    write_parts(model, processor, folder)
    for file in code:
        shutil.copyfile(file, folder / file.name)
    for file in folder.glob("*.json"):
        _strip_local_keys(file)
    write_for_both_generations(folder)


def _forget_where_it_came_from(config) -> None:
    config._name_or_path = ""
    for part in (config.text_config, config.vision_config):
        part._name_or_path = ""


def _give_no_token_type_ids(tokenizer) -> None:
    """transformers 4's plain tokenizer makes token_type_ids unless told, and `generate` refuses them."""
    names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
    tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names


def _strip_local_keys(file: Path) -> None:
    if file.name in ("tokenizer.json", "vocab.json", "model.safetensors.index.json"):
        return
    content = json.loads(file.read_text(encoding="utf-8"))
    if stripped := _LOCAL_KEYS & content.keys():
        kept = {key: value for key, value in content.items() if key not in stripped}
        file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- whether it is right


def _sample_inputs(model, processor) -> dict[str, torch.Tensor]:
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    inputs = processor(images=Image.fromarray(pixels), text=f"{processor.image_token}\n?", return_tensors="pt")
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    return dict(inputs)


def _sample_ids(processor) -> list[int]:
    """What text tokenizers treat each in their own way becomes: spaces, digits, accents, marks, special tokens."""
    text = f" Two  spaces, 12345, naïve Ünïcode\n\t{processor.tokenizer.eos_token or ''} café—日本 {processor.image_token}x"
    return processor.tokenizer(text)["input_ids"]


@torch.no_grad()
def _logits(model, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    norm = model.get_aligned_norm()
    if norm is not None and not all(torch.isfinite(parameter).all() for parameter in norm.parameters()):
        raise NormalignError(
            "The gain or bias of the aligned norm holds values that are not finite, so the model is broken: export an "
            "earlier checkpoint, and look in the training log for the step at which the loss became NaN."
        )
    logits = model(**inputs).logits
    if not torch.isfinite(logits).all():
        raise NormalignError(
            "The model's logits for a small picture and prompt are not finite, so it is broken: export an earlier "
            "checkpoint, and look in the training log for the step at which the loss became NaN."
        )
    return logits


def _check_card(card: Path) -> None:
    if problems := check_card(card):
        raise NormalignError(
            f"The model card would not be right, so nothing was written: {'; '.join(map(str, problems))}. Put right what "
            f"was given for it (license, base models, results) or what the model's config says of its origin."
        )


def _check_files(folder: Path, code: list[Path], source: Path) -> None:
    """The folder holds the code of this package and no other, no file of training, and no path of this machine."""
    written = {file.name: file for file in folder.iterdir()}
    strange = sorted(name for name, file in written.items() if file.is_dir() or file.suffix not in _SHIPPED_SUFFIXES)
    python = {name for name in written if name.endswith(".py")}
    strange += sorted(python ^ {file.name for file in code})
    if strange:
        raise NormalignError(f"The export holds or lacks files that it should not: {', '.join(strange)}.")
    for file in code:
        if written[file.name].read_bytes() != file.read_bytes():
            raise NormalignError(f"The exported {file.name} differs from the one of this package.")
    needles = {str(source.resolve()), str(folder.parent.resolve()), f"{Path.home()}{os.sep}"}
    for name, file in written.items():
        if file.suffix in (".json", ".md") and name not in ("tokenizer.json", "vocab.json"):
            text = file.read_text(encoding="utf-8")
            for needle in needles:
                if needle in text or json.dumps(needle)[1:-1] in text:
                    raise NormalignError(
                        f"The exported {name} names the local path {needle}. Take it out of the same file in {source} "
                        f"and export again."
                    )


def _check_weights(model_class: type, folder: Path, expected: torch.Tensor) -> None:
    try:
        model, info = model_class.from_pretrained(folder, dtype="auto", output_loading_info=True)
    except (ValueError, RuntimeError, OSError) as error:
        raise NormalignError(f"The export does not load again: {error}") from error
    problems = {key: sorted(map(str, names)) for key, names in info.items() if names}
    if problems:
        raise NormalignError(f"The weights of the export do not fit its config: {problems}.")
    reloaded = load_processor(folder)
    logits = _logits(model.eval(), _sample_inputs(model, reloaded))
    if not torch.equal(logits, expected):
        difference = (
            (logits.double() - expected.double()).abs().max().item() if logits.shape == expected.shape else None
        )
        raise NormalignError(
            f"The export gives other logits than its source (shape {tuple(logits.shape)} against "
            f"{tuple(expected.shape)}, largest difference {difference}), so it was not written. This is a fault of "
            f"normalign or of the installed transformers: please report it with both versions."
        )


def _check_tokenizer(folder: Path, expected: list[int]) -> None:
    ids = _sample_ids(load_processor(folder))
    if ids != expected:
        raise NormalignError(
            f"The export's tokenizer makes other tokens of a sample text than its source ({ids} against {expected}), so "
            f"it was not written. This is a fault of normalign or of the installed transformers: please report it with "
            f"both versions and the name of the language model."
        )
