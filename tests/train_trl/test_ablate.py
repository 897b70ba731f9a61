"""An ablation trains its arms alike but for the norm, goes on where it was stopped, and mixes with nothing else."""

import json

import pytest
import yaml

from normalign.configuration.errors import NormalignError
from normalign.train_trl import RecipeError
from normalign.train_trl.ablate import ablate, stages_of


SMALL = {"questions": 12, "captions": 2, "text_only": 2, "curve_rows": 6, "measure_every": 1}


@pytest.fixture(scope="module")
def recipes(backbones, tmp_path_factory):
    """The folder of two stages of two steps each."""
    folder = tmp_path_factory.mktemp("stages")
    shared = {"batch_size": 4, "logging_steps": 1, "schedule": "constant", "warmup": 0, "seed": 3}
    compose = {"vision": str(backbones / "vision"), "text": str(backbones / "text"), "seed": 0}
    first = {**shared, "output_dir": "x/first", "compose": compose, "data": {"rows": 8, "stage": 1}}
    second = {**shared, "output_dir": "x/second", "from_stage": "first", "data": {"rows": 8, "stage": 2}}
    (folder / "first.yaml").write_text(yaml.safe_dump(first))
    (folder / "second.yaml").write_text(yaml.safe_dump({**second, "tune": {"language": "full"}}))
    return folder


@pytest.fixture(scope="module")
def done(recipes, tmp_path_factory):
    """An ablation of two arms, and what it said of its progress."""
    out, said = tmp_path_factory.mktemp("ablation") / "out", []
    progress = lambda *words: said.append(words)  # noqa: E731
    ablate(recipes / "second.yaml", ["aligned", "aligned_gwc"], 1, out, progress=progress, **SMALL)
    return out, said


def result_of(out, arm, seed=0):
    return json.loads((out / "runs" / f"seed{seed}" / arm / "result.json").read_text())


def test_stages_are_found_by_the_name_that_a_recipe_goes_on_from(recipes):
    assert [file.name for file in stages_of(recipes / "second.yaml", {})] == ["first.yaml", "second.yaml"]
    with pytest.raises(RecipeError, match="goes on from a model, whose norm is what it is"):
        stages_of(recipes / "second.yaml", {"model": "a/b"})
    with pytest.raises(RecipeError, match="goes on from stage 'zeroth', whose recipe is sought as .*zeroth.yaml"):
        stages_of(recipes / "second.yaml", {"from_stage": "zeroth"})


def test_arms_differ_in_the_norm_alone(done):
    """GWC acts in the backward pass, so what is measured before the first step is the same, and the weights after it are not."""
    out, said = done
    plain, gwc = result_of(out, "aligned"), result_of(out, "aligned_gwc")
    assert [(point["stage"], point["step"]) for point in plain["curve"]] == [
        ("first", 0),
        ("first", 1),
        ("first", 2),
        ("second", 0),
        ("second", 1),
        ("second", 2),
    ]
    assert plain["curve"][0] == gwc["curve"][0]
    assert plain["before"] == gwc["before"] and plain["gain_start"] == gwc["gain_start"]
    assert plain["stages"][0]["log"][0]["loss"] == gwc["stages"][0]["log"][0]["loss"]
    assert plain["curve"][-1] != gwc["curve"][-1]
    assert said == [("found", 0, 2), ("aligned, seed 0", 1, 2), ("aligned_gwc, seed 0", 2, 2)]


def test_the_summary_has_the_keys_that_programs_read(done):
    out, _ = done
    summary = json.loads((out / "summary.json").read_text())
    for arm in ("aligned", "aligned_gwc"):
        figures = summary["arms"][arm]
        assert figures["seeds"] == 1
        held_out = result_of(out, arm)["held_out"]
        questions = [kind for key, kind in held_out.items() if key not in ("caption", "text_only")]
        right = sum(kind["accuracy"] * kind["n"] for kind in questions) / sum(kind["n"] for kind in questions)
        assert figures["accuracy"]["mean"] == pytest.approx(right)
        assert {"start_abs_mean", "end_abs_mean"} <= figures["gain"].keys()
        assert figures["ratio_before"] == pytest.approx(1.0, abs=0.05)
    assert (out / "ablation.html").is_file() and (out / "ablation.md").is_file()


def test_weights_are_removed_when_all_is_measured(done):
    assert not list((done[0] / "runs" / "seed0").rglob("*.safetensors"))


def test_an_ablation_goes_on_with_the_runs_that_are_missing(recipes, done):
    out, _ = done
    kept = out / "runs" / "seed0" / "aligned" / "result.json"
    before, said = kept.stat().st_mtime_ns, []
    gone = out / "runs" / "seed0" / "aligned_gwc" / "result.json"
    expected = json.loads(gone.read_text())
    gone.unlink()
    progress = lambda *words: said.append(words)  # noqa: E731
    ablate(recipes / "second.yaml", ["aligned", "aligned_gwc"], 1, out, progress=progress, **SMALL)
    assert said == [("found", 1, 2), ("aligned_gwc, seed 0", 2, 2)]
    assert kept.stat().st_mtime_ns == before
    again = json.loads(gone.read_text())
    assert again["curve"] == expected["curve"] and again["held_out"] == expected["held_out"]


def test_another_ablation_is_not_mixed_in(recipes, done, tmp_path):
    out, _ = done
    with pytest.raises(NormalignError, match="holds an ablation with another questions"):
        ablate(recipes / "second.yaml", ["aligned", "aligned_gwc"], 1, out, **{**SMALL, "questions": 18})
    with pytest.raises(NormalignError, match="holds an ablation with another overrides"):
        ablate(recipes / "second.yaml", ["aligned"], 1, out, {"learning_rate": "1e-5"}, **SMALL)
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(NormalignError, match="is not empty and holds no ablation"):
        ablate(recipes / "second.yaml", ["aligned"], 1, tmp_path, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("arms", "seeds", "settings", "expected"),
    [
        (["alined"], 1, {}, "There is no arm alined"),
        ([], 1, {}, "There is no arm given"),
        (["none", "none"], 1, {}, "An arm is named twice"),
        (["none"], 0, {}, "at least one seed, got 0"),
        (["none"], 1, {"questions": 0}, "questions must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    recipes, tmp_path, arms, seeds, settings, expected
):
    with pytest.raises(NormalignError, match=expected):
        ablate(recipes / "second.yaml", arms, seeds, tmp_path / "out", **{**SMALL, **settings})
    assert not (tmp_path / "out").exists()
