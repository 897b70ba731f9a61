"""Questions of one's own: the form of a row, what is asked, how it is scored, and what is refused by file and line."""

import json

import pytest
from PIL import Image

from normalign.configuration.errors import NormalignError
from normalign.evaluation.own_data import OwnTask


@pytest.fixture
def write(tmp_path):
    Image.new("RGB", (8, 6), "red").save(tmp_path / "red.png")

    def make(*rows, name="own.jsonl"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return tmp_path / name

    return make


def test_a_question_is_asked_as_it_stands_with_its_images_in_order(write, tmp_path):
    Image.new("RGB", (4, 4), "blue").save(tmp_path / "blue.png")
    task = OwnTask(write({"images": ["red.png", str(tmp_path / "blue.png")], "question": "Same?", "answer": "no"}, ""))
    (request,) = task.requests()
    assert (request.id, request.text) == ("1", "Same?") and task.has_images and task.name == "own"
    assert [image.getpixel((0, 0)) for image in request.images()] == [(255, 0, 0), (0, 0, 255)]


def test_choices_follow_with_letters_and_the_answer_may_be_a_letter_or_a_text(write):
    (letters,) = OwnTask(write({"question": "What?", "choices": ["A", "B"], "answer": "b"})).rows.values()
    assert letters["answers"] == ["B"]  # both ways it is the same
    rows = [{"question": "What?", "choices": ["a cat", "a dog"], "answer": right} for right in ("b", "B", "A dog")]
    task = OwnTask(write(*rows))
    assert not task.has_images
    assert {request.text for request in task.requests()} == {
        "What?\nA. a cat\nB. a dog\nAnswer with the option's letter from the given choices directly."
    }
    scores = task.score({"1": "The answer is B.", "2": "a dog", "3": "A"})
    assert scores.targets == {"1": "B", "2": "B", "3": "B"}
    assert [unit.score for unit in scores.units] == [1.0, 1.0, 0.0] and scores.value == pytest.approx(2 / 3)
    assert scores.parsed == {"1": "B", "2": "B", "3": "A"}


def test_yes_and_no_and_words_are_read_by_their_own_rules_and_counted_by_kind(write):
    task = OwnTask(
        write(
            {"id": "x", "question": "Is it?", "answer": "Yes", "kind": "seen"},
            {"id": "y", "question": "Is it?", "answer": "no", "kind": "seen"},
            {"id": "z", "question": "How many?", "answers": ["two", "2 dogs"], "kind": "count"},
            {"id": 7, "question": "Which year?", "answer": 1999},
        )
    )
    scores = task.score({"x": "Yes, there is a dog.", "y": "Yes", "z": "The two.", "7": "1999"})
    assert {unit.rows[0]: unit.score for unit in scores.units} == {"x": 1.0, "y": 0.0, "z": 1.0, "7": 1.0}
    assert scores.kinds == {"count": [1.0], "seen": [1.0, 0.0]}
    assert scores.parsed == {"x": "yes", "y": "yes"}


def test_a_limit_takes_the_first_questions_and_reads_no_further(write):
    task = OwnTask(write({"question": "a?", "answer": "b"}, {"question": "c?", "answer": "d"}, "{broken"), limit=2)
    assert [request.text for request in task.requests()] == ["a?", "c?"]


GOOD = {"question": "What?", "answer": "a"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{broken", "is no JSON"),
        ("[1]", "is no JSON object"),
        ({"answer": "a"}, "has no question"),
        ({"question": " ", "answer": "a"}, "has no question"),
        ({"question": "What?"}, "has no answer"),
        ({"question": "What?", "answer": ""}, "has no answer"),
        ({"question": "What?", "answer": True}, "has no answer"),
        ({"question": "What?", "answers": []}, "has no answer"),
        ({**GOOD, "answers": ["a"]}, "both 'answer' and 'answers'"),
        ({**GOOD, "anser": "a"}, "the key 'anser'"),
        ({**GOOD, "image": "gone.png"}, "there is no image"),
        ({**GOOD, "images": "red.png"}, "'images' a list of paths"),
        ({**GOOD, "choices": ["a"]}, "two or more"),
        ({**GOOD, "choices": "ab"}, "two or more"),
        ({"question": "What?", "choices": ["x", "y"], "answer": "C"}, "none of the choices"),
        ({"question": "What?", "choices": ["x", "X"], "answer": "x"}, "several of the choices"),
        ({"question": "What?", "choices": ["b", "a"], "answer": "B"}, "text of choice A and the letter of another"),
        ({**GOOD, "id": "1"}, "stands in an earlier line"),
    ],
)
def test_a_row_of_another_form_is_refused_by_file_and_line(write, row, said):
    file = write(GOOD, row)
    with pytest.raises(NormalignError, match=said) as caught:
        OwnTask(file)
    assert f"Line 2 of {file}" in str(caught.value)


def test_missing_empty_and_binary_files_are_named(write, tmp_path):
    with pytest.raises(NormalignError, match="There is no file"):
        OwnTask(tmp_path / "gone.jsonl")
    with pytest.raises(NormalignError, match="no question in"):
        OwnTask(write("", "  "))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(NormalignError, match="UTF-8"):
        OwnTask(tmp_path / "binary.jsonl")


def test_a_broken_image_is_named_with_its_line(write, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    (request,) = OwnTask(write({**GOOD, "image": "broken.png"})).requests()
    with pytest.raises(NormalignError, match=r"Line 1 of .*broken\.png"):
        request.images()
