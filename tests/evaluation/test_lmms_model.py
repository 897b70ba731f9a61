"""The model class for lmms-eval: found by its entry point, asked by the harness's own loop, and honest where it fails."""

import configparser
import logging
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch


pytest.importorskip("lmms_eval", reason="needs lmms-eval: `make test-eval` runs it where it is installed")

import lmms_eval
from datasets import Dataset, Features, Image, Value
from lmms_eval import evaluator
from lmms_eval.api.instance import Instance
from lmms_eval.models import registry_v2
from lmms_eval.tasks import TaskManager

from normalign.configuration.errors import NormalignError
from normalign.evaluation import lmms_model
from normalign.evaluation.generation import chat_prompts, generate_answers
from normalign.evaluation.lmms_model import NormalignModel
from normalign.evaluation.loglikelihood import log_likelihoods
from normalign.train_trl.digit_scenes import digit_scene_rows


pytestmark = pytest.mark.harness

CHECKOUT = Path(__file__).parents[2]
OPTIONS = {"max_new_tokens": 6, "temperature": 0, "top_p": 1.0, "num_beams": 1, "do_sample": False, "until": ["\n\n"]}


@pytest.fixture(scope="module")
def documents():
    """Rows with one image, none and several; the third has its choices in it."""
    scenes = [row["images"][0] for row in digit_scene_rows(6, split="test", text_only_share=0)]
    counts = [1, 0, 2, 1, 3, 1]
    questions = ["Is there a 7?", "Why?", "Which of them has a red digit, and where?", "How many?", "And now?", "A 3?"]
    return [
        {"question": question, "images": scenes[:count], "answer": f"answer {number}"}
        for number, (count, question) in enumerate(zip(counts, questions, strict=True))
    ]


@pytest.fixture
def lm(folder, documents):
    model = NormalignModel(pretrained=str(folder), batch_size=2)
    model.task_dict = {"scenes": {"test": documents}}
    return model


def request(documents, number, asked=None, kind="generate_until", idx=0, **metadata):
    arguments = (
        documents[number]["question"],
        dict(OPTIONS) if asked is None else asked,
        lambda document: document["images"],
        number,
        "scenes",
        "test",
    )
    metadata = {"task": "scenes", "doc_id": number, "repeats": 1, **metadata}
    return Instance(request_type=kind, arguments=arguments, idx=idx, metadata=metadata)


def conversations(documents):
    return [
        [{"role": "user", "content": [*({"type": "image"} for _ in row["images"]), {"type": "text", "text": text}]}]
        for row in documents
        for text in [row["question"]]
    ]


def test_the_entry_point_in_setup_cfg_gives_the_harness_the_class(monkeypatch):
    setup = configparser.ConfigParser()
    setup.read(CHECKOUT / "setup.cfg", encoding="utf-8")
    name, value = setup["options.entry_points"]["lmms_eval.models"].strip().split(" = ")
    points = EntryPoints([EntryPoint(name, value, "lmms_eval.models")])
    monkeypatch.setattr(registry_v2, "entry_points", lambda: points)
    registry = registry_v2.ModelRegistryV2()
    registry.load_entrypoint_manifests()
    assert registry.list_model_names() == ["normalign"]
    assert registry.get_model_class("normalign") is NormalignModel


def test_answers_are_those_of_generate_answers_in_the_order_of_the_requests(lm, documents):
    answers = lm.generate_until([request(documents, number) for number in range(len(documents))])
    expected = [
        generate_answers(lm.model, lm.processor, [conversation], [row["images"]], max_new_tokens=6)[0]
        for conversation, row in zip(conversations(documents), documents, strict=True)
    ]
    assert answers == expected
    assert len(set(expected)) > 3


def test_batches_have_the_size_asked_for_and_the_longest_texts_come_first(lm, documents, monkeypatch):
    batches = []

    def watched(model, processor, conversations, images, **options):
        batches.append([len(one[0]["content"][-1]["text"]) for one in conversations])
        return generate_answers(model, processor, conversations, images, **options)

    monkeypatch.setattr(lmms_model, "generate_answers", watched)
    lm.generate_until([request(documents, number) for number in range(len(documents))])
    lengths = sorted((len(row["question"]) for row in documents), reverse=True)
    assert batches == [lengths[:2], lengths[2:4], lengths[4:]]


def test_each_request_has_its_own_limit_and_stop_texts(lm, documents):
    answers = lm.generate_until([request(documents, number, {"max_new_tokens": 12}) for number in range(6)])
    number, whole = next((number, text) for number, text in enumerate(answers) if len(text.split()) > 2)
    stop = whole.split()[1]
    asked = [
        {"max_new_tokens": 12, "until": stop},
        {"max_new_tokens": 2},
        {"max_new_tokens": 12, "until": ["#", stop]},
    ]
    cut, short, cut_too = lm.generate_until([request(documents, number, one) for one in asked])
    assert cut == cut_too == whole[: whole.index(stop)].strip()
    assert len(lm.processor.tokenizer(short, add_special_tokens=False)["input_ids"]) <= 2 and whole.startswith(short)


