"""The demo, with two thirds of its steps and fewer questions: it learns, it looks at the pictures, it leaves what it promises."""

import json
import shutil

import pytest

from normalign.configuration.errors import NormalignError
from normalign.demo import MARKER, _empty_folder, _read_marker, run_demo


QUESTIONS = 240


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder and the results of one run."""
    out = tmp_path_factory.mktemp("demo") / "with a space"
    return out, run_demo(out, questions=QUESTIONS, overrides={"data.rows": 4480})


def test_held_out_questions_are_answered_and_black_pictures_fall_to_chance(demo):
    _, results = demo
    assert results["accuracy"] >= 0.85
    # two standard errors of a share of 240 answers above the best blind guess
    assert results["accuracy_black_image"] <= results["chance"] + 2 * (0.25 / QUESTIONS) ** 0.5
    assert set(results["accuracy_by_kind"]) == {"digit", "colour", "count", "exists", "largest", "row"}


def test_norms_show_the_gap_and_its_cure(demo):
    _, results = demo
    assert results["visual_norm_before"] > 5 * results["text_norm"]
    assert results["visual_norm_after"] == pytest.approx(results["text_norm"], rel=1e-3)
    assert results["gain_end"] != pytest.approx(results["gain_start"], rel=0.02)


def test_the_export_answers_alike_in_a_process_without_normalign(demo):
    out, results = demo
    assert results["reload"]["logits_bit_equal"] and not results["reload"]["normalign_importable"]
    assert results["reload"]["answers"] == results["reload"]["pipeline_answers"]
    assert results["export"] == str(out / "export")
    assert (out / "export" / "modeling_normalign_llava.py").is_file()


def test_results_logs_reports_and_pictures_are_left(demo):
    out, results = demo
    assert json.loads((out / "results.json").read_text()) == results
    fixed = {"accuracy", "accuracy_black_image", "chance", "seconds", "text_norm"}
    assert fixed | {"visual_norm_before", "visual_norm_after", "export"} <= set(results)
    assert (out / "held_out_scenes.png").stat().st_size > 20_000
    for time in ("before_training", "after_training"):
        assert "verdict" in json.loads((out / "inspection" / time / "report.json").read_text())
    for stage in ("stage1", "stage2"):
        steps = [json.loads(line) for line in (out / stage / "train_log.jsonl").read_text().splitlines()]
        assert steps[-1]["step"] == 140 and steps[-1]["loss"] < steps[0]["loss"]
        trained = {part for part in ("vision", "projector", "norm", "language") if steps[0][f"update/{part}"] > 0}
        assert trained == {"projector", "norm"} | ({"language"} if stage == "stage2" else set())


# --- what may be replaced


def test_only_what_the_demo_wrote_is_removed_by_the_next(demo, tmp_path):
    out = shutil.copytree(demo[0], tmp_path / "demo")  # with the times of the files, which the marker knows
    noted = set(_read_marker(out))
    assert {"composed/model.safetensors", "stage1/train_log.jsonl", "stage2/", "export/README.md"} <= noted
    assert {"inspection/after_training/report.json", "pictures/scene0.png", "results.json"} <= noted
    assert _empty_folder(out) == out
    assert [path.name for path in out.iterdir()] == [MARKER]
    assert _empty_folder(out) == out


@pytest.mark.parametrize("name", ["export/thesis.tex", "thesis.tex", "stage2/sub/thesis.tex", "export/README.md"])
def test_a_file_that_the_demo_has_not_written_as_it_is_stops_the_next_and_all_is_kept(demo, tmp_path, name):
    out = shutil.copytree(demo[0], tmp_path / "demo")
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("my only copy")
    before = sorted(out.rglob("*"))
    with pytest.raises(NormalignError, match=f"{name}.*Nothing was removed"):
        run_demo(out)
    assert sorted(out.rglob("*")) == before
    assert (out / name).read_text() == "my only copy"


def test_training_folders_by_the_demos_recipes_are_not_a_demo(demo, tmp_path):
    for stage in ("stage1", "stage2"):
        shutil.copytree(demo[0] / stage, tmp_path / stage)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(NormalignError, match=f"holds stage1, stage2 and no {MARKER} of a demo"):
        run_demo(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_in_the_place_of_a_folder_of_the_demo_is_not_followed(demo, tmp_path):
    out = shutil.copytree(demo[0], tmp_path / "demo")
    shutil.move(out / "export", tmp_path / "elsewhere")
    (out / "export").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NormalignError, match="holds export,"):
        run_demo(out)
    assert (tmp_path / "elsewhere" / "README.md").is_file()


def test_a_demo_that_was_broken_off_can_be_run_again_in_its_folder(tmp_path):
    with pytest.raises(NormalignError, match="Unknown key 'no_such_key'"):
        run_demo(tmp_path / "demo", questions=2, overrides={"no_such_key": 1})
    assert "composed/config.json" in _read_marker(tmp_path / "demo")
    assert _empty_folder(tmp_path / "demo").is_dir()


def test_a_folder_with_other_things_is_refused_and_kept(tmp_path):
    (tmp_path / "thesis.tex").write_text("my only copy")
    with pytest.raises(NormalignError, match="thesis.tex"):
        run_demo(tmp_path)
    with pytest.raises(NormalignError, match="is a file"):
        run_demo(tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "my only copy"
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(NormalignError, match="is a link to .*gone, which is not there"):
        run_demo(tmp_path / "link")
