"""Held-out rows are answered while a model trains: which ones, how they are scored and logged, and that nothing else changes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from normalign.train_trl import load_recipe, train


def log_of(folder):
    return [json.loads(line) for line in (Path(folder) / "train_log.jsonl").read_text().splitlines()]


def test_weights_and_losses_are_those_of_a_run_without(recipe_file, tmp_path):
    changes = {"max_steps": 3, "gradient_checkpointing": True}
    plain = train(recipe_file(1, tmp_path / "plain", **changes))
    seen = train(recipe_file(1, tmp_path / "seen", **changes), {"eval_generation": 7, "eval_steps": 2})
    one, two = (load_file(folder / "model.safetensors") for folder in (plain, seen))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    print(log_of(seen)[1])
    for a, b in zip(log_of(plain), log_of(seen), strict=True):
        assert {k for k in b if k not in a} == {k for k in b if k.startswith("eval_generation")}
        assert {k: v for k, v in a.items() if "_per_second" not in k} == {k: b[k] for k in a if "_per_second" not in k}
