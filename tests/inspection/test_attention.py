"""Attention to visual tokens: equal to plain loops over the maps that transformers itself returns; nothing stays changed."""

import contextlib
import copy
import math

import pytest
import torch

from normalign.inspection.attention import AttentionSums, attention_by_layer, attention_over_batches, eager_attention
from normalign.inspection.inputs import modality_masks
from normalign.inspection.parts import find_parts

from .hooks import hooks_on
from .reference import attention_means


pytestmark = pytest.mark.both_generations


def settings_of(model):
    return [part.config._attn_implementation for part in model.modules() if hasattr(part, "config")]


def test_every_layer_equals_loops_over_the_maps_in_a_padded_batch(tiny_model, tiny_batch):
    model = tiny_model.double()
    batch = {**tiny_batch, "pixel_values": tiny_batch["pixel_values"].double()}
    parts = find_parts(model)
    masks = modality_masks(parts, batch)
    layers = attention_by_layer(model, parts, batch, masks)
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        maps = reference(**batch, output_attentions=True).attentions
    assert len(layers) == len(maps) == 2
    for layer, expected in zip(layers, maps):
        assert layer == pytest.approx(attention_means(expected, masks["visual"], masks["text"]), rel=1e-6)
        assert layer["visual_entropy"] < layer["visual_entropy_max"] == pytest.approx(math.log(4), rel=1e-6)


def test_text_before_the_image_and_padding_are_no_queries():
    """The one query behind two visual tokens counts: 0.3 + 0.1 of its attention, spread 3 to 1."""
    weights = torch.zeros(1, 1, 5, 5)
    weights[0, 0, 1, 1] = 1
    weights[0, 0, 4] = torch.tensor([0.0, 0.5, 0.3, 0.1, 0.1])
    weights[0, 0, 0] = 0.2  # padding looks everywhere
    sums = AttentionSums()
    sums.add(weights, torch.tensor([[0, 0, 1, 1, 0]]).bool(), torch.tensor([[0, 1, 0, 0, 1]]).bool())
    assert sums.queries == 1
    assert sums.to_dict() == pytest.approx(
        {
            "text_to_visual_mass": 0.4,
            "visual_entropy": -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)),
            "visual_entropy_max": math.log(2),
        }
    )


def test_a_head_that_gives_images_nothing_lowers_the_mass_and_has_no_entropy():
    weights = torch.tensor([[[[0.0, 0.0], [0.5, 0.5]], [[0.0, 0.0], [0.0, 1.0]]]])
    sums = AttentionSums()
    sums.add(weights, torch.tensor([[True, False]]), torch.tensor([[False, True]]))
    assert sums.to_dict() == {"text_to_visual_mass": 0.25, "visual_entropy": 0.0, "visual_entropy_max": 0.0}


def test_batches_add_up_to_one_mean_over_all_queries(tiny_model, tiny_batch):
    parts = find_parts(tiny_model)
    masks = modality_masks(parts, tiny_batch)
    whole = attention_by_layer(tiny_model, parts, tiny_batch, masks)
    rows = [
        ({k: v[i : i + 1] for k, v in tiny_batch.items()}, {k: v[i : i + 1] for k, v in masks.items()}) for i in (0, 1)
    ]
    for layer, expected in zip(attention_over_batches(tiny_model, parts, iter(rows)), whole):
        assert layer == pytest.approx(expected, rel=1e-5)


def test_layers_are_none_where_there_is_no_image_or_no_attention(tiny_model, tiny_batch):
    parts = find_parts(tiny_model)
    text = {"input_ids": torch.tensor([[1, 5, 6]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    assert attention_by_layer(tiny_model, parts, text, modality_masks(parts, text)) == [None, None]

    class LinearAttention(torch.nn.Module):
        def forward(self, hidden_states, **kwargs):
            return hidden_states, None

    tiny_model.model.language_model.layers[0].self_attn = LinearAttention()
    parts = find_parts(tiny_model)
    first, second = attention_by_layer(tiny_model, parts, tiny_batch, modality_masks(parts, tiny_batch))
    assert first is None and second["text_to_visual_mass"] > 0


def test_bfloat16_maps_are_read_in_float32(tiny_model, tiny_batch):
    parts = find_parts(tiny_model)
    masks = modality_masks(parts, tiny_batch)
    exact = attention_by_layer(tiny_model, parts, tiny_batch, masks)
    batch = {**tiny_batch, "pixel_values": tiny_batch["pixel_values"].bfloat16()}
    for layer, expected in zip(attention_by_layer(tiny_model.bfloat16(), parts, batch, masks), exact):
        assert layer == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("fails", [False, True])
def test_every_part_has_its_own_attention_back(tiny_model, tiny_batch, monkeypatch, fails):
    tiny_model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    before, hooks = settings_of(tiny_model), hooks_on(tiny_model)
    assert set(before) == {"sdpa", "eager"}
    parts = find_parts(tiny_model)
    masks = modality_masks(parts, tiny_batch)
    if fails:
        monkeypatch.setattr(tiny_model.lm_head, "forward", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        attention_by_layer(tiny_model, parts, tiny_batch, masks)
    assert settings_of(tiny_model) == before and hooks_on(tiny_model) == hooks


def test_the_vision_encoder_keeps_its_attention_throughout(tiny_model):
    parts = find_parts(tiny_model)
    with eager_attention(tiny_model, parts.vision_encoder):
        assert parts.decoder.config._attn_implementation == "eager"
        assert parts.vision_encoder.config._attn_implementation == "sdpa"
