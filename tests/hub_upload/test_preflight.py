"""What is found in a folder before it is sent: damage, pickles, an invalid card, secrets, places of this machine."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from normalign.configuration.errors import NormalignError
from normalign.hub_upload.preflight import check_folder


TOKEN = "hf_" + "AbCdEfGhIj" * 3 + "Klmn"


@pytest.fixture
def folder(exported, tmp_path):
    """A copy of an export that a test may spoil."""
    return shutil.copytree(exported, tmp_path / "out" / "export")


def refusal(folder, **options):
    with pytest.raises(NormalignError) as caught:
        check_folder(folder, **{"load": False, **options})
    message = str(caught.value)
    assert "nothing was sent" in message and "\n" not in message
    return message


def append(path, text):
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


@pytest.mark.both_generations
def test_an_export_is_fit_and_also_loads_in_a_clean_process(folder):
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"x")
    (folder / ".DS_Store").write_bytes(b"x")
    assert check_folder(folder) == sorted(file.name for file in folder.iterdir() if file.name[:2] not in ("__", ".D"))


def test_a_folder_that_does_not_load_is_refused(folder):
    append(folder / "modeling_normalign_llava.py", "\nraise RuntimeError('left in by mistake')\n")
    with pytest.raises(NormalignError, match="left in by mistake"):
        check_folder(folder)


@pytest.mark.parametrize("change", ["missing", "superfluous"])
def test_weights_that_do_not_fit_the_code_are_refused(folder, change):
    weights = load_file(folder / "model.safetensors")
    if change == "missing":
        weights.pop(next(name for name in weights if name.endswith("linear_1.weight")))
    else:
        weights["model.linear_1.weight"] = torch.ones(2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NormalignError, match=r"linear_1\.weight.*othing was sent"):
        check_folder(folder)


def test_no_folder_and_a_folder_of_something_else_are_refused(tmp_path):
    with pytest.raises(NormalignError, match="is no folder"):
        check_folder(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("x")
    message = refusal(tmp_path)
    assert "no config.json" in message and "no .safetensors" in message and "no README.md" in message


def test_a_plain_checkpoint_is_no_export(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "no auto_map" in refusal(folder)


def test_code_of_another_repository_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"]["AutoConfig"] = f"a/b--{config['auto_map']['AutoConfig']}"
    (folder / "config.json").write_text(json.dumps(config))
    assert "from another repository" in refusal(folder)


def test_missing_code_is_named(folder):
    (folder / "aligned_norm.py").unlink()
    assert "modeling_normalign_llava.py imports aligned_norm.py, which is missing" in refusal(folder)
    (folder / "modeling_normalign_llava.py").unlink()
    assert "auto_map names modeling_normalign_llava.py, which is missing" in refusal(folder)


def test_weights_that_were_cut_are_named(folder):
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-10])
    assert "model.safetensors is cut or damaged" in refusal(folder)


def test_an_index_that_names_a_missing_shard_is_refused(folder):
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors", "nothing": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refusal(folder)
    assert "names model-00002-of-00002.safetensors, which is missing" in message
    assert "looks for nothing in model.safetensors" in message


def test_pickles_are_refused_by_name_and_by_content(folder):
    torch.save({"a": torch.ones(2)}, folder / "optimizer.pt")
    torch.save({"a": torch.ones(2)}, folder / "notes.dat")
    (folder / "scores.json5").write_bytes(pickle.dumps({"a": 1}))
    message = refusal(folder)
    assert all(f"{name} is a pickle" in message for name in ("optimizer.pt", "notes.dat", "scores.json5"))


@pytest.mark.parametrize(
    ("secret", "kind"),
    [
        (TOKEN, "a Hugging Face token"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "a private key"),
        ("-----BEGIN PRIVATE KEY-----", "a private key"),
        ("AKIA" + "ABCDEFGH12345678", "an AWS access key"),
        ("ghp_" + "a1B2" * 9, "a GitHub token"),
    ],
)
@pytest.mark.parametrize("name", ["README.md", "notes.log", "tokenizer_config.json"])
def test_a_secret_is_found_in_any_file_and_not_shown(folder, secret, kind, name):
    (folder / "notes.log").write_text("first\n")
    if name.endswith(".json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "x": secret}))
    else:
        append(folder / name, f"\n{secret}\n")
    message = refusal(folder)
    assert f"{name} holds {kind} in line" in message and secret not in message


def test_a_secret_in_the_metadata_of_weights_is_found(folder):
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt", "note": TOKEN})
    assert "model.safetensors holds a Hugging Face token" in refusal(folder)


@pytest.mark.parametrize("name", [".env", "id_rsa", "server.pem", ".netrc"])
def test_files_that_hold_secrets_are_refused_by_name(folder, name):
    (folder / name).write_text("x")
    assert f"{name} is a file that usually holds secrets" in refusal(folder)


@pytest.mark.parametrize(
    "place", ["/home/me/runs/3", "/" + "Users/ada/runs", r"C:\Users\ada\runs", "HOME/x", "FOLDER"]
)
def test_a_place_of_a_machine_is_found(folder, place):
    place = place.replace("HOME", str(Path.home())).replace("FOLDER", str(folder.parent / "stage2"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "from": place}))
    assert "config.json names the local path" in refusal(folder)


def test_addresses_that_only_look_like_places_are_no_finding(folder):
    append(folder / "README.md", "\nSee https://example.org/home/ada/page and ~/home/x/y and `/var/pictures`.\n")
    append(folder / "README.md", f"\n{folder.parent}hood and {folder.parent}-2\n")
    check_folder(folder, load=False)


# --- cards


VALID = {"license": "mit", "library_name": "transformers", "tags": ["a"], "datasets": ["a/b", "c"]}


def card(text):
    return f"---\n{text}\n---\n\n# Card\n"


def test_an_invalid_card_stops_the_folder(folder):
    (folder / "README.md").write_text(card("license: mit\ndatasets: [null]"))
    assert "README.md: datasets" in refusal(folder)
