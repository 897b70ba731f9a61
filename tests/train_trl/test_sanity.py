"""`--sanity`: eight rows are learned by heart, and a stage at which their answers are lost is named."""

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from normalign.cli import app
from normalign.train_trl import load_recipe, training
from normalign.train_trl.sanity import _verdict, sanity_check


MINI = {"compose": {"vision": "mini-vision", "text": "mini-language", "seed": 0}, "learning_rate": 0.005}


@pytest.fixture(scope="module")
def sound(recipe_file, tmp_path_factory):
    """What the check finds in a sound recipe with adapters, the recipe's file, and the trainer as it was in the end."""
    folder, kept = tmp_path_factory.mktemp("sound"), tmp_path_factory.mktemp("kept")
    path = recipe_file(1, folder, **MINI, tune={"vision": "lora", "language": "lora"})
    trainers = []

    def note(recipe, *args):
        trainer = train_in_memory(recipe, *args)
        trainer.model.peft_config["default"].base_model_name_or_path = str(
            shutil.copytree(Path(recipe.output_dir) / "base", kept / "base")
        )
        trainers.append(trainer)
        return trainer

    train_in_memory = training.train_in_memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "train_in_memory", note)
        result = sanity_check(load_recipe(path))
    assert list(folder.iterdir()) == []
    return SimpleNamespace(result=result, path=path, trainer=trainers[0])


def test_a_sound_recipe_passes_every_stage(sound):
    """R94."""
    result = sound.result
    assert result["broken"] is None, result
    assert result["loss_end"] < 0.1 < result["loss_start"]
    assert result["in_memory"] == result["reloaded"] == result["merged"] == 1
    assert result["black_images"] <= result["chance"] < 1
    assert "All stages agree" in result["verdict"]


def test_a_model_that_is_lost_in_saving_is_named(sound, monkeypatch):
    """R94: by command, with status 1."""
    save = training.AlignedSFTTrainer.save_model

    def lose_the_projector(self, *args, **kwargs):
        projector = self.model.get_base_model().model.multi_modal_projector.modules_to_save["default"]
        kept = copy.deepcopy(projector.state_dict())
        torch.nn.init.normal_(projector.linear_1.weight.data)
        save(self, *args, **kwargs)
        projector.load_state_dict(kept)

    monkeypatch.setattr(training.AlignedSFTTrainer, "save_model", lose_the_projector)
    monkeypatch.setattr(training, "train_in_memory", lambda *args: sound.trainer)
    done = CliRunner().invoke(app, ["train", str(sound.path), "--sanity", "--json"])
    assert done.exit_code == 1, done.output
    result = json.loads(done.stdout)
    assert result["broken"] == "reloaded" and result["in_memory"] == 1 > result["reloaded"]
    assert "weights are lost or changed there" in result["verdict"]


@pytest.mark.parametrize(
    ("changes", "broken", "words"),
    [
        ({"loss_end": 2.0, "in_memory": 0.0}, "training", "Raise learning_rate (it is 0.005)"),
        ({"in_memory": 0.1}, "in_memory", "Look at the chat template"),
        ({"merged": 0.5}, "merged", "after merging the adapter it is 50%"),
        ({"chance": 1.0, "black_images": 1.0}, None, "the questions alone tell the answers"),
        ({"black_images": 0.9}, "images", "With black pictures the model still answers 90%"),
    ],
)
def test_the_first_stage_that_breaks_is_named(sound, recipe_file, tmp_path, changes, broken, words):
    recipe = load_recipe(recipe_file(1, tmp_path, **MINI))
    found, verdict = _verdict({**sound.result, **changes}, recipe)
    assert found == broken and words in verdict
