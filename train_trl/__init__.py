"""Trains with TRL's SFTTrainer: recipes, arguments, data sets, callbacks and the built-in data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .recipe import Recipe, RecipeError
from .recipe_reading import load_recipe, parse_overrides, recipe_as_yaml


if TYPE_CHECKING:
    from .row_check import RowReport

__all__ = ["Recipe", "RecipeError", "check", "load_recipe", "parse_overrides", "recipe_as_yaml", "train"]


def train(recipe_path: str | Path, overrides: Mapping[str, Any] | None = None) -> Path:
    """Trains what a recipe says, with changes by dotted key such as {"data.rows": 20} laid over it.

    Returns:
        the finished folder: weights, config, code, processor, chat template, generation config, train_log.jsonl.

    Raises:
        NormalignError: the recipe, the model, the processor or a row of the data does not fit (the message says which).
    """
    from .training import train_recipe

    return train_recipe(recipe_path, overrides)


def check(recipe_path: str | Path, overrides: Mapping[str, Any] | None = None) -> RowReport:
    """Looks at the rows that a recipe would train on, trains nothing and writes nothing.

    Returns:
        how many rows were looked at, and which of them cannot be trained on, why.

    Raises:
        NormalignError: the recipe, the model or the processor does not fit, or the data cannot be opened.
    """
    from .training import check_recipe

    return check_recipe(recipe_path, overrides)
