"""Reads a training recipe: a YAML file, checked key by key, with changes from the command line on top."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ..configuration.errors import NormalignError


Tune = Literal["frozen", "full"]
Arm = Literal["none", "default", "aligned", "aligned_gwc", "rms", "scale"]

# Source: arXiv 2512.08374, Table 5 for `default`; `rms` and `scale` leave GWC to compose.aligned_norm.gwc
ARMS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "default": {"kind": "layernorm", "gain_init": 1.0, "gwc": False},
    "aligned": {"kind": "layernorm", "gain_init": "text", "gwc": False},
    "aligned_gwc": {"kind": "layernorm", "gain_init": "text", "gwc": True},
    "rms": {"kind": "rmsnorm", "gain_init": "text"},
    "scale": {"kind": "scale", "gain_init": "text"},
}
_SOURCES = ("model", "from_stage", "compose")
_MOST_ROWS = 10_000_000
# far beyond any use; above 1e37 the optimizer's own sums overflow
_HIGHEST_RATE = 1_000_000


class RecipeError(NormalignError):
    """A recipe that cannot be run; the message says which key, and what to write."""


@dataclass
class ComposeSettings:
    """What a run that starts from two backbones is put together from (see `normalign.assembly.compose`).

    `vision` and `text` are Hub ids or folders; `aligned_norm` is the block of the model's config.
    """

    vision: str
    text: str
    aligned_norm: dict[str, Any] = field(default_factory=dict)
    vision_feature_layer: int | None = None
    seed: int | None = None


@dataclass
class TuneSettings:
    """What is trained of each part of the model."""

    vision: Tune = "frozen"
    projector: Tune = "full"
    norm: Tune = "full"
    language: Tune = "frozen"


@dataclass
class DataSettings:
    """Which data set is trained on; `stage` is 1 for captions and 2 for questions."""

    name: Literal["digit_scenes"] = "digit_scenes"
    rows: int = 1000
    seed: int = 0
    stage: Literal[1, 2] = 1


@dataclass
class Recipe:
    """One training run. Exactly one of `model`, `from_stage` and `compose` says where it starts.

    Args:
        name: the stage's name, shown on the progress bar and in the log.
        output_dir: where the finished folder, its checkpoints and train_log.jsonl go; a new or empty folder.
        overwrite: remove an earlier run's folder first, if `output_dir` is one.
        model: a folder or Hub id to go on from.
        from_stage: the name of a former stage's folder, next to `output_dir`.
        compose: the backbones to start from.
        arm: shorthand for the norm's kind, start and GWC; a run that goes on from a model must have that arm already.
        learning_rate: of all parts that are trained.
        batch_size: rows in one step over all processes; `gradient_accumulation` splits it.
        epochs: passes over the data; `max_steps` stops earlier or goes on longer where it is set.
        warmup: steps, or below 1 the share of all steps.
        max_grad_norm: the global gradient norm is clipped to it; 0 clips nothing.
        save_steps: a checkpoint every so many steps; null keeps the finished folder alone.
        save_total_limit: how many checkpoints stay.
        precision: `auto` is bfloat16 autocast where the GPU has it, else float32. The norm is float32 always.
    """

    output_dir: str
    name: str = "train"
    model: str | None = None
    from_stage: str | None = None
    compose: ComposeSettings | None = None
    arm: Arm | None = None
    tune: TuneSettings = field(default_factory=TuneSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: str = "adamw_torch"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    schedule: Literal["cosine", "linear", "constant", "constant_with_warmup"] = "cosine"
    warmup: float = 0.03
    max_grad_norm: float = 1.0
    batch_size: int = 32
    gradient_accumulation: int = 1
    epochs: float = 1.0
    max_steps: int | None = None
    seed: int = 0
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    dataloader_workers: int = 0
    logging_steps: int = 10
    save_steps: int | None = None
    save_total_limit: int | None = None
    overwrite: bool = False

    def __post_init__(self):
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise RecipeError(
                "A recipe says where it starts by exactly one of 'model' (a folder or Hub id), 'from_stage' (a former "
                f"stage's name) and 'compose' (two backbones); this one has {' and '.join(given) or 'none of them'}."
            )
        self._check_places()
        self._check_numbers()
        if self.compose is not None:
            self.compose.aligned_norm = self._aligned_norm_of_arm()

    def _check_places(self) -> None:
        compose = self.compose
        places = {"output_dir": self.output_dir, "model": self.model, "from_stage": self.from_stage}
        if compose is not None:
            places |= {"compose.vision": compose.vision, "compose.text": compose.text}
        for key, place in places.items():
            if place is not None and not place.strip():
                raise RecipeError(f"{key} is empty. Name a folder{'' if key == 'output_dir' else ' or a Hub id'}.")
        self.output_dir = str(Path(self.output_dir).expanduser())
        if Path(self.output_dir).is_file():
            raise RecipeError(f"output_dir is {self.output_dir}, which is a file. Name a folder to write.")

    def _check_numbers(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise RecipeError(f"{item.name} must be a finite number, got {value}.")
        positive = ("learning_rate", "batch_size", "gradient_accumulation", "epochs", "logging_steps")
        optional = ("max_steps", "save_steps", "save_total_limit")
        for key in (*positive, *(name for name in optional if getattr(self, name) is not None)):
            if not getattr(self, key) > 0:
                raise RecipeError(f"{key} must be above 0, got {getattr(self, key)}.")
        if self.learning_rate > _HIGHEST_RATE:
            raise RecipeError(f"learning_rate must be at most {_HIGHEST_RATE:,}, got {self.learning_rate:g}.")
        for key in ("weight_decay", "warmup", "max_grad_norm", "dataloader_workers"):
            if not getattr(self, key) >= 0:
                raise RecipeError(f"{key} must not be negative, got {getattr(self, key)}.")
        if not 0 < self.data.rows <= _MOST_ROWS:
            raise RecipeError(
                f"data.rows must be above 0 and at most {_MOST_ROWS:,}, got {self.data.rows:,}: all rows are "
                f"drawn before the first step. For a longer run set epochs."
            )
        seeds = {"seed": (self.seed, 32), "data.seed": (self.data.seed, 63)}
        if self.compose is not None and self.compose.seed is not None:
            seeds["compose.seed"] = (self.compose.seed, 63)
        for key, (seed, bits) in seeds.items():
            # the trainer gives the run's seed to NumPy too, which takes 32 bits
            if not 0 <= seed < 2**bits:
                raise RecipeError(f"{key} must be from 0 to {2**bits - 1} (2**{bits} - 1), got {seed}.")

    def _aligned_norm_of_arm(self) -> dict[str, Any]:
        settings = self.compose.aligned_norm
        fixed = ARMS[self.arm] if self.arm else {}
        for key in sorted(set(settings) & set(fixed)):
            if settings[key] != fixed[key]:
                raise RecipeError(
                    f"arm: {self.arm} means aligned_norm.{key}: {fixed[key]}, but compose.aligned_norm.{key} is "
                    f"{settings[key]!r}. Leave out one of the two."
                )
        return {**fixed, **settings}

    def start_folder(self) -> str | None:
        """The folder or Hub id that the run goes on from; None where it composes.

        Raises:
            RecipeError: the stage named by `from_stage` has left no folder.
        """
        if self.from_stage is None:
            return self.model
        folder = Path(self.output_dir).parent / self.from_stage
        if not (folder / "config.json").is_file():
            raise RecipeError(
                f"Stage '{self.name}' goes on from stage '{self.from_stage}', but there is no finished folder {folder}. "
                f"Run that stage first, or name a folder with --model."
            )
        return str(folder)


def load_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Reads a recipe file and lays `overrides` over it.

    Args:
        path: the YAML file.
        overrides: changes by dotted key, such as {"data.rows": 20}; nested dicts work alike, and values may be text that
            YAML reads ("20"). One that names another start (`model`, `from_stage`, `compose`) replaces the recipe's.

    Raises:
        RecipeError: the file is missing or no YAML mapping, or a key or value does not fit (it is named, with the
            nearest right one).
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise RecipeError(f"There is no recipe {path}.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"The recipe {path} is not a text file (UTF-8). Name a YAML file.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"The recipe {path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"The recipe {path} must be a mapping of keys to values.")
    content.setdefault("name", path.stem)
    try:
        return _build(Recipe, merge_overrides(content, overrides or {}), "")
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error


def parse_overrides(arguments: Sequence[str]) -> dict[str, str]:
    """Turns `--data.rows 20 --learning-rate=1e-4` into {"data.rows": "20", "learning_rate": "1e-4"} for `load_recipe`.

    Raises:
        RecipeError: an argument is no `--key`, or has no value.
    """
    overrides, rest = {}, list(arguments)
    while rest:
        argument = rest.pop(0)
        key, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not key:
            raise RecipeError(f"Changes to a recipe are written '--key value', but got {argument!r}.")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise RecipeError(f"--{key} needs a value: '--{key} VALUE'.")
            value = rest.pop(0)
        overrides[key.replace("-", "_")] = value
    return overrides


def merge_overrides(content: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`content` with `overrides` (dotted keys or nested dicts) laid over it; neither is changed."""
    merged = _copy(content)
    changed_sources = {key.split(".")[0] for key in overrides} & set(_SOURCES)
    if changed_sources:
        for name in set(_SOURCES) - changed_sources:
            merged.pop(name, None)
    for dotted, value in overrides.items():
        block = merged
        *parents, last = dotted.split(".")
        for depth, key in enumerate(parents):
            if block.get(key) is None:
                block[key] = {}
            block = block[key]
            if not isinstance(block, dict):
                raise RecipeError(f"{dotted} cannot be set: {'.'.join(parents[: depth + 1])} is a single value.")
        if isinstance(value, Mapping) and isinstance(block.get(last), dict):
            block[last] = merge_overrides(block[last], value)
        else:
            block[last] = _copy(value)
    return merged


