"""Writes a trained model as a flat folder that loads without normalign: weights, code, processor, model card."""

import ast
import inspect
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import ModelCard

from ..assembly.licenses import is_license_file
from ..assembly.loading import load_processor
from ..assembly.saving import check_target, named_folder, write_parts, written_in_full
from ..configuration.errors import NormalignError
from ..inspection import NormReport
from .both_generations import write_for_both_generations
from .card_check import check_card
from .eval_results import EVAL_RESULTS, eval_result_files, is_eval_results
from .model_card import CARD_MARK, License, check_results, model_card, model_facts
from .norms import NORMS_FIGURE, draw_norms, norm_table
from .origin import is_hub_id, license_files, public_parts, read_training
from .preflight import path_problems, secret_problems, shipped_files
from .source import MODEL_CLASSES, Source, load_source, open_source, sample_inputs, supported_model_type


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
    source = open_source(model_dir)
    model_class = MODEL_CLASSES[supported_model_type(source, str(model_dir))]
    check_target(
        out,
        sources=source.folders,
        overwrite=overwrite,
        earlier=_is_earlier_export,
        own_folders=[EVAL_RESULTS] if is_eval_results(out / EVAL_RESULTS) else [],
    )
    # what is given wrongly is named before the work
    check_results(results)
    report = None if inspection is None else NormReport.load(inspection)
    training = read_training(source.folder, [Path(recipe).expanduser() for recipe in recipes])
    with written_in_full(out) as folder:
        model, processor = load_source(model_class, source)
        _forget_where_it_came_from(model.config)
        expected = _logits(model, sample_inputs(model, processor))
        expected_ids = _sample_ids(processor)
        code, facts = code_files(model_class), model_facts(model)
        norms = None if report is None else norm_table(report, facts)
        licenses = license_files(source.folders)
        if base_model is None and source.base_name is not None and is_hub_id(source.base_name):
            base_model = None if Path(source.base_name).is_dir() else source.base_name
        card = model_card(
            facts,
            code,
            results=results,
            base_model=base_model,
            license=License(license, license_name, license_link, sorted(licenses)),
            norms=norms,
            training=training,
            merged=source.base is not None,
        )
        _check_card(card.content, licenses)
        _write(model, processor, folder, code, max_shard_size)
        del model
        if report is not None:
            draw_norms(report, folder / NORMS_FIGURE)
        _write_eval_results(results, folder)
        for name, file in licenses.items():
            shutil.copyfile(file, folder / name)
        card.save(folder / "README.md")
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


# --- what may be asked for


def _check_shard_size(size: str | int | None) -> None:
    number = re.fullmatch(r"(\d+(?:\.\d+)?) *[KMGT]B", size, re.IGNORECASE) if isinstance(size, str) else None
    if size is None or (number and float(number[1]) > 0) or (type(size) is int and size > 0):
        return
    raise NormalignError(
        f"The size of a weight file cannot be {size!r}: write a number above 0 with KB, MB, GB or TB, such as 5GB or 200KB."
    )


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


def _forget_where_it_came_from(config) -> None:
    config._name_or_path = ""
    if composed_from := getattr(config, "composed_from", None):
        config.composed_from = public_parts(composed_from)
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


def _check_card(text: str, licenses: dict[str, Path]) -> None:
    problems = [str(problem) for problem in check_card(text)]
    link = ModelCard(text).data.to_dict().get("license_link") if not problems else None
    if link and "://" not in link and link not in licenses:
        problems.append(f"license_link: there is no file {link} beside the model to be copied")
    if problems:
        raise NormalignError(
            f"The model card would not be right, so nothing was written: {'; '.join(problems)}. Put right what "
            f"was given for it (license, base models, results) or what the model's config says of its origin."
        )


def _check_files(folder: Path, code: list[Path], source: Source, out: Path) -> None:
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
    logits = _logits(model.eval(), sample_inputs(model, reloaded))
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
