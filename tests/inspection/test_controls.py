"""Controls: effects equal to plain passes with the control put in by hand; a model that does not look is found out."""

import copy
import dataclasses

import pytest
import torch
from PIL import Image

from normalign.inspection.controls import (
    Effect,
    control_effects,
    divergence,
    other_images,
    shuffled_places,
    shuffled_visual_tokens,
)
from normalign.inspection.inputs import build_inputs
from normalign.inspection.parts import find_parts
from normalign.train_trl.digit_scenes import digit_scene_rows

from .hooks import hooks_on


pytestmark = pytest.mark.both_generations

PROMPT = "Is there a 7?"


@pytest.fixture(scope="module")
def exact(composed):
    """The composed model in float64."""
    model, processor = composed
    return copy.deepcopy(model).double(), processor


@pytest.fixture(scope="module")
def samples():
    return [(PROMPT, row["images"]) for row in digit_scene_rows(3, split="test", text_only_share=0)]


def plain_effect(real, control):
    p, q = real.double().softmax(-1), control.double().softmax(-1)
    kl = sum((a * (a.log() - b.log())).item() for a, b in zip(p, q) if a > 0)
    return kl, float(real.argmax() != control.argmax())


def last_logits(model, processor, images, prompt=PROMPT):
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": prompt}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False)
    if images:
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    with torch.no_grad():
        return model(**inputs).logits[0, -1]


def test_divergence_is_kullback_leibler_in_nats():
    real, control = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.25, 0.25, 0.5]).log()
    expected = 0.5 * torch.log(torch.tensor(2.0)) + 0.25 * torch.log(torch.tensor(0.5))
    assert divergence(real + 3, control - 5) == pytest.approx(expected.item(), rel=1e-6)
    assert divergence(real, real) == 0
    never = torch.tensor([0.0, 0.0, -torch.inf])
    assert divergence(never, never) == 0
    assert divergence(never, torch.zeros(3)) == pytest.approx(torch.tensor(1.5).log().item())


def test_effects_are_means_over_samples():
    effect = Effect()
    assert effect.to_dict() is None
    effect.add(torch.tensor([2.0, 0.0]), torch.tensor([2.0, 0.0]))
    effect.add(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0]))
    both = divergence(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0]))
    assert effect.to_dict() == {"kl_mean": pytest.approx(both / 2), "top1_changed": 0.5}


def test_controls_equal_passes_with_the_other_image_put_in_by_hand(exact, samples):
    model, processor = exact
    effects = control_effects(model, processor, find_parts(model), samples, shuffles=0)
    images = [images for _, images in samples]
    shown = {
        "black": [[Image.new("RGB", image.size) for image in some] for some in images],
        "none": [[], [], []],
        "other": [images[1], images[2], images[0]],
    }
    for name, controls in shown.items():
        pairs = [
            plain_effect(last_logits(model, processor, real), last_logits(model, processor, control))
            for real, control in zip(images, controls)
        ]
        assert effects[name]["kl_mean"] == pytest.approx(sum(kl for kl, _ in pairs) / 3, rel=1e-8)
        assert effects[name]["top1_changed"] == pytest.approx(sum(changed for _, changed in pairs) / 3)
    assert effects["position_sensitivity_index"] is None


def test_position_sensitivity_equals_embeddings_shuffled_by_hand(exact, samples):
    model, processor = exact
    parts = find_parts(model)
    index = control_effects(model, processor, parts, samples, shuffles=2, seed=5)["position_sensitivity_index"]
    generator = torch.Generator().manual_seed(5)
    pairs = []
    for sample in samples:
        inputs = build_inputs(model, processor, [sample])
        places = (inputs["input_ids"][0] == model.config.image_token_id).nonzero().squeeze(-1)
        with torch.no_grad():
            embeds = model.get_input_embeddings()(inputs["input_ids"])
            features = model.get_image_features(pixel_values=inputs["pixel_values"])
            features = features if isinstance(features, (list, tuple)) else features.pooler_output
            embeds[0, places] = features[0]
            real = model(inputs_embeds=embeds).logits[0, -1]
            for _ in range(2):
                shuffled = embeds.clone()
                shuffled[0, places] = embeds[0, places[torch.randperm(len(places), generator=generator)]]
                pairs.append(plain_effect(real, model(inputs_embeds=shuffled).logits[0, -1]))
    assert index["kl_mean"] == pytest.approx(sum(kl for kl, _ in pairs) / len(pairs), rel=1e-8)
    assert index["top1_changed"] == sum(changed for _, changed in pairs) / len(pairs)
    assert index["shuffles"] == 2 and index["kl_mean"] > 0


