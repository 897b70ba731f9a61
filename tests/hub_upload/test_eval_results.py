"""Results of benchmarks on the Hub are also written in the Hub's format, and nothing else gets in with them."""

import json
import shutil

import pytest
import yaml

from normalign.configuration.errors import NormalignError
from normalign.hub_upload import export, verify
from normalign.hub_upload.eval_results import BENCHMARKS, MARK, eval_result_files, eval_result_problems
from normalign.hub_upload.preflight import check_folder


TASK = {"score": 41.24, "metric": "average", "n": 1500, "failed": 3, "stderr": 1.25, "task_version": 0}
RUN = {"harness": "lmms-eval", "harness_version": "0.6.1", "commit": "0123456789abcdef", "date": "2026-11-30"}
PAPER = "mmbench_en_dev_static mmstar pope seedbench_2_plus ocrbench scienceqa_img ai2d hellaswag mmlu"


def results(**tasks):
    return {"model": "m", **RUN, "tasks": tasks, "average": 41.24}


@pytest.fixture(scope="module")
def written(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("exports") / "evaluated"
    return export(checkpoint, out, results=results(mmstar=TASK, digits=TASK, pope={**TASK, "limit": 10}))


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "out")


def test_the_nine_benchmarks_of_the_paper_have_a_data_set():
    assert list(BENCHMARKS) == PAPER.split()
    for task in BENCHMARKS:
        (text,) = eval_result_files(results(**{task: TASK})).values()
        assert eval_result_problems(text) == []


@pytest.mark.both_generations
def test_a_result_is_written_as_the_hub_reads_it(written):
    text = (written / ".eval_results" / "mmstar.yaml").read_text(encoding="utf-8")
    assert text.startswith(MARK)
    assert yaml.safe_load(text) == [
        {
            "dataset": {"id": "Lin-Chen/MMStar", "task_id": "default"},
            "value": 41.24,
            "date": "2026-11-30",
            "notes": "metric average, lmms-eval 0.6.1, version 0, commit 0123456789ab, 3 failed",
        }
    ]


def test_the_hubs_own_client_reads_it(written):
    hub = pytest.importorskip("huggingface_hub")
    if not hasattr(hub, "parse_eval_result_entries"):
        pytest.skip(f"huggingface_hub {hub.__version__} is older than this format")
    entries = yaml.safe_load((written / ".eval_results" / "mmstar.yaml").read_text(encoding="utf-8"))
    (entry,) = hub.parse_eval_result_entries(entries)
    assert (entry.dataset_id, entry.task_id, entry.value) == ("Lin-Chen/MMStar", "default", 41.24)
    assert hub.eval_result_entries_to_yaml([entry]) == entries


def test_own_data_and_parts_of_a_benchmark_stay_in_the_card_alone(written):
    assert [file.name for file in (written / ".eval_results").iterdir()] == ["mmstar.yaml"]
    card = (written / "README.md").read_text(encoding="utf-8")
    assert "| digits | average |" in card and "only the first 10 rows, 3 failed |" in card
    for task in ({**TASK, "score": None}, {**TASK, "score": float("nan")}, {**TASK, "limit": 0.1}):
        assert eval_result_files(results(mmstar=task)) == {}
    assert eval_result_files({**results(mmstar=TASK), "limit": 8}) == {}
    assert eval_result_files({"accuracy": 0.9}) == eval_result_files(None) == {}


def test_own_data_that_is_called_like_a_benchmark_is_none():
    assert eval_result_files(results(pope={**TASK, "harness": "normalign"})) == {}
    assert list(eval_result_files(results(pope=TASK))) == ["pope.yaml"]


def test_versions_by_harness_are_shown_for_their_own_tasks():
    run = {**results(mmlu={**TASK, "harness": "lm-eval"}), "harness_version": {"lm-eval": "0.4.9", "lmms-eval": "1"}}
    (text,) = eval_result_files(run).values()
    assert "lm-eval 0.4.9, version 0" in yaml.safe_load(text)[0]["notes"]


@pytest.mark.both_generations
def test_the_folder_is_fit_to_be_pushed_and_passes_verify(written):
    assert ".eval_results/mmstar.yaml" in check_folder(written, load=False)
    assert verify(written).verdict == "passes"


def test_an_export_with_results_is_replaced_by_one_without(folder, checkpoint):
    export(checkpoint, folder)
    assert not (folder / ".eval_results").exists()
    export(folder, folder.parent / "again")


@pytest.mark.parametrize("name", ["hle.yaml", "notes.txt", "more/pope.yaml"])
def test_results_of_others_are_never_replaced(folder, checkpoint, name):
    theirs = folder / ".eval_results" / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("- dataset: {id: cais/hle, task_id: hle}\n  value: 20.9\n")
    with pytest.raises(NormalignError, match="holds the folder .eval_results"):
        export(checkpoint, folder, overwrite=True)
    assert theirs.exists()


@pytest.mark.parametrize("name", ["notes/a.txt", ".eval_results/a.txt", ".eval_results/more/a.yaml", "eval/a.yaml"])
def test_other_folders_are_not_pushed(folder, name):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("- dataset: {id: cais/hle, task_id: hle}\n  value: 20.9\n")
    with pytest.raises(NormalignError, match=f"{name} lies in a folder, and an export is flat"):
        check_folder(folder, load=False)


def test_many_files_in_folders_are_one_problem(folder):
    for number in range(5):
        (folder / "notes").mkdir(exist_ok=True)
        (folder / "notes" / f"{number}.txt").write_text("x")
    with pytest.raises(NormalignError, match="notes/0.txt, notes/1.txt, notes/2.txt and 2 more files lie in a folder"):
        check_folder(folder, load=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a: [", "broken YAML"),
        ("value: 1", "must be a list of results"),
        ("[]", "must be a list of results"),
        ("- value: 1", "[0].dataset: missing"),
        ("- {dataset: {id: mmstar, task_id: x}, value: 1}", "[0].dataset.id: must be a data set's Hub id"),
        ("- {dataset: {id: a/b}, value: 1}", "[0].dataset.task_id: missing"),
        ("- {dataset: {id: a/b, task_id: x}, value: high}", "[0].value: must be a finite number, not 'high'"),
        ("- {dataset: {id: a/b, task_id: x}, value: .nan}", "[0].value: must be a finite number"),
    ],
)
def test_a_file_that_the_hub_would_reject_is_named(folder, text, expected):
    (problem,) = eval_result_problems(text)
    assert expected in problem
    (folder / ".eval_results" / "mmstar.yaml").write_text(text)
    with pytest.raises(NormalignError, match=r"\.eval_results/mmstar\.yaml: "):
        check_folder(folder, load=False)


def test_a_local_path_in_results_does_not_get_out(checkpoint, tmp_path):
    task = {**TASK, "metric": str(checkpoint / "metric")}
    with pytest.raises(NormalignError, match="names the local path"):
        export(checkpoint, tmp_path / "out", results=results(mmstar=task))
    assert not (tmp_path / "out").exists()
    assert json.loads((checkpoint / "config.json").read_text())["model_type"] == "normalign_llava"
