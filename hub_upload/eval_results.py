"""Results of `normalign evaluate` in the Hub's own format, one `.eval_results/TASK.yaml` for each benchmark.

The Hub shows such a result on the model's page, and on the benchmark's leaderboard where the data set's owner has
registered it as a benchmark with that task id. Source: https://huggingface.co/docs/hub/eval-results.
"""

import math
import re
from pathlib import Path

import yaml


EVAL_RESULTS = ".eval_results"
# A file without this line was written by someone else and is never replaced.
MARK = "# written by normalign export\n"
# task of the harness -> data set on the Hub, and its config, as which such data sets name their task
BENCHMARKS = {
    "mmbench_en_dev_static": ("lmms-lab/MMBench", "en"),
    "mmstar": ("Lin-Chen/MMStar", "default"),
    "pope": ("lmms-lab/POPE", "default"),
    "seedbench_2_plus": ("doolayer/SEED-Bench-2-Plus", "default"),
    "ocrbench": ("echo840/OCRBench", "default"),
    "scienceqa_img": ("lmms-lab/ScienceQA", "ScienceQA-IMG"),
    "ai2d": ("lmms-lab/ai2d", "default"),
    "hellaswag": ("Rowan/hellaswag", "default"),
    "mmlu": ("cais/mmlu", "all"),
}


def eval_result_files(results: dict | None) -> dict[str, str]:
    """The files for a results.json, by name; only tasks whose data set is known on the Hub, measured in full.

    Digit scenes and other data of one's own, whatever they are called, stay in the card's table; so does a task without
    score, and one of which `limit` rows were run, which would stand beside results of the whole on a leaderboard.
    """
    files = {}
    for task, result in ((results or {}).get("tasks") or {}).items():
        own = result.get("harness") == "normalign"
        if task not in BENCHMARKS or own or not is_number(result.get("score")) or of_run(results, result, "limit"):
            continue
        dataset, task_id = BENCHMARKS[task]
        entry = {"dataset": {"id": dataset, "task_id": task_id}, "value": result["score"]}
        if date := of_run(results, result, "date"):
            entry["date"] = str(date)
        if notes := run_notes(results, result):
            entry["notes"] = ", ".join([*([f"metric {result['metric']}"] if result.get("metric") else []), *notes])
        files[f"{task}.yaml"] = MARK + yaml.safe_dump([entry], sort_keys=False, allow_unicode=True)
    return files


def run_notes(results: dict, result: dict) -> list[str]:
    """How a task was run, in a few words each: harness, versions, commit, limit, failures; what is not recorded is left out."""
    harness, version = (of_run(results, result, key) for key in ("harness", "harness_version"))
    if isinstance(version, dict):
        version = version.get(harness)
    notes = [" ".join(str(part) for part in (harness or "harness", version) if part)] if harness or version else []
    if result.get("task_version") is not None:
        notes.append(f"version {result['task_version']}")
    if commit := of_run(results, result, "commit"):
        notes.append(f"commit {str(commit)[:12]}")
    if limit := of_run(results, result, "limit"):
        notes.append(f"only {f'{limit:.0%}' if 0 < limit < 1 else f'the first {limit:g} rows'}")
    if result.get("failed"):
        notes.append(f"{result['failed']} failed")
    return notes


def of_run(results: dict, result: dict, key: str):
    """What is said of a task itself, or else of the whole run."""
    return result[key] if result.get(key) is not None else results.get(key)


def is_eval_results(folder: Path) -> bool:
    """Whether a folder is one that `export` wrote: marked YAML files and nothing else."""
    return folder.is_dir() and all(
        file.is_file() and file.suffix == ".yaml" and file.read_bytes().startswith(MARK.encode())
        for file in folder.iterdir()
    )


def eval_result_problems(text: str) -> list[str]:
    """What the Hub would reject in such a file."""
    try:
        entries = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        return [f"broken YAML ({' '.join(str(error).split())})"]
    if not isinstance(entries, list) or not entries:
        return ["must be a list of results"]
    problems = []
    for i, entry in enumerate(entries):
        dataset = entry.get("dataset") if isinstance(entry, dict) else None
        if not isinstance(dataset, dict):
            problems.append(f"[{i}].dataset: missing")
            continue
        if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(dataset.get("id"))):
            problems.append(f"[{i}].dataset.id: must be a data set's Hub id (owner/name), not {dataset.get('id')!r}")
        if not isinstance(dataset.get("task_id"), str) or not dataset["task_id"].strip():
            problems.append(f"[{i}].dataset.task_id: missing or no text")
        if not is_number(entry.get("value")):
            problems.append(f"[{i}].value: must be a finite number, not {entry.get('value')!r}")
    return problems


def is_number(value: object) -> bool:
    """Whether this is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