def test_the_same_seed_gives_the_same_index(composed, samples):
    model, processor = composed
    first, again, other = (
        control_effects(model, processor, find_parts(model), samples[:1], shuffles=1, seed=seed) for seed in (0, 0, 1)
    )
    assert first == again
    assert first["position_sensitivity_index"] != other["position_sensitivity_index"]
    assert first["black"] == other["black"]


def test_visual_tokens_change_places_within_their_sample_only():
    visual = torch.tensor([[0, 1, 1, 1, 0, 1], [1, 0, 1, 0, 0, 0]]).bool()
    seen = set()
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        order = shuffled_places(visual, generator)
        assert torch.equal(order[~visual], torch.arange(12).view(2, 6)[~visual])
        assert order[0][visual[0]].sort().values.tolist() == [1, 2, 3, 5]
        assert order[1][visual[1]].sort().values.tolist() == [6, 8]
        seen.add(tuple(order.flatten().tolist()))
    assert len(seen) > 5


def test_features_for_later_layers_move_with_their_tokens():
    """As in Qwen3-VL, whose first layers get more features: (visual tokens of the batch, width)."""

    class Decoder(torch.nn.Module):
        def forward(self, inputs_embeds, deepstack_visual_embeds):
            return inputs_embeds, deepstack_visual_embeds

    visual = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 1, 1]]).bool()
    embeds = torch.randn(2, 5, 3)
    decoder = Decoder()
    with shuffled_visual_tokens(decoder, visual, torch.Generator().manual_seed(0)) as calls:
        moved, (features,) = decoder(inputs_embeds=embeds, deepstack_visual_embeds=[2 * embeds[visual]])
    assert calls == [1] and not torch.equal(moved, embeds)
    assert torch.equal(features, 2 * moved[visual]) and torch.equal(moved[~visual], embeds[~visual])


def test_a_model_that_does_not_look_is_moved_by_nothing_but_the_missing_tokens(composed, samples):
    model, processor = composed
    model = copy.deepcopy(model)
    model.model.multi_modal_projector.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    effects = control_effects(model, processor, find_parts(model), samples, shuffles=1)
    for name in ("black", "other", "position_sensitivity_index"):
        assert effects[name]["kl_mean"] == pytest.approx(0, abs=1e-9) and effects[name]["top1_changed"] == 0
    assert effects["none"]["kl_mean"] > 0


def test_other_images_differ_and_are_as_many():
    red, blue = (Image.new("RGB", (4, 4), colour) for colour in ("red", "blue"))
    samples = [("a", [red, red]), ("b", [red.copy(), red]), ("c", [blue]), ("d", [])]
    assert other_images(samples, 0) == [blue, blue]
    assert other_images(samples, 2) == [red]
    assert other_images([("a", [red]), ("b", [red.copy()])], 0) is None


def test_one_sample_has_no_other_image(composed, samples):
    model, processor = composed
    effects = control_effects(model, processor, find_parts(model), samples[:1], shuffles=0)
    assert effects["other"] is None and effects["black"]["kl_mean"] > 0


def test_an_index_that_cannot_be_measured_is_explained(composed, samples):
    model, processor = composed
    # a part that is never called with embeddings
    parts = dataclasses.replace(find_parts(model), decoder=model.lm_head, not_found=[])
    effects = control_effects(model, processor, parts, samples[:1], shuffles=1)
    assert effects["position_sensitivity_index"] is None and effects["black"]
    assert "inputs_embeds" in parts.not_found[0]


def test_hooks_are_gone_also_after_an_error_and_progress_counts_samples(composed, samples):
    model, processor = composed
    done = []
    control_effects(model, processor, find_parts(model), samples, shuffles=1, progress=done.append)
    assert done == [1, 1, 1]
    before = hooks_on(model)
    visual = torch.zeros(1, 4).bool()
    with pytest.raises(ZeroDivisionError), shuffled_visual_tokens(model, visual, torch.Generator()):
        1 / 0
    assert hooks_on(model) == before
