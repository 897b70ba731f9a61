"""Held-out rows are answered while a model trains: which ones, how they are scored and logged, and that nothing else changes."""

import json
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from normalign.configuration.errors import NormalignError
from normalign.evaluation.answers import extract_choice, extract_yes_no, vqa_match
from normalign.evaluation.generation import generate_answers, load_model
from normalign.evaluation.intervals import share_interval
from normalign.train_trl import RecipeError, check, eval_generation, load_recipe, train, training
from normalign.train_trl.callbacks import StageProgress
from normalign.train_trl.eval_generation import EvalGeneration, line_of
from normalign.train_trl.eval_rows import EvalRow, EvalRows, chosen, load_eval_rows
from normalign.train_trl.trainer import AlignedSFTTrainer


ROOT = Path(__file__).parents[2]
PREFIX = "eval_generation/"
SCENES = {"eval_data": {"rows": 30, "stage": 2}}
COLOURS = ("red", "green", "blue", "white")


def log_of(folder):
    return [json.loads(line) for line in (Path(folder) / "train_log.jsonl").read_text().splitlines()]


def evaluations(folder, without=("seconds",)):
    """By step, the figures of its evaluation."""
    found = {}
    for record in log_of(folder):
        figures = {key.removeprefix(PREFIX): value for key, value in record.items() if key.startswith(PREFIX)}
        if figures:
            found[record["step"]] = {key: value for key, value in figures.items() if key not in without}
    return found


def row(question, answer, image, **more):
    content = [{"type": "image"}, {"type": "text", "text": question}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": [image], **more}


def write(file, rows):
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(file)


@pytest.fixture(scope="module")
def lessons(tmp_path_factory):
    """A folder with four questions that a tiny model learns by heart, and held-out ones of which it knows some."""
    folder = tmp_path_factory.mktemp("lessons")
    for colour in COLOURS:
        Image.new("RGB", (16, 16), colour).save(folder / f"{colour}.png")
    taught = [
        row("Sky?", "yes", "red.png"),
        row("Cat?", "no", "green.png"),
        row("Which?", "B", "blue.png"),
        row("Fruit?", "an apple", "white.png"),
    ]
    write(folder / "train.jsonl", taught)
    held_out = [
        row("Sky?", "yes", "green.png", kind="sky"),
        row("Sky?", "no", "red.png", kind="sky"),
        row("Cat?", "No", "red.png"),
        row("Which?", "pear", "red.png", choices=["plum", "pear"]),
        row("Which?", "A", "green.png", choices=["plum", "pear"]),
        row("Fruit?", "Apple.", "white.png"),
        row("Fruit?", "A plum", "green.png"),
        row("Fruit?", "apple", "red.png"),
    ]
    write(folder / "held_out.jsonl", held_out)
    return folder


@pytest.fixture(scope="module")
def taught(lessons, recipe_file, tmp_path_factory):
    """The folder of a run that has learned the four answers, and evaluated before and after."""
    path = recipe_file(
        1,
        tmp_path_factory.mktemp("taught"),
        data={"name": "trl", "path": str(lessons / "train.jsonl")},
        eval_data={"name": "trl", "path": str(lessons / "held_out.jsonl")},
        eval_generation=8,
        eval_steps=70,
        logging_steps=10,
        max_steps=90,
        learning_rate=1e-2,
        tune={"language": "full"},
    )
    return train(path)


def test_the_logged_accuracy_is_that_of_the_answers_to_the_same_rows(taught, lessons):
    model, processor = load_model(taught)
    rows = [json.loads(line) for line in (lessons / "held_out.jsonl").read_text().splitlines()]
    pictures = [[Image.open(lessons / one["images"][0]).convert("RGB")] for one in rows]
    prompts = [[{"role": "user", "content": one["messages"][0]["content"]}] for one in rows]
    answers = generate_answers(model, processor, prompts, pictures, max_new_tokens=64)
    right = []
    for one, said in zip(rows, answers):
        expected = one["messages"][1]["content"]
        if "choices" in one:
            choice = extract_choice(said, {"A": "plum", "B": "pear"})
            kind, hit = "choice", choice == ("B" if expected == "pear" else "A")
        elif expected.lower() in ("yes", "no"):
            kind, hit = "yes_no", extract_yes_no(said) == expected.lower()
        else:
            kind, hit = "text", vqa_match(said, [expected])
        right.append((one.get("kind", kind), hit))
    # else nothing was compared
    assert 0 < sum(hit for _, hit in right) < len(rows)
    figures = evaluations(taught)
    assert list(figures) == [70, 90]
    for kind in (None, "sky", "yes_no", "choice", "text"):
        hits = [hit for other, hit in right if kind in (None, other)]
        share, prefix = share_interval(sum(hits), len(hits)), "" if kind is None else f"{kind}/"
        expected = {"accuracy": share.value, "low": share.low, "high": share.high, "n": len(hits), "failed": 0}
        assert {key: figures[90][prefix + key] for key in expected} == expected
    assert len(figures[90]) == 25
    noted = json.loads((taught / "eval_generation_rows.json").read_text())
    assert [one["row"] for one in noted] == list(range(8)) and noted[3]["answer"] == "B"
    assert noted[0] == {"row": 0, "source": str(lessons / "held_out.jsonl"), "kind": "sky", "answer": "yes"}


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True, "tune": {"language": "full", "vision": "full"}, "dataloader_workers": 1},
        {"tune": {"language": "lora"}, "lora": {"dropout": 0.3}, "precision": "bfloat16"},
        {"batching": "padding_free", "cache_vision_features": True, "group_by_length": True},
    ],
    ids=["checkpointing", "lora", "padding_free"],
)
def test_weights_and_losses_are_bit_for_bit_those_of_a_run_without(recipe_file, tmp_path, changes):
    plain = train(recipe_file(1, tmp_path / "plain", max_steps=3, **changes))
    path = recipe_file(1, tmp_path / "seen", max_steps=3, eval_generation=5, eval_steps=1, **SCENES, **changes)
    seen = train(path)
    [name] = [file.name for file in plain.glob("*model.safetensors")]
    one, two = load_file(plain / name), load_file(seen / name)
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert list(evaluations(seen)) == [1, 2, 3]
    for expected, record in zip(log_of(plain), log_of(seen), strict=True):
        for key in expected:
            assert key.endswith("_per_second") or record[key] == expected[key], key
        assert all(key.startswith(PREFIX) for key in record.keys() - expected.keys())


