"""What `export` writes, what it refuses, and that a failure leaves nothing behind."""

import ast
import getpass
import json
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import dynamic_module_utils

import normalign.modeling
from normalign.configuration.errors import NormalignError
from normalign.hub_upload import export
from normalign.hub_upload import export as export_function
from normalign.hub_upload.both_generations import older_name
from normalign.hub_upload.export import code_files
from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration


CODE = ["aligned_norm.py", "configuration_normalign_llava.py", "modeling_normalign_llava.py"]
FILES = [
    *CODE,
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
]
if transformers.__version__.startswith("4."):
    FILES += ["special_tokens_map.json"]


def names(folder):
    return sorted(file.name for file in Path(folder).iterdir())


@pytest.mark.both_generations
def test_the_export_is_flat_and_holds_what_a_user_needs_and_nothing_of_the_training(exported):
    """R14: every file of code is there, side by side."""
    assert names(exported) == sorted(FILES)


@pytest.mark.both_generations
def test_exported_code_is_that_of_the_package_byte_for_byte(exported):
    home = Path(normalign.modeling.__file__).parent
    for name in CODE:
        assert (exported / name).read_bytes() == (home / name).read_bytes()


@pytest.mark.both_generations
def test_exported_code_imports_torch_transformers_and_siblings_only(exported):
    """R80: so loading asks for no further package."""
    siblings = {Path(name).stem for name in CODE}
    for name in CODE:
        third_party = set(dynamic_module_utils.get_imports(exported / name)) - sys.stdlib_module_names
        assert third_party <= {"torch", "transformers"}
        assert set(dynamic_module_utils.check_imports(exported / name)) <= siblings


@pytest.mark.both_generations
def test_exported_code_does_not_use_the_auto_class_that_transformers_5_has_dropped(exported):
    """R21: it is named in auto_map alone, where it does no harm."""
    for name in CODE:
        for node in ast.walk(ast.parse((exported / name).read_text(encoding="utf-8"))):
            used = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
            assert used != "AutoModelForVision2Seq"


def test_code_files_are_the_model_file_and_all_it_imports():
    assert [file.name for file in code_files(NormAlignLlavaForConditionalGeneration)] == CODE


@pytest.mark.both_generations
def test_no_file_names_a_local_path_or_the_user(exported, checkpoint):
    for file in exported.iterdir():
        if file.suffix in (".json", ".md", ".jinja"):
            text = file.read_text(encoding="utf-8")
            assert str(checkpoint.parent) not in text
            assert str(exported.parent) not in text
            assert "name_or_path" not in text
            assert "is_local" not in text
            if getpass.getuser() not in ("user", "model"):
                assert f"/{getpass.getuser()}/" not in text


@pytest.mark.both_generations
def test_config_names_a_class_of_the_folder_for_every_auto_class(exported):
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["NormAlignLlavaForConditionalGeneration"]
    assert set(config["auto_map"]) == {
        "AutoConfig",
        "AutoModel",
        "AutoModelForImageTextToText",
        "AutoModelForVision2Seq",
        "AutoModelForMultimodalLM",
        "AutoModelForCausalLM",
    }
    for reference in config["auto_map"].values():
        assert "--" not in reference
        module, name = reference.split(".")
        assert f"class {name}(" in (exported / f"{module}.py").read_text()


def weights_of(checkpoint):
    """A checkpoint's weights by the names that an export gives them."""
    weights = load_file(checkpoint / "model.safetensors")
    return {older_name(key, "siglip_vision_model"): value for key, value in weights.items()}


@pytest.mark.both_generations
def test_exported_weights_are_those_of_the_checkpoint(exported, checkpoint):
    source, written = weights_of(checkpoint), load_file(exported / "model.safetensors")
    assert source.keys() == written.keys()
    assert all(torch.equal(source[key], written[key]) for key in source)
    assert all(source[key].dtype == written[key].dtype for key in source)


