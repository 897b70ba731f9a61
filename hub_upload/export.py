"""Writes a trained model as a flat folder that loads without normalign: weights, code, processor, model card."""

import ast
import inspect
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from PIL import Image

from ..assembly.adapters import base_model_of, load_adapter
from ..assembly.loading import explained, load_processor, quiet_transformers, read_config, refuse_missing_weights
from ..assembly.saving import check_target, named_folder, write_parts, written_in_full
from ..configuration.errors import NormalignError
from ..inspection import NormReport
from ..modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .both_generations import write_for_both_generations
from .card_check import check_card
from .eval_results import EVAL_RESULTS, eval_result_files, is_eval_results
from .model_card import CARD_MARK, License, model_card, model_facts
from .norms import NORMS_FIGURE, draw_norms, norm_table
from .origin import RECIPE_FILE, is_hub_id, is_license_file, license_files, read_training
from .preflight import path_problems, secret_problems, shipped_files


# The model classes that can be exported, by the model_type in config.json. A new family is one more line.
MODEL_CLASSES = {"normalign_llava": NormAlignLlavaForConditionalGeneration}

_SHIPPED_SUFFIXES = {".safetensors", ".json", ".jinja", ".txt", ".model", ".py", ".md"}
# What the loaders of a local folder leave in the JSON files; no key of these means anything to another machine.
_LOCAL_KEYS = {"_name_or_path", "name_or_path", "is_local", "local_files_only", "cache_dir", "_commit_hash"}
_LOCAL_KEYS |= {"tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file"}


@dataclass(frozen=True)
class _Source:
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


def export(
    model_dir: str | os.PathLike,
    out: str | os.PathLike,
    *,
    overwrite: bool = False,
    results: dict | None = None,
    base_model: str | list[str] | None = None,
    license: str | None = None,
    license_name: str | None = None,
    license_link: str | None = None,
    inspection: str | os.PathLike | None = None,
    recipes: Sequence[str | os.PathLike] = (),
    max_shard_size: str | int | None = None,
) -> Path:
    """Writes `model_dir` to a self-contained folder `out`, ready for the Hub, for transformers 4.57 and 5 alike.

    The folder holds safetensors weights, the model's Python files as they are in this package, config, processor,
    generation config and README.md, and no training state, pickle or local path. It is flat but for
    `.eval_results/*.yaml`, and has `norms.png` and license files where they are known. It is written beside `out` and
    renamed when its weights are found to give bit for bit the source's logits.

    Args:
        model_dir: a checkpoint of training, a composed model or a PEFT adapter, as a local folder or a Hub id. An adapter
            is merged into its base model, which is loaded in the number format it is stored in.
        out: the folder to write. An earlier export there is replaced.
        overwrite: also replace a folder with other files; one with sub-folders is never replaced.
        results: the content of a results.json of `normalign demo` or `normalign evaluate`, for the card. Those of
            benchmarks on the Hub also become `.eval_results/TASK.yaml`.
        base_model: Hub ids of the models it was built from; None reads an adapter's base model and `composed_from`.
        license: the license id for the card; None leaves it to the base models and license files, and says so.
        license_name: the name of a license that is `other`.
        license_link: the address of its text, or a file in the folder.
        inspection: a report of `normalign inspect` on this very model (its folder or report.json), for the card.
        recipes: the recipes it was trained by, in the order of the stages; none reads recipe.yaml in `model_dir`.
        max_shard_size: the largest weight file, such as "5GB" or "200KB" (or bytes); a tensor is never split. None
            leaves it to transformers.

    Returns:
        `out`.

    Raises:
        NormalignError: `model_dir` cannot be exported, `out` may not be replaced, or the written folder is not right.
    """
    out = named_folder(out)
    _check_shard_size(max_shard_size)
    source = _opened(model_dir)
    model_class = MODEL_CLASSES[_supported_model_type(source, str(model_dir))]
    check_target(
        out,
        sources=source.folders,
        overwrite=overwrite,
        earlier=_is_earlier_export,
        own_folders=[EVAL_RESULTS] if is_eval_results(out / EVAL_RESULTS) else [],
    )
    # what is given wrongly is named before the work
    report = None if inspection is None else NormReport.load(inspection)
    training = read_training(source.folder, [Path(recipe).expanduser() for recipe in recipes])
    with written_in_full(out) as folder:
        model, processor = _load_source(model_class, source)
        expected = _logits(model, _sample_inputs(model, processor))
        expected_ids = _sample_ids(processor)
        code, facts = code_files(model_class), model_facts(model)
        norms = None if report is None else norm_table(report, facts)
        _write(model, processor, folder, code, max_shard_size)
        del model
        if report is not None:
            draw_norms(report, folder / NORMS_FIGURE)
        _write_eval_results(results, folder)
        files = _copy_licenses(license_files(source.folders, facts.composed_from), folder)
        if base_model is None and source.base_name is not None and is_hub_id(source.base_name):
            base_model = None if Path(source.base_name).is_dir() else source.base_name
        model_card(
            facts,
            code,
            results=results,
            base_model=base_model,
            license=License(license, license_name, license_link, files),
            norms=norms,
            training=training,
        ).save(folder / "README.md")
        _check_card(folder / "README.md")
        _check_files(folder, code, source, out)
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
        patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*", RECIPE_FILE]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, HFValidationError) as error:
        raise NormalignError(
            f"{name} is neither a local folder nor a model that can be had from the Hub now: "
            f"{str(error).splitlines()[0]} Check the name, the network and your access to it."
        ) from error


