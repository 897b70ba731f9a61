"""What `verify` says of a folder or repository: code, pickles, weights, norm and card, with nothing of it run."""

import hashlib
import json
import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import normalign
from normalign.cli import app
from normalign.configuration.errors import NormalignError
from normalign.hub_upload import export, verify


MODELING = "modeling_normalign_llava.py"
CODE = ["aligned_norm.py", "configuration_normalign_llava.py", MODELING]
GAIN = "model.multi_modal_projector.aligned_norm.weight"
LINEAR = "model.multi_modal_projector.linear_1.weight"


@pytest.fixture
def folder(exported, tmp_path):
    """A copy of an export, to be spoiled."""
    return Path(shutil.copytree(exported, tmp_path / "folder"))


def change_config(folder, name="config.json", **changes):
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    (folder / name).write_text(json.dumps({**content, **changes}), encoding="utf-8")


def change_weights(folder, **changes):
    """Replaces tensors by name; None takes one out."""
    tensors = load_file(folder / "model.safetensors")
    tensors.update(changes)
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def fingerprint(folder):
    return {f: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.rglob("*")) if f.is_file()}


def code(found):
    return {file.file: (file.state, file.runs) for file in found.code}


def only_reason(found):
    assert found.verdict == "fails" and len(found.reasons) == 1, found.reasons
    return found.reasons[0]


# --- as it should be


@pytest.mark.both_generations
def test_an_export_passes(exported, model):
    before = fingerprint(exported)
    found = verify(exported)
    assert (found.verdict, found.reasons, found.notes) == ("passes", [], [])
    assert code(found) == dict.fromkeys(CODE, ("identical", True))
    assert found.identical_to == normalign.__version__ and found.revision is None
    assert found.packages == ["torch", "transformers"] and found.elsewhere == found.pickles == found.card == []
    assert found.weights.files == ["model.safetensors"]
    assert found.weights.parameters == sum(p.numel() for p in model.parameters())
    assert found.aligned_norm["target_norm"] == model.config.aligned_norm["target_norm"]
    assert found.aligned_norm["gain_abs_mean"] == pytest.approx(model.get_aligned_norm().weight.abs().mean().item())
    assert fingerprint(exported) == before


@pytest.mark.both_generations
@pytest.mark.parametrize(
    "options",
    [{"tie": True}, {"aligned_norm": {"kind": "none"}}, {"aligned_norm": {"kind": "scale"}}, {"text_type": "qwen3"}],
)
def test_tied_embeddings_and_other_norms_pass(make_model, make_checkpoint, tmp_path, options):
    checkpoint = make_checkpoint(make_model(**options), tmp_path / "checkpoint")
    found = verify(export(checkpoint, tmp_path / "out"))
    assert found.reasons == []
    assert ("gain_abs_mean" in found.aligned_norm) == (options.get("aligned_norm") != {"kind": "none"})


@pytest.mark.both_generations
def test_experts_that_transformers_5_holds_in_one_tensor_pass(make_model, make_checkpoint, tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 12}
    checkpoint = make_checkpoint(make_model(text_type="qwen3_moe", text=experts), tmp_path / "checkpoint")
    assert verify(export(checkpoint, tmp_path / "out")).reasons == []


@pytest.mark.parametrize("ends", [b"\r\n", b"\r"])
def test_line_endings_are_no_difference(folder, ends):
    for name in CODE:
        (folder / name).write_bytes((folder / name).read_bytes().replace(b"\n", ends))
    assert verify(folder).reasons == []


def test_the_working_tree_of_git_is_read_without_its_history(folder):
    (folder / ".git" / "hooks").mkdir(parents=True)
    (folder / ".git" / "hooks" / "fsmonitor.py").write_text("raise SystemExit")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    assert verify(folder).reasons == []


# --- code


def test_a_changed_line_is_shown(folder):
    text = (folder / "aligned_norm.py").read_text(encoding="utf-8")
    (folder / "aligned_norm.py").write_text(text.replace("_ROWS_AT_ONCE = 8192", "_ROWS_AT_ONCE = 4096"))
    found = verify(folder)
    assert only_reason(found) == f"aligned_norm.py is not that of normalign {normalign.__version__}"
    assert code(found)["aligned_norm.py"] == ("differs", True) and found.identical_to is None
    changed = next(file for file in found.code if file.file == "aligned_norm.py")
    assert changed.diff[0] == f"--- normalign {normalign.__version__}/aligned_norm.py"
    assert [line for line in changed.diff if line[0] in "+-"][2:] == ["-_ROWS_AT_ONCE = 8192", "+_ROWS_AT_ONCE = 4096"]


