"""Makes a recipe from a YAML file and its parents, checked key by key, with changes from the command line on top."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from .. import configuration
from .recipe import _SOURCES, PartFigures, Recipe, RecipeError


RECIPES = Path(configuration.__file__).parent / "recipes"

# keys whose value is a number for all parts or a block, with the number that holds where the block has no `all`
_BY_PART = {
    item.name: item.default_factory().all for item in dataclasses.fields(Recipe) if item.type == PartFigures.__name__
}


def load_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Reads a recipe file and lays `overrides` over it.

    Args:
        path: the YAML file, or the name of a recipe that comes with the package, such as demo/stage1.
        overrides: changes by dotted key, such as {"data.rows": 20}; nested dicts work alike, and values may be text that
            YAML reads ("20"). One that names another start (`model`, `from_stage`, `compose`) replaces the recipe's.

    Raises:
        RecipeError: the file is missing or no YAML mapping, or a key or value does not fit (it is named, with the
            nearest right one).
    """
    path = find_recipe(path)
    content = read_recipe(path)
    content.setdefault("name", path.stem)
    try:
        return _build(Recipe, merge_overrides(content, overrides or {}), "")
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error


def read_recipe(path: str | Path, *, extended: bool = True) -> dict[str, Any]:
    """The content of a recipe file, laid over the files that it extends; its keys and values are not checked.

    Args:
        path: the YAML file.
        extended: False reads this file alone, and leaves `extends` in it as it is.

    Raises:
        RecipeError: a file is missing or no YAML mapping.
    """
    return _with_parents(Path(path), ()) if extended else _read_file(Path(path), ())


def find_recipe(path: str | Path) -> Path:
    """The recipe file of that path, or else the one of that name that comes with the package.

    Raises:
        RecipeError: there is neither; lists the names.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return path
    names = shipped_recipes()
    if str(path.with_suffix("")) in names:
        return names[str(path.with_suffix(""))]
    near = difflib.get_close_matches(str(path.with_suffix("")), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise RecipeError(f"There is no recipe {path}.{hint} Name a YAML file, or one of: {', '.join(names)}.")


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name (demo/stage1)."""
    return {file.relative_to(RECIPES).with_suffix("").as_posix(): file for file in sorted(RECIPES.rglob("*.yaml"))}


def recipe_as_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `load_recipe` reads to the same recipe; what is null is left out."""
    return yaml.safe_dump(_plain(recipe), sort_keys=False, allow_unicode=True, width=120)


def _plain(value: Any) -> Any:
    if isinstance(value, PartFigures):
        given = value.given()
        return value.all if list(given) == ["all"] else given
    if dataclasses.is_dataclass(value):
        fields = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        return {key: _plain(inner) for key, inner in fields.items() if inner is not None}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _with_parents(path: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    """The content of a recipe file laid over that of the file it extends, and so on up."""
    content = _read_file(path, children)
    parent = content.pop("extends", None)
    if parent is None:
        return content
    if not isinstance(parent, str) or not parent.strip():
        raise RecipeError(f"{path}: 'extends' must name a recipe file, seen from this file's folder, got {parent!r}.")
    file = path.parent / Path(parent).expanduser()
    if not file.is_file():  # then it may be the name of one that comes with the package
        file = shipped_recipes().get(Path(parent).with_suffix("").as_posix(), file)
    line = (*children, path.resolve())
    if file.resolve() in line:
        raise RecipeError(f"{path}: 'extends' goes in a circle: {' -> '.join(p.name for p in line)} -> {file.name}.")
    above = _with_parents(file, line)
    # a child that has no name of its own is called by its file, not by its parent's
    above.pop("name", None)
    return merge_overrides(above, content)


def _read_file(path: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    if not path.is_file():
        whose = f" that {children[-1]} extends" if children else ""
        raise RecipeError(f"There is no recipe {path}{whose}.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"The recipe {path} is not a text file (UTF-8). Name a YAML file.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"The recipe {path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"The recipe {path} must be a mapping of keys to values.")
    return content


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
    _drop_other_data(merged, overrides)
    for dotted, value in overrides.items():
        block = merged
        *parents, last = dotted.split(".")
        for depth, key in enumerate(parents):
            if block.get(key) is None:
                block[key] = {}
            elif key in _BY_PART and not isinstance(block[key], Mapping):
                block[key] = {"all": block[key]}
            block = block[key]
            if not isinstance(block, dict):
                raise RecipeError(f"{dotted} cannot be set: {'.'.join(parents[: depth + 1])} is a single value.")
        if isinstance(value, Mapping) and last in _BY_PART and isinstance(block.get(last), int | float):
            block[last] = {"all": block[last], **value}
        elif isinstance(value, Mapping) and isinstance(block.get(last), dict):
            block[last] = merge_overrides(block[last], value)
        else:
            block[last] = _copy(value)
    return merged


def _drop_other_data(content: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Removes from `content` what belongs to other data than `overrides` name: how many rows those had, or their mixture."""
    block, given = content.get("data"), overrides.get("data")
    given = dict(given) if isinstance(given, Mapping) else {}
    given |= {key.removeprefix("data."): value for key, value in overrides.items() if key.startswith("data.")}
    if not isinstance(block, dict):
        return
    if "name" in given and given["name"] != block.get("name", "digit_scenes"):
        block.clear()
    elif "name" in given or "path" in given:
        block.pop("mixture", None)


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
    if hint is PartFigures and not isinstance(value := _read_text(value), dict):
        return PartFigures(_convert(value, float, key))
    if hint is PartFigures:
        value = {"all": _BY_PART[key], **value}
    if typing.get_origin(hint) is list:
        [inner] = typing.get_args(hint)
        values = _read_text(value)
        if not isinstance(values, list):
            raise RecipeError(f"'{key}' must be a list such as [a, b], got {value!r}.")
        return [_convert(one, inner, f"{key}[{index}]") for index, one in enumerate(values)]
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