def _opened(model_dir: str | os.PathLike) -> _Source:
    """The folder that is meant, and the base model's where it holds an adapter."""
    folder = _source_folder(model_dir)
    if not (folder / "adapter_config.json").is_file():
        return _Source(folder)
    if (folder / "config.json").is_file():
        raise NormalignError(
            f"{model_dir} holds a whole model (config.json) and an adapter (adapter_config.json), so it is not clear which "
            f"is meant. Move one of them into a folder of its own and export that."
        )
    name = base_model_of(folder)
    try:
        return _Source(folder, _source_folder(name), name)
    except NormalignError as error:
        raise NormalignError(
            f"The adapter {model_dir} cannot be merged without its base model. {error} Where it has moved, write its place "
            f"into base_model_name_or_path in {folder / 'adapter_config.json'}."
        ) from error


def _supported_model_type(source: _Source, name: str) -> str:
    """The model_type of a folder, or of an adapter's base model, that can be exported."""
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


def _check_shard_size(size: str | int | None) -> None:
    number = re.fullmatch(r"(\d+(?:\.\d+)?) *[KMGT]B", size, re.IGNORECASE) if isinstance(size, str) else None
    if size is None or (number and float(number[1]) > 0) or (type(size) is int and size > 0):
        return
    raise NormalignError(
        f"The size of a weight file cannot be {size!r}: write a number above 0 with KB, MB, GB or TB, such as 5GB or 200KB."
    )


def _load_source(model_class: type, source: _Source):
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
    inputs = _sample_inputs(model, processor)
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


# --- where it goes


def _is_earlier_export(folder: Path) -> bool:
    files = [file for file in folder.iterdir() if file.is_file() and not file.name.startswith(".")]
    card = folder / "README.md"
    return (
        card.exists()
        and CARD_MARK in card.read_text(encoding="utf-8", errors="replace")
        and all(_may_ship(file.name) for file in files)
    )


def _may_ship(name: str) -> bool:
    """Whether an export may hold a file of this name."""
    return Path(name).suffix in _SHIPPED_SUFFIXES or name == NORMS_FIGURE or is_license_file(name)


# --- what is written


def _write(model, processor, folder: Path, code: list[Path], max_shard_size: str | int | None) -> None:
    _forget_where_it_came_from(model.config)
    _give_no_token_type_ids(processor.tokenizer)
    write_parts(model, processor, folder, max_shard_size)
    for file in code:
        shutil.copyfile(file, folder / file.name)
    for file in folder.glob("*.json"):
        _strip_local_keys(file)
    write_for_both_generations(folder)


def _write_eval_results(results: dict | None, folder: Path) -> None:
    for name, text in eval_result_files(results).items():
        (folder / EVAL_RESULTS).mkdir(exist_ok=True)
        (folder / EVAL_RESULTS / name).write_text(text, encoding="utf-8")


def _copy_licenses(files: dict[str, Path], folder: Path) -> list[str]:
    for name, file in files.items():
        shutil.copyfile(file, folder / name)
    return sorted(files)


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


def _check_files(folder: Path, code: list[Path], source: _Source, out: Path) -> None:
    """The folder holds the code of this package and no other, no file of training, and nothing of this machine or account."""
    strange = sorted(
        file.name
        for file in folder.iterdir()
        if not (is_eval_results(file) if file.name == EVAL_RESULTS else file.is_file() and _may_ship(file.name))
    )
    strange += sorted({file.name for file in folder.glob("*.py")} ^ {file.name for file in code})
    if strange:
        raise NormalignError(f"The export holds or lacks files that it should not: {', '.join(strange)}.")
    for file in code:
        if (folder / file.name).read_bytes() != file.read_bytes():
            raise NormalignError(f"The exported {file.name} differs from the one of this package.")
    files = shipped_files(folder)
    places = [place.resolve() for place in (*source.folders, out, out.parent, folder.parent)]
    if problems := [*secret_problems(folder, files), *path_problems(folder, files, places)]:
        raise NormalignError(
            f"The export would tell the world what is of this machine alone, so it was not written: {'; '.join(problems)}. "
            f"Take it out of the same file in {source.model}, or of what was given for the card, and export again."
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
