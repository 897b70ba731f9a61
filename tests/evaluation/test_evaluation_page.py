"""docs/evaluation.md: its table is that of the benchmarks, its questions are read, and its commands run."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from normalign.cli import app
from normalign.evaluation.benchmarks import BENCHMARKS
from normalign.evaluation.own_data import _KEYS, OwnTask


PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| `\w+` \| lmm?s?-eval \|", line)
]


def command(start, **changes):
    """The arguments of the one command of the page that begins so, with its words in capitals replaced."""
    (line,) = re.findall(rf"^    normalign ({re.escape(start)}.*)$", PAGE, re.MULTILINE)
    return [str(changes.get(word, word)) for word in line.split()]


def test_the_table_is_that_of_the_benchmarks():
    assert [
        (name.strip("`"), harness, metric, rows, measures) for name, harness, metric, rows, _, measures in ROWS
    ] == [(b.name, b.harness, b.metric, f"{b.rows:,}", b.measures) for b in BENCHMARKS.values()]
    assert f"The whole is {sum(b.rows for b in BENCHMARKS.values()):,} rows" in " ".join(PAGE.split())
    assert not any(b.login or b.judge for b in BENCHMARKS.values())


@pytest.mark.harness
def test_the_most_new_tokens_are_those_of_the_tasks(tmp_path):
    from normalign.evaluation.harness import load_benchmarks

    from .benchmark_data import make_benchmark_data

    tasks = load_benchmarks(list(BENCHMARKS.values()), 1, data=make_benchmark_data(tmp_path), scratch=tmp_path)
    assert [row[4] for row in ROWS] == [str(task.max_new_tokens) if task.generates else "-" for task in tasks]


def test_every_key_of_a_question_is_explained():
    table = "\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    assert [key for key in _KEYS if f"`{key}`" not in table] == []


def test_the_questions_of_the_page_are_asked_by_its_command(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (questions,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "questions.jsonl").write_text(questions, encoding="utf-8")
    for name in re.findall(r"\w+\.png", questions):
        Image.new("RGB", (48, 48), "orange").save(tmp_path / name)
    assert f"have {OwnTask(tmp_path / 'questions.jsonl').max_new_tokens} tokens at most" in PAGE
    arguments = command("evaluate MODEL --data", MODEL=folder)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "runs/mine/results.json").read_text())["tasks"]["questions"]
    assert (result["n"], result["failed"], result["black_image"]["failed"]) == (4, 0, 0)
    assert {kind: figures["n"] for kind, figures in result["kinds"].items()} == {"things": 1, "yes or no": 1}
    written = {file.name for file in (tmp_path / "runs/mine").iterdir()}
    assert {"results.json", "results.md", "results.png", "samples"} <= written


@pytest.mark.harness
def test_the_command_for_a_local_copy_of_the_data_runs(folder, tmp_path, monkeypatch):
    from .benchmark_data import make_benchmark_data

    monkeypatch.chdir(tmp_path)
    (tmp_path / "pope").symlink_to(make_benchmark_data(tmp_path / "data")["pope"])
    done = CliRunner().invoke(app, command("evaluate MODEL --tasks pope", MODEL=folder))
    assert done.exit_code == 0, done.output
