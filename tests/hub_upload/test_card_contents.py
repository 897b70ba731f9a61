"""What a card says beyond the weights: norms and figure, recipes, data, licenses; and that nothing of a machine is in it."""

import getpass
import json
import re
import shutil
import sys

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

from normalign.assembly import save_whole
from normalign.configuration.errors import NormalignError
from normalign.hub_upload import check_card, export, verify
from normalign.hub_upload.export import code_files
from normalign.hub_upload.model_card import model_card, model_facts
from normalign.hub_upload.origin import Training
from normalign.hub_upload.preflight import check_folder
from normalign.inspection import NormReport, inspect_model
from normalign.inspection.report import write_json
from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration


HOME = "/" + "home/ada"  # put together, so that no file of the project names a path of one machine
STAGE1 = {
    "name": "align",
    "output_dir": f"{HOME}/run/align",
    "compose": {"vision": "google/siglip-base-patch16-224", "text": f"{HOME}/llama"},
    "learning_rate": 1e-3,
    "data": {"mixture": [{"name": "liuhaotian/LLaVA-Pretrain"}, {"path": f"{HOME}/rows.jsonl"}]},
}
STAGE2 = {"name": "instruct", "output_dir": "run/instruct", "from_stage": "align", "data": {"name": "a/b"}, "seed": 7}
STAGE2 |= {"model": None, "overwrite": True}


