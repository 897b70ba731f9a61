"""Trains with TRL's SFTTrainer: recipes, arguments, data sets, callbacks and the built-in data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .recipe import Recipe, RecipeError
from .recipe_reading import load_recipe, parse_overrides, recipe_as_yaml


__all__ = ["Recipe", "RecipeError", "load_recipe", "parse_overrides", "recipe_as_yaml", "train"]


def train(recipe_path: str | Path, overrides: Mapping[str, Any] | None = None) -> Path:
    """Trains what a recipe says, with changes by dotted key such as {"data.rows": 20} laid over it.

    Returns:
        the finished folder: weights, config, code, processor, chat template, generation config, train_log.jsonl.

    Raises:
        NormalignError: the recipe, the model, the processor or a row of the data does not fit (the message says which).
    """
    from .training import train_recipe

    return train_recipe(recipe_path, overrides)
