"""Both stages with TRL's real trainer on a tiny model: what moves, what the log says, what is saved."""

import json
import logging
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from normalign.configuration.errors import NormalignError
from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign.train_trl import RecipeError, check, load_recipe, train
from normalign.train_trl.callbacks import InterfaceProbe, gwc_effect
from normalign.train_trl.digit_scenes import digit_scenes_dataset
from normalign.train_trl.parts import PARTS, freeze, part_of, training_table
from normalign.train_trl.training import (
    build_trainer,
    check_processor,
    load_data,
    load_or_compose,
    training_arguments,
)


LOG_KEYS = {
    "step",
    "loss",
    "aligned_norm/gain_abs_mean",
    "aligned_norm/gain_l2",
    "aligned_norm/mu",
    "norm/visual_in",
    "norm/visual_out",
    "norm/text",
    "norm/ratio",
    "clip_factor",
    *(f"grad_norm/{part}" for part in PARTS),
    *(f"update/{part}" for part in PARTS),
}
FOLDER = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "aligned_norm.py",
    "configuration_normalign_llava.py",
    "modeling_normalign_llava.py",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}


def log_of(folder):
    return [json.loads(line) for line in (Path(folder) / "train_log.jsonl").read_text().splitlines()]


def hooks_on(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def moved_parts(before, after):
    """For each part the share of its tensors that are no longer the same."""
    assert before.keys() == after.keys()
    moved = {part: [] for part in PARTS}
    for name in before:
        moved[part_of(name)].append(not torch.equal(before[name], after[name]))
    return {part: sum(values) / len(values) if values else None for part, values in moved.items()}


@pytest.fixture(scope="session")
def runs(recipe_file, tmp_path_factory):
    """Both stages, run once: the folders of each, and the weights at the start."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = load_recipe(recipe_file(1, folder))
    model, _ = load_or_compose(recipe, load_data(recipe))
    model.save_pretrained(folder / "start")
    first = train(recipe_file(1, folder, save_steps=1))
    second = train(recipe_file(2, folder, data={"rows": 10, "stage": 2}))
    return SimpleNamespace(start=folder / "start", stage1=first, stage2=second, parent=folder)


@pytest.fixture
def composed(recipe_file, tmp_path):
    """A function that composes a model by a changed stage 1 recipe: recipe, model, processor."""

    def make(overrides=None, **changes):
        recipe = load_recipe(recipe_file(1, tmp_path, **changes), overrides)
        model, processor = load_or_compose(recipe, load_data(recipe))
        freeze(model, recipe.tune)
        return recipe, model, processor

    return make


def weights_of(folder):
    return load_file(folder / "model.safetensors")


# --- what is trained


def test_stage_1_moves_every_weight_of_projector_and_norm_and_no_other(runs):
    moved = moved_parts(weights_of(runs.start), weights_of(runs.stage1))
    assert moved == {"vision": 0, "projector": 1, "norm": 1, "language": 0}


def test_stage_2_moves_every_weight_but_the_encoders(runs):
    moved = moved_parts(weights_of(runs.stage1), weights_of(runs.stage2))
    assert moved == {"vision": 0, "projector": 1, "norm": 1, "language": 1}


def test_stage_2_goes_on_with_the_gain_of_stage_1(runs, recipe_file):
    recipe = load_recipe(recipe_file(2, runs.parent))
    model, _ = load_or_compose(recipe, load_data(recipe))
    gain = weights_of(runs.stage1)["model.multi_modal_projector.aligned_norm.weight"]
    assert torch.equal(model.get_aligned_norm().weight, gain)
    assert gain.unique().numel() > 1


def test_a_model_keeps_the_arm_it_was_composed_with(runs, recipe_file):
    recipe = load_recipe(recipe_file(2, runs.parent, arm="aligned"))
    with pytest.raises(NormalignError, match="arm 'aligned' means aligned_norm.gwc: False"):
        load_or_compose(recipe, load_data(recipe))


def test_a_frozen_norm_stays_while_the_projector_learns(recipe_file, runs, tmp_path):
    out = train(recipe_file(1, tmp_path, tune={"norm": "frozen"}), {"max_steps": 1})
    moved = moved_parts(weights_of(runs.start), weights_of(out))
    assert moved == {"vision": 0, "projector": 1, "norm": 0, "language": 0}
    record = log_of(out)[0]
    assert record["update/norm"] == record["grad_norm/norm"] == 0 < record["update/projector"]


def test_frozen_parts_are_in_eval_mode_and_build_no_graph(composed):
    recipe, model, processor = composed(max_steps=1)
    seen = []
    model.model.vision_tower.register_forward_hook(
        lambda module, args, output: seen.append((module.training, output.last_hidden_state.requires_grad))
    )
    model.model.language_model.register_forward_hook(lambda module, args, output: seen.append((module.training, None)))
    trainer = build_trainer(model, processor, load_data(recipe), recipe)
    trainer.train()
    assert seen == [(False, False), (False, None)]
    assert model.training and model.model.multi_modal_projector.aligned_norm.training


def test_nothing_to_train_is_refused(composed):
    with pytest.raises(NormalignError, match="nothing to train"):
        composed(tune={"projector": "frozen", "norm": "frozen"})


def test_a_norm_that_is_fixed_by_its_config_cannot_be_tuned(composed):
    with pytest.raises(NormalignError, match="aligned_norm.trainable is false"):
        composed(overrides={"compose.aligned_norm.trainable": False})


def test_gain_and_bias_are_never_decayed(composed):
    recipe, model, processor = composed(weight_decay=0.1, tune={"language": "full"})
    trainer = build_trainer(model, processor, load_data(recipe), recipe)
    decayed = trainer.get_decay_parameter_names(model)
    assert not [name for name in decayed if "aligned_norm" in name]
    assert "model.multi_modal_projector.linear_1.weight" in decayed
    trainer.create_optimizer()
    decay_of = {id(p): group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    norm = model.get_aligned_norm()
    assert decay_of[id(norm.weight)] == decay_of[id(norm.bias)] == 0
    assert decay_of[id(model.model.multi_modal_projector.linear_1.weight)] == 0.1


def test_the_table_names_parts_counts_and_the_state_of_the_norm(composed):
    from rich.console import Console

    recipe, model, _ = composed()
    console = Console(width=140)
    with console.capture() as capture:
        console.print(training_table(model, recipe.learning_rate, "stage1", {"vision": "sdpa", "language": "eager"}))
    lines = [line.replace("│", "").split() for line in capture.get().splitlines()]
    norm, T = model.get_aligned_norm(), model.config.aligned_norm["target_norm"]
    assert ["norm", "trained", "64", "0.001"] in lines
    assert ["language", "frozen", f"{sum(p.numel() for p in model.model.language_model.parameters()):,}", "-"] in lines
    assert f"T {T:.4g}, gain {T / math.sqrt(32):.4g}, GWC on, mu {norm.mu.item():.4g}" in capture.get()
    assert "attention: vision sdpa, language eager" in capture.get()


# --- the log


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_every_logged_step_has_the_keys_that_programs_read(runs, stage):
    records = log_of(getattr(runs, stage))
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    for record in records:
        assert record.keys() >= LOG_KEYS and record["stage"] == stage
        assert all(record[key] is not None for key in LOG_KEYS)


def test_the_log_ends_with_the_gain_that_is_saved(runs):
    for folder in (runs.stage1, runs.stage2):
        gain = weights_of(folder)["model.multi_modal_projector.aligned_norm.weight"]
        last = log_of(folder)[-1]
        assert last["aligned_norm/gain_abs_mean"] == last["aligned_norm/mu"] == gain.abs().mean().item()
        assert last["aligned_norm/gain_l2"] == gain.norm().item()


def test_only_trained_parts_have_gradients_and_updates(runs):
    for folder, trained in ((runs.stage1, {"projector", "norm"}), (runs.stage2, {"projector", "norm", "language"})):
        for record in log_of(folder):
            assert {part for part in PARTS if record[f"update/{part}"] > 0} == trained
            assert {part for part in PARTS if record[f"grad_norm/{part}"] > 0} == trained


def test_the_relative_update_is_that_of_the_saved_weights(runs):
    before, after = weights_of(runs.stage1 / "checkpoint-1"), weights_of(runs.stage1)
    names = [name for name in before if part_of(name) == "projector"]
    moved = math.hypot(*((after[name] - before[name]).norm().item() for name in names))
    size = math.hypot(*(before[name].norm().item() for name in names))
    assert log_of(runs.stage1)[1]["update/projector"] == pytest.approx(moved / size, rel=1e-4)


def test_gradient_norms_are_those_before_clipping(recipe_file, runs, tmp_path):
    free = log_of(train(recipe_file(1, tmp_path / "free", max_grad_norm=0, max_steps=1)))[0]
    clipped = log_of(runs.stage1)[0]
    assert free["clip_factor"] == 1 > clipped["clip_factor"]
    for record in (free, clipped):
        total = math.hypot(*(record[f"grad_norm/{part}"] for part in PARTS))
        assert total == pytest.approx(record["grad_norm"], rel=1e-5)
    for part in PARTS:
        assert clipped[f"grad_norm/{part}"] == pytest.approx(free[f"grad_norm/{part}"], rel=1e-4)
    assert clipped["clip_factor"] * clipped["grad_norm"] == pytest.approx(1, rel=1e-5)


def test_the_log_shows_visual_tokens_at_the_norm_of_text(runs):
    first = log_of(runs.stage1)[0]
    T = json.loads((runs.start / "config.json").read_text())["aligned_norm"]["target_norm"]
    assert first["norm/visual_out"] == pytest.approx(T, rel=0.02)
    assert first["norm/ratio"] == pytest.approx(first["norm/visual_out"] / first["norm/text"])


@pytest.mark.parametrize(("arm", "tolerance"), [("rms", 0.02), ("scale", 0.1), ("default", 0.02)])
def test_every_arm_starts_where_it_says(recipe_file, tmp_path, arm, tolerance):
    out = train(recipe_file(1, tmp_path, arm=arm, max_steps=1))
    settings = json.loads((out / "config.json").read_text())["aligned_norm"]
    start = math.sqrt(32) if arm == "default" else settings["target_norm"]
    record = log_of(out)[0]
    assert record["norm/visual_out"] == pytest.approx(start, rel=tolerance)
    assert record["aligned_norm/gwc_fired"] is (None if arm == "default" else True)
    assert record["update/norm"] > 0


def test_without_a_norm_its_keys_are_null(recipe_file, tmp_path):
    out = train(recipe_file(1, tmp_path, arm="none", max_steps=1))
    record = log_of(out)[0]
    for key in ("gain_abs_mean", "gain_l2", "mu", "gwc_fired"):
        assert record[f"aligned_norm/{key}"] is None
    assert record["update/norm"] == record["grad_norm/norm"] == 0 < record["update/projector"]
    assert record["norm/visual_in"] == record["norm/visual_out"] > 0


def test_steps_between_logged_ones_are_not_measured_and_the_last_is_logged(recipe_file, tmp_path):
    out = train(recipe_file(1, tmp_path, logging_steps=2, max_steps=3))
    assert [record["step"] for record in log_of(out)] == [2, 3]


def test_the_probe_measures_what_enters_the_language_model_and_leaves_no_hook(composed):
    recipe, model, processor = composed()
    trainer = build_trainer(model, processor, load_data(recipe), recipe)
    batch = trainer.data_collator([load_data(recipe)[0], digit_scenes_dataset(1, text_only_share=1.0)[0]])
    with torch.no_grad():
        model(**batch)  # transformers puts hooks of its own on a model at its first call
    hooks = hooks_on(model)
    with torch.no_grad(), InterfaceProbe(model) as probe:
        model(**batch)
        assert hooks_on(model) == hooks + 3
        visual = torch.stack(list(model.get_image_features(pixel_values=batch["pixel_values"]).pooler_output))
    text = (batch["attention_mask"] == 1) & (batch["input_ids"] != model.config.image_token_id)
    embeddings = model.get_input_embeddings()(batch["input_ids"][text])
    assert probe.visual_out.value() == pytest.approx(visual.norm(dim=-1).mean().item(), rel=1e-5)
    assert probe.text.value() == pytest.approx(embeddings.norm(dim=-1).mean().item(), rel=1e-5)
    assert probe.gwc_runs == 0
    assert hooks_on(model) == hooks


def test_gwc_is_seen_to_act(runs):
    assert [record["aligned_norm/gwc_fired"] for record in log_of(runs.stage1)] == [True, True]


def test_a_gwc_that_is_bypassed_is_warned_of(composed, caplog):
    recipe, model, processor = composed(max_steps=2)
    norm = model.get_aligned_norm()
    norm.forward = lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    trainer = build_trainer(model, processor, load_data(recipe), recipe)
    with caplog.at_level(logging.WARNING, logger="normalign.train_trl.callbacks"):
        trainer.train()
    assert [record["aligned_norm/gwc_fired"] for record in log_of(recipe.output_dir)] == [False, False]
    assert len([message for message in caplog.messages if "GWC is on" in message]) == 1


def test_a_loss_that_is_not_finite_stops_the_run(composed):
    recipe, model, processor = composed(max_steps=2)
    with torch.no_grad():
        model.model.multi_modal_projector.linear_1.weight.fill_(float("nan"))
    trainer = build_trainer(model, processor, load_data(recipe), recipe)
    with pytest.raises(
        NormalignError, match="The loss became nan in step 1, because the weight .*linear_1.weight is not"
    ):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("batching", ["padded", "padding_free"])
def test_a_loss_that_is_not_finite_names_the_rows_of_its_batch(composed, batching):
    """FAULTS R70."""
    recipe, model, processor = composed(batching=batching, gradient_accumulation=2)
    trainer = build_trainer(model, processor, load_data(recipe), recipe)
    order = [batch["rows"] for batch in trainer.get_train_dataloader()]
    seen = []

    def spoil(module, args, output):
        seen.append(True)
        return output * float("inf") if len(seen) > 3 else output

    model.model.language_model.layers[1].mlp.down_proj.register_forward_hook(spoil)
    with pytest.raises(NormalignError) as error:
        trainer.train()
    # the fourth batch is the second half of the second step
    assert "The loss became nan in step 2: model.language_model.layers.1.mlp.down_proj is" in str(error.value)
    assert f"In the batch: {', '.join(order[3])}." in str(error.value)
    assert order[3][0].endswith(" of digit_scenes") and order[3] != order[2]


# --- by others, and again


def test_trl_trains_a_saved_folder_by_its_path(runs, tmp_path):
    """R10: with the model's own code."""
    from transformers import AutoProcessor
    from trl import SFTConfig, SFTTrainer

    assert json.loads((runs.stage1 / "config.json").read_text())["architectures"] == [
        "NormAlignLlavaForConditionalGeneration"
    ]
    settings = SFTConfig(
        output_dir=str(tmp_path),
        model_init_kwargs={"trust_remote_code": True},
        max_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        assistant_only_loss=True,
        max_length=None,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    )
    processor = AutoProcessor.from_pretrained(runs.stage1)
    data = digit_scenes_dataset(2)
    trainer = SFTTrainer(str(runs.stage1), settings, train_dataset=data, processing_class=processor)
    assert type(trainer.model).__name__ == "NormAlignLlavaForConditionalGeneration"
    trainer.train()
    trained, before = dict(trainer.model.named_parameters()), weights_of(runs.stage1)
    for name in ("multi_modal_projector.linear_1.weight", "multi_modal_projector.aligned_norm.weight"):
        assert not torch.equal(trained[f"model.{name}"], before[f"model.{name}"])


def test_an_exported_model_is_trained_further_as_it_is(runs, recipe_file, tmp_path):
    """R95: no config is edited by hand."""
    from normalign.hub_upload import export

    exported = export(runs.stage1, tmp_path / "export")
    out = train(recipe_file(1, tmp_path, model=str(exported)), {"max_steps": 1})
    folders = (runs.stage1, exported, out)
    first, before, after = (
        dict(NormAlignLlavaForConditionalGeneration.from_pretrained(folder).named_parameters()) for folder in folders
    )
    assert set(moved_parts(first, before).values()) == {0}
    assert moved_parts(before, after) == {"vision": 0, "projector": 1, "norm": 1, "language": 0}


def test_an_evaluation_builds_no_logits(composed):
    """R11: it takes no more memory than a training step, and gives the loss alone."""
    recipe, model, processor = composed()
    trainer = build_trainer(model, processor, load_data(recipe), recipe)
    sizes, head = [], model.lm_head
    head.register_forward_hook(lambda module, args, output: sizes.append(output.shape))
    loss = trainer.evaluate(load_data(recipe))["eval_loss"]
    batch = trainer.data_collator(list(load_data(recipe)))
    rows = batch.pop("rows")
    assert not sizes and trainer.args.per_device_eval_batch_size == trainer.args.per_device_train_batch_size
    losses = trainer.prediction_step(model, {**batch, "rows": rows}, trainer.args.prediction_loss_only)
    assert losses[1:] == (None, None) and math.isfinite(loss)
    with torch.no_grad():
        assert losses[0].item() == pytest.approx(model(**batch).loss.item(), rel=1e-5)


# --- where it is written


def files_of(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def earlier(runs, tmp_path):
    """A copy of a finished run, with its checkpoints, where a recipe of `recipe_file(1, tmp_path)` writes."""
    return shutil.copytree(runs.stage1, tmp_path / "stage1")


def test_a_folder_that_is_not_empty_is_refused_before_anything_is_loaded(earlier, recipe_file, tmp_path, monkeypatch):
    before = files_of(earlier)
    monkeypatch.setattr("normalign.train_trl.training.load_data", lambda recipe: pytest.fail("data were loaded"))
    with pytest.raises(NormalignError, match="stage1 is not empty.*--overwrite true"):
        train(recipe_file(1, tmp_path))
    assert files_of(earlier) == before


def test_an_earlier_run_is_replaced_when_told_and_its_checkpoints_do_not_stay(earlier, recipe_file, tmp_path):
    assert (earlier / "checkpoint-2").is_dir()
    out = train(recipe_file(1, tmp_path, max_steps=1, save_steps=1), {"overwrite": "true"})
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-1"]
    assert [record["step"] for record in log_of(out)] == [1]


def test_an_interrupted_rerun_shows_no_old_model_beside_its_new_log(earlier, recipe_file, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("normalign.train_trl.training.save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(recipe_file(1, tmp_path, max_steps=1, overwrite=True))
    assert len(log_of(earlier)) == 1
    assert not list(earlier.rglob("*.safetensors"))


def test_an_earlier_run_stays_when_the_new_one_cannot_start(earlier, recipe_file, tmp_path):
    before = files_of(earlier)
    with pytest.raises(NormalignError, match="no-such-model"):
        train(recipe_file(1, tmp_path, model="no-such-model", overwrite=True))
    assert files_of(earlier) == before


@pytest.mark.parametrize("name", ["thesis.tex", "notes/thesis.tex", "my.jsonl"])
def test_a_folder_with_more_than_a_run_writes_is_not_replaced(earlier, recipe_file, tmp_path, name):
    (earlier / name).parent.mkdir(exist_ok=True)
    (earlier / name).write_text("my only copy")
    before = files_of(earlier)
    with pytest.raises(NormalignError, match=f"holds {Path(name).parts[0]}, which training does not write"):
        train(recipe_file(1, tmp_path, overwrite=True))
    assert files_of(earlier) == before


def test_a_folder_that_is_no_run_is_not_replaced(earlier, recipe_file, tmp_path):
    (earlier / "train_log.jsonl").unlink()
    before = files_of(earlier)
    with pytest.raises(NormalignError, match="has no train_log.jsonl, so it is not the folder of an earlier run"):
        train(recipe_file(1, tmp_path, overwrite=True))
    assert files_of(earlier) == before


def test_a_run_is_never_written_over_the_model_it_starts_from(earlier, recipe_file, backbones, tmp_path):
    before = files_of(earlier)
    for start in ({"model": str(earlier)}, {"model": str(earlier / "checkpoint-1")}):
        with pytest.raises(NormalignError, match="holds the model that the run starts from"):
            train(recipe_file(1, tmp_path, overwrite=True, **start))
    assert files_of(earlier) == before
    with pytest.raises(NormalignError, match="holds the model that the run starts from"):
        train(recipe_file(1, tmp_path), {"output_dir": str(backbones / "text"), "overwrite": True})
    with pytest.raises(NormalignError, match="holds the model that the run starts from"):
        train(
            recipe_file(2, tmp_path, from_stage="stage2"),
            {"output_dir": str(shutil.copytree(earlier, tmp_path / "stage2"))},
        )


# --- what is wrong with a run


def test_weights_that_are_not_finite_at_the_end_are_not_saved(recipe_file, tmp_path):
    """The last step's update comes after the last loss that could be looked at."""
    with pytest.raises(
        NormalignError, match=r"weight model\.multi_modal_projector\..* not finite.*Lower learning_rate"
    ):
        train(recipe_file(1, tmp_path, max_steps=1, weight_decay=1e300))
    assert {path.name for path in (tmp_path / "stage1").iterdir()} == {"train_log.jsonl", "recipe.yaml"}


def test_an_unknown_optimizer_is_told_the_nearest_and_a_broken_norm_its_key(recipe_file, tmp_path, monkeypatch):
    path = recipe_file(1, tmp_path, optimizer="adamw")
    with pytest.raises(
        RecipeError, match=f"{path}: There is no optimizer 'adamw'. Near it are .*adamw_torch"
    ) as caught:
        train(path)
    assert len(str(caught.value)) - len(str(path)) < 250
    monkeypatch.setattr("normalign.train_trl.training.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="The optimizer 'paged_adamw_8bit' needs the extra 'quant'"):
        train(path, {"optimizer": "paged_adamw_8bit"})
    path = recipe_file(1, tmp_path)
    with pytest.raises(RecipeError, match=f"{path}: compose: aligned_norm.kind must be one of layernorm"):
        train(path, {"compose.aligned_norm.kind": "batchnorm"})
    with pytest.raises(RecipeError, match="Unknown key 'gain_int' in aligned_norm. Did you mean 'gain_init'?"):
        check(path, {"compose.aligned_norm.gain_int": 1})


def test_a_model_whose_file_is_cut_off_or_whose_config_is_none_is_named(runs, recipe_file, tmp_path):
    model = shutil.copytree(runs.stage2, tmp_path / "model")
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(NormalignError, match="model.safetensors is truncated or corrupt. Copy or download it again"):
        train(recipe_file(1, tmp_path, model=str(model)))
    (model / "config.json").write_text("[]")
    with pytest.raises(NormalignError, match="config.json holds a list"):
        train(recipe_file(1, tmp_path, model=str(model)))


# --- the data


def test_a_batch_of_image_rows_and_text_rows_teaches_answers_alone(composed):
    recipe, model, processor = composed()
    trainer = build_trainer(model, processor, load_data(recipe), recipe)
    rows = [digit_scenes_dataset(1, text_only_share=share, seed=3)[0] for share in (0.0, 1.0)]
    batch = trainer.data_collator(rows)
    assert batch["pixel_values"].shape[0] == 1
    assert [int((ids == processor.image_token_id).sum()) for ids in batch["input_ids"]] == [4, 0]
    for row, labels in zip(rows, batch["labels"]):
        taught = labels[labels != -100]
        assert processor.image_token_id not in taught
        assert processor.tokenizer.decode(taught) == row["answer"] + "<|im_end|>"


def test_a_batch_without_images_trains_the_language_model_alone(composed):
    """R95: no picture is put in its place, and the encoder does not run."""
    recipe, model, processor = composed(tune={"language": "full"}, max_steps=1)
    runs = []
    model.model.vision_tower.register_forward_hook(lambda *args: runs.append(args))
    build_trainer(model, processor, digit_scenes_dataset(4, text_only_share=1.0), recipe).train()
    assert not runs
    record = log_of(recipe.output_dir)[0]
    assert record["norm/visual_out"] is record["norm/ratio"] is None
    assert record["grad_norm/projector"] == record["update/projector"] == 0 < record["update/language"]


def test_a_batch_without_images_changes_nothing_where_the_language_model_is_frozen(composed):
    recipe, model, processor = composed(max_steps=1)
    build_trainer(model, processor, digit_scenes_dataset(4, text_only_share=1.0), recipe).train()
    record = log_of(recipe.output_dir)[0]
    assert all(record[f"update/{part}"] == 0 for part in PARTS)
    assert math.isfinite(record["loss"])


def test_a_bare_tokenizer_is_refused(composed):
    """R09."""
    recipe, model, processor = composed()
    with pytest.raises(NormalignError, match="bare .* with which TRL would train on text alone"):
        build_trainer(model, processor.tokenizer, load_data(recipe), recipe)


def test_a_folder_without_a_processor_is_refused(runs, recipe_file, tmp_path):
    shutil.copytree(
        runs.stage1, tmp_path / "model", ignore=shutil.ignore_patterns("checkpoint-*", "processor_config*")
    )
    with pytest.raises(NormalignError, match="The processor of the model .* could not be loaded"):
        train(recipe_file(1, tmp_path, model=str(tmp_path / "model")))


def test_a_template_without_generation_markers_is_refused(composed):
    _, _, processor = composed()
    processor.chat_template = processor.chat_template.replace("generation %}", "set x = 1 %}")
    with pytest.raises(NormalignError, match="does not mark the assistant's words"):
        check_processor(processor)


def test_a_model_of_another_family_is_refused(backbones, recipe_file, tmp_path):
    with pytest.raises(NormalignError, match="a model of type 'llama'; training needs a normalign_llava model"):
        train(recipe_file(1, tmp_path, model=str(backbones / "text")))


def test_a_global_batch_is_split_over_processes_and_accumulation(recipe_file, tmp_path, monkeypatch):
    recipe = load_recipe(recipe_file(1, tmp_path, batch_size=12, gradient_accumulation=2))
    assert training_arguments(recipe).per_device_train_batch_size == 6
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(NormalignError, match="Choose a multiple of 10"):
        training_arguments(recipe)


# --- what is saved


def test_checkpoints_and_the_finished_folder_are_complete(runs):
    for folder in (runs.stage1, runs.stage1 / "checkpoint-1", runs.stage1 / "checkpoint-2", runs.stage2):
        names = {path.name for path in folder.iterdir()}
        assert names >= FOLDER
        assert "README.md" not in names
    assert not (runs.stage1 / "training_args.bin").exists()
    assert "{% generation %}" in (runs.stage2 / "chat_template.jinja").read_text()
    for name, weight in weights_of(runs.stage1).items():
        assert torch.equal(weight, weights_of(runs.stage1 / "checkpoint-2")[name])


def test_a_checkpoint_loads_where_normalign_is_not_installed(runs):
    code = """
import sys, json
sys.modules["normalign"] = None
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor
folder = sys.argv[1]
model, info = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
inputs = processor.apply_chat_template(
    [{"role": "user", "content": [{"type": "text", "text": "2 + 2"}]}],
    tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True,
)
with torch.no_grad():
    logits = model(**inputs).logits
print(json.dumps({"class": type(model).__module__, "missing": sorted(info["missing_keys"]),
                  "logits": logits.double().sum().item(), "ids": inputs["input_ids"].tolist()}))
"""
    folder = runs.stage1 / "checkpoint-1"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["class"].startswith("transformers_modules.") and answer["missing"] == []

    from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration

    with torch.no_grad():
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
        assert model(torch.tensor(answer["ids"])).logits.double().sum().item() == answer["logits"]


# --- figures by part


def test_each_part_has_its_own_learning_rate_and_the_norm_is_never_decayed(composed, runs):
    """FAULTS R27, R86."""
    recipe, model, processor = composed(
        {"tune.vision": "full", "tune.language": "full"},
        optimizer="sgd",
        learning_rate={"all": 1e-2, "vision": 0.0, "language": 1e-3},
        weight_decay={"all": 0.1, "language": 0.5},
    )
    freeze(model, recipe.tune)
    trainer = build_trainer(model, processor, load_data(recipe), recipe)
    trainer.create_optimizer()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        (part_of(names[id(p)]), group["lr"], group["weight_decay"])
        for group in trainer.optimizer.param_groups
        for p in group["params"]
    }
    assert found == {
        ("vision", 0.0, 0.1),
        ("vision", 0.0, 0.0),
        ("projector", 1e-2, 0.1),
        ("projector", 1e-2, 0.0),
        ("norm", 1e-2, 0.0),
        ("language", 1e-3, 0.5),
        ("language", 1e-3, 0.0),
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == len(trained)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trainer.train()
    moved = {part_of(name) for name, parameter in model.named_parameters() if not parameter.equal(before[name])}
    assert moved == {"projector", "norm", "language"}


# --- what GWC did, and where figures go


def test_the_log_says_what_clipping_would_have_been_without_gwc(recipe_file, tmp_path):
    logs = {}
    for arm in ("aligned", "aligned_gwc"):
        changes = {"arm": arm, "tune": {"vision": "full", "language": "full"}, "max_steps": 1, "max_grad_norm": 0.3}
        folder = train(recipe_file(1, tmp_path, output_dir=str(tmp_path / arm), **changes))
        logs[arm] = log_of(folder)[0]
    plain, gwc = logs["aligned"], logs["aligned_gwc"]
    assert plain["clip_factor_without_gwc"] is None
    assert gwc["clip_factor_without_gwc"] == pytest.approx(plain["clip_factor"], rel=1e-4)
    assert gwc["clip_factor"] < 0.9 * plain["clip_factor"]


@pytest.mark.parametrize(
    ("optimizer", "steps", "expected"),
    [
        ("sgd", [(0.1, 0.5, 0.9)], "by 10. sgd takes that in full"),
        ("adamw_torch", [(0.02, 0.1, 0.5), (0.02, 0.3, 0.7)], "0.2 with it and would have been 0.6 without"),
        ("adamw_torch", [(0.02, 1.0, 1.0)], "so GWC hardly acted in this run"),
    ],
)
def test_a_line_says_through_what_gwc_acted(optimizer, steps, expected):
    assert expected in gwc_effect(steps, optimizer)


def test_figures_go_to_tensorboard_too(recipe_file, tmp_path, caplog):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = train(recipe_file(1, tmp_path, report_to=["tensorboard"]))
    [events] = folder.rglob("events.out.*")
    accumulator = EventAccumulator(str(events.parent))
    accumulator.Reload()
    tags = set(accumulator.Tags()["scalars"])
    assert {"train/norm/ratio", "train/update/projector", "train/images_per_second", "train/loss"} <= tags
    record = log_of(folder)[-1]
    assert accumulator.Scalars("train/norm/ratio")[-1].value == pytest.approx(record["norm/ratio"])
    assert record["images_per_second"] > 0 and 0 <= record["padding_share"] < 1
    assert "GWC multiplied the gradient" in caplog.text and "adamw_torch hardly notices" in caplog.text
