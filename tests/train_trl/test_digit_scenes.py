"""The built-in data: the same from the same seed, answers that follow from the scene, and no leak from train to test."""

import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from normalign.train_trl.digit_scenes import (
    COLOURS,
    LOOKALIKE,
    PLACES,
    QUESTION_KINDS,
    Digit,
    chance_accuracy,
    digit_samples,
    digit_scene_rows,
    digit_scenes_dataset,
    draw_questions,
    load_digits,
    render_scene,
)


@pytest.fixture(scope="module")
def rows():
    return digit_scene_rows(600, seed=3)


def parse(caption):
    """The scene as {place: (colour, value)}, read back from the caption by a second program than the one that wrote it."""
    scene = {}
    for place, colour, value in re.findall(r"(\w+ \w+): (\w+) ?(\d?)", caption):
        if value:
            scene[place] = (colour, int(value))
        else:
            assert colour == "empty"
    return scene


def expected_answer(scene, question):
    """The right answer, from the question's wording and the scene alone."""
    values = [value for _, value in scene.values()]
    if place := re.fullmatch(r"Which digit is at the (.+)\?", question):
        return str(scene[place[1]][1])
    if place := re.fullmatch(r"What colour is the digit at the (.+)\?", question):
        return scene[place[1]][0]
    if question == "How many digits are there?":
        return str(len(values))
    if asked := re.fullmatch(r"Is there a (\d)\?", question):
        return "yes" if int(asked[1]) in values else "no"
    if question == "Which digit is the largest?":
        return str(max(values))
    row = re.fullmatch(r"Read the (top|bottom) row\.", question)[1]
    return " ".join(str(scene[place][1]) for place in (f"{row} left", f"{row} right") if place in scene)


def test_every_answer_follows_from_the_scene(rows):
    assert {row["kind"] for row in rows} == set(QUESTION_KINDS)
    for row in rows:
        assert row["answer"] == expected_answer(parse(row["caption"]), row["question"]), row


def test_captions_name_every_digit_at_its_place():
    for item in draw_questions(200, stage=1):
        expected = {place: (digit.colour, digit.value) for place, digit in zip(PLACES, item.scene) if digit}
        assert parse(item.answer) == expected
        assert item.kind == "caption"


def test_samples_show_the_digit_that_the_scene_names():
    labels = load_digits()[1]
    for item in draw_questions(300, split="test"):
        for digit in item.scene:
            if digit:
                assert labels[digit.sample] == digit.value
                assert digit.sample in digit_samples("test")[digit.value]


def test_same_arguments_give_the_same_rows_and_another_seed_others():
    first, again, other = digit_scene_rows(30, seed=5), digit_scene_rows(30, seed=5), digit_scene_rows(30, seed=6)
    assert [row["messages"] for row in first] == [row["messages"] for row in again]
    for a, b in zip(first, again):
        assert [image.tobytes() for image in a["images"]] == [image.tobytes() for image in b["images"]]
    assert [row["caption"] for row in first] != [row["caption"] for row in other]


def test_train_and_test_show_disjoint_samples_of_every_digit():
    train, test = digit_samples("train"), digit_samples("test")
    for value in range(10):
        assert not set(train[value]) & set(test[value])
        assert len(train[value]) >= 100
        assert len(test[value]) >= 25
    assert sum(len(samples) for split in (train, test) for samples in split.values()) == 1797


def test_kinds_and_yes_and_no_are_balanced():
    items = draw_questions(1200, seed=1)
    assert Counter(item.kind for item in items) == dict.fromkeys(QUESTION_KINDS, 200)
    assert Counter(item.answer for item in items if item.kind == "exists") == {"yes": 100, "no": 100}


