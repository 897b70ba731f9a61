"""Recipes: every key known and typed, overrides on top, arms as shorthand."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import normalign.configuration
from normalign.train_trl import RecipeError, load_recipe, parse_overrides
from normalign.train_trl.__main__ import main
from normalign.train_trl.recipe import ARMS, PartFigures
from normalign.train_trl.recipe_reading import recipe_as_yaml, shipped_recipes


RECIPES = Path(normalign.configuration.__file__).parent / "recipes"


@pytest.fixture
def recipe(tmp_path):
    """A function that loads a recipe with the given content."""

    def load(overrides=None, **content):
        path = tmp_path / "alignment.yaml"
        path.write_text(yaml.safe_dump({"output_dir": "out", "model": "a/b", **content}))
        return load_recipe(path, overrides)

    return load


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"lerning_rate": 1e-3}, "Unknown key 'lerning_rate'. Did you mean 'learning_rate'?"),
        ({"data": {"row": 3}}, "Unknown key 'data.row'. Did you mean 'data.rows'?"),
        ({"tune": {"visoin": "full"}}, "Did you mean 'tune.vision'?"),
        (
            {"tune": {"vision": "frozn"}},
            "'tune.vision' must be one of frozen, full, lora, got 'frozn'. Did you mean 'frozen'?",
        ),
        ({"arm": "aligned_gcw"}, "Did you mean 'aligned_gwc'?"),
        ({"batch_size": "many"}, "'batch_size' must be a whole number, got 'many'"),
        ({"batch_size": 2.5}, "'batch_size' must be a whole number"),
        ({"batch_size": True}, "'batch_size' must be a whole number"),
        ({"learning_rate": [1]}, "'learning_rate' must be a number"),
        ({"name": 3}, "'name' must be a text"),
        ({"tune": "full"}, "'tune' must be a block of keys"),
        ({"learning_rate": 0}, "learning_rate must be above 0"),
        ({"max_steps": 0}, "max_steps must be above 0"),
        ({"max_grad_norm": -1}, "max_grad_norm must not be negative"),
        ({"from_stage": "stage1"}, "this one has model and from_stage"),
        ({"model": None}, "this one has none of them"),
        ({"model": None, "compose": {"vision": "a"}}, "The key 'compose.text' is missing"),
        ({"learning_rate": float("inf")}, "learning_rate must be a finite number, got inf"),
        ({"learning_rate": 1e38}, "learning_rate must be at most 1,000,000, got 1e+38"),
        ({"warmup": float("nan")}, "warmup must be a finite number, got nan"),
        ({"epochs": float("inf")}, "epochs must be a finite number"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm must be a finite number"),
        ({"weight_decay": float("nan")}, "weight_decay must be a finite number"),
        ({"learning_rate": 10**400}, "'learning_rate' must be a number, got one of 401 digits"),
        ({"seed": -1}, "seed must be from 0 to 4294967295"),
        ({"seed": 2**32}, "seed must be from 0 to 4294967295"),
        ({"data": {"seed": -1}}, "data.seed must be from 0 to"),
        ({"data": {"seed": 2**63}}, "data.seed must be from 0 to"),
        ({"data": {"rows": 10_000_001}}, "data.rows must be above 0 and at most 10,000,000, got 10,000,001"),
        ({"model": None, "compose": {"vision": "a", "text": "b", "seed": 2**63}}, "compose.seed must be from 0 to"),
        ({"model": None, "compose": {"vision": "", "text": "b"}}, "compose.vision is empty"),
        ({"model": ""}, "model is empty. Name a folder or a Hub id"),
        ({"output_dir": " "}, "output_dir is empty. Name a folder"),
        ({"output_dir": __file__}, "test_recipe.py, which is a file"),
        ({"overwrite": "perhaps"}, "'overwrite' must be true or false"),
        ({"lora": {"dropout": 1}}, "lora.dropout must be below 1, got 1.0"),
        ({"lora": {"rank": 10**9}}, "lora.rank must be at most 65,536"),
        ({"epochs": 1e300}, "epochs must be at most 1,000,000"),
        ({"data": {"weight": 1e308}}, "data.weight must be at most 1,000"),
        ({"data": {"mixture": [{"nme": "trl"}]}}, "Did you mean 'data.mixture[0].name'?"),
        ({"data": {"mixture": [{}, {"weight": 0}]}}, "data.mixture[1].weight must be above 0, got 0.0"),
        ({"data": {"mixture": [{"weight": float("nan")}]}}, "data.mixture[0].weight must be a finite number"),
        ({"data": {"mixture": [{"seed": -3}]}}, "data.mixture[0].seed must be from 0 to"),
    ],
)
def test_a_key_or_value_that_does_not_fit_is_named(recipe, content, expected):
    with pytest.raises(RecipeError) as error:
        recipe(**content)
    assert expected in str(error.value)
    assert "alignment.yaml" in str(error.value)


def test_values_have_the_declared_types(recipe):
    loaded = recipe(learning_rate="1e-3", epochs=2, warmup=0, max_steps=None, data={"rows": 5, "stage": 2})
    assert (loaded.learning_rate.all, loaded.data.rows, loaded.data.stage) == (1e-3, 5, 2)
    assert isinstance(loaded.epochs, float) and isinstance(loaded.warmup, float)
    assert (loaded.name, loaded.max_steps, loaded.tune.vision) == ("alignment", None, "frozen")


def test_overrides_from_the_command_line_replace_values(recipe):
    arguments = [
        "--data.rows",
        "7",
        "--learning-rate=2e-4",
        "--max_steps",
        "null",
        "--name",
        "7",
        "--tune.norm=frozen",
    ]
    loaded = recipe(parse_overrides(arguments), max_steps=3, data={"rows": 5, "seed": 4})
    assert (loaded.data.rows, loaded.data.seed, loaded.learning_rate.all) == (7, 4, 2e-4)
    assert (loaded.max_steps, loaded.name, loaded.tune.norm) == (None, "7", "frozen")


def test_overrides_may_be_nested_and_leave_the_rest_of_a_block(recipe):
    loaded = recipe(
        {"data": {"rows": 7}, "tune.language": "full"}, data={"rows": 5, "seed": 4}, tune={"norm": "frozen"}
    )
    assert (loaded.data.rows, loaded.data.seed) == (7, 4)
    assert (loaded.tune.norm, loaded.tune.language) == ("frozen", "full")


def test_an_overridden_start_replaces_the_recipes_own(recipe):
    composed = {"model": None, "compose": {"vision": "v", "text": "t"}}
    assert recipe({"model": "c/d"}, **composed).compose is None
    assert recipe({"compose.vision": "other"}, **composed).compose.vision == "other"
    assert recipe({"compose.vision": "v", "compose.text": "t"}).model is None


def test_a_figure_may_be_given_for_all_parts_and_for_single_ones(recipe):
    loaded = recipe({"weight_decay.language": "0.1"}, learning_rate={"all": "2e-5", "vision": 2e-6})
    assert [loaded.learning_rate.of(part) for part in ("vision", "projector", "language")] == [2e-6, 2e-5, 2e-5]
    assert [loaded.weight_decay.of(part) for part in ("vision", "language")] == [0, 0.1]
    assert recipe({"learning_rate": "1e-4"}, learning_rate={"all": 1, "vision": 2}).learning_rate.vision is None
    with pytest.raises(RecipeError, match="learning_rate.vision must be at most 1,000,000"):
        recipe(learning_rate={"all": 1, "vision": 1e9})
    with pytest.raises(RecipeError, match="Unknown key 'learning_rate.visoin'. Did you mean 'learning_rate.vision'"):
        recipe({"learning_rate.visoin": "1"})


def test_a_mixture_is_a_list_of_data_sets(recipe):
    parts = [{"name": "llava", "path": "a.json", "weight": 3}, {"rows": 7}]
    loaded = recipe(data={"mixture": parts})
    assert [(part.name, part.weight, part.rows) for part in loaded.data.sources()] == [
        ("llava", 3.0, None),
        ("digit_scenes", 1.0, 7),
    ]
    with pytest.raises(
        RecipeError, match=r"Unknown key 'data.mixture\[1\].row'. Did you mean 'data.mixture\[1\].rows'"
    ):
        recipe(data={"mixture": [{}, {"row": 3}]})
    with pytest.raises(RecipeError, match="'report_to' must be a list"):
        recipe(report_to="wandb")


def test_a_recipe_is_a_small_difference_from_its_parent(tmp_path):
    (tmp_path / "family").mkdir()
    (tmp_path / "base.yaml").write_text(
        "{output_dir: a, model: b/c, name: base, tune: {norm: frozen}, learning_rate: 3.0e-4}"
    )
    child = tmp_path / "family" / "child.yaml"
    child.write_text(
        "{extends: ../base.yaml, tune: {language: full}, learning_rate: {vision: 1.0e-6}, compose: {vision: v, text: t}}"
    )
    loaded = load_recipe(child, {"seed": 5})
    assert (loaded.name, loaded.output_dir, loaded.model, loaded.seed) == ("child", "a", None, 5)
    assert (loaded.tune.norm, loaded.tune.language) == ("frozen", "full")
    assert loaded.learning_rate == PartFigures(3e-4, vision=1e-6)


def test_a_recipe_extends_one_that_comes_with_the_package_by_its_name(tmp_path):
    child = tmp_path / "mine.yaml"
    for parent in ("demo/stage1", "demo/stage1.yaml"):
        child.write_text(f"{{extends: {parent}, output_dir: a}}")
        assert load_recipe(child) == load_recipe("demo/stage1", {"output_dir": "a", "name": "mine"})


def test_other_data_do_not_take_over_the_rows_or_the_mixture_of_the_parents(tmp_path):
    child, mixed = tmp_path / "mine.yaml", tmp_path / "mixed.yaml"
    child.write_text("{extends: demo/stage1, data: {name: llava, path: a.json}}")
    loaded = load_recipe(child)
    assert (loaded.data.name, loaded.data.path, loaded.data.rows) == ("llava", "a.json", None)
    assert load_recipe(child, {"data.rows": "9"}).data.rows == 9
    assert load_recipe("demo/stage1", {"data.seed": 3}).data.rows == 6400
    mixed.write_text("{extends: mine.yaml, data: {mixture: [{name: trl, path: b.jsonl}]}}")
    assert load_recipe(mixed).data.mixture[0].path == "b.jsonl"
    assert load_recipe(mixed, {"data.path": "c.json"}).data.mixture is None
    assert load_recipe(mixed, {"data": {"name": "trl", "path": "c.json"}}).data.mixture is None


def test_a_parent_that_is_missing_or_goes_in_a_circle_is_named(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("extends: second.yaml")
    with pytest.raises(RecipeError, match="There is no recipe .*second.yaml that .*first.yaml extends"):
        load_recipe(first)
    second.write_text("extends: first.yaml")
    with pytest.raises(RecipeError, match="in a circle: first.yaml -> second.yaml -> first.yaml"):
        load_recipe(first)
    first.write_text("extends: [second.yaml]")
    with pytest.raises(RecipeError, match="'extends' must name a recipe file"):
        load_recipe(first)


def test_a_resolved_recipe_is_read_back_as_the_same(recipe, tmp_path):
    loaded = recipe(learning_rate={"all": 1e-5, "norm": 1e-3}, data={"mixture": [{"rows": 3}]}, report_to=["trackio"])
    (tmp_path / "resolved.yaml").write_text(recipe_as_yaml(loaded))
    assert load_recipe(tmp_path / "resolved.yaml") == loaded


@pytest.mark.parametrize("arguments", [["rows", "3"], ["--rows"], ["--rows", "--seed", "3"], ["--"]])
def test_an_override_without_key_or_value_is_refused(arguments):
    with pytest.raises(RecipeError):
        parse_overrides(arguments)


def test_an_unknown_override_is_refused_like_a_key_of_the_file(recipe):
    with pytest.raises(RecipeError, match="Unknown key 'data.row'. Did you mean 'data.rows'"):
        recipe({"data.row": "3"})
    with pytest.raises(RecipeError, match="seed.rows cannot be set: seed is a single value"):
        recipe({"seed.rows": "3"}, seed=1)


@pytest.mark.parametrize("arm", list(ARMS))
def test_an_arm_sets_the_norm_of_a_composed_model(recipe, arm):
    loaded = recipe(model=None, arm=arm, compose={"vision": "v", "text": "t", "aligned_norm": {"eps": "1e-5"}})
    assert loaded.compose.aligned_norm == {**ARMS[arm], "eps": 1e-5}


def test_an_arm_and_a_setting_that_contradicts_it_are_refused(recipe):
    backbones = {"vision": "v", "text": "t"}
    with pytest.raises(RecipeError, match="arm: aligned means aligned_norm.gwc: False"):
        recipe(model=None, arm="aligned", compose={**backbones, "aligned_norm": {"gwc": True}})
    rms = recipe(model=None, arm="rms", compose={**backbones, "aligned_norm": {"gwc": False}})
    assert rms.compose.aligned_norm == {"kind": "rmsnorm", "gain_init": "text", "gwc": False}


def test_a_stage_that_has_not_been_run_is_named(recipe):
    loaded = recipe(model=None, from_stage="stage1", output_dir="nowhere/stage2")
    with pytest.raises(RecipeError, match="there is no finished folder nowhere.stage1. Run that stage first"):
        loaded.start_folder()


def test_the_demo_recipes_train_alignment_then_instructions():
    first, second = (load_recipe(RECIPES / "demo" / f"stage{stage}.yaml") for stage in (1, 2))
    assert vars(first.tune) == {"vision": "frozen", "projector": "full", "norm": "full", "language": "frozen"}
    assert vars(second.tune) == {"vision": "frozen", "projector": "full", "norm": "full", "language": "full"}
    assert (first.data.stage, second.data.stage, second.from_stage) == (1, 2, first.name)
    assert Path(second.output_dir).parent / second.from_stage == Path(first.output_dir)


def test_the_module_exits_with_2_on_wrong_usage(capsys):
    assert main([]) == 2
    assert main(["no_such_recipe.yaml"]) == 2
    assert "There is no recipe no_such_recipe.yaml" in capsys.readouterr().err


def test_a_recipe_that_is_no_text_is_named(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_bytes(b"\x89PNG\r\n\x00\xff")
    assert main([str(tmp_path / "recipe.yaml")]) == 2
    assert "recipe.yaml is not a text file" in capsys.readouterr().err


def test_home_is_meant_by_a_tilde(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert recipe(output_dir="~/run").output_dir == str(tmp_path / "run")
    assert load_recipe("~/alignment.yaml").model == "a/b"


def test_importing_the_room_does_not_load_torch():
    code = "import sys, normalign.train_trl; sys.exit('torch' in sys.modules or 'trl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_recipe_that_comes_with_the_package_can_be_read_in_every_arm():
    for name, file in shipped_recipes().items():
        for arm in ARMS:
            assert load_recipe(file, {"arm": arm}) == load_recipe(name, {"arm": arm})


@pytest.mark.parametrize(
    ("model", "text"), [("llama32_3b", "llama-3.2-3b-instruct"), ("qwen25_7b", "qwen2.5-7b-instruct")]
)
def test_the_full_recipes_have_the_figures_of_the_paper(model, text):
    """Source: arXiv 2512.08374, section 5, with the two stages of LLaVA-1.5."""
    first, second = (load_recipe(f"llava15_{model}/stage{stage}") for stage in (1, 2))
    assert (first.compose.vision, first.compose.text) == ("siglip-so400m-384", text)
    assert (first.learning_rate.all, first.batch_size, first.epochs) == (1e-3, 256, 1)
    assert (second.learning_rate.all, second.batch_size, second.epochs) == (2e-5, 128, 1)
    for recipe in (first, second):
        assert (recipe.schedule, recipe.warmup, recipe.weight_decay.all, recipe.precision) == (
            "cosine",
            0.03,
            0,
            "bfloat16",
        )
    trained = [[part for part, how in vars(recipe.tune).items() if how == "full"] for recipe in (first, second)]
    assert trained == [["projector", "norm"], ["projector", "norm", "language"]]
    assert second.from_stage == "stage1" and Path(first.output_dir).parent == Path(second.output_dir).parent
