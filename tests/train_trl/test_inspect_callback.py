"""The callback that inspects a model while it trains: what it writes, and that the training does not notice it."""

import json
from types import SimpleNamespace

import pytest
import torch

from normalign.configuration.errors import NormalignError
from normalign.train_trl import load_recipe
from normalign.train_trl.digit_scenes import digit_scene_rows
from normalign.train_trl.inspect_callback import InspectCallback
from normalign.train_trl.parts import freeze
from normalign.train_trl.training import build_trainer, load_data, load_or_compose


ROWS = digit_scene_rows(2, split="test", text_only_share=0)


@pytest.fixture(scope="module")
def train(recipe_file, tmp_path_factory):
    """A function that trains for three steps, with the callback or without: weights at the end, and the folder."""

    def run(watched, **options):
        folder = tmp_path_factory.mktemp("watched")
        recipe = load_recipe(recipe_file(1, folder, data={"rows": 12, "stage": 1}))
        data = load_data(recipe)
        model, processor = load_or_compose(recipe, data)
        freeze(model, recipe.tune)
        trainer = build_trainer(model, processor, data, recipe)
        if watched:
            trainer.add_callback(InspectCallback(processor, ROWS, folder / "norms", every=2, **options))
        trainer.train()
        return SimpleNamespace(weights=model.state_dict(), folder=folder / "norms", model=model, processor=processor)

    return run


@pytest.fixture(scope="module")
def watched(train):
    return train(True, controls=True)


def records(folder):
    return [json.loads(line) for line in (folder / "evolution.jsonl").read_text().splitlines()]


def test_it_measures_the_start_every_n_steps_and_the_end(watched):
    found = records(watched.folder)
    assert [record["step"] for record in found] == [0, 2, 3]
    assert all(record["report"]["controls"]["black"]["kl_mean"] >= 0 for record in found)
    assert found[0]["report"]["ratio"] == pytest.approx(1, abs=0.01)
    projector = [record["report"]["interface"]["projector"]["mean"] for record in found]
    assert len(set(projector)) == 3, "stage 1 trains the projector"
    assert (watched.folder / "evolution.png").stat().st_size > 10_000


def test_training_does_not_notice_it(train, watched):
    unwatched = train(False).weights
    assert all(torch.equal(unwatched[name], weight) for name, weight in watched.weights.items())


def test_each_module_keeps_its_mode(watched, tmp_path):
    model = watched.model.train()
    model.model.vision_tower.eval()
    before = [module.training for module in model.modules()]
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    callback = InspectCallback(watched.processor, ROWS, tmp_path)
    callback.on_train_begin(SimpleNamespace(), state, None, model=model)
    assert [module.training for module in model.modules()] == before


def test_a_resumed_training_goes_on_with_the_file(watched, tmp_path):
    (tmp_path / "evolution.jsonl").write_text((watched.folder / "evolution.jsonl").read_text())
    callback = InspectCallback(watched.processor, ROWS, tmp_path)
    state = SimpleNamespace(global_step=2, is_world_process_zero=True)
    callback.on_train_begin(SimpleNamespace(), state, None, model=watched.model)
    state.global_step = 5
    callback.on_train_end(SimpleNamespace(), state, None, model=watched.model)
    assert [record["step"] for record in records(tmp_path)] == [0, 2, 5]


def test_only_the_first_process_writes(watched, tmp_path):
    state = SimpleNamespace(global_step=0, is_world_process_zero=False)
    InspectCallback(watched.processor, ROWS, tmp_path).on_train_begin(SimpleNamespace(), state, None, model=None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("setting", ["fsdp", "deepspeed"])
def test_a_model_that_is_split_up_is_refused(watched, tmp_path, setting):
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    callback = InspectCallback(watched.processor, ROWS, tmp_path)
    with pytest.raises(NormalignError, match="normalign inspect"):
        callback.on_train_begin(SimpleNamespace(**{setting: "full_shard"}), state, None, model=watched.model)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "no row"),
        (ROWS, {"every": 0}, "at least 1: got 0"),
        ([*ROWS, {**ROWS[0], "images": []}], {}, "Row 2 .* no image"),
        ([{**ROWS[0], "messages": ROWS[0]["messages"][1:]}], {}, "Row 0 .* no text of the user"),
    ],
)
def test_what_cannot_be_looked_at_is_named(tmp_path, rows, options, message):
    with pytest.raises(NormalignError, match=message):
        InspectCallback(None, rows, tmp_path, **options)
