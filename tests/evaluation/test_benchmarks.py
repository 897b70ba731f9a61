"""The nine benchmarks through the harnesses' own task code: scripted models score 1.0 and 0.0, a tiny one runs the whole way."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from normalign.cli import app
from normalign.configuration.errors import NormalignError
from normalign.evaluation.benchmarks import BENCHMARKS
from normalign.evaluation.evaluating import ModelAnswerer, evaluate, evaluate_tasks

from .benchmark_data import gold_index, make_benchmark_data, right_answer, wrong_answer


pytestmark = pytest.mark.harness


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_benchmark_data(tmp_path_factory.mktemp("benchmarks"))


@pytest.fixture(scope="module")
def tasks(data, tmp_path_factory):
    """All nine, with their data."""
    from normalign.evaluation.harness import load_benchmarks

    return load_benchmarks(list(BENCHMARKS.values()), data=data, scratch=tmp_path_factory.mktemp("scratch"))


class Scripted:
    """Knows the right answers, or says wrong ones; `breaks` names rows on which it raises."""

    def __init__(self, tasks, right=True, breaks=lambda task, row: False, form=lambda answer: answer):
        self.right, self.breaks, self.form, self.asked = right, breaks, form, []
        self.docs = {}
        for task in tasks:
            for request in task.requests():
                doc = task.plain_docs[int(request.id)] if task.generates else task.docs[request.id]
                self.docs[id(task), request.id] = doc
        self.tasks = {task.name: task for task in tasks}
        self.now = None

    def identity(self):
        return {"weights": "scripted", "dtype": "float32", "chat_template": "none", "commit": None}

    def _start(self, requests):
        self.asked += [request.id for request in requests]
        if any(self.breaks(self.now.name, request.id) for request in requests):
            raise RuntimeError("this row is broken")

    def generate(self, requests, max_new_tokens, stop, black):
        self._start(requests)
        assert all(request.images() for request in requests)
        say = right_answer if self.right and not black else wrong_answer
        return [self.form(say(self.now.name, self.docs[id(self.now), request.id])) for request in requests]

    def log_likelihoods(self, requests):
        self._start(requests)
        found = []
        for request in requests:
            gold = gold_index(self.now.name, self.docs[id(self.now), request.id])
            best = gold if self.right else (gold + 1) % len(request.instances)
            found.append([(-1.0 if i == best else -90.0, i == best) for i in range(len(request.instances))])
        return found


def run(model, tasks, out, **options):
    """Evaluates, telling the scripted model which task is asked."""
    results = None
    for task in tasks:
        model.now = task
        results = evaluate_tasks(model, [task], out / task.name, model="scripted", **options)["tasks"] | (
            results or {}
        )
    return results


def test_a_model_that_knows_scores_one_on_all_nine_and_one_that_does_not_zero(tasks, tmp_path):
    right = run(Scripted(tasks), tasks, tmp_path / "right", batch_size=4)
    wrong = run(Scripted(tasks, right=False), tasks, tmp_path / "wrong", batch_size=4)
    assert set(right) == set(BENCHMARKS)
    for name in BENCHMARKS:
        assert (right[name]["score"], right[name]["failed"]) == (100.0, 0), name
        assert (wrong[name]["score"], wrong[name]["failed"]) == (0.0, 0), name
        assert right[name]["metric"] == BENCHMARKS[name].metric
        assert right[name]["harness_version"] and right[name]["n"] > 0
        if BENCHMARKS[name].answers in ("letter", "yes or no"):
            assert right[name]["extracted_score"] == 100.0 and wrong[name]["extracted_score"] == 0.0
            assert right[name]["unparsed"] == wrong[name]["unparsed"] == 0
    assert right["mmlu"]["other"] == {"humanities": 100.0, "other": 100.0, "social_sciences": 100.0, "stem": 100.0}
    assert right["pope"]["other"]["says yes"] == 50.0


def test_the_average_is_the_plain_mean_of_the_nine_and_there_is_none_of_eight(tasks, tmp_path):
    class All(Scripted):
        """Right on the first four tasks."""

        def generate(self, requests, *rest):
            self.now = next(task for task in tasks if any(requests[0].text == one.text for one in known[task.name]))
            self.right = self.now.name in list(BENCHMARKS)[:4]
            return super().generate(requests, *rest)

        def log_likelihoods(self, requests):
            self.now = next(task for task in tasks if any(requests[0].id == one.id for one in known[task.name]))
            return super().log_likelihoods(requests)

    known = {task.name: task.requests() for task in tasks}
    for task in tasks:
        task.requests = lambda name=task.name: known[name]
    model = All(tasks, right=False)
    results = evaluate_tasks(model, tasks, tmp_path / "nine", model="m")
    assert results["average"] == pytest.approx(400 / 9)
    assert results["average"] == pytest.approx(sum(t["score"] for t in results["tasks"].values()) / 9)
    assert evaluate_tasks(model, tasks[:-1], tmp_path / "eight", model="m")["average"] is None
    for task in tasks:
        del task.requests


def test_a_row_that_breaks_is_a_failure_and_not_a_wrong_answer(tasks, tmp_path):
    """FAULTS R71, on every benchmark."""
    first = {task.name: task.requests()[1].id for task in tasks}
    results = run(Scripted(tasks, breaks=lambda task, row: row == first[task]), tasks, tmp_path)
    for task in tasks:
        result = results[task.name]
        assert (result["score"], result["failed"]) == (100.0, 1), task.name
        assert result["failures"] == [f"{first[task.name]}: RuntimeError: this row is broken"]


def test_a_question_of_mmbench_counts_only_with_all_its_rotations(tasks, tmp_path):
    (mmbench,) = (task for task in tasks if task.name == "mmbench_en_dev_static")
    indices = {request.id: int(mmbench.plain_docs[int(request.id)]["index"]) for request in mmbench.requests()}
    turned = next(row for row, index in indices.items() if index >= 1_000_000)
    questions = {index % 1_000_000 for index in indices.values()}
    whole = run(Scripted(tasks), [mmbench], tmp_path / "whole")["mmbench_en_dev_static"]
    assert whole["n"] == len(questions) < len(indices)
    broken = run(Scripted(tasks, breaks=lambda _, row: row == turned), [mmbench], tmp_path / "broken")
    assert broken["mmbench_en_dev_static"]["n"] == len(questions) - 1
    assert broken["mmbench_en_dev_static"]["score"] == 100.0


def test_the_same_answers_score_the_same_twice_in_one_process(tasks, tmp_path):
    """The task of OCRBench counts on in its module from one call to the next."""
    (ocr,) = (task for task in tasks if task.name == "ocrbench")
    for out in ("once", "twice"):
        assert run(Scripted(tasks), [ocr], tmp_path / out, black_images=True)["ocrbench"]["score"] == 100.0
    black = run(Scripted(tasks), [ocr], tmp_path / "twice", black_images=True)["ocrbench"]["black_image"]
    assert black["score"] == 0.0 and black["difference"]["value"] == 100.0


@pytest.mark.parametrize("form", ["The answer is {}.", "({})", "**{}**"])
def test_right_answers_in_a_form_that_the_harness_does_not_foresee_show_beside_its_score(tasks, tmp_path, form):
    """FAULTS R72: the harness scores them wrong, our rules read them, and nothing is unparsed."""
    chosen = [task for task in tasks if task.name in ("seedbench_2_plus", "scienceqa_img")]
    results = run(Scripted(tasks, form=form.format), chosen, tmp_path)
    for task in chosen:
        assert results[task.name]["score"] < 100.0
        assert (results[task.name]["extracted_score"], results[task.name]["unparsed"]) == (100.0, 0)


def test_units_have_the_harness_score_as_their_mean(tasks, tmp_path):
    """The interval is of the figure that is shown: also for MM-Star, a mean of means."""
    rows = {task.name: [request.id for request in task.requests()] for task in tasks}
    for task in tasks:
        model = Scripted([task])
        model.now = task
        doc = model.docs
        answers = {}
        for i, row in enumerate(rows[task.name]):
            model.right = i % 3 > 0
            (request,) = (one for one in task.requests() if one.id == row)
            answers[row] = (
                model.generate([request], 1, (), False) if task.generates else model.log_likelihoods([request])
            )[0]
        scores = task.score(answers)
        strata = {}
        for unit in scores.units:
            strata.setdefault(unit.stratum, []).append(unit.score)
        means = [sum(values) / len(values) for values in strata.values()]
        assert scores.value == pytest.approx(sum(means) / len(means)), task.name
        assert 0 < scores.value < 1 or task.name == "mmbench_en_dev_static", task.name
        assert doc


def test_the_command_runs_all_nine_with_a_tiny_model_and_goes_on(folder, data, tmp_path):
    given = [part for name, path in data.items() for part in ("--task-data", f"{name}={path}")]
    command = ["evaluate", str(folder), "--tasks", "paper", "--limit", "2", "--out", str(tmp_path), "--json", *given]
    done = CliRunner().invoke(app, [*command, "--control", "black"])
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)
    assert set(results["tasks"]) == set(BENCHMARKS) and results["limit"] == 2
    assert set(results["harness_version"]) == {"lmms-eval", "lm-eval"}
    assert all(task["failed"] == 0 for task in results["tasks"].values()), results["tasks"]
    assert results["tasks"]["mmlu"]["n"] > 57 and results["tasks"]["pope"]["n"] == 2
    assert results["average"] == pytest.approx(sum(task["score"] for task in results["tasks"].values()) / 9)
    assert (tmp_path / "results.png").is_file() and "MM" not in (tmp_path / "results.md").read_text()[:20]
    assert not (tmp_path / ".eval_results").exists()  # of a part nothing goes to a leaderboard
    before = (tmp_path / "samples/pope.jsonl").read_text()
    again = json.loads(CliRunner().invoke(app, command).stdout)
    assert {n: t["score"] for n, t in again["tasks"].items()} == {n: t["score"] for n, t in results["tasks"].items()}
    assert (tmp_path / "samples/pope.jsonl").read_text() == before
    assert not list(Path.cwd().glob("submissions")) and not list(Path.cwd().glob("results"))


def test_what_was_measured_in_full_is_written_in_the_hubs_form(folder, data, tmp_path):
    command = [
        "evaluate",
        str(folder),
        "--tasks",
        "pope",
        "--out",
        str(tmp_path),
        "--task-data",
        f"pope={data['pope']}",
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "pope" in done.stdout and "95% interval" in done.stdout
    assert [file.name for file in (tmp_path / ".eval_results").iterdir()] == ["pope.yaml"]


def test_text_benchmarks_score_the_language_model_within_as_it_scores_alone(composed, tasks):
    """FAULTS R74: the same log-likelihoods from the VLM and from its bare language model."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM

    model, processor = composed
    bare = AutoModelForCausalLM.from_config(model.config.text_config)
    state = {f"model.{name}": value for name, value in model.model.language_model.state_dict().items()}
    bare.load_state_dict(state | {"lm_head.weight": model.lm_head.weight})
    alone = HFLM(pretrained=bare.eval(), tokenizer=processor.tokenizer, backend="causal", batch_size=4, device="cpu")
    for task in tasks:
        if not task.generates:
            requests = task.requests()[:6]
            within = ModelAnswerer(model, processor).log_likelihoods(requests)
            flat = alone.loglikelihood([one for request in requests for one in request.instances], disable_tqdm=True)
            got = [pair for pairs in within for pair in pairs]
            assert [value for value, _ in got] == pytest.approx([value for value, _ in flat], abs=1e-4)
            assert [greedy for _, greedy in got] == [greedy for _, greedy in flat]


