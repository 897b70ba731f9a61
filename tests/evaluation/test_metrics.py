"""The metrics for the `evaluate` library: they load offline and by import, and score hand-made answers as by hand."""

import doctest
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import evaluate
import pytest

from normalign.configuration.errors import NormalignError
from normalign.evaluation.intervals import share_interval
from normalign.evaluation.metrics import METRICS, metric_path


OPTIONS = ["a red bus", "a green tram", "two cars", "a dog"]
# what is said, the right letter, whether it counts
CHOICES = [
    ("C", "C", True),
    ("c.", "C", True),
    ("(C)", "c", True),
    ("The answer is C", "C", True),
    ("The answer is C", "B", False),
    ("Answer: (b)", "B", True),
    ("**D**", "D", True),
    (r"\boxed{A}", "A", True),
    ("<think>B or C? No, A.</think> A", "A", True),
    ("A. a red bus", "A", True),
    ("a red bus", "A", True),
    ("A green tram.", "B", True),
    ("two cars", "D", False),
    ("The picture shows a dog", "D", True),
    ("I think it is option c because of the wheels", "C", True),
    ("Ｄ", "D", True),
]
UNREADABLE = [("A or B", "A"), ("", "A"), ("It is hard to tell.", "C"), ("A, B, C and D", "D"), ("E", "A")]


def load(name):
    return evaluate.load(metric_path(name))


def answers(rows):
    said, right = (list(column) for column in list(zip(*rows))[:2])
    return {"predictions": said, "references": right}


def interval(hits, n):
    return {"low": share_interval(hits, n).low, "high": share_interval(hits, n).high}


def test_a_choice_is_read_out_of_what_is_said():
    metric = load("multiple_choice")
    for said, right, counts in CHOICES:
        result = metric.compute(predictions=[said], references=[right], choices=OPTIONS)
        assert (result["accuracy"], result["unparsed"]) == (float(counts), 0), said
    hits = sum(counts for *_, counts in CHOICES)
    result = metric.compute(**answers([*CHOICES, *UNREADABLE]), choices=OPTIONS)
    n = len(CHOICES) + len(UNREADABLE)
    assert result == {"accuracy": hits / n, **interval(hits, n), "n": n, "unparsed": len(UNREADABLE)}


def test_choices_differ_by_answer_and_without_them_letters_alone_are_read():
    metric = load("multiple_choice")
    rows = {"predictions": ["a dog", "a dog", "E"], "references": ["A", "B", "E"]}
    result = metric.compute(**rows, choices=[["a dog", "a cat"], ["a cat", "a dog"], None])
    assert (result["accuracy"], result["unparsed"]) == (1.0, 0)
    result = metric.compute(**rows)
    assert (result["accuracy"], result["unparsed"]) == (1 / 3, 2)
    with pytest.raises(NormalignError, match="choices has 1 entries, but there are 3 answers"):
        metric.compute(**rows, choices=[["a dog", "a cat"]])


@pytest.mark.parametrize("reference", ["the bus", "E", "", "1"])
def test_a_reference_that_is_no_letter_of_an_option_is_refused(reference):
    with pytest.raises(NormalignError, match="is no letter from A to D"):
        load("multiple_choice").compute(predictions=["A"], references=[reference], choices=OPTIONS)


# what is said, the right answer, what is read
YES_NO = [
    ("Yes", "yes", "yes"),
    ("yes.", "Yes", "yes"),
    ("Yes, there is a dog in the image.", "no", "yes"),
    ("No", "no", "no"),
    ("No, there isn't.", "yes", "no"),
    ("There is no dog.", "no", "no"),
    ("I do not see one", "no", "no"),
    ("There is a dog on the left.", "yes", "yes"),
    ("The answer is yes", "no", "yes"),
    ("**No**", "NO", "no"),
    ("Yes and no", "yes", None),
    ("I am not sure", "no", None),
    ("", "yes", None),
    ("a dog", "yes", None),
]