@pytest.fixture
def evaluation(composed):
    """What answers twelve built-in scenes, whose model and processor ship with the package."""
    model, processor = composed
    recipe = load_recipe("demo/stage2", {"model": "unused", "eval_generation": 12, **SCENES})
    return EvalGeneration(processor, load_eval_rows(recipe))


def test_measuring_leaves_modes_random_numbers_gradients_and_the_cache_as_they_were(composed, evaluation, monkeypatch):
    model, _ = composed
    model.model.language_model.train()
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    monkeypatch.setattr(model.generation_config, "use_cache", False)
    seen, generate = [], eval_generation.generate_answers

    def draws(*args, **kwargs):
        seen.append((torch.rand(1).item(), model.generation_config.use_cache, model.model.language_model.training))
        return generate(*args, **kwargs)

    monkeypatch.setattr(eval_generation, "generate_answers", draws)
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    figures = evaluation.measure(model)
    assert [module.training for module in model.modules()] == modes and any(modes) and not all(modes)
    assert torch.equal(torch.get_rng_state(), state) and model.generation_config.use_cache is False
    assert all(use_cache and not training for _, use_cache, training in seen) and seen
    assert torch.equal(parameter.grad, torch.ones_like(parameter)) and figures[f"{PREFIX}n"] == 12
    parameter.grad = None
    model.eval()


def test_keys_and_values_are_cached_while_answers_are_generated(composed, evaluation):
    model, lengths = composed[0], []
    handle = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
    )
    before, model.config.use_cache = getattr(model.config, "use_cache", None), False
    try:
        evaluation.measure(model)
    finally:
        handle.remove()
        model.config.use_cache = before
    assert lengths.count(1) > 0 and lengths[1] == 1


