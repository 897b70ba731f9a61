"""Where an exported model comes from: the recipes it was trained by, their data sets, and the licenses that came with it."""

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import yaml

from ..assembly.licenses import licenses_in
from ..configuration.backbones import BACKBONES
from ..configuration.errors import NormalignError
from ..train_trl.recipe import Recipe
from ..train_trl.recipe_reading import read_recipe


RECIPE_FILE = "recipe.yaml"
_LOG_FILE = "train_log.jsonl"
# Of no meaning on another machine, or for what was learned.
_OF_THE_MACHINE = {"output_dir", "overwrite", "dataloader_workers", "resume", "report_to", "cache_dir"}
_OF_THE_MACHINE |= {"eval_generation", "eval_steps", "eval_data"}
_MODEL_KEYS = {"model", "vision", "text", "from_stage", "base_model"}
# The keys of a recipe's data block whose value names a data set.
_DATA_SET_KEYS = {"name", "id", "path", "dataset"}
_DATA_FILES = {".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".zip", ".tar", ".gz", ".npz", ".txt"}


@dataclass
class Training:
    """The stages of a training in order, as a card may show them, the Hub ids of their data, and the log's last line."""

    stages: list[tuple[str, str]] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)
    last: str | None = None


def is_hub_id(name: str) -> bool:
    """Whether this is written as owner/name."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name))


# --- recipes


def read_training(source: Path, recipes: Sequence[Path] = ()) -> Training:
    """The recipes given, in the order of the stages; none given, those that `normalign train` left in and beside `source`.

    Args:
        source: the folder that is exported: a finished stage's, or a checkpoint in one.

    Raises:
        NormalignError: a recipe is no YAML mapping, or one that is given has none of a recipe's keys.
    """
    # "." and a link have another name, and other folders beside them
    source = source.resolve()
    files = list(recipes) or _recipes_of(source)
    training = Training(last=_last_logged(source))
    for file in files:
        # a folder of someone else's must not lead to files of this machine
        recipe = read_recipe(file, extended=bool(recipes))
        if recipes and not recipe.keys() & {item.name for item in dataclasses.fields(Recipe)}:
            # what it has instead may be secret
            raise NormalignError(
                f"The recipe {file} has none of a recipe's keys. Name the recipe that was trained by."
            )
        name = " ".join(str(recipe.get("name") or Path(file).stem).split())
        shown = {key: value for key, value in recipe.items() if key not in {"name", *_OF_THE_MACHINE}}
        shown = _without_what_did_not_act(shown)
        shown = _public(shown, "", Path(file).parent)
        training.stages.append((name, yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).strip()))
        training.datasets += [name for name in _data_sets(shown.get("data")) if name not in training.datasets]
    return training


def _without_what_did_not_act(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe without defaults of what it does not use: adapters, epochs beside max_steps, keys of the built-in scenes."""
    tuned, data = recipe.get("tune"), recipe.get("data")
    left_out = set()
    if isinstance(tuned, dict) and "lora" not in tuned.values():
        left_out.add("lora")
    if recipe.get("max_steps") is not None:
        left_out.add("epochs")
    if isinstance(data, dict) and data.get("name", "digit_scenes") != "digit_scenes":
        recipe = {**recipe, "data": {key: value for key, value in data.items() if key not in ("seed", "stage")}}
    return {key: value for key, value in recipe.items() if key not in left_out}


def _stage_folder(source: Path) -> Path:
    return source.parent if source.name.startswith("checkpoint-") else source


def _recipes_of(source: Path) -> list[Path]:
    """The recipe in a folder, after those of the stages that it went on from, as far as they lie beside it."""
    files: list[Path] = []
    stage = _stage_folder(source)
    file = next((place / RECIPE_FILE for place in (source, stage) if (place / RECIPE_FILE).is_file()), None)
    while file is not None and file.is_file() and file not in files:
        files.insert(0, file)
        former = read_recipe(file, extended=False).get("from_stage")
        file = stage.parent / former / RECIPE_FILE if isinstance(former, str) and former.strip() else None
    return files


def _public(value: Any, key: str, beside: Path) -> Any:
    """The same without places of this machine, of what was local only that it was, and without what is not set."""
    if isinstance(value, dict):
        return {name: _public(inner, str(name), beside) for name, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_public(inner, key, beside) for inner in value]
    if not isinstance(value, str) or not _is_local(value, beside):
        return value
    return "local model" if key in _MODEL_KEYS else "local data"


def public_parts(composed_from: dict[str, str]) -> dict[str, str]:
    """The names of a model's backbones by part; of a place on a machine the last name alone."""
    return {
        part: PureWindowsPath(name).name if _is_local(name, Path()) else name for part, name in composed_from.items()
    }


def _is_local(value: str, beside: Path) -> bool:
    if value in BACKBONES or "://" in value and not value.startswith("file:"):
        return False
    if PurePosixPath(value).is_absolute() or PureWindowsPath(value).drive or value.startswith(("~", ".", "file:")):
        return True
    if PurePosixPath(value).suffix.lower() in _DATA_FILES or "\\" in value:
        return True
    # a relative folder is written like a Hub id
    return "/" in value and (value.count("/") > 1 or Path(value).exists() or (beside / value).exists())


def _data_sets(data: Any, key: str = "name") -> list[str]:
    if isinstance(data, dict):
        return [name for inner, value in data.items() for name in _data_sets(value, str(inner))]
    if isinstance(data, list):
        return [name for value in data for name in _data_sets(value, key)]
    return [data] if isinstance(data, str) and key in _DATA_SET_KEYS and is_hub_id(data) else []


def _last_logged(source: Path) -> str | None:
    """The last step and loss in the training log beside the weights."""
    file = next(
        (place / _LOG_FILE for place in (source, _stage_folder(source)) if (place / _LOG_FILE).is_file()), None
    )
    if file is None:
        return None
    step = int(source.name.rpartition("-")[2]) if re.fullmatch(r"checkpoint-\d+", source.name) else None
    found = None
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # a run that was killed leaves half a line
            continue
        known = isinstance(record, dict) and record.get("loss") is not None and record.get("step") is not None
        if known and (step is None or record["step"] <= step):
            found = f"step {record['step']}, loss {record['loss']:.4g}"
    return found


# --- licenses


def license_files(folders: Sequence[Path]) -> dict[str, Path]:
    """The license and notice files to ship, by name: all of the first that has any of the folders the weights are read
    from, the nearest first."""
    return {file.name: file for file in next(filter(None, map(licenses_in, folders)), [])}