def test_one_space_is_a_difference(folder):
    with (folder / MODELING).open("ab") as file:
        file.write(b" ")
    assert code(verify(folder))[MODELING] == ("differs", True)


def test_code_behind_a_lone_carriage_return_in_a_comment_is_a_difference(folder):
    with (folder / MODELING).open("ab") as file:
        file.write(b"# harmless\rimport antigravity\n")
    found = verify(folder)
    assert "+import antigravity" in next(file.diff for file in found.code if file.file == MODELING)
    assert "antigravity" not in sys.modules


def test_characters_that_hide_text_are_written_out(folder):
    with (folder / MODELING).open("a", encoding="utf-8") as file:
        file.write("hidden = 1  # \x1b[2K \u202e\n")
    diff = next(file.diff for file in verify(folder).code if file.file == MODELING)
    assert "+hidden = 1  # \\x1b[2K \\u202e" in diff
    assert all(line.isprintable() for line in diff)


def test_a_long_difference_is_cut(folder):
    (folder / "aligned_norm.py").write_text("\n".join(f"x{i} = {i}" for i in range(500)))
    diff = next(file.diff for file in verify(folder).code if file.file == "aligned_norm.py")
    assert len(diff) == 41 and diff[-1].endswith(" more lines")


def test_the_card_names_the_release_to_compare_with(folder):
    (folder / "aligned_norm.py").write_text("x = 1")
    text = (folder / "README.md").read_text(encoding="utf-8")
    (folder / "README.md").write_text(text.replace(f"normalign {normalign.__version__}", "normalign 0.0.9"))
    assert verify(folder).notes == ["the card says that normalign 0.0.9 wrote it: compare with that release"]


def test_a_file_of_code_that_is_missing_is_named(folder):
    (folder / "aligned_norm.py").unlink()
    found = verify(folder)
    assert code(found)["aligned_norm.py"] == ("missing", False)
    assert found.reasons == ["aligned_norm.py is named as code and is not there", "aligned_norm.py is missing"]


def test_an_added_file_is_named_and_whether_it_runs(folder):
    (folder / "helper.py").write_text("import requests\nfrom . import deeper\n")
    (folder / "deeper.py").write_text("import os\n")
    (folder / "library.so").write_bytes(b"")
    (folder / "lonely.py").write_text("raise SystemExit\n")
    text = (folder / MODELING).read_text(encoding="utf-8")
    (folder / MODELING).write_text(text + "\n\ndef late():\n    from .helper import x\n")
    found = verify(folder)
    states = code(found)
    assert states["helper.py"] == states["deeper.py"] == ("added", True)
    assert states["lonely.py"] == states["library.so"] == ("added", False)
    assert found.packages == ["requests", "torch", "transformers"]
    assert found.runs == ["aligned_norm.py", "configuration_normalign_llava.py", "deeper.py", "helper.py", MODELING]
    assert "helper.py was added and runs when the model is loaded" in found.reasons
    assert "lonely.py was added and is not part of normalign's code" in found.reasons


@pytest.mark.parametrize("place", ["tokenizer_config.json", "processor_config.json", "generation_config.json"])
def test_code_that_another_file_of_settings_names_runs(folder, place):
    (folder / "tok.py").write_text("x = 1\n")
    change_config(folder, place, auto_map={"AutoTokenizer": ["tok.Slow", None]})
    assert code(verify(folder))["tok.py"] == ("added", True)


def test_a_pipeline_and_a_generate_function_of_the_folder_run(folder):
    (folder / "pipe.py").write_text("x = 1\n")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text("from .inner import f\n")
    (folder / "custom_generate" / "inner.py").write_text("f = 1\n")
    change_config(folder, custom_pipelines={"image-text-to-text": {"impl": "pipe.Pipe", "pt": ["AutoModel"]}})
    states = code(verify(folder))
    for name in ("pipe.py", "custom_generate/generate.py", "custom_generate/inner.py"):
        assert states[name] == ("added", True)


def test_code_that_is_no_python_is_named(folder):
    (folder / "aligned_norm.py").write_text("def (")
    assert any("aligned_norm.py is not Python that can be read" in reason for reason in verify(folder).reasons)