def test_a_bfloat16_model_is_exported_in_bfloat16_with_its_norm_in_float32(make_model, make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(make_model().to(torch.bfloat16), tmp_path / "checkpoint")
    weights = load_file(export(checkpoint, tmp_path / "out") / "model.safetensors")
    gains = {key: value.dtype for key, value in weights.items() if "aligned_norm" in key}
    assert set(gains.values()) == {torch.float32}
    assert {value.dtype for key, value in weights.items() if key not in gains} == {torch.bfloat16}


def test_a_model_without_norm_and_one_with_tied_embeddings_are_exported(make_model, make_checkpoint, tmp_path):
    plain = make_checkpoint(make_model(aligned_norm={"kind": "none"}), tmp_path / "plain")
    tied = make_checkpoint(make_model(tie=True), tmp_path / "tied")
    assert not any("aligned_norm" in key for key in load_file(export(plain, tmp_path / "a") / "model.safetensors"))
    assert "lm_head.weight" not in load_file(export(tied, tmp_path / "b") / "model.safetensors")


def test_a_sharded_checkpoint_is_exported(model, processor, checkpoint, tmp_path):
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    processor.save_pretrained(tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    written = load_file(export(tmp_path / "sharded", tmp_path / "out") / "model.safetensors")
    source = weights_of(checkpoint)
    assert source.keys() == written.keys() and all(torch.equal(source[key], written[key]) for key in source)


def test_a_model_is_exported_from_its_hub_id(exported, tmp_path):
    repo = Path(huggingface_hub.constants.HF_HUB_CACHE) / "models--someone--published"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    shutil.copytree(exported, repo / "snapshots" / ("0" * 40))
    out = export("someone/published", tmp_path / "out")
    assert (out / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    assert names(out) == sorted(FILES)


def test_results_get_into_the_card(checkpoint, tmp_path):
    out = export(checkpoint, tmp_path / "out", results={"accuracy": 0.875}, license="mit", base_model="a/b")
    text = (out / "README.md").read_text(encoding="utf-8")
    assert "0.875" in text and "license: mit" in text and "base_model:\n- a/b\n" in text


# --- where it may be written


def test_an_earlier_export_is_replaced(checkpoint, exported, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(exported, out)
    (out / "model-00001-of-00002.safetensors").write_bytes(b"an old shard")
    export(checkpoint, out)
    assert names(out) == sorted(FILES)
    assert names(tmp_path) == ["out"]


def test_other_files_are_kept_unless_told(checkpoint, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(NormalignError, match="is not empty"):
        export(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"
    export(checkpoint, tmp_path / "out", overwrite=True)
    assert names(tmp_path / "out") == sorted(FILES)


def test_a_link_and_the_current_folder_can_be_written_to(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    export(checkpoint, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and names(tmp_path / "real") == sorted(FILES)
    monkeypatch.chdir(tmp_path / "real")
    export(checkpoint, ".")
    assert names(tmp_path / "real") == sorted(FILES) and names(tmp_path) == ["link", "real"]


def test_a_folder_with_folders_is_never_replaced(checkpoint, tmp_path):
    (tmp_path / "out" / "checkpoint-10").mkdir(parents=True)
    with pytest.raises(NormalignError, match="holds the folder checkpoint-10"):
        export(checkpoint, tmp_path / "out", overwrite=True)


def test_the_source_is_never_replaced(checkpoint):
    for out in (checkpoint, checkpoint.parent):
        with pytest.raises(NormalignError, match="would replace what it is made from"):
            export(checkpoint, out, overwrite=True)


@pytest.mark.both_generations
def test_a_failure_leaves_no_half_folder_and_keeps_the_earlier_export(
    model, checkpoint, exported, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    shutil.copytree(exported, out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def disk_full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(NormAlignLlavaForConditionalGeneration, "save_pretrained", disk_full)
    with pytest.raises(NormalignError, match="There is no room on the disk for .*out"):
        export(checkpoint, out)
    with pytest.raises(NormalignError, match="There is no room on the disk for .*new"):
        export(checkpoint, tmp_path / "new")
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert names(tmp_path) == ["out"]


def test_an_export_whose_logits_differ_is_not_written(checkpoint, tmp_path, monkeypatch):
    save = NormAlignLlavaForConditionalGeneration.save_pretrained

    def save_another(model, folder, **kwargs):
        with torch.no_grad():
            model.lm_head.weight[0] += 1e-3
        save(model, folder, **kwargs)

    monkeypatch.setattr(NormAlignLlavaForConditionalGeneration, "save_pretrained", save_another)
    with pytest.raises(NormalignError, match="other logits than its source"):
        export(checkpoint, tmp_path / "out")
    assert names(tmp_path) == []


def test_a_local_path_that_gets_into_a_config_stops_the_export(make_model, make_checkpoint, tmp_path):
    model = make_model()
    model.config.trained_in = str(tmp_path / "checkpoint")
    make_checkpoint(model, tmp_path / "checkpoint")
    with pytest.raises(NormalignError, match="config.json names the local path"):
        export(tmp_path / "checkpoint", tmp_path / "out")


# --- what cannot be exported


def folder_with(tmp_path, **contents):
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def test_a_foreign_model_is_told_to_be_grafted(tmp_path):
    with pytest.raises(NormalignError, match="of type 'llava'.*normalign graft"):
        export(folder_with(tmp_path, config={"model_type": "llava"}), tmp_path / "out")


def test_a_training_folder_is_told_its_newest_checkpoint(tmp_path):
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20" / "config.json").write_text("{}")
    with pytest.raises(NormalignError, match="no config.json.*checkpoint-20: export that"):
        export(tmp_path, tmp_path / "out")


def test_pickled_weights_are_not_read(tmp_path):
    folder_with(tmp_path, config={"model_type": "normalign_llava"})
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(NormalignError, match="no .safetensors file"):
        export(tmp_path, tmp_path / "out")


def test_a_model_that_is_nowhere_is_named(tmp_path):
    with pytest.raises(NormalignError, match="no-such-folder does not exist"):
        export(tmp_path / "no-such-folder", tmp_path / "out")
    with pytest.raises(NormalignError, match="nobody/no-such-model is neither a local folder nor"):
        export("nobody/no-such-model", tmp_path / "out")


@pytest.mark.both_generations
def test_a_checkpoint_without_processor_is_refused(model, tmp_path):
    model.save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(NormalignError, match="The processor of the model .* could not be loaded"):
        export(tmp_path / "checkpoint", tmp_path / "out")


@pytest.mark.both_generations
def test_a_checkpoint_without_chat_template_is_refused(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(NormalignError, match="has no chat template.*chat_template.jinja.*Copy"):
        export(copy, tmp_path / "out")
    assert names(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize("out", ["", "file"])
def test_a_place_that_is_no_folder_is_refused(checkpoint, tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NormalignError, match="has no name|file is a file"):
        export(checkpoint, out, overwrite=True)


def test_a_tokenizer_that_comes_out_different_stops_the_export(checkpoint, tmp_path, monkeypatch):
    ids = iter(([1, 2, 3], [1, 2]))
    # the package's attribute of that name is the function, not its module
    monkeypatch.setitem(export_function.__globals__, "_sample_ids", lambda processor: next(ids))
    with pytest.raises(NormalignError, match="tokenizer makes other tokens"):
        export(checkpoint, tmp_path / "out")
    assert names(tmp_path) == []


def test_a_gain_that_is_not_finite_is_named(make_model, make_checkpoint, tmp_path):
    model = make_model()
    with torch.no_grad():
        model.get_aligned_norm().weight[3] = float("nan")
    with pytest.raises(NormalignError, match="gain or bias of the aligned norm holds values that are not finite"):
        export(make_checkpoint(model, tmp_path / "checkpoint"), tmp_path / "out")


def test_the_package_offers_export():
    assert normalign.export is export_function
