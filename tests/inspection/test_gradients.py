"""Gradients by part: equal to a plain backward, with and without GWC; the model is left as it was found."""

import copy
import math

import pytest
import torch

from normalign.configuration.errors import NormalignError
from normalign.inspection.gradients import (
    answer_inputs,
    budget_shares,
    clip_factor,
    gradient_report,
    parameters_by_part,
)
from normalign.inspection.inputs import build_inputs
from normalign.inspection.parts import find_parts
from normalign.train_trl.digit_scenes import digit_scene_rows


pytestmark = pytest.mark.both_generations

ANSWERS = ["Yes.", "No, there is none."]


@pytest.fixture
def aligned(composed):
    """A copy of the composed model in float64, its processor and two samples."""
    return copy.deepcopy(composed[0]).double(), composed[1]


@pytest.fixture(scope="module")
def samples():
    return [("Is there a 7?", row["images"]) for row in digit_scene_rows(2, split="test", text_only_share=0)]


@pytest.fixture(scope="module")
def plain():
    from normalign import compose

    return compose("mini-vision", "mini-language", {"kind": "none"}, seed=0, dtype=torch.float32)


def part_of(name):
    if "aligned_norm" in name:
        return "norm"
    return "projector" if "multi_modal_projector" in name else "vision" if "vision_tower" in name else "language"


def plain_norms(model, processor, samples, gwc):
    """One backward through transformers' own loss, samples weighted by their answer's tokens."""
    model = copy.deepcopy(model).eval().requires_grad_(True)
    norm = model.get_aligned_norm()
    if norm is not None:
        norm.gwc = gwc
    batches = []
    for sample, answer in zip(samples, ANSWERS):
        inputs = build_inputs(model, processor, [sample])
        ids = processor.tokenizer(answer, add_special_tokens=False)["input_ids"] + [processor.tokenizer.eos_token_id]
        labels = torch.cat([torch.full_like(inputs["input_ids"], -100), torch.tensor([ids])], dim=1)
        whole = torch.cat([inputs["input_ids"], torch.tensor([ids])], dim=1)
        batches.append(({"input_ids": whole, "pixel_values": inputs["pixel_values"], "labels": labels}, len(ids)))
    total = sum(count for _, count in batches)
    for inputs, count in batches:
        (model(**inputs).loss * count / total).backward()
    squares = dict.fromkeys(["vision", "projector", "norm", "language"], 0.0)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            squares[part_of(name)] += parameter.grad.double().square().sum().item()
    whole = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    return {part: math.sqrt(square) for part, square in squares.items()}, whole


def state_of(model):
    return (
        [parameter.requires_grad for parameter in model.parameters()],
        [parameter.grad for parameter in model.parameters()],
        [module.training for module in model.modules()],
        getattr(model.get_aligned_norm(), "gwc", None),
    )


def test_both_arms_equal_a_plain_backward(aligned, samples):
    model, processor = aligned
    report = gradient_report(model, processor, find_parts(model), samples, ANSWERS, max_grad_norm=0.5)
    for arm, gwc, factor in (("gwc_on", True, "factor_on"), ("gwc_off", False, "factor_off")):
        expected, whole = plain_norms(model, processor, samples, gwc)
        assert report[arm]["grad_norm"] == pytest.approx(expected, rel=1e-5)
        shares = {part: norm**2 / whole**2 for part, norm in expected.items()}
        assert report[arm]["share"] == pytest.approx(shares, rel=1e-4)
        assert report["clip"][factor] == pytest.approx(min(1, 0.5 / whole), rel=1e-5)
    assert report["clip"]["max_grad_norm"] == 0.5


def test_gwc_multiplies_what_stands_before_the_norm_by_one_over_mu(aligned, samples):
    model, processor = aligned
    model.get_aligned_norm().gwc = False  # mu is asked for although the model trains without GWC
    report = gradient_report(model, processor, find_parts(model), samples, ANSWERS)
    gain = model.get_aligned_norm().weight.abs().mean().item()
    assert report["mu"] == pytest.approx(gain, rel=1e-6)
    assert report["predicted_factor"] == pytest.approx(1 / gain, rel=1e-6)
    assert report["measured_factor"] == pytest.approx({"vision": 1 / gain, "projector": 1 / gain}, rel=1e-5)
    on, off = report["gwc_on"]["grad_norm"], report["gwc_off"]["grad_norm"]
    for part in ("norm", "language"):
        assert on[part] == pytest.approx(off[part], rel=1e-6)
    assert report["gwc_on"]["share"]["language"] < report["gwc_off"]["share"]["language"]


def test_a_gain_below_the_floor_is_compensated_by_the_floor(aligned, samples):
    model, processor = aligned
    with torch.no_grad():
        model.get_aligned_norm().weight.fill_(1e-4)
    report = gradient_report(model, processor, find_parts(model), samples[:1], ANSWERS[:1])
    assert report["mu"] == pytest.approx(1e-3)
    assert report["measured_factor"] == pytest.approx({"vision": 1e3, "projector": 1e3}, rel=1e-5)