def test_decoding_is_greedy_and_options_left_aside_are_noted_once(lm, documents, caplog):
    with caplog.at_level(logging.WARNING, logger=lmms_model.__name__):
        plain = lm.generate_until([request(documents, 0)])
        assert not caplog.records
        sampled = {**OPTIONS, "temperature": 0.7, "do_sample": True, "num_beams": 5, "top_p": 0.9}
        for _ in range(2):
            assert lm.generate_until([request(documents, 0, sampled)]) == plain
    (record,) = caplog.records
    assert "left aside: do_sample, num_beams, temperature, top_p" in record.message


CHOICES = [" red", " There is a 7 on the left.", " 7", " no"]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_log_likelihoods_come_in_the_order_of_the_requests(lm, documents, batch_size):
    lm.batch_size = batch_size
    pairs = [(number, choice) for number in (2, 1, 0) for choice in CHOICES]
    requests = [request(documents, number, choice, "loglikelihood", i) for i, (number, choice) in enumerate(pairs)]
    found = lm.loglikelihood(requests)
    prompts = chat_prompts(lm.processor, conversations(documents))
    for (number, choice), (value, greedy) in zip(pairs, found, strict=True):
        images = documents[number]["images"]
        (expected,) = log_likelihoods(lm.model, lm.processor, [prompts[number]], [images], [choice])
        assert (value, greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])


def test_a_target_is_taken_from_the_document_and_a_choice_alone_has_no_document(lm, documents):
    by_function = request(documents, 3, lambda document: document["answer"], "loglikelihood")
    by_text = request(documents, 3, documents[3]["answer"], "loglikelihood")
    assert lm.loglikelihood([by_function]) == lm.loglikelihood([by_text])
    metadata = {"task": "scenes", "doc_id": 3, "repeats": 1}
    alone = Instance(request_type="loglikelihood", arguments=("", "red"), idx=0, metadata=metadata)
    nothing = [{"role": "user", "content": [{"type": "text", "text": ""}]}]
    expected = log_likelihoods(lm.model, lm.processor, chat_prompts(lm.processor, [nothing]), [[]], ["red"])
    assert lm.loglikelihood([alone, by_text])[0][0] == pytest.approx(expected[0][0], abs=1e-4)


def test_copies_that_fill_up_a_process_are_not_asked_again(lm, documents, monkeypatch):
    asked = []
    monkeypatch.setattr(
        lmms_model,
        "generate_answers",
        lambda model, processor, conversations, images, **options: (
            asked.extend(conversations) or [one[0]["content"][-1]["text"] for one in conversations]
        ),
    )
    requests = [request(documents, 0), request(documents, 1), request(documents, 1, __padding_only__=True)]
    assert lm.generate_until(requests) == [documents[number]["question"] for number in (0, 1, 1)]
    assert len(asked) == 2
    # a process without any document of its own is given one by the harness
    assert lm.generate_until([request(documents, 3, __padding_only__=True)]) == [documents[3]["question"]]


def test_a_request_that_fails_is_raised_by_its_name(lm, documents, monkeypatch):
    broken = [dict(row) for row in documents]
    broken[4]["images"] = ["no-such-file.png"]
    lm.task_dict = {"scenes": {"test": broken}}
    for run, kind, asked in (
        (lm.generate_until, "generate_until", None),
        (lm.loglikelihood, "loglikelihood", "red"),
    ):
        with pytest.raises(NormalignError, match=r"Document 4 of the task scenes failed: .*no-such-file\.png"):
            run([request(broken, number, asked, kind) for number in range(6)])
    broken[4] = documents[4] | {"question": "What is in <image>?"}
    with pytest.raises(NormalignError, match="Document 4 of the task scenes failed: .*holds the text <image>"):
        lm.generate_until([request(broken, 4)])


def test_a_batch_that_does_not_fit_is_halved(lm, documents, monkeypatch):
    sizes = []

    def small(model, processor, conversations, images, **options):
        sizes.append(len(conversations))
        if len(conversations) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return generate_answers(model, processor, conversations, images, **options)

    requests = [request(documents, number) for number in range(6)]
    expected = lm.generate_until(requests)
    monkeypatch.setattr(lmms_model, "generate_answers", small)
    lm.batch_size = "auto"
    assert lm.generate_until(requests) == expected
    assert sizes == [6, 3, 2, 2, 2]


