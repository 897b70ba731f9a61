"""Held-out figures without generation are those of greedy decoding, and measuring leaves the model as it was."""

from collections import Counter

import pytest
import torch

from normalign.configuration.errors import NormalignError
from normalign.evaluation.generation import answer_rows
from normalign.train_trl.digit_scenes import digit_scene_rows
from normalign.train_trl.held_out import HeldOut, digit_scene_held_out


@pytest.fixture(scope="module")
def rows():
    return digit_scene_held_out(questions=36, captions=4, text_only=20, seed=5)


def test_an_answer_is_right_exactly_when_greedy_decoding_gives_it(composed, rows):
    model, processor = composed
    figures = HeldOut(processor, rows, batch_size=7).measure(model)
    questions = [row for row in rows if row["kind"] not in ("caption", "text_only")]
    answers = answer_rows(model, processor, questions)
    right = Counter(row["kind"] for row, answer in zip(questions, answers) if answer == row["answer"])
    assert sum(right.values()) > 0  # else nothing was compared
    for kind in {row["kind"] for row in questions}:
        assert figures[kind]["n"] == 6
        assert figures[kind]["accuracy"] * 6 == pytest.approx(right[kind])


def test_the_loss_is_that_of_a_row_alone(composed, rows):
    model, processor = composed
    one_by_one = [HeldOut(processor, [row]).measure(model)["caption"] for row in rows if row["kind"] == "caption"]
    together = HeldOut(processor, rows, batch_size=64).measure(model)["caption"]
    lengths = [
        len(processor.tokenizer(row["answer"])["input_ids"]) + 1 for row in rows if row["kind"] == "caption"
    ]  # and the end of the turn
    expected = sum(one["loss"] * length for one, length in zip(one_by_one, lengths)) / sum(lengths)
    assert together["loss"] == pytest.approx(expected, rel=1e-4)
    assert together["n"] == 4


def test_measuring_leaves_modes_and_random_numbers_as_they_were(composed, rows):
    model, processor = composed
    held_out = HeldOut(processor, rows[:4])
    model.model.language_model.train()
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    held_out.measure(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    model.eval()


def test_a_row_without_an_answer_is_refused(composed):
    [row] = digit_scene_rows(1, text_only_share=0)
    with pytest.raises(NormalignError, match="A held-out row has no answer: .*Which|Is|Read|What|How"):
        HeldOut(composed[1], [{**row, "messages": row["messages"][:1]}])
