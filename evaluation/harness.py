"""The paper's benchmarks as lmms-eval and lm-eval define them: their data, prompts, parsing and scores, loaded and asked.

The harness's task objects are used as they are, so a score is the harness's own; only the loop between question and answer
is ours (evaluating.py), since a failed row must not become an empty answer, and a broken run must go on where it stopped.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..configuration.errors import NormalignError
from .answers import extract_choice, extract_yes_no
from .benchmarks import Benchmark, harness_version
from .requests import Progress, Request, Scores, Unit


# a file to be handed in, and a ratio that counts the references and not the answers
_LEFT_OUT = ("submission", "pope_yes_ratio")
_MMBENCH_ROTATION = 1_000_000  # rows whose index differs by a multiple of it are one question with its options turned


def load_benchmarks(
    benchmarks: list[Benchmark],
    limit: int | None = None,
    num_fewshot: int | None = None,
    data: Mapping[str, Path] | None = None,
    scratch: Path | None = None,
    progress: Progress | None = None,
) -> list[LmmsTask | LmTask]:
    """The benchmarks with their data and prompts.

    Args:
        limit: how many rows of each are taken, the first ones; of MMLU, of each subject.
        num_fewshot: how many examples stand before each question of the benchmarks of lm-eval; None is the harness's choice.
        data: by benchmark, a folder with a copy of its data set's repository, for machines without network.
        scratch: where the harness may write the files that some of its scores leave.
        progress: called with what is done, how far, and of how much.

    Raises:
        NormalignError: the data of a benchmark cannot be had.
    """
    data = data or {}
    _refuse_missing_data(benchmarks, data, progress)
    loaded = []
    for i, benchmark in enumerate(benchmarks):
        if progress:
            progress("data sets", i, len(benchmarks))
        with _explained(benchmark, data), _without_logs():
            if benchmark.harness == "lmms-eval":
                loaded.append(LmmsTask(benchmark, limit, data.get(benchmark.name), scratch))
            else:
                loaded.append(LmTask(benchmark, limit, num_fewshot, data.get(benchmark.name)))
    if progress:
        progress("data sets", len(benchmarks), len(benchmarks))
    return loaded


class LmmsTask:
    """One task of lmms-eval; see `Task` in requests.py."""

    generates = True
    has_images = True

    def __init__(self, benchmark: Benchmark, limit: int | None, folder: Path | None, scratch: Path | None) -> None:
        import lmms_eval
        from lmms_eval.tasks import TaskManager

        self.benchmark, self.name, self.metric = benchmark, benchmark.name, benchmark.metric
        # the whole index of lmms-eval takes seconds to build
        room = {"mmbench_en_dev_static": "mmbench", "scienceqa_img": "scienceqa"}.get(self.name, self.name)
        tasks = Path(lmms_eval.__file__).parent / "tasks" / room
        manager = TaskManager("ERROR", include_path=f"{tasks}/", include_defaults=False)
        # the tasks ask for a login (`token: True`), which none of these data sets needs
        changes = {"dataset_kwargs": {}, **({"dataset_path": str(folder)} if folder else {})}
        (self.task,) = manager.load_config({"task": self.name, **changes}).values()
        self.docs = self.task.eval_docs
        self.plain_docs = self.task.eval_docs_no_media
        self.task.args = SimpleNamespace(output_path=None if scratch is None else str(scratch))
        with _quietly():
            self.task.build_all_requests(limit=limit)
        self.instances = {str(instance.args[3]): instance for instance in self.task.instances}
        first = next(iter(self.instances.values()))
        self.max_new_tokens = int(first.args[1].get("max_new_tokens", 1024))
        stop = first.args[1].get("until", [])
        self.stop = [stop] if isinstance(stop, str) else list(stop)
        metadata = self.task.config.metadata
        metadata = metadata[0] if isinstance(metadata, list) and metadata else metadata
        self.about = _about(benchmark, (metadata or {}).get("version"))

    def requests(self) -> list[Request]:
        return [
            Request(row, instance.args[0], lambda row=row: self.task.doc_to_visual(self.docs[int(row)]) or [])
            for row, instance in self.instances.items()
        ]

    def score(self, answers: dict[str, str]) -> Scores:
        scores = Scores(None)
        instances = []
        for row, answer in answers.items():
            instance = self.instances[row]
            instance.resps, instance.filtered_resps = [answer], {}
            instances.append(instance)
        self.task._instances = instances
        self.task.apply_filters()
        metrics: dict[str, dict[str, Any]] = {}
        for row in answers:
            (filtered,) = self.instances[row].filtered_resps.values()
            doc = self.plain_docs[int(row)]
            try:
                metrics[row] = self.task.process_results(doc, [filtered])
                scores.targets[row] = self.task.doc_to_target(doc)
            except Exception as error:  # what a task raises on an answer it did not foresee has no common class
                scores.errors[row] = _reason(error)
        units = self._units([row for row in metrics if row not in scores.errors], scores)
        by_metric = defaultdict(list)
        for rows in units.values():
            for row in rows:
                for metric, value in metrics[row].items():
                    by_metric[metric].append(value)
        if not by_metric:
            return scores
        with _quietly():
            for metric, values in by_metric.items():
                if metric == self.metric:
                    scores.value = self._aggregated(metric, values)
                elif metric not in _LEFT_OUT and metric in self.task.aggregation():
                    scores.other[metric] = self._aggregated(metric, values)
            for rows in units.values():
                values = [metrics[row][self.metric] for row in rows]
                stratum = values[0]["l2_category"] if self.name == "mmstar" else None
                scores.units.append(Unit(tuple(rows), self._aggregated(self.metric, values), stratum))
        self._extract(answers, units, scores)
        return scores

    def _units(self, rows: list[str], scores: Scores) -> dict[str, list[str]]:
        """The rows that count together. A question of MMBench without its first row, or with a failed one, counts nowhere."""
        if self.name != "mmbench_en_dev_static":
            return {row: [row] for row in rows}
        turned = defaultdict(list)
        for row in self.instances:
            turned[int(self.plain_docs[int(row)]["index"]) % _MMBENCH_ROTATION].append(row)
        there = set(rows)
        units = {}
        for index, group in turned.items():
            first = any(int(self.plain_docs[int(row)]["index"]) == index for row in group)
            if first and there.issuperset(group):
                units[str(index)] = group
        return units

    def _aggregated(self, metric: str, values: list) -> float:
        function = self.task.aggregation()[metric]
        if self.name == "ocrbench":
            # the task counts on in a table of its module from one call to the next, and divides by all 1000 rows
            counts = function.__globals__["OCRBench_score"]
            counts.update(dict.fromkeys(counts, 0))
            return function(values, args=self.task.args) * self.benchmark.rows / len(values)
        if "args" in inspect.signature(function).parameters:
            value = function(values, args=self.task.args)
        else:
            value = function(values)
        return value / 100 if self.name == "mmbench_en_dev_static" else value

    def _extract(self, answers: dict[str, str], units: dict[str, list[str]], scores: Scores) -> None:
        """What our rules read out of the answers, beside the harness's score: they differ where the form was not foreseen."""
        if self.benchmark.answers not in ("letter", "yes or no"):
            return
        right = []
        for rows in units.values():
            for row in rows:
                if self.benchmark.answers == "letter":
                    scores.parsed[row] = extract_choice(answers[row], self._choices(self.plain_docs[int(row)]))
                else:
                    scores.parsed[row] = extract_yes_no(answers[row])
            targets = (str(scores.targets[row]).strip().lower() for row in rows)
            right.append(
                all((scores.parsed[row] or "").lower() == target for row, target in zip(rows, targets, strict=True))
            )
        scores.extracted = sum(right) / len(right)
        if self.benchmark.answers == "yes or no":
            scores.other["says yes"] = sum(said == "yes" for said in scores.parsed.values()) / len(scores.parsed)

    def _choices(self, doc: dict[str, Any]) -> dict[str, str] | list[str]:
        """The letters of a question with the texts behind them, or the letters alone where the question holds the texts."""
        if self.name == "mmstar":
            return list("ABCD")
        if self.name == "seedbench_2_plus":
            return {letter: str(doc[f"choice_{letter}"]) for letter in "ABCD"}
        if self.name == "mmbench_en_dev_static":
            return {
                x: str(doc[x]) for x in "ABCDE" if doc.get(x) is not None and str(doc[x]).lower() not in ("nan", "")
            }
        texts = doc["choices"] if self.name == "scienceqa_img" else doc["options"]
        return {chr(ord("A") + i): str(text) for i, text in enumerate(texts)}