def test_answers_are_handed_to_the_cache_of_the_harness(lm, documents):
    kept = []

    class Hook:
        def add_partial(self, kind, asked, result):
            kept.append((kind, asked, result))

    lm.set_cache_hook(Hook())
    answers = lm.generate_until([request(documents, 0), request(documents, 2)])
    values = lm.loglikelihood([request(documents, 0, lambda document: "red", "loglikelihood")])
    assert kept == [
        ("generate_until", (documents[2]["question"], OPTIONS), answers[1]),
        ("generate_until", (documents[0]["question"], OPTIONS), answers[0]),
        ("loglikelihood", (documents[0]["question"], "red"), values[0]),
    ]


def test_tasks_of_several_rounds_are_refused(lm, documents):
    with pytest.raises(NormalignError, match="scenes asks in several rounds"):
        lm.generate_until_multi_round([request(documents, 0)])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "pretrained=FOLDER_OR_HUB_ID"),
        ({"pretrained": "/nowhere/model"}, "/nowhere/model"),
        ({"pretrained": "x", "conv_template": "vicuna"}, "no option conv_template; it takes pretrained"),
        ({"pretrained": "x", "batch_size": "many"}, "batch size is 'many'"),
        ({"pretrained": "x", "batch_size": 0}, "at least 1"),
    ],
)
def test_wrong_model_args_get_one_paragraph(options, words):
    with pytest.raises(NormalignError, match=words) as caught:
        NormalignModel(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("batch_size", "most", "expected"), [(4, None, 4), ("4", None, 4), ("auto", None, "auto"), ("auto", 16, 16)]
)
def test_the_arguments_of_the_command_line_reach_the_model(folder, batch_size, most, expected):
    model = NormalignModel.create_from_arg_string(
        f"pretrained={folder},dtype=float32", {"batch_size": batch_size, "max_batch_size": most, "device": "cpu"}
    )
    assert model.batch_size == expected
    assert model.device == torch.device("cpu") and model.model.dtype == torch.float32
    assert (model.rank, model.world_size) == (0, 1)


@pytest.fixture(scope="module")
def pope(tmp_path_factory):
    """The task as the harness has it, over five rows in the schema of its data set."""
    folder = tmp_path_factory.mktemp("pope")
    texts = ("id", "question_id", "question", "answer", "image_source")
    features = {name: Value("string") for name in texts} | {"image": Image(), "category": Value("string")}
    rows = [
        {
            "id": str(i),
            "question_id": str(i),
            "question": f"Is there a {i} in the image?",
            "answer": "yes" if i % 2 else "no",
            "image_source": f"scene_{i}",
            "image": row["images"][0],
            "category": "adversarial",
        }
        for i, row in enumerate(digit_scene_rows(5, split="test", text_only_share=0))
    ]
    Dataset.from_list(rows, features=Features(features)).to_parquet(folder / "test-00000-of-00001.parquet")
    tasks = Path(lmms_eval.__file__).parent / "tasks" / "pope"
    manager = TaskManager("ERROR", include_path=f"{tasks}/", include_defaults=False)
    return rows, lambda: manager.load_config({"task": "pope", "dataset_path": str(folder), "dataset_kwargs": {}})


def scored(lm, tasks):
    lm.task_dict = {name: task.dataset for name, task in tasks.items()}
    return evaluator.evaluate(lm, tasks, log_samples=True)


def test_a_task_of_the_harness_runs_end_to_end(folder, pope):
    rows, load = pope
    lm = NormalignModel(pretrained=str(folder), batch_size=3)
    model, processor = lm.model, lm.processor
    samples = scored(lm, load())["samples"]["pope"]
    text = "{}\nAnswer the question using a single word or phrase."
    asked = conversations([{"question": text.format(row["question"]), "images": [row["image"]]} for row in rows])
    images = [[row["image"]] for row in rows]
    expected = generate_answers(model, processor, asked, images, max_new_tokens=128, stop=["\n\n"])
    assert [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])] == [
        [answer] for answer in expected
    ]


@pytest.mark.parametrize(("says", "accuracy", "f1"), [("right", 1.0, 1.0), ("wrong", 0.0, 0.0), ("Yes", 0.4, 4 / 7)])
def test_the_score_of_a_task_is_that_of_the_answers(folder, pope, monkeypatch, says, accuracy, f1):
    rows, load = pope
    other = {"yes": "no", "no": "yes"}

    def scripted(model, processor, conversations, images, **options):
        answers = []
        for conversation in conversations:
            question = conversation[0]["content"][-1]["text"].split("\n")[0]
            (right,) = [row["answer"] for row in rows if row["question"] == question]
            answers.append({"right": right, "wrong": other[right]}.get(says, says))
        return answers

    monkeypatch.setattr(lmms_model, "generate_answers", scripted)
    results = scored(NormalignModel(pretrained=str(folder), batch_size=2), load())["results"]["pope"]
    assert results["pope_accuracy,none"] == pytest.approx(accuracy)
    assert results["pope_f1_score,none"] == pytest.approx(f1)
