"""The model card says what the files say, and no more."""

import math
import re

import pytest
import yaml

from normalign.configuration.errors import NormalignError
from normalign.hub_upload.export import code_files
from normalign.hub_upload.model_card import model_card, model_facts, result_rows


def card_of(model, **options):
    return model_card(model_facts(model), code_files(type(model)), **options)


def metadata(text):
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.DOTALL).group(1))


def test_card_metadata(exported):
    data = metadata((exported / "README.md").read_text(encoding="utf-8"))
    assert data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "image-text-to-text"
    assert {"normalign", "aligned-norm", "vision-language-model"} <= set(data["tags"])
    assert data["license"] == "unknown" and "license_name" not in data
    assert "base_model" not in data and "datasets" not in data


def test_card_names_T_gain_and_gwc_of_this_model(model):
    text = card_of(model).content
    T = model.config.aligned_norm["target_norm"]
    gain = model.get_aligned_norm().weight
    assert f"| {T:.6g} |" in text
    assert f"| {T / math.sqrt(48):.6g} (T / sqrt(48)) |" in text
    assert f"mean of its absolute value {gain.abs().mean().item():.6g}, L2 norm {gain.norm().item():.6g}" in text
    assert "(GWC) | on: " in text and f"now {model.get_aligned_norm().mu.item():.6g};" in text
    assert "arXiv 2512.08374" in text and "@inproceedings" in text


@pytest.mark.parametrize(
    ("settings", "expected", "absent"),
    [
        ({"kind": "none"}, "This model has none", "gain now"),
        ({"gain_init": 1.0, "gwc": False}, "| gain at the start | 1 |", "whose gain started so small"),
        ({"gwc": False}, "(GWC) | off |", "mu ="),
        ({"kind": "rmsnorm", "trainable": False}, "`rmsnorm`, not trained", "`layernorm`"),
        ({"kind": "scale"}, "| gain at the start | not recorded |", "T / sqrt("),
    ],
)
def test_card_follows_the_arm(make_model, settings, expected, absent):
    text = card_of(make_model(aligned_norm=settings)).content
    assert expected in text
    assert absent not in text


def test_license_and_base_models_are_said_when_known(make_model):
    model = make_model(composed_from={"vision": "google/siglip-base-patch16-224", "text": "Qwen/Qwen3-8B"})
    data = metadata(card_of(model, license="apache-2.0").content)
    assert data["base_model"] == ["google/siglip-base-patch16-224", "Qwen/Qwen3-8B"]
    assert data["license"] == "apache-2.0" and "license_name" not in data
    assert metadata(card_of(model, base_model="a/b").content)["base_model"] == ["a/b"]


def test_local_base_models_are_told_in_the_text_alone(make_model):
    text = card_of(make_model(composed_from={"vision": "mini-siglip", "text": "mini-llama"})).content
    assert "Composed from mini-siglip (vision) and mini-llama (text)." in text
    assert "base_model" not in metadata(text)


def test_card_without_results_has_no_figure(model):
    results = card_of(model).content.split("## Results")[1].split("##")[0]
    assert results.strip() == "None recorded."


def test_card_shows_the_results_of_the_demo(model):
    results = {"accuracy": 0.91, "accuracy_black_image": 0.2, "chance": 0.19, "seconds": 200, "export": "/home/me/out"}
    text = card_of(model, results=results).content
    assert "| built-in digit scenes: accuracy on held-out scenes | exact match | 0.91 |  |  |" in text
    assert "| built-in digit scenes: the same with black images | exact match | 0.2 |  |  |" in text
    assert "| built-in digit scenes: chance | exact match | 0.19 |  |  |" in text
    assert "/home/me" not in text and "None recorded" not in text


def test_card_shows_the_results_of_evaluate(model):
    task = {"score": 41.24, "metric": "average", "n": 1500, "failed": 3, "stderr": 1.25, "task_version": 0}
    results = {"model": "/home/me/m", "tasks": {"mmstar": task}, "average": 41.24}
    text = card_of(model, results=results).content
    link = "[mmstar](https://huggingface.co/datasets/Lin-Chen/MMStar)"
    assert f"| {link} | average | 41.24 ± 1.25 | 1500 | version 0, 3 failed |" in text
    assert "/home/me" not in text


def test_results_of_another_kind_are_refused():
    with pytest.raises(NormalignError, match="need the key 'tasks'.*'loss'"):
        result_rows({"loss": 1.0})


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ({"tasks": []}, r"tasks is \[\], not a block"),
        ({"tasks": {"pope": None}}, "tasks.pope is None, not a block"),
        ({"tasks": {"pope": {"score": "high"}}}, "tasks.pope.score is 'high', not a number"),
        ({"tasks": {"pope": {"score": 0.5, "stderr": float("nan")}}}, "tasks.pope.stderr is nan, not a number"),
        ({"tasks": {}, "average": "x"}, "average is 'x', not a number"),
        ({"accuracy": True, "chance": "abc"}, "accuracy is True, not a number; chance is 'abc', not a number"),
    ],
)
def test_results_that_are_broken_are_named_by_their_key(results, words):
    with pytest.raises(NormalignError, match=words):
        result_rows(results)


def test_card_lists_the_hash_of_every_code_file(exported):
    import hashlib

    text = (exported / "README.md").read_text(encoding="utf-8")
    for file in exported.glob("*.py"):
        assert f"- `{file.name}`: `{hashlib.sha256(file.read_bytes()).hexdigest()}`" in text


def test_card_pins_a_revision_in_every_call_that_runs_code(exported):
    text = (exported / "README.md").read_text(encoding="utf-8")
    calls = re.findall(r"\w+\([^()]*trust_remote_code=True\)", text)
    assert len(calls) == 3
    assert all("revision=revision" in call for call in calls)


@pytest.mark.parametrize(("vision", "mentioned"), [("mini-vision", True), ("google/siglip-base-patch16-224", False)])
def test_card_of_a_model_of_mini_backbones_says_how_little_they_know(make_model, vision, mentioned):
    model = make_model(composed_from={"vision": vision, "text": "owner/model"})
    assert ("scenes of handwritten digits" in card_of(model).content) == mentioned
