"""inspect_model on a composed model: what is measured, of which samples, and what is refused."""

import copy

import pytest
import torch
import transformers

from normalign import inspect_model
from normalign.configuration.errors import NormalignError
from normalign.inspection.inputs import build_inputs
from normalign.inspection.measure import NotFiniteError
from normalign.train_trl.digit_scenes import digit_scene_rows

from .hooks import hooks_on
from .reference import layer_means, norm_figures, record


pytestmark = pytest.mark.both_generations


KEYS = {"schema", "model", "images", "prompts", "text_embedding_norm", "interface", "ratio", "layers", "not_found"} | {
    "aligned_norm",
    "controls",
    "gradients",
    "verdict",
    "verdict_figures",
}


@pytest.fixture(scope="module")
def images():
    return [row["images"][0] for row in digit_scene_rows(3, split="test", text_only_share=0)]


@pytest.fixture(scope="module")
def report(composed, images):
    return inspect_model(*composed, images, ["Is there a 7?"]).to_dict()


def prompt_inputs(processor, image, prompt):
    conversation = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}]
    text = processor.apply_chat_template(conversation, add_generation_prompt=True)
    return processor(text=[text], images=[image], return_tensors="pt", add_special_tokens=False)


def test_interface_norms_are_those_of_the_tokens(composed, images, report):
    model, processor = composed
    pixels = processor.image_processor(images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        states = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
        features = states[model.config.vision_feature_layer]
        if model.config.vision_feature_select_strategy == "default":
            features = features[:, 1:]
        projector = model.model.multi_modal_projector
        projected = projector.linear_2(projector.act(projector.linear_1(features)))
        inserted = projector(features)
    for part, tokens in (("vision_encoder", features), ("projector", projected), ("inserted", inserted)):
        figures = norm_figures(tokens.norm(dim=-1))
        assert report["interface"][part]["count"] == figures["count"]
        assert report["interface"][part]["mean"] == pytest.approx(figures["mean"], rel=1e-5)
        assert report["interface"][part]["std"] == pytest.approx(figures["std"], rel=1e-3, abs=1e-6)
        assert report["interface"][part]["quantiles"] == pytest.approx(figures["quantiles"], rel=1.5e-3)
    T = model.config.aligned_norm["target_norm"]
    assert report["text_embedding_norm"] == pytest.approx(T, rel=1e-6)
    assert report["ratio"] == pytest.approx(1, abs=0.02)
    assert report["interface"]["projector"]["mean"] > 5 * T


def test_samples_are_taken_together(composed, images, report):
    """Means are over the tokens of all samples, not over the samples' means."""
    model, processor = composed
    layers = model.model.language_model.layers
    before, after, first = [], [], []
    for image in images:
        inputs = prompt_inputs(processor, image, "Is there a 7?")
        kept, visual = record(model, inputs, layers), inputs["input_ids"] == model.config.image_token_id
        before.append(kept.before[1][visual])
        after.append(kept.after[1][visual])
        first.append(kept.before[0][visual])
    expected = layer_means(torch.cat(before), torch.cat(after), torch.cat(first))
    assert report["layers"][1]["visual"] == pytest.approx(expected, rel=1e-5)


def test_report_has_the_keys_of_its_schema(report):
    assert set(report) == KEYS
    assert (report["schema"], report["images"], report["prompts"]) == (1, 3, 3)
    assert report["not_found"] == [] and report["controls"] is None and report["gradients"] is None
    assert all(set(layer) == {"visual", "text", "attention"} for layer in report["layers"])


def test_each_image_has_its_prompt_and_a_prompt_may_have_two_images(composed, images):
    one = inspect_model(*composed, images[:1], ["Is there a 7?"]).to_dict()
    both = inspect_model(*composed, [images[:2], images[2]], ["Is there a 7?", "How many?"]).to_dict()
    assert (both["images"], both["prompts"]) == (3, 2)
    assert both["interface"]["inserted"]["count"] == 3 * one["interface"]["inserted"]["count"]
    assert inspect_model(*composed, images[:1], "Is there a 7?").to_dict() == one


def test_progress_names_the_stage_and_counts_to_its_end(composed, images):
    seen = []
    inspect_model(
        *composed,
        images[:2],
        attention=True,
        controls=True,
        gradients=True,
        answers=["7", "no"],
        progress=lambda *step: seen.append(step),
    )
    stages = {"norms": 2, "attention": 2, "controls": 2, "gradients": 4}
    assert seen == [(stage, i + 1, total) for stage, total in stages.items() for i in range(total)]


def test_mode_weights_and_hooks_are_left_as_they_were(composed, images, monkeypatch):
    model, processor = composed
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.train()
    model.model.vision_tower.eval()  # as a trainer does with a part that is frozen
    modes = [module.training for module in model.modules()]
    try:
        inspect_model(model, processor, images[:1])
        assert [module.training for module in model.modules()] == modes
        monkeypatch.setattr(model.lm_head, "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            inspect_model(model, processor, images[:1])
        assert [module.training for module in model.modules()] == modes
    finally:
        model.eval()
    assert hooks_on(model) == 0
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_what_does_not_fit_together_is_refused(composed, images):
    with pytest.raises(NormalignError, match="at least one image"):
        inspect_model(*composed, [])
    with pytest.raises(NormalignError, match="got 2 for 3"):
        inspect_model(*composed, images, ["a", "b"])
    with pytest.raises(NormalignError, match="one answer for each prompt: got none for 3"):
        inspect_model(*composed, images, gradients=True)
    with pytest.raises(NormalignError, match="one answer for each prompt: got 1 for 3"):
        inspect_model(*composed, images, gradients=True, answers=["7"])


def test_a_model_that_yields_nan_is_refused_with_the_place(composed):
    model, processor = copy.deepcopy(composed[0]), composed[1]
    rows = digit_scene_rows(1, split="test", text_only_share=0)
    model.get_decoder().layers[1].mlp.up_proj.weight.data[0] = float("nan")
    with pytest.raises(NotFiniteError, match="first at: the visual tokens of layer 2"):
        inspect_model(model, processor, rows[0]["images"], [rows[0]["question"]])
    model.model.multi_modal_projector.linear_1.weight.data[0] = float("nan")
    with pytest.raises(NotFiniteError, match="first at: projector"):
        inspect_model(model, processor, rows[0]["images"], [rows[0]["question"]])


def test_images_given_as_functions_are_opened_when_needed_and_measured_alike(composed):
    rows = digit_scene_rows(3, split="test", text_only_share=0)
    images, prompts = [row["images"][0] for row in rows], [row["question"] for row in rows]
    calls = []
    lazy = [lambda image=image: calls.append(1) or image for image in images]
    report = inspect_model(*composed, lazy, prompts, controls=True)
    assert report.to_dict() == inspect_model(*composed, images, prompts, controls=True).to_dict()
    assert len(calls) >= 3


@pytest.mark.skipif(transformers.__version__ < "5", reason="compiling is tried on one generation")
def test_a_compiled_model_is_measured_as_it_is(composed):
    """A graph that was made before the hooks came would leave parts of the report out."""
    torch._dynamo.reset()
    rows = digit_scene_rows(2, split="test", text_only_share=0)
    images, prompts = [row["images"][0] for row in rows], [row["question"] for row in rows]
    expected = inspect_model(*composed, images, prompts).to_dict()
    model, processor = copy.deepcopy(composed[0]), composed[1]
    model.compile(backend="eager")
    with torch.no_grad():
        model(**build_inputs(model, processor, [(prompts[0], images[:1])]))
    found = inspect_model(model, processor, images, prompts).to_dict()
    assert found["interface"] == expected["interface"] and found["layers"] == expected["layers"]
