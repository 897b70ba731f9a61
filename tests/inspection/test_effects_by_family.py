"""Attention, controls and gradients in every family, against what transformers returns and a plain backward."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from normalign.inspection.attention import attention_over_batches
from normalign.inspection.controls import CONTROLS, control_effects, next_token_logits, shuffled_visual_tokens
from normalign.inspection.gradients import answer_inputs, gradient_report
from normalign.inspection.inputs import build_inputs, modality_masks
from normalign.inspection.parts import find_parts

from .reference import attention_means


if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("the image processors for PIL images have these names since transformers 5", allow_module_level=True)

from .families import FAMILIES, picture


SAMPLES = [("Hi", [picture(40, 24)]), ("What is it?", [picture(16, 16, seed=1)])]
ANSWERS = ["a cat", "no"]


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request):
    return request.param


def test_attention_equals_loops_over_the_maps(family):
    model, processor = family()
    parts = find_parts(model)
    inputs = build_inputs(model, processor, SAMPLES[:1])
    masks = modality_masks(parts, inputs)
    layers = attention_over_batches(model, parts, [(inputs, masks)])
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        maps = eager(**inputs, output_attentions=True).attentions
    assert len(layers) == len(maps) == 3
    for layer, expected in zip(layers, maps):
        assert layer == pytest.approx(attention_means(expected, masks["visual"], masks["text"]), rel=1e-5)


def test_controls_are_measured_and_only_visual_tokens_are_shuffled(family):
    model, processor = family()
    parts = find_parts(model)
    effects = control_effects(model, processor, parts, SAMPLES, shuffles=1)
    assert set(effects) == {*CONTROLS, "position_sensitivity_index"} and not parts.not_found
    assert all(effect["kl_mean"] > 0 for effect in effects.values())

    inputs = build_inputs(model, processor, SAMPLES[:1])
    visual = inputs["input_ids"] == parts.image_token_id
    entered = []
    hook = parts.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    next_token_logits(model, inputs)
    with shuffled_visual_tokens(parts.decoder, visual, torch.Generator().manual_seed(0)):
        next_token_logits(model, inputs)
    hook.remove()
    plain, shuffled = entered
    assert torch.equal(plain[~visual], shuffled[~visual]) and not torch.equal(plain, shuffled)
    orders = [states[visual].sum(dim=-1).sort().values for states in (plain, shuffled)]
    torch.testing.assert_close(*orders)


def test_gradients_equal_a_plain_backward(family):
    model, processor = family()
    parts = find_parts(model)
    report = gradient_report(model, processor, parts, SAMPLES, ANSWERS)
    reference = copy.deepcopy(model).requires_grad_(True)
    inputs = [answer_inputs(model, processor, parts, sample, answer) for sample, answer in zip(SAMPLES, ANSWERS)]
    total = sum(len(targets) for _, targets in inputs)
    if report["gwc_on"]:
        find_parts(reference).aligned_norm.gwc = False
    for given, targets in inputs:
        labels = torch.full_like(given["input_ids"], -100)
        labels[0, -len(targets) :] = targets
        (reference(**given, labels=labels).loss * len(targets) / total).backward()
    squares = dict.fromkeys(report["gwc_off"]["grad_norm"], 0.0)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            squares[part_of(name, family)] += parameter.grad.double().square().sum().item()
    for part, norm in report["gwc_off"]["grad_norm"].items():
        assert norm is None or norm == pytest.approx(squares[part] ** 0.5, rel=1e-4), part
    assert (report["gwc_on"] is not None) == (family.name == "ours")
    assert all(parameter.grad is None for parameter in model.parameters())


def part_of(name, family):
    if "aligned_norm" in name:
        return "norm"
    if name.startswith(family.projector + "."):
        return "projector"
    if name.startswith(family.vision_encoder + "."):
        return "vision"
    language = family.layers.removesuffix("layers")
    return "language" if name.startswith((language, "lm_head")) else "other"