def test_without_an_aligned_norm_there_is_one_arm(plain, samples):
    model, processor = plain
    report = gradient_report(model, processor, find_parts(model), samples, ANSWERS)
    expected, whole = plain_norms(model, processor, samples, False)
    assert expected.pop("norm") == 0 and report["gwc_off"]["grad_norm"].pop("norm") is None
    assert report["gwc_off"]["grad_norm"] == pytest.approx(expected, rel=1e-4)
    assert report["clip"]["factor_off"] == pytest.approx(min(1, 1 / whole), rel=1e-4)
    assert report["gwc_on"] is report["mu"] is report["measured_factor"] is report["clip"]["factor_on"] is None


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(aligned, samples, monkeypatch, fails):
    """As in the middle of training: part frozen and in eval, gradients of the trainer waiting in .grad."""
    model, processor = aligned
    model.train()
    model.model.vision_tower.requires_grad_(False).eval()
    for parameter in model.model.multi_modal_projector.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    model.get_aligned_norm().gwc = True
    before = state_of(model)
    values = copy.deepcopy(model.state_dict())
    if fails:
        monkeypatch.setattr(model.lm_head, "forward", lambda *args: 1 / 0)
    try:
        gradient_report(model, processor, find_parts(model), samples[:1], ANSWERS[:1])
        assert not fails
    except ZeroDivisionError:
        assert fails
    after = state_of(model)
    assert after[0] == before[0] and after[2] == before[2] and after[3] is True
    assert all(a is b for a, b in zip(after[1], before[1]))
    assert all((p.grad == 3).all() for p in model.model.multi_modal_projector.parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def test_works_where_gradients_are_switched_off(aligned, samples):
    model, processor = aligned
    with torch.no_grad():
        report = gradient_report(model, processor, find_parts(model), samples[:1], ANSWERS[:1])
    assert report["gwc_on"]["grad_norm"]["vision"] > 0


def test_every_parameter_belongs_to_one_part(composed):
    model = copy.deepcopy(composed[0])
    model.model.image_newline = torch.nn.Parameter(torch.zeros(4))  # belongs to none of the four
    by_part = parameters_by_part(find_parts(model))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(parameter)]: part for part, group in by_part.items() for parameter in group}
    assert found.pop("model.image_newline") == "other"
    assert found == {name: part_of(name) for name in names.values() if name != "model.image_newline"}


def test_the_answer_follows_the_prompt_and_token_types_go_on(composed, samples):
    model, processor = composed
    parts = find_parts(model)
    prompt = build_inputs(model, processor, samples[:1])["input_ids"]

    def token_types(of_images, name="token_type_ids"):
        def typed(*args, **kwargs):
            inputs = processor(*args, **kwargs)
            inputs[name] = (inputs["input_ids"] == parts.image_token_id).long() * of_images
            return inputs

        typed.tokenizer, typed.chat_template = processor.tokenizer, processor.chat_template
        typed.apply_chat_template = processor.apply_chat_template
        return typed

    ids = [*processor.tokenizer("Yes.", add_special_tokens=False)["input_ids"], processor.tokenizer.eos_token_id]
    # types that mark images (Gemma 3, Qwen) call an answer text; types that mark targets (PaliGemma) call it one
    for of_images, name, expected in ((1, "token_type_ids", 0), (0, "token_type_ids", 1), (1, "mm_token_type_ids", 0)):
        inputs, targets = answer_inputs(model, token_types(of_images, name), parts, samples[0], "Yes.")
        assert targets.tolist() == ids
        assert inputs["input_ids"].tolist() == [prompt[0].tolist() + ids]
        assert inputs["attention_mask"].shape == inputs["input_ids"].shape and inputs["attention_mask"].all()
        assert inputs[name][0, -len(ids) :].tolist() == [expected] * len(ids)


def test_clip_factor_and_shares_of_known_norms():
    norms = {"vision": 3.0, "projector": 4.0, "norm": None, "language": 0.0}
    assert clip_factor(norms, 1.0) == pytest.approx(0.2, rel=1e-6)
    assert clip_factor(norms, 10.0) == clip_factor(norms, 0) == 1
    assert budget_shares(norms) == pytest.approx({"vision": 0.36, "projector": 0.64, "norm": None, "language": 0})
    assert budget_shares({"vision": 0.0, "language": 0.0}) == {"vision": 0, "language": 0}


def test_samples_without_answers_are_refused(composed, samples):
    model, processor = composed
    for answers in (["Yes."], ["Yes.", ""], []):
        with pytest.raises(NormalignError, match=f"got 2 samples and {sum(map(bool, answers))} such answers"):
            gradient_report(model, processor, find_parts(model), samples, answers)