class LmTask:
    """One benchmark of lm-eval with all its subtasks; see `Task` in requests.py."""

    generates = False
    has_images = False
    max_new_tokens = 0
    stop = ()

    def __init__(self, benchmark: Benchmark, limit: int | None, num_fewshot: int | None, folder: Path | None) -> None:
        import lm_eval
        from lm_eval.tasks import TaskManager

        self.benchmark, self.name, self.metric = benchmark, benchmark.name, benchmark.metric
        room = {"mmlu": "mmlu/default"}.get(self.name, self.name)
        manager = TaskManager(include_path=str(Path(lm_eval.__file__).parent / "tasks" / room), include_defaults=False)
        changes = {"dataset_path": str(folder)} if folder else {}
        # a group of our own, since only a member of a group takes changes to a task that the harness knows
        members = [{"task": name, **changes} for name in manager.all_subtasks]
        self.tasks = manager.load([{"group": "normalign", "task": members}])["tasks"]
        tags = {name: sorted(manager.task_index[name].tags) for name in self.tasks}
        # the subjects of MMLU by field
        self.field = {name: tags[name][0].removeprefix("mmlu_").removesuffix("_tasks") for name in tags if tags[name]}
        self.instances: dict[str, list[Any]] = defaultdict(list)
        with _quietly():
            for name, task in self.tasks.items():
                if num_fewshot is not None:
                    task.set_config(key="num_fewshot", value=num_fewshot)
                # as the harness does; examples are drawn the same way in each run
                task.set_fewshot_seed(seed=1234)
                task.build_all_requests(limit=limit)
                for instance in task.instances:
                    self.instances[f"{name}/{instance.doc_id}"].append(instance)
        self.docs = {row: instances[0].doc for row, instances in self.instances.items()}
        versions = {str(task.VERSION) for task in self.tasks.values()}
        shots = {task.config.num_fewshot or 0 for task in self.tasks.values()}
        self.about = _about(benchmark, "/".join(sorted(versions))) | {"num_fewshot": max(shots)}

    def requests(self) -> list[Request]:
        return [
            Request(row, instances[0].args[0], instances=tuple(instances)) for row, instances in self.instances.items()
        ]

    def score(self, answers: dict[str, list[tuple[float, bool]]]) -> Scores:
        scores = Scores(None)
        by_metric, by_field = defaultdict(list), defaultdict(list)
        for row, likelihoods in answers.items():
            task = self.tasks[row.rsplit("/", 1)[0]]
            doc = self.docs[row]
            try:
                metrics = task.process_results(doc, [tuple(pair) for pair in likelihoods])
            except Exception as error:  # see LmmsTask.score
                scores.errors[row] = _reason(error)
                continue
            scores.targets[row] = task.doc_to_target(doc)
            for metric in task.aggregation():
                by_metric[metric].append(float(metrics[metric]))
            by_field[self.field.get(task.task_name)].append(float(metrics[self.metric]))
            scores.units.append(Unit((row,), float(metrics[self.metric])))
        # lm-eval weighs the subjects of MMLU by their size: that is the mean over all rows
        means = {metric: sum(values) / len(values) for metric, values in by_metric.items()}
        scores.value = means.pop(self.metric, None)
        scores.other = means
        if len(self.tasks) > 1:
            scores.other |= {str(name): sum(values) / len(values) for name, values in sorted(by_field.items())}
        return scores


