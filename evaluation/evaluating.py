"""`normalign evaluate`: asks a model the questions of benchmarks or of one's own, keeps every answer, and scores them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..configuration.errors import NormalignError
from .batching import Failure, run_batched
from .benchmarks import BENCHMARKS, average_of_nine, chosen_benchmarks, harness_version, refuse_missing_harnesses
from .intervals import Estimate, mean_interval, paired_interval
from .own_data import OwnTask
from .requests import Progress, Request, Scores, Task, Unit
from .sample_store import SampleStore


if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

SAMPLES = "samples"
RESULTS = "results.json"
_RUN = "run.json"
_SHOWN_FAILURES = 5


class Answerer(Protocol):
    """What answers requests: a model, or in tests something that knows the answers."""

    def generate(
        self, requests: list[Request], max_new_tokens: int, stop: Sequence[str], black: bool
    ) -> list[str]: ...

    def log_likelihoods(self, requests: list[Request]) -> list[list[tuple[float, bool]]]: ...

    def identity(self) -> dict[str, Any]: ...


@dataclass
class Processes:
    """This process among those that evaluate together, as `accelerate launch` started them."""

    rank: int = 0
    world: int = 1
    wait: Callable[[], None] = lambda: None

    @classmethod
    def started(cls) -> Processes:
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return cls()
        import torch
        from accelerate import PartialState

        # one process may be hours behind another, more than the half hour that torch waits by itself
        state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=2))
        if torch.cuda.is_available():
            torch.cuda.set_device(state.local_process_index)
        return cls(state.process_index, state.num_processes, state.wait_for_everyone)


def evaluate(
    model: str,
    out: Path,
    tasks: str | None = None,
    *,
    data: Sequence[Path] = (),
    limit: int | None = None,
    batch_size: int | str = "auto",
    black_images: bool = False,
    num_fewshot: int | None = None,
    compare: Path | None = None,
    task_data: Mapping[str, Path] | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluates a model by greedy decoding and log-likelihood; writes `out`/results.json and every answer beside it.

    Run again with the same `out`, it asks only what has no answer yet. Under `accelerate launch` the rows are shared out
    among the processes, and the first one writes.

    Args:
        model: folder or Hub id of any image-text-to-text model, or the folder of a PEFT adapter.
        tasks: names of the paper's benchmarks with commas, or `paper` for the nine.
        data: JSONL files with questions of one's own, see `OwnTask`.
        limit: how many rows of each task are asked; of MMLU, of each subject.
        batch_size: a number, or "auto": large, and halved when memory does not suffice.
        black_images: ask everything that has images once more with black ones: what is right then was not seen.
        num_fewshot: examples before each question of hellaswag and mmlu; None is lm-eval's choice.
        compare: the `out` folder of another model, for the differences over the same rows.
        task_data: by benchmark, a folder with a copy of its data set's repository.
        progress: called with a task's name, the rows answered, and of how many.

    Returns:
        what results.json holds; scores, standard errors and intervals in percent.

    Raises:
        NormalignError: something named is not there, a harness is missing, `out` holds answers of another model, or
            `compare` is no finished evaluation or shares no question with this one.
    """
    benchmarks = chosen_benchmarks(tasks) if tasks else []
    if not benchmarks and not data:
        raise NormalignError("Nothing to evaluate: name benchmarks with --tasks, or a file of questions with --data.")
    if unknown := sorted(set(task_data or {}) - {benchmark.name for benchmark in benchmarks}):
        raise NormalignError(f"--task-data names {', '.join(unknown)}, which is none of the chosen benchmarks.")
    if taken := [str(file) for file in data if Path(file).stem in BENCHMARKS]:
        raise NormalignError(
            f"{', '.join(taken)} has the name of a benchmark, and its score would stand as that of the benchmark: rename it."
        )
    refuse_missing_harnesses(benchmarks)
    other = None if compare is None else read_run(compare)
    processes = Processes.started()
    loaded: list[Task] = [OwnTask(Path(file), limit) for file in data]
    names = [task.name for task in loaded]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise NormalignError(f"Two tasks are called {', '.join(twice)}: rename one of the files.")
    if benchmarks:
        from .harness import load_benchmarks

        shown = None if processes.rank else progress
        if processes.rank:  # the first one fetches the data, the others find it in the cache
            processes.wait()
        loaded = load_benchmarks(benchmarks, limit, num_fewshot, task_data, Path(out) / "harness", shown) + loaded
        if not processes.rank:
            processes.wait()
    if other is not None:
        _refuse_nothing_in_common(loaded, other)
    from .generation import load_model

    answerer = ModelAnswerer(*load_model(model, dtype))
    return evaluate_tasks(
        answerer,
        loaded,
        Path(out),
        model=model,
        limit=limit,
        batch_size=batch_size,
        black_images=black_images,
        other=other,
        progress=progress,
        processes=processes,
    )