def test_a_row_that_raises_is_named_and_counted_as_failed(composed, evaluation, monkeypatch, caplog):
    wrong = evaluation.rows.rows[4]
    question = evaluation.rows.read([4])[0][0]
    generate = eval_generation.generate_answers

    def breaks(model, processor, conversations, images, **options):
        if question in conversations:
            raise RuntimeError("no picture")
        return generate(model, processor, conversations, images, **options)

    monkeypatch.setattr(eval_generation, "generate_answers", breaks)
    same = [row for row, (turns, _) in zip(evaluation.rows.rows, evaluation.rows.read(range(12))) if turns == question]
    figures = evaluation.measure(composed[0])
    assert figures[f"{PREFIX}failed"] == len(same) and figures[f"{PREFIX}n"] == 12 - len(same)
    assert figures[f"{PREFIX}{wrong.kind}/failed"] == len(same)
    assert f"{len(same)} of 12 rows could not be answered" in caplog.text
    assert all(f"{row.name}: RuntimeError: no picture" in caplog.text for row in same)


def test_without_any_answer_there_is_no_accuracy(composed, evaluation, monkeypatch):
    monkeypatch.setattr(eval_generation, "generate_answers", lambda *args, **kwargs: 1 / 0)
    figures = evaluation.measure(composed[0])
    assert figures[f"{PREFIX}accuracy"] is None and figures[f"{PREFIX}failed"] == 12 and figures[f"{PREFIX}n"] == 0
    shown = {key: value for key, value in figures.items() if value is not None}
    assert line_of(shown).startswith("eval_generation  none answered, 12 failed  colour none answered")
    assert line_of({"loss": 1.0}) is None


def test_rows_that_together_pass_the_models_limit_are_answered_one_by_one(composed, evaluation, monkeypatch):
    """A short question with a long answer and a long question with a short one each fit."""
    rows = [EvalRow(0, "x", "a", "yes", length=90), EvalRow(1, "x", "a", "no " * 30, length=60)]
    some = EvalGeneration(composed[1], EvalRows(rows, evaluation.rows.dataset.select([0, 1])), limit=100)
    asked = []

    def note(model, processor, conversations, images, *, batch_size, max_new_tokens):
        asked.append((len(conversations), max_new_tokens))
        return ["yes"] * len(conversations)

    monkeypatch.setattr(eval_generation, "generate_answers", note)
    assert some.measure(composed[0])[f"{PREFIX}n"] == 2
    short, long = (len(ids) + 1 for ids in composed[1].tokenizer([row.answer for row in rows])["input_ids"])
    assert 90 - short + long > 100
    assert asked == [(1, max(short, 100 - (90 - short))), (1, max(long, min(64, 100 - (60 - long))))]


# --- which rows


def test_the_choice_is_spread_over_kinds_and_always_the_same():
    kinds = ["a"] * 50 + ["b"] * 3 + ["c"] * 20
    places = chosen(kinds, 20)
    assert Counter(kinds[place] for place in places) == {"a": 9, "b": 3, "c": 8}
    assert places == sorted(set(places)) == chosen(kinds, 20) != chosen(kinds, 20, seed=1)
    assert chosen(kinds, 500) == list(range(73)) and len(chosen(kinds, 2)) == 2


def test_held_out_scenes_are_of_the_split_that_is_not_trained_on(recipe_file, tmp_path):
    rows = load_eval_rows(load_recipe(recipe_file(2, tmp_path), {"eval_generation": 12}))
    assert Counter(row.kind for row in rows.rows) == dict.fromkeys(
        ("digit", "colour", "count", "exists", "largest", "row"), 2
    )
    from normalign.train_trl.digit_scenes import digit_scene_rows

    test = digit_scene_rows(1000, split="test", text_only_share=0)
    for row, (turns, read) in zip(rows.rows, rows.read(range(12))):
        same = test[row.row]
        assert turns[-1]["content"][-1]["text"] == same["question"] and row.answer == same["answer"]
        assert len(read["images"]) == 1
        assert row.is_right(same["answer"]) and not row.is_right(same["answer"] + ".")


def test_the_last_answer_of_a_dialogue_is_asked_for_with_the_images_before_it(recipe_file, lessons, tmp_path):
    turns = [("user", "<image>One?"), ("assistant", "yes"), ("user", "<image>Two?"), ("assistant", "blue")]
    turns = [{"role": role, "content": text} for role, text in turns]
    later = {"role": "user", "content": "<image>Three?"}
    path = write(tmp_path / "dialogue.jsonl", [{"messages": [*turns, later], "images": ["a.png", "b.png", "c.png"]}])
    changes = {"eval_generation": 1, "eval_data.name": "trl", "eval_data.path": path}
    rows = load_eval_rows(load_recipe(recipe_file(1, tmp_path), changes))
    [(asked, read)] = rows.read([0])
    assert [turn["role"] for turn in asked] == ["user", "assistant", "user"] and rows.rows[0].answer == "blue"
    assert [Path(image["path"]).name for image in read["images"]] == ["a.png", "b.png"]


