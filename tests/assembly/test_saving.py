"""Where a whole model may be written: in full, over nothing that matters, and never over what it is made from."""

import os
import stat

import pytest
import torch
from safetensors import SafetensorError

from normalign.assembly import check_target, load_adapter, save_whole
from normalign.assembly.saving import written_in_full
from normalign.configuration.errors import NormalignError
from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def thesis(tmp_path):
    """A folder with a file that nobody wants to lose."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("my only copy")
    return folder


@pytest.mark.both_generations
def test_a_model_is_saved_whole_with_its_processor_and_code(composed, tmp_path):
    out = save_whole(*composed(), tmp_path / "parent" / "model")
    assert names(tmp_path / "parent") == ["model"]
    assert {"model.safetensors", "config.json", "tokenizer.json", "modeling_normalign_llava.py"} <= set(names(out))
    modes = {stat.S_IMODE((out / name).stat().st_mode) for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1
    loaded = NormAlignLlavaForConditionalGeneration.from_pretrained(out)
    assert torch.equal(loaded.lm_head.weight, composed()[0].lm_head.weight)


def test_home_is_meant_by_a_tilde(composed, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert save_whole(*composed(), "~/model") == tmp_path / "model"
    assert "config.json" in names(tmp_path / "model")


def test_a_folder_with_files_is_replaced_only_when_told(composed, thesis):
    with pytest.raises(NormalignError, match="mine is not empty.*--overwrite"):
        save_whole(*composed(), thesis)
    assert names(thesis) == ["thesis.tex"]
    save_whole(*composed(), thesis, overwrite=True)
    assert "thesis.tex" not in names(thesis) and "config.json" in names(thesis)


def test_a_folder_with_folders_is_never_replaced(composed, thesis):
    with pytest.raises(
        NormalignError, match="holds the folder mine, and a folder with folders in it is never replaced"
    ):
        save_whole(*composed(), thesis.parent, overwrite=True)
    assert names(thesis) == ["thesis.tex"]


def test_a_source_or_a_folder_above_it_is_never_replaced(composed, thesis, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(thesis)
    for out in (thesis, tmp_path, link):
        with pytest.raises(NormalignError, match="would replace what it is made from"):
            save_whole(*composed(), out, sources=["mini-language", "owner/name", thesis], overwrite=True)
    assert names(thesis) == ["thesis.tex"]


def test_a_source_that_is_a_preset_is_never_replaced(composed):
    from normalign.configuration.backbones import resolve_backbone

    with pytest.raises(NormalignError, match="would replace what it is made from"):
        save_whole(*composed(), resolve_backbone("mini-language"), sources=["mini-language"], overwrite=True)


def test_no_name_a_file_and_a_link_to_nothing_are_refused(thesis, tmp_path):
    with pytest.raises(NormalignError, match="has no name"):
        check_target("")
    with pytest.raises(NormalignError, match="thesis.tex is a file"):
        check_target(thesis / "thesis.tex", overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(NormalignError, match="is a link to .*gone, which is not there"):
        check_target(tmp_path / "link")


def test_an_empty_and_a_new_folder_do(tmp_path):
    assert check_target(tmp_path) == tmp_path
    assert check_target(tmp_path / "new") == tmp_path / "new"
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (OSError(28, "No space left on device"), NormalignError, "There is no room on the disk for .*(mine|new)"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), NormalignError, "no room on the disk"),
        (SafetensorError("something else"), SafetensorError, "something else"),
        (PermissionError(13, "Permission denied"), PermissionError, "Permission denied"),
    ],
)
def test_a_failure_leaves_the_folder_as_it_was(composed, thesis, tmp_path, monkeypatch, error, expected, words):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(NormAlignLlavaForConditionalGeneration, "save_pretrained", fail)
    for out in (thesis, tmp_path / "new"):
        with pytest.raises(expected, match=words):
            save_whole(*composed(), out, overwrite=True)
    assert names(tmp_path) == ["mine"] and names(thesis) == ["thesis.tex"]


def test_a_folder_that_cannot_be_made_is_named(thesis):
    with (
        pytest.raises(NormalignError, match="thesis.tex/model cannot be made"),
        written_in_full(thesis / "thesis.tex" / "model"),
    ):
        pass


def test_the_room_offers_load_adapter():
    assert load_adapter.__module__ == "normalign.assembly.adapters"