class ModelAnswerer:
    """Answers by a model that is loaded."""

    def __init__(self, model: PreTrainedModel, processor: ProcessorMixin) -> None:
        self.model, self.processor = model, processor
        self._lm = None

    def generate(self, requests: list[Request], max_new_tokens: int, stop: Sequence[str], black: bool) -> list[str]:
        from PIL import Image

        from .generation import generate_answers, question

        images = [request.images() for request in requests]
        if black:
            images = [[Image.new("RGB", image.size) for image in some] for some in images]
        conversations = [question(request.text, len(some)) for request, some in zip(requests, images, strict=True)]
        return generate_answers(
            self.model,
            self.processor,
            conversations,
            images,
            batch_size=len(requests),
            max_new_tokens=max_new_tokens,
            stop=stop,
        )

    def log_likelihoods(self, requests: list[Request]) -> list[list[tuple[float, bool]]]:
        """By lm-eval's own model class, so that text benchmarks stand beside those of bare language models."""
        lm = self._language_model()
        lm.batch_size_per_gpu = len(requests)
        values = iter(lm.loglikelihood([one for request in requests for one in request.instances], disable_tqdm=True))
        return [[next(values) for _ in request.instances] for request in requests]

    def _language_model(self):
        if self._lm is None:
            from lm_eval.models.huggingface import HFLM

            with contextlib.redirect_stderr(io.StringIO()):
                self._lm = HFLM(
                    pretrained=self.model,
                    tokenizer=self.processor.tokenizer,
                    backend="causal",
                    batch_size=1,
                    device=str(self.model.device),
                )
        return self._lm

    def identity(self) -> dict[str, Any]:
        """What tells this model from another one: weights (a sample of each tensor), number format, chat template."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            values = tensor.detach().flatten()
            values = values[:: max(1, values.numel() // 256)].float().cpu()
            digest.update(f"{name} {tuple(tensor.shape)}".encode() + values.numpy().tobytes())
        return {
            "weights": digest.hexdigest()[:16],
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "chat_template": hashlib.sha256(str(self.processor.chat_template).encode()).hexdigest()[:16],
            "commit": getattr(self.model.config, "_commit_hash", None),
        }


def evaluate_tasks(
    answerer: Answerer,
    tasks: Sequence[Task],
    out: Path,
    *,
    model: str,
    limit: int | None = None,
    batch_size: int | str = "auto",
    black_images: bool = False,
    other: dict[str, Any] | None = None,
    progress: Progress | None = None,
    processes: Processes | None = None,
) -> dict[str, Any]:
    """Asks and scores tasks that are loaded; see `evaluate`. In every process but the first it returns an empty result."""
    processes = processes or Processes()
    started = time.monotonic()
    identity = answerer.identity()
    _refuse_other_run(out, identity, processes)
    answered = {}
    for task in tasks:
        for black in (False, True) if black_images and task.has_images else (False,):
            answered[task.name, black] = _answer(task, answerer, out, identity, black, batch_size, progress, processes)
    processes.wait()
    if processes.rank:
        return {}
    results: dict[str, Any] = _about_run(model, identity, limit, batch_size)
    results["tasks"] = {}
    for task in tasks:
        rows, estimate, scores = _scored(task, out, answered[task.name, False], black=False)
        result = _result(task, rows, scores, estimate)
        if (task.name, True) in answered:
            black_rows, black_estimate, black_scores = _scored(task, out, answered[task.name, True], black=True)
            result["black_image"] = {
                **_figures(black_estimate),
                "failed": sum("error" in row for row in black_rows),
                "difference": _percent(_difference(_units(scores.units), _units(black_scores.units))),
            }
        results["tasks"][task.name] = result
    results["average"] = average_of_nine({name: result["score"] for name, result in results["tasks"].items()})
    results["seconds"] = round(time.monotonic() - started, 1)
    _write(out / RESULTS, results)
    if other is not None:
        results["comparison"] = compare_runs({"results": results, "units": read_units(out)}, other)
        _write(out / RESULTS, results)
    return results


def _refuse_nothing_in_common(tasks: Sequence[Task], other: dict[str, Any]) -> None:
    """Says before a model is loaded and asked for hours that the other evaluation was of other questions."""
    for task in tasks:
        texts = {request.id: request.text for request in task.requests()}
        if any(texts.get(unit) == kept[2] for unit, kept in other["units"].get(task.name, {}).items()):
            return
    raise NormalignError(
        f"The evaluation of {other['results'].get('model')} to compare with holds no answer to a question of "
        f"{', '.join(task.name for task in tasks)}, so there is nothing to compare: evaluate both on the "
        f"same tasks, or leave out the comparison. Nothing was asked yet."
    )


def _answer(
    task: Task,
    answerer: Answerer,
    out: Path,
    identity: dict[str, Any],
    black: bool,
    batch_size: int | str,
    progress: Progress | None,
    processes: Processes,
) -> dict[str, str]:
    """Asks this process's share of what has no answer yet; returns for each row of the task what its prompt hashes to."""
    requests = task.requests()
    settings = [identity["chat_template"], task.max_new_tokens, list(task.stop), black]
    hashes = {request.id: _hash([settings, request.text, _continuations(request)]) for request in requests}
    store = SampleStore(out / SAMPLES, _store_name(task, black), processes.rank, processes.world)
    have = store.read()
    todo = [
        request
        for request in requests[processes.rank :: processes.world]
        if "error" in (row := have.get(request.id, {"error": None})) or row.get("prompt_hash") != hashes[request.id]
    ]
    # the longest first: what does not fit into memory shows at once, and little is padded
    todo.sort(key=lambda request: (-len(request.text), request.id))
    label = f"{task.name}, black images" if black else task.name
    done = total = len(requests[processes.rank :: processes.world])
    done -= len(todo)
    if progress and not processes.rank:
        progress(label, done, total)

    def run(batch: list[Request]) -> list[Any]:
        if task.generates:
            return answerer.generate(batch, task.max_new_tokens, task.stop, black)
        return answerer.log_likelihoods(batch)

    def keep(indices: list[int], answers: list[Any]) -> None:
        nonlocal done
        rows = []
        for index, answer in zip(indices, answers, strict=True):
            row = {"id": todo[index].id, "prompt_hash": hashes[todo[index].id]}
            rows.append(row | ({"error": str(answer)} if isinstance(answer, Failure) else {"answer": answer}))
        store.append(rows)
        done += len(rows)
        if progress and not processes.rank:
            progress(label, done, total)

    try:
        run_batched(todo, run, batch_size=batch_size, prepare=_opened if task.has_images else None, done=keep)
    finally:
        store.close()
    return hashes


