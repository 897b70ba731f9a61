"""License files travel with the weights, from the parts of a model to what is made of them."""

import pytest

from normalign.assembly import save_whole
from normalign.assembly.licenses import is_license_file
from normalign.train_trl.checkpoints import complete_folder
from normalign.train_trl.recipe import ComposeSettings, Recipe
from normalign.train_trl.training import check_output


@pytest.fixture
def parts(tmp_path):
    """The folders of an encoder and a language model, with their licenses."""
    for name, file in (("vit", "LICENSE.txt"), ("Llama 3.2", "NOTICE")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(f"The terms of {name}.\n")
        (tmp_path / name / "notes.txt").write_text("Not a license.\n")
    return [str(tmp_path / "vit"), str(tmp_path / "Llama 3.2")]


def licenses(folder):
    return {file.name: file.read_text() for file in folder.iterdir() if is_license_file(file.name)}


def test_a_composed_model_has_the_licenses_of_its_parts_by_their_names(composed, parts, tmp_path):
    out = save_whole(*composed(), tmp_path / "out", sources=parts)
    assert licenses(out) == {
        "LICENSE-vit.txt": "The terms of vit.\n",
        "NOTICE-Llama-3-2": "The terms of Llama 3.2.\n",
    }
    grafted = save_whole(*composed(), tmp_path / "grafted", sources=[out])
    assert licenses(grafted) == licenses(out)


def test_a_trained_folder_has_the_licenses_of_what_it_started_from(parts, tmp_path):
    folder = tmp_path / "stage" / "checkpoint-2"
    folder.mkdir(parents=True)
    complete_folder(folder, Recipe(output_dir=str(folder.parent), model=parts[0]))
    assert licenses(folder) == {"LICENSE.txt": "The terms of vit.\n"}
    compose = ComposeSettings(vision=parts[0], text="mini-language")
    complete_folder(folder.parent, Recipe(output_dir=str(folder.parent), compose=compose))
    assert licenses(folder.parent) == {"LICENSE-vit.txt": "The terms of vit.\n"}


def test_a_run_with_license_files_may_be_replaced_when_told(parts, tmp_path):
    recipe = Recipe(output_dir=str(tmp_path / "stage"), model=parts[0], overwrite=True)
    (tmp_path / "stage").mkdir()
    complete_folder(tmp_path / "stage", recipe)
    (tmp_path / "stage" / "train_log.jsonl").write_text("")
    check_output(recipe)
    assert licenses(tmp_path / "stage") == {"LICENSE.txt": "The terms of vit.\n"}