def test_examples_stand_before_each_question_when_asked_for(data):
    from normalign.evaluation.harness import load_benchmarks

    (none,) = load_benchmarks([BENCHMARKS["mmlu"]], 1, None, data)
    (two,) = load_benchmarks([BENCHMARKS["mmlu"]], 1, 2, data)
    assert [task.requests()[0].text.count("Answer:") for task in (none, two)] == [1, 3]
    assert (none.about["num_fewshot"], two.about["num_fewshot"]) == (0, 2)


def test_data_that_cannot_be_had_is_named_for_every_benchmark_before_a_model_is_loaded(tmp_path):
    with pytest.raises(NormalignError) as caught:
        evaluate("no/such-model", tmp_path / "out", "pope,mmlu,hellaswag", task_data={"mmlu": tmp_path / "gone"})
    said = str(caught.value)
    assert all(name in said for name in ("pope (lmms-lab-encoder/POPE)", "hellaswag (Rowan/hellaswag)"))
    assert f"mmlu: there is no folder {tmp_path / 'gone'}" in said
    assert "HF_HUB_OFFLINE is set" in said and "--task-data" in said


def test_data_of_another_form_is_refused_by_name(tmp_path, data):
    with pytest.raises(NormalignError, match=r"mmstar \(.*pope\)"):
        evaluate("no/such-model", tmp_path / "out", "mmstar", task_data={"mmstar": data["pope"]})