def _opened(request: Request) -> Request:
    """The request with its images open."""
    images = request.images()
    return replace(request, images=lambda: images)


def _scored(
    task: Task, out: Path, hashes: dict[str, str], *, black: bool
) -> tuple[list[dict[str, Any]], Estimate | None, Scores]:
    """Scores the answers on disk, and writes them once more with prompt, right answer and score."""
    store = SampleStore(out / SAMPLES, _store_name(task, black))
    have = store.read()
    rows = {row_id: have[row_id] for row_id in hashes}
    scores = task.score({row_id: row["answer"] for row_id, row in rows.items() if "error" not in row})
    texts = {request.id: request.text for request in task.requests()}
    of_row = {row_id: unit for unit in scores.units for row_id in unit.rows}
    final = []
    for row_id, row in rows.items():
        kept = {key: row[key] for key in ("prompt_hash", "answer", "error") if key in row}
        if row_id in scores.errors:
            kept["error"] = f"The harness could not score this answer: {scores.errors[row_id]}"
        final.append({"id": row_id, "prompt": texts[row_id], **kept})
        if row_id in scores.targets:
            final[-1]["target"] = scores.targets[row_id]
        if row_id in scores.parsed:
            final[-1]["parsed"] = scores.parsed[row_id]
        if unit := of_row.get(row_id):
            final[-1] |= {"unit": unit.rows[0], "score": unit.score}
            if unit.stratum is not None:
                final[-1]["stratum"] = unit.stratum
    # answers to other rows, of a run with another limit, are kept
    rest = [row for row_id, row in have.items() if row_id not in rows]
    store.finish([*final, *rest])
    return final, _estimate(scores.units), scores