def _copy(value: Any) -> Any:
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def _build(cls: type, content: dict[str, Any], prefix: str) -> Any:
    """A dataclass from a mapping, each key known and each value of its declared type."""
    known = {item.name: item for item in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in content.items():
        if key not in known:
            raise RecipeError(_unknown_key(prefix, str(key), list(known)))
        values[key] = _convert(value, hints[key], prefix + key)
    needed = [
        name
        for name, item in known.items()
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]
    missing = [f"'{prefix}{name}'" for name in needed if name not in values]
    if missing:
        raise RecipeError(f"The key {' and '.join(missing)} is missing.")
    return cls(**values)


def _unknown_key(prefix: str, key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f" Did you mean '{prefix}{near[0]}'?" if near else ""
    return f"Unknown key '{prefix}{key}'.{hint} Known keys here: {', '.join(known)}."


def _convert(value: Any, hint: Any, key: str) -> Any:
    """`value` as the declared type; text (from the command line) is read as YAML where the type is not text."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None or value == "null":
            return None
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if dataclasses.is_dataclass(hint) or typing.get_origin(hint) is dict:
        value = _read_text(value)
        if not isinstance(value, dict):
            raise RecipeError(f"'{key}' must be a block of keys, got {value!r}.")
        if dataclasses.is_dataclass(hint):
            return _build(hint, value, key + ".")
        return {name: _read_text(inner) for name, inner in value.items()}
    if typing.get_origin(hint) is Literal:
        return _choose(value, typing.get_args(hint), key)
    if hint is not str:
        value = _read_text(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            raise RecipeError(f"'{key}' must be a number, got one of {len(str(value))} digits.") from None
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        what = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[hint]
        raise RecipeError(f"'{key}' must be {what}, got {value!r}.")
    return value


def _choose(value: Any, options: tuple, key: str) -> Any:
    for option in options:
        if str(value) == str(option):
            return option
    near = difflib.get_close_matches(str(value), [str(option) for option in options], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise RecipeError(f"'{key}' must be one of {', '.join(map(str, options))}, got {value!r}.{hint}")


def _read_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return float(value) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) else yaml.safe_load(value)
    except yaml.YAMLError:
        return value