def test_negatives_ask_for_the_lookalike_of_a_digit_in_the_scene():
    negatives = [item for item in draw_questions(1200) if item.kind == "exists" and item.answer == "no"]
    for item in negatives:
        asked = int(re.search(r"\d", item.question)[0])
        values = [digit.value for digit in item.scene if digit]
        assert asked not in values
        assert LOOKALIKE[asked] in values


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25])
def test_share_of_text_only_rows(share):
    rows = digit_scene_rows(200, text_only_share=share)
    text_only = [row for row in rows if row["text_only"]]
    assert len(text_only) == round(200 * share)
    assert all(row["images"] == [] for row in text_only)
    assert all(len(row["images"]) == 1 for row in rows if not row["text_only"])
    for row in text_only:
        assert row["messages"][0]["content"] == [{"type": "text", "text": f"{row['caption']}\n{row['question']}"}]


def test_rows_have_trl_conversational_form(rows):
    row = next(row for row in rows if not row["text_only"])
    assert row["messages"] == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["question"]}]},
        {"role": "assistant", "content": [{"type": "text", "text": row["answer"]}]},
    ]
    assert row["images"][0].size == (64, 64)
    assert row["images"][0].mode == "RGB"


def test_pictures_show_the_tint_in_the_right_quarter():
    for index, place in enumerate(PLACES):
        for colour, rgb in COLOURS.items():
            scene = [None] * 4
            scene[index] = Digit(3, colour, digit_samples("train")[3][0])
            pixels = np.asarray(render_scene(tuple(scene)), dtype=float)
            quarters = [pixels[r : r + 32, c : c + 32].reshape(-1, 3) for r in (0, 32) for c in (0, 32)]
            brightest = [quarter[quarter.sum(-1).argmax()] for quarter in quarters]
            assert np.argmax([pixel.sum() for pixel in brightest]) == index, place
            assert np.abs(brightest[index] - rgb).max() < 40, colour


def test_dataset_keeps_pictures_and_text_only_rows():
    dataset = digit_scenes_dataset(20, seed=2, text_only_share=0.2)
    rows = digit_scene_rows(20, seed=2, text_only_share=0.2)
    assert len(dataset) == 20
    for stored, row in zip(dataset, rows):
        assert stored["answer"] == row["answer"]
        assert stored["text_only"] == (not stored["images"])
        for a, b in zip(stored["images"], row["images"]):
            assert isinstance(a, Image.Image)
            assert a.tobytes() == b.tobytes()
        content = stored["messages"][0]["content"]
        assert [part["type"] for part in content] == (["text"] if row["text_only"] else ["image", "text"])


def test_chance_is_the_best_answer_without_a_picture():
    rows = digit_scene_rows(1200, split="test", seed=4)
    by_kind = {kind: chance_accuracy([row for row in rows if row["kind"] == kind]) for kind in QUESTION_KINDS}
    assert by_kind["exists"] == pytest.approx(0.5, abs=0.12)
    assert by_kind["count"] == pytest.approx(0.25, abs=0.1)
    assert by_kind["digit"] < 0.2
    assert by_kind["colour"] < 0.3
    assert by_kind["largest"] < 0.25
    assert by_kind["row"] < 0.15
    assert chance_accuracy(rows) < 0.3


def test_chance_learns_from_the_training_rows_it_is_given():
    def row(answer, question="How many digits are there?"):
        return {"kind": "count", "question": question, "answer": answer, "text_only": False}

    training = [row("2"), row("2"), row("1")]
    assert chance_accuracy([row("2"), row("1")], training) == 0.5
    assert chance_accuracy([row("2", "An unseen question?")], training) == 1.0
    with pytest.raises(ValueError, match="at least one row with a picture"):
        chance_accuracy([{**row("2"), "text_only": True}])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": -1}, "negative"),
        ({"stage": 3}, "stage must be 1 or 2"),
        ({"split": "dev"}, "split must be"),
        ({"text_only_share": 1.5}, "between 0 and 1"),
        ({"kinds": ["digit", "weather"]}, "weather"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw_questions(**{"count": 1} | arguments)
