"""`normalign evaluate` on the command line: what it refuses before a model is loaded, what it prints and what it writes."""

import json
import re

import pytest
from PIL import Image
from typer.testing import CliRunner

from normalign.cli import app
from normalign.evaluation.benchmarks import BENCHMARKS, PAPER, average_of_nine


def run(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    """Eighty columns, the narrowest terminal in use."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """A function that runs the command, which must fail before a model is loaded and write nothing; gives what it said."""
    loaded = []
    monkeypatch.setattr("normalign.evaluation.generation.load_model", lambda *names: loaded.append(names))
    monkeypatch.setattr("normalign.evaluation.benchmarks.harness_version", lambda name: None)
    out = tmp_path / "out"

    def fail(*arguments, status):
        result = run("a/model", "--out", out, *arguments)
        assert result.exit_code == status, result.output
        assert result.stdout == "" and loaded == [] and not out.exists()
        if status == 1:  # one paragraph and nothing beside it
            assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
            assert "Unexpected" not in result.stderr
        return " ".join(re.sub("[│╭╮╰╯─]", " ", result.stderr).split())

    return fail


@pytest.fixture
def questions(tmp_path):
    """Four questions, one of them about an image."""
    Image.new("RGB", (16, 16), "red").save(tmp_path / "red.png")
    rows = [
        {"id": "colour", "image": "red.png", "question": "Which colour?", "answer": "red"},
        {"id": "sum", "question": "What is 1 + 1?", "answers": ["2", "two"]},
        {"id": "day", "question": "Is it day?", "answer": "yes"},
        {"id": "pick", "question": "Which is a fruit?", "choices": ["apple", "car"], "answer": "apple"},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def model(composed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("composed")
    for part in composed:
        part.save_pretrained(folder)
    return folder


# --- what is refused


@pytest.mark.parametrize(
    ("tasks", "harnesses"),
    [("paper", "lmms-eval and lm-eval"), ("pope,ai2d", "lmms-eval"), ("mmlu", "lm-eval")],
)
def test_a_missing_harness_is_named_with_the_extra_that_brings_it(refused, tasks, harnesses):
    said = refused("--tasks", tasks, status=1)
    assert f"scored by {harnesses}, not installed here" in said
    assert "pip install 'normalign[eval]'" in said and "--data FILE.jsonl" in said


def test_unknown_benchmarks_are_named_with_those_nearest_to_them(refused):
    said = refused("--tasks", "mmstra,pope,MMLU,gqa", status=1)
    assert "no benchmark 'MMLU', 'gqa', 'mmstra'. Did you mean mmlu, mmstar?" in said
    assert all(name in said for name in BENCHMARKS) and "lmms-eval --model normalign" in said
    assert "Did you mean" not in refused("--tasks", "gqa", status=1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["pope"], "'pope' is not BENCHMARK=FOLDER"),
        (["=folder"], "'=folder' is not BENCHMARK=FOLDER"),
        (["pope= "], "'pope= ' is not BENCHMARK=FOLDER"),
        (["pope=no/such/folder"], "There is no folder 'no/such/folder'"),
        (["pope=.", "pope=.."], "'pope' is given twice"),
    ],
)
def test_task_data_of_another_form_is_wrong_usage(refused, given, words):
    said = refused("--tasks", "pope", *(part for one in given for part in ("--task-data", one)), status=2)
    assert "--task-data" in said and words in said


def test_task_data_for_a_benchmark_that_is_not_chosen_is_refused(refused, tmp_path, questions):
    said = refused("--data", questions, "--task-data", f"pope={tmp_path}", status=1)
    assert "--task-data names pope, which is none of the chosen benchmarks" in said


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--batch-size", "0", "'0' is neither 'auto' nor a number"),
        ("--batch-size", "-4", "'-4' is neither 'auto' nor a number"),
        ("--batch-size", "2.5", "'2.5' is neither 'auto' nor a number"),
        ("--batch-size", "²", "'²' is neither 'auto' nor a number"),
        ("--control", "white", "'white'"),
        ("--limit", "0", "1"),
        ("--limit", "some", "valid integer"),
        ("--num-fewshot", "-1", "0"),
        ("--compare", "no/such/folder", "There is no folder 'no/such/folder'"),
        ("--data", "no/such/file.jsonl", "There is no file 'no/such/file.jsonl'"),
        ("--dtype", "float8", "'float8'"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_wrong_usage(refused, questions, option, value, words):
    said = refused("--data", questions, option, value, status=2)
    assert f"Invalid value for '{option}'" in said and words in said


def test_nothing_to_ask_or_nobody_to_ask_is_wrong_usage(refused, questions):
    assert "--tasks paper" in refused(status=2)
    result = run("--data", questions)
    assert (result.exit_code, result.stdout) == (2, "") and "Name a model" in result.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"question": "a", "answer": "b"}\n{"question": ', "Line 2 of FILE is no JSON"),
        ('{"question": "a"}', "Line 1 of FILE has no answer"),
        ('{"question": "a", "answer": "b", "image": "gone.png"}', "Line 1 of FILE: there is no image"),
        ("\n", "There is no question in FILE"),
    ],
)
def test_a_bad_file_of_questions_is_named_with_its_line(refused, tmp_path, text, words):
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    assert words.replace("FILE", str(file)) in refused("--data", file, status=1)


@pytest.mark.parametrize("content", [None, "[]", '{"tasks": ', "{}"])
def test_a_folder_without_a_finished_evaluation_cannot_be_compared_with(refused, questions, tmp_path, content):
    other = tmp_path / "other"
    other.mkdir()
    if content is not None:
        (other / "results.json").write_text(content)
    said = refused("--data", questions, "--compare", other, status=1)
    assert f"There is no finished evaluation in {other} to compare with" in said


# --- the list of benchmarks


def test_the_list_says_of_each_benchmark_what_it_needs_in_eighty_columns():
    result = run("--list")
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for benchmark in BENCHMARKS.values():
        (line,) = (line for line in lines if benchmark.harness in line.split() and benchmark.name in line.split())
        assert not benchmark.login and not benchmark.judge
        assert line.split() == [benchmark.name, benchmark.harness, benchmark.metric, f"{benchmark.rows:,}", "nothing"]


def test_the_list_as_json_holds_the_same_for_programs():
    result = run("--list", "--json")
    listed = json.loads(result.stdout)
    assert list(listed) == list(BENCHMARKS)
    for name, benchmark in BENCHMARKS.items():
        for key in ("harness", "metric", "rows", "login", "judge", "measures"):
            assert listed[name][key] == getattr(benchmark, key)


# --- what a run prints and writes


def test_json_is_alone_on_stdout_and_is_what_the_file_holds(model, questions, tmp_path):
    out = tmp_path / "out"
    result = run(model, "--data", questions, "--out", out, "--control", "black", "--json")
    assert result.exit_code == 0, result.output
    results = json.loads(result.stdout)
    assert results == json.loads((out / "results.json").read_text())
    assert results["model"] == str(model) and results["average"] is None
    task = results["tasks"]["mine"]
    assert {"score", "metric", "n", "failed", "stderr", "task_version"} <= set(task)
    assert (task["n"], task["failed"], task["metric"]) == (4, 0, "accuracy")
    assert {"score", "difference"} <= set(task["black_image"])
    samples = [json.loads(line) for line in (out / "samples/mine.jsonl").read_text().splitlines()]
    assert [row["id"] for row in samples] == ["colour", "sum", "day", "pick"]
    assert "mine" in (out / "results.md").read_text()
    with Image.open(out / "results.png") as picture:
        assert picture.format == "PNG"


def test_runs_are_compared_over_the_same_questions_and_refused_without_one(model, questions, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(model, "--data", questions, "--out", first).exit_code == 0
    result = run(model, "--data", questions, "--out", second, "--compare", first, "--json")
    assert result.exit_code == 0, result.output
    compared = json.loads(result.stdout)["comparison"]
    assert compared["model"] == str(model)
    assert (compared["tasks"]["mine"]["n"], compared["tasks"]["mine"]["value"]) == (4, 0)
    questions.write_text('{"id": "sum", "question": "What is 2 + 2?", "answer": "4"}')
    result = run("no/such-model", "--data", questions, "--out", tmp_path / "third", "--compare", first)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"The evaluation of {model} to compare with holds no answer to a question of mine" in result.stderr
    assert "Nothing was asked yet" in result.stderr and not (tmp_path / "third").exists()


def by_hand(names, limit=None):
    """Results as an evaluation would give them for these benchmarks: 40 percent for the first, one more for each next."""
    tasks = {
        name: {
            "score": 40.0 + number,
            "stderr": 1.0,
            "low": 38.0 + number,
            "high": 42.0 + number,
            "n": BENCHMARKS[name].rows,
            "metric": BENCHMARKS[name].metric,
            "failed": 0,
            "harness": BENCHMARKS[name].harness,
            "task_version": 0,
            "dataset": BENCHMARKS[name].dataset,
            "split": BENCHMARKS[name].split,
        }
        for number, name in enumerate(names)
    }
    return {
        "model": "a/model",
        "dtype": "float32",
        "commit": None,
        "date": "2026-01-02",
        "limit": limit,
        "batch_size": "auto",
        "harness_version": {"lmms-eval": "1.2.3"},
        "versions": {"normalign": "0", "torch": "0", "transformers": "0"},
        "tasks": tasks,
        "average": average_of_nine({name: task["score"] for name, task in tasks.items()}),
    }


@pytest.mark.parametrize("names", [list(BENCHMARKS), ["mmstar", "mmlu"]])
def test_benchmarks_stand_beside_the_figures_of_the_paper(monkeypatch, tmp_path, names):
    results = by_hand(names, limit=7)
    monkeypatch.setattr("normalign.evaluation.evaluating.evaluate", lambda *args, **options: results)
    result = run("a/model", "--tasks", ",".join(names), "--out", tmp_path)
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "results.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    heads, rows = table[0], {row[0]: row[1:] for row in table[2:]}
    assert heads[:2] == ["task", "score"]
    assert heads[-2:] == ["paper, Llama-3.2-3B", "paper, Qwen2.5-7B"]
    assert list(rows) == [*names, "average of nine"]
    for name in (*names, "average"):
        figures = [" / ".join(f"{value:.1f}" for value in PAPER[model].get(name, ())) for model in PAPER]
        assert rows["average of nine" if name == "average" else name][-2:] == figures
    assert rows["mmstar"][-2] == "37.7 / 41.2 / 41.2"
    assert rows["average of nine"][0] == ("44.00" if len(names) == 9 else "-")
    assert any("no average of nine without mmbench_en_dev_static" in line for line in lines) == (len(names) < 9)
    assert any("Only the first 7 rows" in line for line in lines)
    with Image.open(tmp_path / "results.png") as picture:
        assert picture.format == "PNG" and picture.width > picture.height > 100
    # the same table on the terminal, cut into several where it is too wide, and no cell is cut
    assert "…" not in result.stdout and str(tmp_path / "samples") in " ".join(result.stdout.split())
    assert all(cell in result.stdout for row in table[2:] for cell in row)


def test_a_task_without_one_row_that_ran_is_told_and_fails(monkeypatch, tmp_path):
    results = by_hand(["mmstar"])
    results["tasks"]["mmstar"] |= {
        "score": None, "stderr": None, "low": None, "high": None, "n": 0, "failed": 3, "failures": ["7: ValueError: no"],
    }  # fmt: skip
    monkeypatch.setattr("normalign.evaluation.evaluating.evaluate", lambda *args, **options: results)
    result = run("a/model", "--tasks", "mmstar", "--out", tmp_path)
    assert result.exit_code == 1 and "no score" in result.stdout
    assert result.stderr.startswith("Error: No row of mmstar could be run; the first failure: 7: ValueError: no.")
    assert (tmp_path / "results.md").is_file() and (tmp_path / "results.png").is_file()