def _estimate(units: Sequence[Unit]) -> Estimate | None:
    if not units:
        return None
    strata = [unit.stratum for unit in units]
    return mean_interval([unit.score for unit in units], strata if strata[0] is not None else None)


def _result(task: Task, rows: list[dict[str, Any]], scores: Scores, estimate: Estimate | None) -> dict[str, Any]:
    failed = [row for row in rows if "error" in row]
    result: dict[str, Any] = {
        **_figures(estimate),
        "metric": task.metric,
        "failed": len(failed),
        **task.about,
        "prompts_hash": _hash([row["prompt_hash"] for row in rows]),
    }
    if scores.value is not None:
        result["score"] = 100 * scores.value
    if scores.other:
        result["other"] = {name: 100 * value for name, value in scores.other.items()}
    if scores.kinds:
        result["kinds"] = {kind: _figures(mean_interval(values)) for kind, values in scores.kinds.items()}
    if scores.parsed:
        result["unparsed"] = sum(parsed is None for parsed in scores.parsed.values())
    if scores.extracted is not None:
        result["extracted_score"] = 100 * scores.extracted
    if failed:
        result["failures"] = [f"{row['id']}: {row['error']}" for row in failed[:_SHOWN_FAILURES]]
    return result


def _figures(estimate: Estimate | None) -> dict[str, Any]:
    if estimate is None:
        return {"score": None, "stderr": None, "low": None, "high": None, "n": 0}
    in_percent = {
        key: 100 * getattr(estimate, name)
        for key, name in (("score", "value"), ("stderr", "stderr"), ("low", "low"), ("high", "high"))
    }
    return in_percent | {"n": estimate.n}


def _percent(estimate: Estimate | None) -> dict[str, float] | None:
    """A difference in percentage points."""
    if estimate is None:
        return None
    return {"value": 100 * estimate.value, "low": 100 * estimate.low, "high": 100 * estimate.high, "n": estimate.n}


def _units(units: Sequence[Unit]) -> dict[str, tuple[float, Any]]:
    return {unit.rows[0]: (unit.score, unit.stratum) for unit in units}


def _difference(first: Mapping[str, tuple], second: Mapping[str, tuple]) -> Estimate | None:
    """first - second over the units that both have."""
    common = [name for name in first if name in second]
    if not common:
        return None
    strata = [first[name][1] for name in common]
    return paired_interval(
        [first[name][0] for name in common],
        [second[name][0] for name in common],
        strata if strata[0] is not None else None,
    )


