"""Log-likelihoods against a plain reference in float64 that takes one row at a time, and against the bare language model."""

import copy

import pytest
import torch

from normalign.configuration.errors import NormalignError
from normalign.evaluation.generation import chat_prompts, generate_answers
from normalign.evaluation.loglikelihood import log_likelihoods
from normalign.train_trl.digit_scenes import digit_scene_rows


CONTINUATIONS = ["red", "There is a 7 on the left of the picture.", "7", "no", "a small green digit", "yes, there is"]


@pytest.fixture(scope="module")
def pictures():
    return [row["images"][0] for row in digit_scene_rows(8, split="test", text_only_share=0)]


@pytest.fixture(scope="module")
def rows(composed, pictures):
    """(prompt, images, continuation): no image, one and several, at different lengths."""
    counts = [1, 0, 2, 1, 0, 3]
    questions = [
        "Is there a 7?",
        "Which digit is red? Say its colour.",
        "Why?",
        "How many?",
        "Is it?",
        "What do you see?",
    ]
    images = [pictures[:count] for count in counts]
    conversations = [
        [{"role": "user", "content": [*({"type": "image"} for _ in some), {"type": "text", "text": question}]}]
        for some, question in zip(images, questions, strict=True)
    ]
    return list(zip(chat_prompts(composed[1], conversations), images, CONTINUATIONS, strict=True))


@pytest.fixture(scope="module")
def reference(composed):
    """The log-likelihood of one row in float64, with the continuation's tokens told by what the processor makes of both."""
    model, processor = copy.deepcopy(composed[0]).double(), composed[1]

    def of(prompt, images, continuation, add_special_tokens=False):
        def inputs(text):
            options = {"return_tensors": "pt", "add_special_tokens": add_special_tokens}
            return processor(text=[text], images=images or None, **options)

        whole, before = inputs(prompt + continuation), inputs(prompt)["input_ids"].shape[1]
        if "pixel_values" in whole:
            whole["pixel_values"] = whole["pixel_values"].double()
        with torch.no_grad():
            logits = model(**whole).logits[0, before - 1 : -1]
        targets = whole["input_ids"][0, before:]
        assert len(targets) > 0
        total = sum(logits[i].log_softmax(-1)[token] for i, token in enumerate(targets)).item()
        return total, all(logits[i].argmax() == token for i, token in enumerate(targets))

    return of


def columns(rows):
    return [list(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("batch_size", [1, 2, 32])
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_batched_values_equal_those_of_one_row_at_a_time(
    composed, rows, reference, monkeypatch, batch_size, padding_side
):
    monkeypatch.setattr(composed[1].tokenizer, "padding_side", padding_side)
    counted = []
    found = log_likelihoods(*composed, *columns(rows), batch_size=batch_size, progress=counted.append)
    expected = [reference(*row) for row in rows]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert sum(counted) == len(rows)
    assert len({round(value, 3) for value, _ in found}) == len(rows)


def test_images_and_their_order_count(composed, rows, pictures):
    prompt, images, continuation = rows[2]
    several = [images, images[::-1], [pictures[4], pictures[5]]]
    values = [value for value, _ in log_likelihoods(*composed, [prompt] * 3, several, [continuation] * 3)]
    assert len({round(value, 4) for value in values}) == 3


def test_what_the_model_answers_is_greedy_and_another_answer_is_not(composed, rows, pictures):
    question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Is there a 7?"}]}]
    (answer,) = generate_answers(*composed, [question], [pictures[:1]], max_new_tokens=4)
    (prompt,) = chat_prompts(composed[1], [question])
    found = log_likelihoods(*composed, [prompt] * 2, [pictures[:1]] * 2, [answer, "zebra"])
    assert [greedy for _, greedy in found] == [True, False]
    assert found[0][0] > found[1][0]


def test_a_model_that_gives_all_logits_gives_the_same(composed, rows):
    class AllLogits(torch.nn.Module):
        device, dtype = composed[0].device, composed[0].dtype

        def forward(self, **inputs):
            assert "logits_to_keep" not in inputs
            return composed[0](**inputs)

    expected = log_likelihoods(*composed, *columns(rows))
    found = log_likelihoods(AllLogits(), composed[1], *columns(rows))
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-5)


def test_only_the_logits_that_are_asked_for_are_computed(composed, rows):
    sizes = []
    head = composed[0].lm_head
    hook = head.register_forward_hook(lambda module, args, output: sizes.append(output.shape[1]))
    log_likelihoods(*composed, *columns(rows[:1]))
    hook.remove()
    (tokens,) = composed[1].tokenizer([rows[0][2]], add_special_tokens=False)["input_ids"]
    assert sizes == [len(tokens)]


def test_the_space_before_a_continuation_is_there_once(composed, rows, reference):
    """Tasks put a space before a choice; a prompt that ends in a line break has one already."""
    prompt, images, continuation = rows[0]
    assert prompt[-1].isspace()
    spaced = log_likelihoods(*composed, [prompt], [images], [f" {continuation}"])
    assert spaced == log_likelihoods(*composed, [prompt], [images], [continuation])
    (found,) = log_likelihoods(*composed, ["Is there a 7? The answer is"], [[]], [" no"])
    assert found[0] == pytest.approx(reference("Is there a 7? The answer is", [], " no")[0], abs=1e-4)


TEXTS = [("A digit is", " red"), ("The sum of two and two is ", "four, as you know"), ("Is there a 7?", "\nno")]


def test_text_alone_has_the_log_likelihood_that_the_bare_language_model_gives_it(composed):
    """In raw form, as lm-eval puts it: the space at the end of a context counts to what follows."""
    from transformers import AutoModelForCausalLM

    model, processor = composed
    bare = AutoModelForCausalLM.from_config(model.config.text_config).eval()
    bare.model.load_state_dict(model.get_decoder().state_dict())
    bare.lm_head.load_state_dict(model.lm_head.state_dict())
    found = log_likelihoods(model, processor, *columns([(a, [], b) for a, b in TEXTS]), raw=True, batch_size=2)
    for (context, continuation), (value, greedy) in zip(TEXTS, found, strict=True):
        ids = processor.tokenizer(context + continuation, return_tensors="pt")["input_ids"]
        start = len(processor.tokenizer(context.rstrip())["input_ids"])
        with torch.no_grad():
            logits = bare(ids).logits[0, start - 1 : -1].double()
        expected = logits.log_softmax(-1).gather(1, ids[0, start:, None]).sum().item()
        assert value == pytest.approx(expected, abs=1e-4)
        assert greedy == bool((logits.argmax(-1) == ids[0, start:]).all())


def test_a_continuation_without_tokens_is_refused(composed):
    with pytest.raises(NormalignError, match=r"continuation '' \(row 1\) adds no token"):
        log_likelihoods(*composed, ["a", "b"], [[], []], ["c", ""])


def test_no_rows_give_no_values(composed):
    assert log_likelihoods(*composed, [], [], []) == []
