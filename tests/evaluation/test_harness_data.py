"""The small data sets run through the task code of lmms-eval and lm-eval: they load, ask, and score right and wrong answers."""

from collections import defaultdict
from types import SimpleNamespace

import pytest

from .benchmark_data import (
    GENERATION_TASKS,
    MMLU_SUBJECTS,
    MMSTAR_CATEGORIES,
    OCRBENCH_ROWS,
    gold_index,
    make_benchmark_data,
    right_answer,
    wrong_answer,
)


pytestmark = pytest.mark.harness

ROWS = {
    "mmbench_en_dev_static": 13,
    "mmstar": 9,
    "pope": 6,
    "seedbench_2_plus": 6,
    "ocrbench": 10,
    "scienceqa_img": 5,
    "ai2d": 6,
}
MMSTAR_METRICS = [*MMSTAR_CATEGORIES, "average"]
SEED_METRICS = ["seedbench_2_plus_Chart", "seedbench_2_plus_Map", "seedbench_2_plus_Web", "seedbench_2_plus_all"]
# what the task's own aggregation says when every row is right; OCRBench divides by its thousand rows however many there are
ALL_RIGHT = {
    "mmbench_en_dev_static": {"gpt_eval_score": 100.0},
    "mmstar": dict.fromkeys(MMSTAR_METRICS, 1.0),
    "pope": dict.fromkeys(["pope_accuracy", "pope_precision", "pope_recall", "pope_f1_score"], 1.0),
    "seedbench_2_plus": dict.fromkeys(SEED_METRICS, 1.0),
    "ocrbench": {"ocrbench_accuracy": len(OCRBENCH_ROWS) / 1000},
    "scienceqa_img": {"exact_match": 1.0},
    "ai2d": {"exact_match": 1.0},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_benchmark_data(tmp_path_factory.mktemp("benchmarks"))


@pytest.fixture(scope="module")
def vision_tasks():
    from lmms_eval.tasks import TaskManager

    return TaskManager()


@pytest.fixture
def load(data, vision_tasks):
    """A function that gives a task of lmms-eval whose rows are the small ones and everything else as published."""
    from lmms_eval.tasks import get_task_dict

    def load(name):
        # as published, `token: true` has the Hub client ask for a login
        config = {"task": name, "dataset_path": str(data[name]), "dataset_kwargs": None}
        return get_task_dict([config], vision_tasks)[name]

    return load


@pytest.fixture(scope="module")
def text_tasks(data, tmp_path_factory):
    """Both text tasks of lm-eval, loaded as one group of a folder of its own; MMLU's override reaches its 57 subjects."""
    import yaml
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("tasks")
    hellaswag = {"task": "hellaswag", "dataset_path": str(data["hellaswag"])}
    mmlu = {"group": "mmlu", "dataset_path": str(data["mmlu"])}
    (folder / "small.yaml").write_text(yaml.safe_dump({"group": "small", "task": [hellaswag, mmlu]}))
    return TaskManager(include_path=str(folder)).load(["small"])


def score(task, name, answer, folder):
    """Answers every request by `answer(name, row)`; the task's aggregated metrics."""
    task.build_all_requests()
    values = defaultdict(list)
    for request in task.instances:
        request.resps = [answer(name, task.eval_docs[request.arguments[3]])]
    task.apply_filters()
    for request in task.instances:
        [filtered] = request.filtered_resps.values()
        for metric, value in task.process_results(task.eval_docs[request.arguments[3]], [filtered]).items():
            values[metric].append(value)
    # with no folder to write to, MMBench and OCRBench would write their files below the working directory
    files = {"args": SimpleNamespace(output_path=str(folder))}
    takes_files = {"mmbench_en_dev_static", "ocrbench"}
    return {
        metric: task.aggregation()[metric](rows, **(files if name in takes_files else {}))
        for metric, rows in values.items()
    }


@pytest.mark.parametrize("name", GENERATION_TASKS)
def test_a_vision_task_asks_one_question_a_row_about_its_image(load, name):
    task = load(name)
    task.build_all_requests()
    assert len(task.instances) == ROWS[name]
    for request in task.instances:
        prompt, settings, images_of, row, *_ = request.arguments
        doc = task.eval_docs[row]
        [image] = images_of(doc)
        assert image.mode == "RGB" and image.size == doc["image"].size
        assert doc["question"].strip().split("\n")[0] in prompt
        assert not settings.get("do_sample", False)


@pytest.mark.parametrize("name", GENERATION_TASKS)
def test_right_answers_score_one_and_wrong_ones_zero_on_every_vision_task(load, name, tmp_path):
    right = score(load(name), name, right_answer, tmp_path)
    wrong = score(load(name), name, wrong_answer, tmp_path)
    for metric, value in ALL_RIGHT[name].items():
        assert right[metric] == pytest.approx(value), metric
        assert wrong[metric] == 0.0, metric


def test_mmbench_counts_a_question_only_when_it_is_right_in_every_rotation(load, tmp_path):
    def right_but_once(name, doc):
        return (wrong_answer if doc["index"] == 2_000_241 else right_answer)(name, doc)

    name = "mmbench_en_dev_static"
    assert score(load(name), name, right_but_once, tmp_path)["gpt_eval_score"] == 75.0


def test_pope_takes_the_bare_word_and_nothing_else(load, tmp_path):
    def sentence(name, doc):
        return f"{right_answer(name, doc)}, there is"

    assert score(load("pope"), "pope", sentence, tmp_path)["pope_accuracy"] == 0.0


def test_the_images_differ_in_size_and_mode(load):
    images = [doc["image"] for doc in load("ocrbench").eval_docs]
    assert len({image.size for image in images}) > 5
    assert {image.mode for image in images} == {"RGB", "RGBA", "L"}


@pytest.mark.parametrize(("offset", "expected"), [(0, 1.0), (1, 0.0)])
def test_the_gold_choice_scores_one_and_another_zero_on_both_text_tasks(text_tasks, offset, expected):
    assert set(text_tasks["tasks"]) == {"hellaswag", *(f"mmlu_{subject}" for subject in MMLU_SUBJECTS)}
    for name, task in text_tasks["tasks"].items():
        task.build_all_requests()
        by_row = defaultdict(list)
        for request in task.instances:
            likeliest = (gold_index(name.split("_")[0], request.doc) + offset) % 4
            request.resps = [(-1.0 if request.idx == likeliest else -50.0, False)]
            by_row[request.doc_id].append(request)
        task.apply_filters()
        for requests in by_row.values():
            results = [request.filtered_resps["none"] for request in requests]
            assert task.process_results(requests[0].doc, results)["acc"] == expected, name


def test_mmlu_keeps_its_four_groups_and_hellaswag_its_four_choices(text_tasks):
    assert text_tasks["group_map"]["mmlu"] == ["mmlu_stem", "mmlu_other", "mmlu_social_sciences", "mmlu_humanities"]
    anatomy, hellaswag = text_tasks["tasks"]["mmlu_anatomy"], text_tasks["tasks"]["hellaswag"]
    anatomy.build_all_requests()
    prompt, choice = anatomy.instances[3].arguments
    assert "about anatomy" in prompt and prompt.endswith("D. the fourth\nAnswer:") and choice == " D"
    assert len(list(anatomy.fewshot_docs())) == 5
    hellaswag.build_all_requests()
    assert len(hellaswag.instances) == 16
    assert hellaswag.instances[0].arguments == ("Filling a jar: How to fill a jar. Take a jar.", " pours jam in.")