def test_more_rows_than_there_are_are_all_answered_and_the_run_says_so(recipe_file, lessons, tmp_path, caplog):
    changes = {"eval_data": {"name": "trl", "path": str(lessons / "held_out.jsonl")}, "eval_generation": 9}
    with caplog.at_level(logging.WARNING):
        rows = load_eval_rows(load_recipe(recipe_file(1, tmp_path, **changes)))
    assert len(rows.rows) == 8 and "asks for 9 held-out rows" in caplog.text and "has 8" in caplog.text


# --- what is refused


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"eval_generation": 0}, "eval_generation must be above 0, got 0"),
        ({"eval_generation": -3}, "eval_generation must be above 0, got -3"),
        ({"eval_generation": 2.5}, "'eval_generation' must be a whole number, got 2.5"),
        ({"eval_generation": 4, "eval_steps": 0}, "eval_steps must be above 0"),
        ({"eval_generation": 4, "eval_steps": 15, "logging_steps": 10}, "Set eval_steps to 20, or logging_steps"),
        ({"eval_steps": 5}, "eval_steps without eval_generation"),
        (
            {"eval_generation": 4, "data": {"name": "trl", "path": "a.jsonl"}},
            "needs held-out rows, and the recipe has none",
        ),
        ({"eval_generation": 4, "eval_data": {"name": "trl"}}, "eval_data.name: trl needs eval_data.path"),
        ({"eval_generation": 4, "eval_data": {"name": "trl", "path": "none.jsonl"}}, "none.jsonl"),
        ({"eval_generation": 4, "eval_data": {"streaming": True}}, "eval_data.streaming has no meaning"),
        ({"eval_generation": 4, "eval_data": {"weight": 2}}, "eval_data.weight has no meaning"),
        ({"eval_generations": 4}, "Unknown key 'eval_generations'. Did you mean 'eval_generation'"),
        ({"eval_generation": 4, "eval_data": {"pth": "x"}}, "Unknown key 'eval_data.pth'"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_a_model_is_loaded(
    recipe_file, tmp_path, monkeypatch, changes, message
):
    monkeypatch.setattr(training, "load_or_compose", lambda *args: pytest.fail("a model was loaded"))
    for act in (check, train):
        with pytest.raises(NormalignError) as caught:
            act(recipe_file(1, tmp_path, **changes))
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_rows_that_are_trained_on_are_not_held_out(recipe_file, lessons, tmp_path):
    same = {"name": "trl", "path": str(lessons / "train.jsonl")}
    with pytest.raises(RecipeError, match="which is trained on"):
        load_recipe(recipe_file(1, tmp_path, data={"rows": 2, **same}, eval_data=same, eval_generation=2))


def test_bad_held_out_rows_are_found_by_the_check_and_before_the_first_step(recipe_file, lessons, tmp_path, caplog):
    rows = [row("Sky?", "yes", str(lessons / "red.png")), row("Cat?", "no", "gone.png")]
    path = recipe_file(
        1,
        tmp_path,
        data={"rows": 4},
        eval_data={"name": "trl", "path": write(tmp_path / "held.jsonl", rows)},
        eval_generation=2,
    )
    report = check(path)
    assert report.rows == 6 and [(bad.kind, bad.index, bad.row) for bad in report.bad] == [("missing image", 5, 1)]
    with pytest.raises(NormalignError, match="The held-out rows of eval_generation: 1 of 2 rows"):
        train(path)
    out = train(path, {"on_bad_row": "skip"})
    assert "They are left out (on_bad_row: skip)." in caplog.text
    assert evaluations(out)[1]["n"] == 1


def test_rows_that_cannot_be_asked_are_named(recipe_file, lessons, tmp_path, caplog):
    good = row("Sky?", "yes", str(lessons / "red.png"))
    bad = [{"messages": good["messages"][:1]}, {**good, "choices": ["a", "b"]}, {**good, "choices": "ab"}, {}]
    changes = {
        "eval_data": {"name": "trl", "path": write(tmp_path / "held.jsonl", [good, *bad])},
        "eval_generation": 5,
    }
    recipe = recipe_file(1, tmp_path, **changes)
    with pytest.raises(NormalignError, match=r"4 of 5 held-out rows cannot be asked. The first: Row 1 of .*no answer"):
        load_eval_rows(load_recipe(recipe))
    assert len(load_eval_rows(load_recipe(recipe, {"on_bad_row": "skip"})).rows) == 1
    assert "4 held-out rows are left out" in caplog.text


def test_shared_weights_are_refused_before_a_model_is_loaded(recipe_file, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "load_or_compose", lambda *args: pytest.fail("a model was loaded"))
    path = recipe_file(1, tmp_path, eval_generation=4)
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        with pytest.raises(NormalignError, match="FSDP2 and ZeRO-3 give each a share"):
            train(path)
    monkeypatch.setattr(eval_generation, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(NormalignError, match="FSDP2 and ZeRO-3 give each a share"):
        train(path)


# --- going on, and several processes


def test_a_run_that_goes_on_evaluates_as_one_that_was_not_interrupted(recipe_file, tmp_path, monkeypatch):
    changes = {"max_steps": 4, "save_steps": 2, "eval_generation": 6, "eval_steps": 2, **SCENES}
    whole = train(recipe_file(1, tmp_path / "whole", **changes))
    path = recipe_file(1, tmp_path / "broken", **changes)
    step = AlignedSFTTrainer.training_step

    def interrupted(self, *args, **kwargs):
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(AlignedSFTTrainer, "training_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(path)
    # when it is evaluated does not change what is learned, and may differ
    out = train(path, {"eval_steps": 1})
    assert list(evaluations(whole)) == [2, 4] and list(evaluations(out)) == [2, 3, 4]
    assert evaluations(whole).items() <= evaluations(out).items()
    assert [record["step"] for record in log_of(out)] == [1, 2, 3, 4]
    one, two = (load_file(folder / "model.safetensors") for folder in (whole, out))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_two_processes_share_the_rows_and_log_what_one_does(taught, lessons, recipe_file, tmp_path):
    changes = {
        "data": {"name": "trl", "path": str(lessons / "train.jsonl")},
        "eval_data": {"name": "trl", "path": str(lessons / "held_out.jsonl")},
        "eval_generation": 7,
        "eval_steps": 1,
        "max_steps": 2,
        "learning_rate": 1e-6,
        "model": str(taught),
    }
    one = train(recipe_file(1, tmp_path / "one", **changes))
    settings = ROOT / "configuration" / "accelerate" / "cpu.yaml"
    path = recipe_file(1, tmp_path / "two", **changes)
    command = ["accelerate.commands.launch", "--config_file", settings, "-m", "normalign.train_trl", path]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)], capture_output=True, text=True, timeout=180, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = evaluations(tmp_path / "two" / "stage1")
    assert figures == evaluations(one) and list(figures) == [1, 2]
    assert figures[2]["n"] == 7 and 0 < figures[2]["accuracy"] < 1


def test_the_console_has_one_line_an_evaluation():
    progress, lines = StageProgress("stage2"), []
    progress.training_bar = type("Bar", (), {"write": lambda self, text: lines.append(text)})()
    figures = {"loss": 0.5, PREFIX + "accuracy": 0.5, PREFIX + "low": 0.25, PREFIX + "high": 0.75, PREFIX + "n": 8}
    figures |= {
        PREFIX + "failed": 1,
        PREFIX + "row/accuracy": 0.5,
        PREFIX + "row/low": 0.25,
        PREFIX + "row/high": 0.75,
    }
    figures |= {PREFIX + "row/n": 8, PREFIX + "row/failed": 1, PREFIX + "seconds": 1.0}
    state = type("State", (), {"global_step": 40, "is_world_process_zero": True})()
    progress.on_log(None, state, None, logs=figures)
    share = "50.0% (25.0% to 75.0%) of 8, 1 failed"
    assert lines[1:] == [f"stage2  step 40  eval_generation  {share}  row {share}"]