@pytest.fixture(scope="module")
def inspected(model, checkpoint, processor, tmp_path_factory):
    """The folder of a report on the model that is exported."""
    folder = tmp_path_factory.mktemp("report")
    write_json(inspect_model(model, processor, [Image.new("RGB", (20, 30), "red")]).to_dict(), folder / "report.json")
    return folder


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    """A checkpoint in the folder of a second stage, beside the first stage's, with the recipes that training left."""
    run = tmp_path_factory.mktemp("run")
    for recipe in (STAGE1, STAGE2):
        (run / recipe["name"]).mkdir()
        (run / recipe["name"] / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    log = [{"step": step, "loss": 2 / step} for step in (10, 20, 30)]
    (run / "instruct" / "train_log.jsonl").write_text("\n".join(map(json.dumps, log)) + '\n{"step": 4')
    folder = shutil.copytree(checkpoint, run / "instruct" / "checkpoint-20")
    (folder / "LICENSE").write_text("All of it is free.\n")
    (folder / "NOTICE.txt").write_text("Made of parts.\n")
    return folder


@pytest.fixture(scope="module")
def full(trained, inspected, tmp_path_factory):
    """An export with everything that can be in one."""
    task = {"score": 41.24, "metric": "average", "n": 1500, "failed": 0, "stderr": 1.25, "task_version": 0}
    return export(
        trained,
        tmp_path_factory.mktemp("exports") / "full",
        results={"tasks": {"mmstar": task}},
        inspection=inspected,
        max_shard_size="100KB",
    )


def card_of(folder):
    return (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.both_generations
def test_a_full_card_is_valid_for_us_for_the_hubs_client_and_for_a_push(full):
    assert check_card(full / "README.md") == []
    data = ModelCard.load(full / "README.md").data.to_dict()
    assert data["datasets"] == ["liuhaotian/LLaVA-Pretrain", "a/b"]
    assert (data["license"], data["license_name"], data["license_link"]) == ("other", "see-license-file", "LICENSE")
    assert {"norms.png", "LICENSE", "NOTICE.txt", ".eval_results/mmstar.yaml"} <= set(check_folder(full, load=False))
    assert verify(full).verdict == "passes"


def test_the_code_example_is_the_one_of_every_card(full, exported):
    (example,) = re.findall(r"```python\n(.*?)```", card_of(full), re.DOTALL)
    assert f"```python\n{example}```" in card_of(exported)


def test_limits_citation_and_results_are_in_every_card(full):
    text = card_of(full)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == [
        "The aligned norm",
        "Use",
        "Results",
        "Training",
        "License",
        "Limits",
        "Code in this repository",
        "Citation",
    ]
    assert "\n\n\n" not in text


# --- norms


def test_norms_and_turns_are_those_of_the_report(full, inspected, model):
    report, text = NormReport.load(inspected).data, card_of(full)
    T = report["text_embedding_norm"]
    for part, words in (("vision_encoder", "vision encoder"), ("projector", "projector"), ("inserted", "inserted")):
        cells = re.search(rf"^\| {words} \| (.*?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE).groups()
        mean, std = report["interface"][part]["mean"], report["interface"][part]["std"]
        assert [float(cell) for cell in cells] == pytest.approx([mean, std, mean / T], rel=6e-3)
    for modality in ("visual", "text"):
        cells = re.search(rf"^\| {modality} tokens \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE).groups()
        angles = [report["layers"][i][modality]["angle_mean_rad"] for i in (0, -1)]
        assert [float(cell) for cell in cells] == pytest.approx(angles, rel=6e-3)
    assert report["verdict"] in text


def test_the_figure_lies_beside_the_card_and_has_a_text(full):
    alt, target = re.search(r"!\[(.*?)\]\((.*?)\)", card_of(full)).groups()
    assert target == "norms.png" and "visual tokens are inserted at a mean norm of" in alt
    with Image.open(full / target) as figure:
        assert figure.format == "PNG" and figure.width > 1000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text_embedding_norm": 99.0}, "its text embedding norm is 99"),
        ({"layers": [{}]}, "it has 1 layers, this model 2"),
        ({"aligned_norm": None}, "its norm is of kind none, this model's of kind layernorm"),
        ({"aligned_norm": {"kind": "layernorm", "gain_abs_mean": 0.5}}, "its gain has a mean absolute value of 0.5"),
        ({"interface": {}}, "lacks what the card shows"),
        ({"verdict": None}, "lacks what the card shows"),
    ],
)
def test_a_report_of_another_model_or_another_time_is_refused(checkpoint, inspected, tmp_path, change, words):
    write_json({**NormReport.load(inspected).data, **change}, tmp_path / "report.json")
    with pytest.raises(NormalignError, match=words):
        export(checkpoint, tmp_path / "out", inspection=tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_report_of_the_stage_before_is_refused_though_the_gain_hardly_moved(checkpoint, inspected, tmp_path):
    data = NormReport.load(inspected).data
    norm = {**data["aligned_norm"], "gain_abs_mean": data["aligned_norm"]["gain_abs_mean"] * 1.0003}
    write_json({**data, "aligned_norm": norm}, tmp_path / "report.json")
    with pytest.raises(NormalignError, match="its gain has a mean absolute value of"):
        export(checkpoint, tmp_path / "out", inspection=tmp_path)


def test_a_folder_without_a_report_is_named_before_the_work(checkpoint, tmp_path):
    with pytest.raises(NormalignError, match="cannot be read as a norm report"):
        export(checkpoint, tmp_path / "out", inspection=tmp_path)


# --- recipes


def test_recipes_beside_the_model_are_in_the_card_stage_by_stage_without_places(full):
    text = card_of(full)
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    assert blocks == [
        {
            "compose": {"vision": "google/siglip-base-patch16-224", "text": "local model"},
            "learning_rate": 1e-3,
            "data": {"mixture": [{"name": "liuhaotian/LLaVA-Pretrain"}, {"path": "local data"}]},
        },
        {"from_stage": "align", "data": {"name": "a/b"}, "seed": 7},
    ]
    assert text.index("### align") < text.index("### instruct")
    assert "Last logged: step 20, loss 0.1." in text
    assert HOME not in text


def test_a_place_in_any_text_of_a_recipe_is_left_out(checkpoint, tmp_path):
    places = [f"see {HOME}/notes", "~/data", "../data", r"C:\data\rows", f"file:{HOME}", "rows.jsonl", str(checkpoint)]
    kept = ["owner/name", "mini-vision", "https://example.org/a/b/c", "digit_scenes", "a note"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"seed": 1, "places": places, "kept": kept}))
    text = card_of(export(checkpoint, tmp_path / "out", recipes=[tmp_path / "mine.yaml"]))
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert yaml.safe_load(block) == {"seed": 1, "places": ["local data"] * len(places), "kept": kept}


@pytest.mark.parametrize("place", [".", "link"])
def test_the_former_stages_of_a_folder_by_another_name_are_found(trained, tmp_path, monkeypatch, place):
    (tmp_path / "link").symlink_to(trained)
    monkeypatch.chdir(trained if place == "." else tmp_path)
    text = card_of(export(place, tmp_path / "out"))
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == ["align", "instruct"]
    assert "Last logged: step 20, loss 0.1." in text


def test_a_recipe_is_shown_with_what_it_extends(checkpoint, tmp_path):
    (tmp_path / "parent.yaml").write_text("name: parent\nbatch_size: 8\ntune: {language: full, vision: frozen}\n")
    child = {"name": "mine\n\n# and more", "extends": "parent.yaml", "tune": {"language": "lora"}}
    (tmp_path / "child.yaml").write_text(yaml.safe_dump(child))
    text = card_of(export(checkpoint, tmp_path / "out", recipes=[tmp_path / "child.yaml"]))
    (title, block) = re.search(r"^### (.*)\n\n```yaml\n(.*?)```", text, re.MULTILINE | re.DOTALL).groups()
    assert title == "mine # and more"
    assert yaml.safe_load(block) == {"batch_size": 8, "tune": {"language": "lora", "vision": "frozen"}}


def test_a_recipe_that_is_found_in_the_model_leads_to_no_other_file(checkpoint, tmp_path):
    source = shutil.copytree(checkpoint, tmp_path / "source")
    (tmp_path / "private.yaml").write_text("name: mine\nseed: 1234\n")
    (source / "recipe.yaml").write_text("extends: ../private.yaml\nbatch_size: 8\n")
    text = card_of(export(source, tmp_path / "out"))
    assert "batch_size: 8" in text and "1234" not in text


def test_recipes_that_are_given_take_the_place_of_those_found(trained, tmp_path):
    for i in (1, 2):
        recipe = {"name": f"stage{i}", "model": str(trained), "data": {"name": "digit_scenes"}, "learning_rate": i}
        (tmp_path / f"{i}.yaml").write_text(yaml.safe_dump(recipe))
    text = card_of(export(trained, tmp_path / "out", recipes=[tmp_path / "1.yaml", tmp_path / "2.yaml"]))
    assert re.findall(r"^### (stage.*)$", text, re.MULTILINE) == ["stage1", "stage2"]
    assert "model: local model" in text and "align" not in re.findall(r"^### .*$", text, re.MULTILINE)
    assert "datasets" not in ModelCard(text).data.to_dict()


@pytest.mark.parametrize("training", [Training(), Training(last="step 3, loss 1"), Training([("a", "seed: 1")])])
def test_no_line_too_many_is_left_by_what_is_not_known(model, training):
    text = model_card(model_facts(model), code_files(type(model)), training=training).content
    assert "\n\n\n" not in text and text.count("## Training\n\n") == (training != Training())


@pytest.mark.parametrize("text", ["- a list", "a: [", "\xff", '{"step": 4, "loss": 1.5}'])
def test_a_recipe_that_is_none_is_named(checkpoint, tmp_path, text):
    (tmp_path / "mine.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(NormalignError, match="recipe .*mine.yaml"):
        export(checkpoint, tmp_path / "out", recipes=[tmp_path / "mine.yaml"])


# --- licenses


def test_license_files_travel_with_the_weights_and_again_with_the_export(full, trained, tmp_path):
    again = export(full, tmp_path / "again")
    for name in ("LICENSE", "NOTICE.txt"):
        assert (again / name).read_bytes() == (full / name).read_bytes() == (trained / name).read_bytes()
    assert "License files in this repository: [LICENSE](LICENSE), [NOTICE.txt](NOTICE.txt)." in card_of(full)


def test_license_files_of_local_backbones_travel_and_those_of_a_folder_that_happens_to_be_there_do_not(
    composed, tmp_path, monkeypatch
):
    encoder = tmp_path / "models" / "encoder"
    encoder.mkdir(parents=True)
    (encoder / "LICENSE.txt").write_text("For seeing.\n")
    save_whole(*composed, tmp_path / "vlm", sources=[encoder, "mini-language"])
    (tmp_path / "mini-vision").mkdir()
    (tmp_path / "mini-vision" / "LICENSE").write_text("Something else.\n")
    monkeypatch.chdir(tmp_path)
    out = export("vlm", "out").resolve()
    assert [file.name for file in out.iterdir() if "LICENSE" in file.name] == ["LICENSE-encoder.txt"]
    assert (out / "LICENSE-encoder.txt").read_text() == "For seeing.\n"
    data = ModelCard(card_of(out)).data
    assert (data.license_name, data.license_link) == ("see-license-file", "LICENSE-encoder.txt")


def test_without_files_the_base_models_licenses_are_linked(make_model, make_checkpoint, tmp_path):
    model = make_model(composed_from={"vision": "owner/vision", "text": "owner/language"})
    source = make_checkpoint(model, tmp_path / "checkpoint")
    text = card_of(export(source, tmp_path / "out"))
    data = ModelCard(text).data
    assert (data.license, data.license_name) == ("other", "see-base-models")
    assert data.license_link == "https://huggingface.co/owner/language"
    for base in ("owner/vision", "owner/language"):
        assert f"[{base}](https://huggingface.co/{base})" in text.split("## License")[1].split("## Limits")[0]


def test_a_license_that_is_other_needs_a_name_and_a_link(checkpoint, trained, tmp_path, monkeypatch):
    named = {"license": "other", "license_name": "llama-3-research"}
    link = "https://example.org/terms"
    data = ModelCard(card_of(export(checkpoint, tmp_path / "out", **named, license_link=link))).data
    assert (data.license, data.license_name, data.license_link) == ("other", "llama-3-research", link)
    assert ModelCard(card_of(export(trained, tmp_path / "file", **named))).data.license_link == "LICENSE"
    for settings, words in (
        ({"license": "other"}, "license_name: missing"),
        (named, "license_link: 'other' needs it"),
        ({**named, "license_link": "LICENSE"}, "license_link: there is no file LICENSE beside the model"),
        ({"license_name": "x"}, "need the license itself"),
        ({"results": {"tasks": []}}, r"tasks is \[\], not a block"),
    ):
        # what is wrong with the card is known before the long writing
        monkeypatch.setattr(sys.modules[export.__module__], "_write", None)
        with pytest.raises(NormalignError, match=words):
            export(checkpoint, tmp_path / "refused", **settings)
    assert not (tmp_path / "refused").exists()


# --- nothing of the machine, the account, or a secret


TOKEN = "hf_" + "AbCdEfGhIj" * 3 + "Klmn"


@pytest.mark.parametrize("file", ["NOTICE.txt", "chat_template.jinja", "recipe.yaml"])
@pytest.mark.parametrize(
    ("found", "words"),
    [
        (TOKEN, "token"),
        (f"see {HOME}/notes", "names the local path"),
        ("in D:/work/agnes_b/runs", "names the account agnes_b"),
    ],
    ids=["token", "path", "account"],
)
def test_what_is_of_this_machine_alone_gets_into_no_file(checkpoint, tmp_path, monkeypatch, file, found, words):
    monkeypatch.setattr(getpass, "getuser", lambda: "agnes_b")
    source = shutil.copytree(checkpoint, tmp_path / "source")
    before = (source / file).read_text() if (source / file).exists() else ""
    line = f"'{found}': 1\n" if file == "recipe.yaml" else f"{{# {found} #}}"
    (source / file).write_text(before + line)
    with pytest.raises(NormalignError) as caught:
        export(source, tmp_path / "out")
    assert words in str(caught.value) and TOKEN not in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_backbones_that_were_places_keep_their_last_name_alone(make_model, make_checkpoint, tmp_path):
    model = make_model(composed_from={"vision": "/data/models/vit", "text": "owner/language"})
    out = export(make_checkpoint(model, tmp_path / "checkpoint"), tmp_path / "out")
    composed_from = json.loads((out / "config.json").read_text())["composed_from"]
    assert composed_from == {"vision": "vit", "text": "owner/language"}
    assert not any(b"/data/models" in file.read_bytes() for file in out.iterdir())


def test_an_owner_on_the_hub_may_be_called_as_the_account(make_model, make_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "agnes_b")
    model = make_model(composed_from={"vision": "agnes_b/vision", "text": "owner/language"})
    out = export(make_checkpoint(model, tmp_path / "checkpoint"), tmp_path / "out")
    assert "https://huggingface.co/agnes_b/vision" in card_of(out)
    check_folder(out, load=False)


# --- shards


@pytest.mark.both_generations
def test_weights_in_shards_give_the_same_logits_by_the_index(full, exported, tiny_batch):
    shards = sorted(file.name for file in full.glob("*.safetensors"))
    assert len(shards) > 3 and max((full / name).stat().st_size for name in shards) < 110_000
    index = json.loads((full / "model.safetensors.index.json").read_text())
    for name in shards:
        with safe_open(full / name, framework="pt") as weights:
            assert {key for key, place in index["weight_map"].items() if place == name} == set(weights.keys())
    assert sorted(set(index["weight_map"].values())) == shards
    with torch.no_grad():
        sharded, whole = (
            AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True).eval()(**tiny_batch).logits
            for folder in (full, exported)
        )
    assert torch.equal(sharded, whole)


def test_another_size_leaves_no_shard_of_the_former(full, tmp_path):
    out = shutil.copytree(full, tmp_path / "out")
    export(full, out, max_shard_size="1MB")
    assert [file.name for file in out.glob("*safetensors*")] == ["model.safetensors"]
    export(full, out, max_shard_size=150_000)
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 1 and all(f"-of-{len(shards):05d}." in file.name for file in shards)


@pytest.mark.parametrize("size", ["", "5", "0GB", "-1GB", "5 G", "big", "5GiB", 0, -3, True, 1.5])
def test_a_size_that_is_none_is_refused_before_the_work(tmp_path, size):
    with pytest.raises(NormalignError, match="such as 5GB or 200KB"):
        export(tmp_path / "nothing", tmp_path / "out", max_shard_size=size)


@pytest.mark.parametrize("size", ["5GB", "200kb", "0.5 MB"])
def test_a_size_in_any_spelling_that_transformers_reads_is_taken(checkpoint, tmp_path, size):
    assert NormAlignLlavaForConditionalGeneration.from_pretrained(
        export(checkpoint, tmp_path / "out", max_shard_size=size)
    )


def test_the_card_leaves_out_what_a_recipe_did_not_use(tmp_path):
    from normalign.hub_upload.origin import read_training

    file = tmp_path / "recipe.yaml"
    used = {"tune": {"language": "full"}, "max_steps": 10, "data": {"name": "llava", "path": "owner/name"}}
    unused = {"lora": {"rank": 16}, "epochs": 1.0, "resume": "auto", "report_to": []}
    file.write_text(yaml.safe_dump({**used, **unused, "data": {**used["data"], "seed": 0, "stage": 1}}))
    [(_, shown)] = read_training(tmp_path).stages
    assert yaml.safe_load(shown) == used
    file.write_text(yaml.safe_dump({**unused, "tune": {"language": "lora"}}))
    [(_, shown)] = read_training(tmp_path).stages
    assert yaml.safe_load(shown) == {"lora": {"rank": 16}, "epochs": 1.0, "tune": {"language": "lora"}}