def test_the_figures_of_pope_are_those_of_what_is_read():
    result = load("pope").compute(**answers(YES_NO))
    # read: yes of yes 3, yes of no 2, no of no 4, no of yes 1, and of unreadable ones three are of yes
    assert result == {
        "accuracy": 7 / 14,
        **interval(7, 14),
        "n": 14,
        "precision": 3 / 5,
        "recall": 3 / 7,
        "f1": pytest.approx(2 * (3 / 5) * (3 / 7) / (3 / 5 + 3 / 7)),
        "yes_ratio": 5 / 14,
        "unparsed": 4,
    }


def test_pope_without_a_yes_has_no_precision_and_a_strange_reference_is_refused():
    result = load("pope").compute(predictions=["no", "no"], references=["no", "no"])
    assert (result["accuracy"], result["precision"], result["recall"], result["f1"]) == (1.0, 0.0, 0.0, 0.0)
    with pytest.raises(NormalignError, match="'maybe' is neither yes nor no"):
        load("pope").compute(predictions=["no"], references=["maybe"])


FORMULAS, SCENES = "Handwritten Mathematical Expression Recognition", "Scene Text-centric VQA"
# what is said, accepted texts, type, whether it counts
READ = [
    ("The sign says STOP.", ["stop"], SCENES, True),
    ("stop", ["Stop sign", "STOP"], SCENES, True),
    ("st op", ["stop"], SCENES, False),
    ("12 June 1987", ["12 May 1987"], SCENES, False),
    ("Total:\n$31.90", ["$31.90"], "Key Information Extraction", True),
    ("ＡＢＣ", ["abc"], "Regular Text Recognition", True),
    ("x^{2}+1", ["x ^ { 2 } + 1"], FORMULAS, True),
    ("X^{2}+1", ["x ^ { 2 } + 1"], FORMULAS, False),
    ("", ["stop"], SCENES, False),
]


def test_ocrbench_counts_answers_that_contain_an_accepted_text():
    types = [kind for _, _, kind, _ in READ]
    result = load("ocrbench").compute(**answers(READ), question_types=types)
    assert result == {
        "score": 5,
        "accuracy": 5 / 9,
        **interval(5, 9),
        "n": 9,
        "by_type": {
            SCENES: {"score": 2, "n": 5},
            "Key Information Extraction": {"score": 1, "n": 1},
            "Regular Text Recognition": {"score": 1, "n": 1},
            FORMULAS: {"score": 1, "n": 2},
        },
    }
    # without types nothing is known to be a formula: spaces count and case does not
    assert load("ocrbench").compute(**answers(READ[6:8]))["score"] == 0
    with pytest.raises(NormalignError, match="references of answer 2 are no texts to look for: an empty reference"):
        load("ocrbench").compute(predictions=["a", "b"], references=[["a"], [""]])
    with pytest.raises(NormalignError, match="question_types has 1 entries, but there are 2 answers"):
        load("ocrbench").compute(predictions=["a", "b"], references=[["a"], ["b"]], question_types=[SCENES])


# what is said, the right answer, whether it counts
SHORT = [
    ("2", "two", True),
    ("Two.", "2", True),
    ("the red one", "red 1", True),
    ("A dog", "dog", True),
    ("dogs", "dog", False),
    ("T-shirt!", "t shirt", True),
    ("don't", "dont", True),
    ("1,000", "1000", True),
    ("1.5", "15", False),
    ("  yes ", "Yes", True),
    ("", "yes", False),
    ("the", "a", False),
]


def test_short_answers_are_compared_after_normalisation():
    result = load("vqa_exact_match").compute(**answers(SHORT))
    hits = sum(counts for *_, counts in SHORT)
    assert result == {"accuracy": hits / 12, **interval(hits, 12), "n": 12, "empty": 1}
    for said, right, counts in SHORT:
        assert load("vqa_exact_match").compute(predictions=[said], references=[[right]])["accuracy"] == counts, said