@pytest.mark.parametrize("part", ["config.json", "text_config"])
def test_code_of_another_repository_is_named(folder, part):
    config = json.loads((folder / "config.json").read_text())
    block = config if part == "config.json" else config["text_config"]
    block["auto_map"] = {**block.get("auto_map", {}), "AutoModel": "someone/else--modeling.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    where = "auto_map.AutoModel" if part == "config.json" else "text_config.auto_map.AutoModel"
    found = verify(folder)
    assert only_reason(found) == (
        f"config.json: {where} runs code of another repository, someone/else, by no fixed revision"
    )
    assert found.elsewhere == [f"config.json: {where} -> someone/else"]


def test_an_auto_map_that_leads_out_of_the_folder_or_to_another_class_is_named(folder):
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    auto_map |= {"AutoModel": "../evil.Model", "AutoConfig": "aligned_norm.AlignedNorm"}
    del auto_map["AutoModelForVision2Seq"]
    change_config(folder, auto_map=auto_map)
    assert verify(folder).reasons == [
        "config.json: auto_map.AutoModel names '../evil.Model', which is no class of a file in the folder",
        "config.json: auto_map.AutoConfig is aligned_norm.AlignedNorm, not configuration_normalign_llava.NormAlignLlavaConfig",
        "config.json: auto_map.AutoModel is ../evil.Model, not modeling_normalign_llava.NormAlignLlavaModel",
        "config.json: auto_map lacks AutoModelForVision2Seq",
    ]


def test_a_config_without_auto_map_is_named(folder):
    change_config(folder, auto_map=None)
    found = verify(folder)
    assert only_reason(found) == "config.json has no auto_map, so the model does not load without normalign"
    assert found.runs == []


@pytest.mark.parametrize("part", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_or_weights_from_elsewhere_are_named(folder, part):
    change_config(folder, **{part: "someone/kernel", "transformers_weights": "other.safetensors"})
    found = verify(folder)
    assert f"{part} runs a kernel of another repository, someone/kernel" in found.reasons
    assert "transformers_weights names another file of weights, other.safetensors" in found.reasons


# --- pickles


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.system, (f"echo run > '{self.target}'",)


def write_pickle(path, payload):
    path.write_bytes(pickle.dumps(payload))


def write_torch(path, payload):
    torch.save({"x": payload}, path)


@pytest.mark.parametrize("write", [write_pickle, write_torch])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pt", "x.PTH", "x.pkl", "x.ckpt", "x.json.bak", "a/weights"])
def test_a_pickle_is_refused_and_never_loaded(folder, tmp_path, name, write):
    payload, target = Payload(tmp_path / "was-run"), folder / name
    target.parent.mkdir(exist_ok=True)
    write(target, payload)
    found = verify(folder)
    assert only_reason(found) == f"pickles, which run code when they are loaded: {name}"
    assert found.pickles == [name]
    assert not (tmp_path / "was-run").exists()


def test_no_code_of_the_folder_is_run(folder, tmp_path):
    trap = f"\nopen({str(tmp_path / 'was-run')!r}, 'w').close()\n"
    for name in [*CODE, "conftest.py", "torch.py"]:
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write(trap)
    assert verify(folder).verdict == "fails"
    assert not (tmp_path / "was-run").exists()


# --- weights


@pytest.mark.both_generations
def test_a_tensor_that_is_missing_renamed_or_reshaped_is_named(folder):
    change_weights(folder, **{LINEAR: None, "lm_head.weight": torch.zeros(3, 48), "lm_head.scale": torch.ones(1)})
    found = verify(folder)
    assert found.weights.missing == [LINEAR]
    assert found.weights.unexpected == ["lm_head.scale"]
    assert found.weights.wrong_shape == [{"name": "lm_head.weight", "found": (3, 48), "expected": (64, 48)}]
    assert found.reasons == [
        f"weights that the code needs are missing: {LINEAR}",
        "weights that the code has no place for: lm_head.scale",
        "weights of another shape than the code's: lm_head.weight is (3, 48), not (64, 48)",
    ]


def test_an_empty_tensor_is_named(folder):
    change_weights(folder, **{LINEAR: torch.zeros(0, 32)})
    assert f"tensors without a value in them: {LINEAR}" in verify(folder).reasons


@pytest.mark.both_generations
def test_a_head_that_is_missing_without_being_tied_is_named(folder):
    change_weights(folder, **{"lm_head.weight": None})
    assert only_reason(verify(folder)) == "weights that the code needs are missing: lm_head.weight"


def test_a_config_of_more_layers_than_the_weights_is_named(folder):
    text = json.loads((folder / "config.json").read_text())["text_config"]
    change_config(folder, text_config={**text, "num_hidden_layers": 3, "layer_types": None})
    missing = verify(folder).weights.missing
    assert missing and all(".layers.2." in name for name in missing)


@pytest.fixture
def sharded(model, folder):
    """The folder with its weights in shards of 100 KB."""
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.mark.both_generations
def test_shards_are_read_by_their_index(sharded, exported):
    found = verify(sharded)
    assert found.reasons == [] and len(found.weights.files) > 1
    assert found.weights.parameters == verify(exported).weights.parameters


def test_a_shard_that_is_missing_is_named(sharded):
    lost = sorted(sharded.glob("*.safetensors"))[0]
    lost.unlink()
    found = verify(sharded)
    assert f"weight files are missing: {lost.name}" in found.reasons and found.weights.missing


def test_an_index_that_does_not_fit_its_files_is_named(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first, *_ = content["weight_map"]
    content["weight_map"]["ghost.weight"] = content["weight_map"].pop(first)
    index.write_text(json.dumps(content))
    found = verify(sharded)
    assert any(f"the tensor {first} of" in reason for reason in found.reasons)
    assert "tensors that the index names are in no file: ghost.weight" in found.reasons
    content["weight_map"] = {first: "../elsewhere.safetensors"}
    index.write_text(json.dumps(content))
    assert any("leads out of the folder: ../elsewhere.safetensors" in reason for reason in verify(sharded).reasons)
    index.write_text("{}")
    assert "model.safetensors.index.json has no weight_map" in verify(sharded).reasons


def test_weights_that_are_not_read_or_not_there_are_named(folder):
    shutil.copy(folder / "model.safetensors", folder / "old.safetensors")
    assert only_reason(verify(folder)) == "files of weights that from_pretrained does not read: old.safetensors"
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert only_reason(verify(folder)) == "there are no weights as safetensors"


def test_an_adapter_and_quantized_weights_are_named(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    change_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    reasons = verify(folder).reasons
    assert any("adapter_config.json puts an adapter" in reason for reason in reasons)
    assert any("quantization_config quantizes the weights" in reason for reason in reasons)


def test_a_part_that_would_download_its_weights_is_named_and_not_built(folder):
    change_config(folder, vision_config={"model_type": "timm_wrapper", "architecture": "hf-hub:someone/else"})
    assert only_reason(verify(folder)) == "vision_config (model type timm_wrapper) takes its weights from elsewhere"


@pytest.mark.both_generations
def test_a_part_of_an_unknown_type_is_one_paragraph_and_its_code_is_not_fetched(folder):
    block = {"model_type": "homemade", "auto_map": {"AutoConfig": "someone/else--config.C"}}
    change_config(folder, text_config=block)
    with pytest.raises(NormalignError, match="The config of the model .* could not be loaded"):
        verify(folder)


# --- the aligned norm


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gain_that_is_not_finite_is_named(folder, value):
    gain = load_file(folder / "model.safetensors")[GAIN]
    gain[3] = value
    change_weights(folder, **{GAIN: gain})
    assert only_reason(verify(folder)) == f"{GAIN} holds values that are not finite"


def test_a_gain_that_is_missing_or_zero_is_named(folder):
    change_weights(folder, **{GAIN: torch.zeros(48)})
    assert "the gain of the aligned norm is zero" in only_reason(verify(folder))
    change_weights(folder, **{GAIN: None})
    assert only_reason(verify(folder)) == f"weights that the code needs are missing: {GAIN}"


def test_a_config_without_T_is_named(folder):
    block = json.loads((folder / "config.json").read_text())["aligned_norm"]
    change_config(folder, aligned_norm={**block, "target_norm": None})
    assert only_reason(verify(folder)) == "config.json does not say the text norm T (aligned_norm.target_norm)"


# --- the card


def test_a_card_that_would_be_rejected_is_named(folder):
    text = (folder / "README.md").read_text(encoding="utf-8")
    (folder / "README.md").write_text(text.replace("license: unknown", "license: unheard-of"), encoding="utf-8")
    found = verify(folder)
    assert [problem.field for problem in found.card] == ["license"]
    assert "the model card: license: 'unheard-of' is no license id" in only_reason(found)


def test_a_folder_without_card_is_told_so(folder):
    (folder / "README.md").unlink()
    found = verify(folder)
    assert (found.verdict, found.notes) == ("passes", ["there is no model card (README.md)"])
    assert re.search("card +none", run(folder).stdout)


# --- the Hub


COMMIT = "0123456789" * 4


@pytest.fixture
def cached(exported):
    """The id of a repository of which the cache holds a commit; the tests have no network."""
    repo = Path(huggingface_hub.constants.HF_HUB_CACHE) / "models--someone--verified"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    shutil.copytree(exported, repo / "snapshots" / COMMIT)
    yield "someone/verified"
    shutil.rmtree(repo)


@pytest.mark.both_generations
def test_a_repository_is_told_with_the_commit_to_pin(cached):
    found = verify(cached)
    assert (found.verdict, found.revision) == ("passes", COMMIT)
    assert f"the main branch can move: load with revision='{COMMIT}'" in found.notes[0]
    assert "only the copy in the cache" in found.notes[1]
    assert len(verify(cached, revision=COMMIT).notes) == 1


def test_names_of_files_that_are_not_fetched_count(cached, monkeypatch):
    names = [*CODE, "config.json", "training_args.bin", "extra.so"]
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *a, **k: names)
    found = verify(cached, revision=COMMIT)
    assert found.pickles == ["training_args.bin"] and code(found)["extra.so"] == ("added", False)
    assert found.notes == []


def test_a_repository_that_cannot_be_had_is_one_paragraph(cached):
    with pytest.raises(NormalignError, match="nobody/nothing is neither a local folder nor a model that can be had"):
        verify("nobody/nothing")
    with pytest.raises(NormalignError, match="someone/verified at revision 'v9' is neither"):
        verify(cached, revision="v9")


# --- bad input


def test_what_is_no_model_is_one_paragraph(folder, tmp_path):
    with pytest.raises(NormalignError, match="has no name"):
        verify(" ")
    with pytest.raises(NormalignError, match="does not exist"):
        verify(tmp_path / "nowhere")
    with pytest.raises(NormalignError, match="is a file"):
        verify(folder / "config.json")
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    with pytest.raises(NormalignError, match="lora holds a PEFT adapter.* `normalign export"):
        verify(tmp_path / "lora")
    with pytest.raises(NormalignError, match="has no config.json"):
        verify(tmp_path)
    with pytest.raises(NormalignError, match="is a local folder, which has no revisions"):
        verify(folder, revision="main")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("config.json", b"{", "config.json is broken"),
        ("config.json", b"[]", "holds a list"),
        ("config.json", b'{"model_type": "llava"}', "model of type 'llava'.*nothing to compare"),
        ("config.json", b'{"model_type": ["a"]}', "model of type"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is broken"),
        ("model.safetensors", b"\x00" * 20, "model.safetensors is truncated or corrupt"),
        ("model.safetensors", b"", "model.safetensors is truncated or corrupt"),
    ],
)
def test_a_broken_file_is_one_paragraph_that_names_it(folder, name, content, expected):
    (folder / name).write_bytes(content)
    with pytest.raises(NormalignError, match=expected):
        verify(folder)


def test_truncated_weights_and_a_config_that_builds_nothing_are_one_paragraph(folder):
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(NormalignError, match="truncated or corrupt"):
        verify(folder)
    (folder / "model.safetensors").write_bytes(weights)
    change_config(folder, aligned_norm={"kind": "other"})
    with pytest.raises(NormalignError, match="aligned_norm.kind must be"):
        verify(folder)


# --- on the command line


def run(*arguments):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_the_command_ends_with_0_for_a_good_folder_and_1_for_another(folder):
    good = run(folder)
    assert good.exit_code == 0 and "passes" in good.stdout
    assert f"identical to normalign {normalign.__version__}" in good.stdout and "0 problems found" in good.stdout
    assert all(name in good.stdout for name in CODE)
    (folder / "helper[red].py").write_text("x = 1")
    with (folder / MODELING).open("a") as file:
        file.write("x = [/]\n")
    bad = run(folder)
    assert bad.exit_code == 1 and "fails" in bad.stdout
    assert "helper[red].py was added" in bad.stdout and "+x = [/]" in bad.stdout
    broken = run(folder / "nowhere")
    assert broken.exit_code == 1 and "Traceback" not in broken.output


def test_the_json_is_alone_on_stdout(folder):
    (folder / "x.pkl").write_bytes(b"")
    result = run(folder, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (report["verdict"], report["pickles"], report["identical_to"]) == (
        "fails",
        ["x.pkl"],
        normalign.__version__,
    )
    assert report["code"][0] == {"file": "aligned_norm.py", "state": "identical", "runs": True, "diff": []}
    assert report["runs"] == CODE and report["revision"] is None