def _about(benchmark: Benchmark, task_version: Any) -> dict[str, Any]:
    return {
        "harness": benchmark.harness,
        "harness_version": harness_version(benchmark.harness),
        "task_version": task_version,
        "dataset": benchmark.dataset,
        "split": benchmark.split,
    }


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Keeps back what the harnesses log of their own working; their errors are raised and shown by us."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        from loguru import logger
    except ImportError:
        yield
        return
    logger.disable("")
    try:
        yield
    finally:
        logger.enable("")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keeps back what they print and the bars that they draw, too."""
    with _without_logs(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _refuse_missing_data(benchmarks: list[Benchmark], data: Mapping[str, Path], progress: Progress | None) -> None:
    """Names every data set that cannot be had, before the harnesses try each for a minute."""
    from datasets import load_dataset_builder

    # that a request is tried again is said for each of many
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    configs = {"mmbench_en_dev_static": "en", "scienceqa_img": "ScienceQA-IMG", "mmlu": "anatomy"}
    problems, unreached = [], False
    for i, benchmark in enumerate(benchmarks):
        if progress:
            progress("data sets", i, len(benchmarks))
        folder = data.get(benchmark.name)
        if folder is not None and not folder.is_dir():
            problems.append(f"{benchmark.name}: there is no folder {folder}")
        elif folder is None and unreached:
            problems.append(f"{benchmark.name} ({benchmark.dataset}): not tried, the Hub cannot be reached")
        else:
            try:
                load_dataset_builder(str(folder or benchmark.dataset), configs.get(benchmark.name))
            except Exception as error:  # hub, file and network errors have no common class
                problems.append(f"{benchmark.name} ({folder or benchmark.dataset}): {_reason(error)}")
                unreached |= folder is None and isinstance(error, ConnectionError)
    if problems:
        raise NormalignError(_no_data(problems))


@contextlib.contextmanager
def _explained(benchmark: Benchmark, data: Mapping[str, Path]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # see _refuse_missing_data
        source = data.get(benchmark.name) or benchmark.dataset
        raise NormalignError(_no_data([f"{benchmark.name} ({source}): {_reason(error)}"])) from error


def _no_data(problems: list[str]) -> str:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    hint = "HF_HUB_OFFLINE is set, so nothing is fetched: unset it. " if offline else ""
    return (
        f"The data of {'these benchmarks' if len(problems) > 1 else 'this benchmark'} cannot be had. {hint}With no network, "
        f"set HF_HUB_OFFLINE=1 if an earlier run has fetched it; or copy the data set's repository once (`hf download --repo-type dataset NAME --local-dir FOLDER`) and give it with "
        f"--task-data BENCHMARK=FOLDER; a gated data set needs your consent on its page and `hf auth login`."
        + "".join(f"\n  - {problem}" for problem in problems)
    )


def _reason(error: BaseException) -> str:
    """The cause of an error in one line; the harnesses wrap it in that of their retries."""
    attempt = getattr(error, "last_attempt", None)
    if attempt is not None and attempt.exception() is not None:
        error = attempt.exception()
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