def read_run(folder: Path) -> dict[str, Any]:
    """What an earlier evaluation left in its folder: its results, and the scores of its units by task.

    Raises:
        NormalignError: the folder holds no whole evaluation.
    """
    try:
        results = json.loads((Path(folder) / RESULTS).read_text(encoding="utf-8"))
        tasks = dict(results["tasks"])
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise NormalignError(
            f"There is no finished evaluation in {folder} to compare with: it needs the results.json that `normalign "
            f"evaluate` writes there ({type(error).__name__}: {error})."
        ) from error
    return {"results": results, "units": read_units(Path(folder), tasks)}


def read_units(out: Path, tasks: Mapping[str, Any] | None = None) -> dict[str, dict[str, tuple]]:
    """By task and unit, the score and stratum that the kept answers got, and the question's text."""
    units: dict[str, dict[str, tuple]] = {}
    for file in sorted((out / SAMPLES).glob("*.jsonl")):
        if not file.name.endswith(".black.jsonl") and (tasks is None or file.stem in tasks):
            rows = SampleStore(file.parent, file.stem).read().values()
            units[file.stem] = {
                row["id"]: (row["score"], row.get("stratum"), row["prompt"])
                for row in rows
                if row.get("unit") == row["id"]
            }
    return units


def compare_runs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """first - second for each task that both have, over the same questions, with the paired 95% interval in points.

    Raises:
        NormalignError: the two have no question in common.
    """
    tasks = {}
    for name in first["results"]["tasks"]:
        one, two = first["units"].get(name, {}), second["units"].get(name, {})
        same = {unit: one[unit] for unit in one if unit in two and one[unit][2] == two[unit][2]}
        difference = _difference({k: v[:2] for k, v in same.items()}, {k: two[k][:2] for k in same})
        if difference is not None:
            tasks[name] = {**_percent(difference), "other_score": second["results"]["tasks"][name]["score"]}
    if not tasks:
        raise NormalignError(
            f"The evaluation of {second['results'].get('model')} shares no question with this one, so there is nothing to "
            f"compare: evaluate both on the same tasks. The results of this one are kept."
        )
    return {"model": second["results"].get("model"), "tasks": tasks}


def _refuse_other_run(out: Path, identity: dict[str, Any], processes: Processes) -> None:
    """Answers of one model are never mixed with those of another."""
    file = out / _RUN
    if file.is_file():
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise NormalignError(
                f"{file} cannot be read ({error}). Name another --out, or remove that folder."
            ) from error
        if changed := [key for key in ("weights", "dtype") if before.get(key) != identity.get(key)]:
            raise NormalignError(
                f"{out} holds answers of another model: its {' and '.join(changed)} differ from those of this one. Name "
                f"another --out, or remove that folder to evaluate anew."
            )
    processes.wait()
    if not processes.rank:
        out.mkdir(parents=True, exist_ok=True)
        _write(file, identity)


def _about_run(model: str, identity: dict[str, Any], limit: int | None, batch_size: int | str) -> dict[str, Any]:
    import torch
    import transformers

    from .. import __version__

    harnesses = {name: harness_version(name) for name in ("lmms-eval", "lm-eval")}
    return {
        "schema": 1,
        "model": model,
        **identity,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "unit": "percent",
        "decoding": "greedy",
        "limit": limit,
        "batch_size": batch_size,
        "harness_version": {name: version for name, version in harnesses.items() if version},
        "versions": {"normalign": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def _continuations(request: Request) -> list:
    return [list(instance.args) for instance in request.instances]


def _store_name(task: Task, black: bool) -> str:
    return f"{task.name}.black" if black else task.name


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False, default=str).encode()).hexdigest()[:16]


def _write(file: Path, content: dict[str, Any]) -> None:
    new = file.with_suffix(file.suffix + ".new")
    new.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    new.replace(file)
