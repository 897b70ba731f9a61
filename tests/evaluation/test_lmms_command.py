"""`lmms-eval --model normalign` as a command of its own: the same answers and scores as `normalign evaluate`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from normalign.evaluation.evaluating import evaluate

from .benchmark_data import make_benchmark_data


pytestmark = pytest.mark.harness

# by task, the folder in lmms-eval, its metrics that `normalign evaluate` shows too; one task for each form of answer
TASKS = {"pope": "pope_accuracy", "mmstar": "average", "ocrbench": "ocrbench_accuracy"}


def test_the_harness_alone_gives_the_answers_and_scores_of_normalign_evaluate(folder, tmp_path):
    import lmms_eval

    data = make_benchmark_data(tmp_path / "data")
    ours = evaluate(
        str(folder), tmp_path / "ours", ",".join(TASKS), batch_size=3, task_data={name: data[name] for name in TASKS}
    )
    (tmp_path / "tasks").mkdir()
    for name in TASKS:
        original = Path(lmms_eval.__file__).parent / "tasks" / name / f"{name}.yaml"
        local = f"include: {original}\ntask: local_{name}\ndataset_path: {data[name]}\ndataset_kwargs: {{}}\n"
        (tmp_path / "tasks" / f"local_{name}.yaml").write_text(local)
    command = [sys.executable, "-m", "lmms_eval", "--model", "normalign", "--model_args", f"pretrained={folder}"]
    command += ["--tasks", ",".join(f"local_{name}" for name in TASKS), "--include_path", str(tmp_path / "tasks")]
    command += ["--batch_size", "3", "--log_samples", "--output_path", str(tmp_path / "theirs")]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "theirs").rglob("*_results.json")
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    for name, metric in TASKS.items():
        (samples,) = (tmp_path / "theirs").rglob(f"*_samples_local_{name}.jsonl")
        theirs = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
        answers = {str(row["doc_id"]): row["filtered_resps"] for row in theirs}
        kept = (tmp_path / "ours" / "samples" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        assert answers == {row["id"]: row["answer"] for row in map(json.loads, kept)}
        score = 100 * results[f"local_{name}"][f"{metric},none"]
        # OCRBench's own score is over its thousand rows, however many were asked
        scale = len(theirs) / 1000 if name == "ocrbench" else 1
        assert score == pytest.approx(ours["tasks"][name]["score"] * scale), name