def test_answers_of_annotators_give_the_soft_score_too():
    ten = ["red"] * 2 + ["Red."] + ["dark red"] * 6 + ["blue"]
    rows = {"predictions": ["red", "dark red", "blue", "green"], "references": [ten] * 4}
    result = load("vqa_exact_match").compute(**rows)
    assert (result["accuracy"], result["soft_score"]) == (3 / 4, pytest.approx((1 + 1 + 1 / 3 + 0) / 4))
    assert "soft_score" not in load("vqa_exact_match").compute(predictions=["red"], references=[["red", "blue"]])
    assert load("vqa_exact_match").compute(predictions=["?!"], references=["red"])["empty"] == 1
    with pytest.raises(NormalignError, match="Question 1 has no accepted answer"):
        load("vqa_exact_match").compute(predictions=["red"], references=[[""]])


ROWS = {
    "multiple_choice": answers(CHOICES),
    "ocrbench": answers(READ),
    "pope": answers(YES_NO),
    "vqa_exact_match": answers(SHORT),
}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_described_and_its_example_is_true(name):
    module = importlib.import_module(f"normalign.evaluation.metrics.{name}")
    metric = load(name)
    assert metric.description.strip() and "@" in metric.citation
    assert set(metric._feature_names()) == {"predictions", "references"}
    test = doctest.DocTestParser().get_doctest(metric.inputs_description, {}, name, module.__file__, 0)
    assert test.examples and doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("name", METRICS)
def test_import_and_path_batches_and_two_at_once_score_alike(name):
    module = importlib.import_module(f"normalign.evaluation.metrics.{name}")
    (of_module,) = (one for one in vars(module).values() if isinstance(one, type) and issubclass(one, evaluate.Metric))
    whole = load(name).compute(**ROWS[name])
    assert of_module().compute(**ROWS[name]) == whole
    one, two = load(name), load(name)
    rows = list(zip(ROWS[name]["predictions"], ROWS[name]["references"]))
    for said, right in rows:
        two.add_batch(predictions=[said], references=[right])
        one.add(prediction=said, reference=right)
    assert one.compute() == two.compute() == whole


@pytest.mark.parametrize("name", METRICS)
def test_nothing_to_score_and_lists_of_two_lengths_are_refused(name):
    with pytest.raises(NormalignError, match="no answers to score"):
        load(name).compute(predictions=[], references=[])
    with pytest.raises(NormalignError, match="references has 1 entries, but there are 2 answers"):
        load(name).compute(predictions=["a", "b"], references=ROWS[name]["references"][:1])
    for predictions in ("no", None):
        with pytest.raises(NormalignError, match="predictions and references as lists"):
            load(name).compute(predictions=predictions, references=ROWS[name]["references"][:2])
    for odd in (None, 3):
        with pytest.raises(NormalignError, match=f"Answer 2 is {odd}, which is no text"):
            load(name).compute(predictions=["yes", odd], references=ROWS[name]["references"][:2])


def test_the_metrics_load_offline_from_anywhere_and_another_name_is_refused(tmp_path):
    """In a process of its own, in an empty folder, with an empty cache: nothing is fetched."""
    code = "import evaluate\nfrom normalign.evaluation.metrics import METRICS, metric_path\n"
    code += "print([type(evaluate.load(metric_path(name))).__module__.split('.')[-1] for name in METRICS])"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_EVALUATE_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(list(METRICS)), done.stderr
    copied = shutil.copy(metric_path("pope"), tmp_path)  # as `evaluate` itself does
    assert evaluate.load(str(copied)).compute(predictions=["no"], references=["no"])["accuracy"] == 1.0
    assert {Path(metric_path(name)).stem for name in METRICS} == set(METRICS)
    with pytest.raises(NormalignError, match="no metric 'bleu'"):
        metric_path("bleu")
