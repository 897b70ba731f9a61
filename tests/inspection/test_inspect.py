"""Inspection: measures against their plain definitions, hooks that go away, a report that programs and people read."""

import json

import pytest
import torch

from normalign import inspect_model
from normalign.configuration.errors import NormalignError
from normalign.inspection.measure import Moments, _Layer
from normalign.train_trl.digit_scenes import digit_scene_rows


@pytest.fixture(scope="module")
def images():
    return [row["images"][0] for row in digit_scene_rows(3, split="test", text_only_share=0)]


@pytest.fixture(scope="module")
def report(composed, images):
    return inspect_model(*composed, images, ["Is there a 7?"]).to_dict()


def hooks_on(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


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
        norms = tokens.norm(dim=-1)
        assert report["interface"][part]["mean"] == pytest.approx(norms.mean().item(), rel=1e-4)
        assert report["interface"][part]["std"] == pytest.approx(norms.std(correction=0).item(), rel=1e-2, abs=1e-4)
    T = model.config.aligned_norm["target_norm"]
    assert report["text_embedding_norm"] == pytest.approx(T, rel=1e-6)
    assert report["ratio"] == pytest.approx(1, abs=0.02)
    assert report["interface"]["projector"]["mean"] > 5 * T


def test_layers_agree_with_hidden_states(composed, images):
    model, processor = composed
    prompt = "Is there a 7?"
    report = inspect_model(model, processor, images[:1], [prompt]).to_dict()
    conversation = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}]
    text = processor.apply_chat_template(conversation, add_generation_prompt=True)
    inputs = processor(text=[text], images=images[:1], return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
    visual = inputs["input_ids"] == model.config.image_token_id
    assert len(report["layers"]) == len(states) - 1
    for i, layer in enumerate(report["layers"][:-1]):  # the last state comes after the final norm
        for modality, mask in (("visual", visual), ("text", ~visual)):
            before, after = states[i][mask].double(), states[i + 1][mask].double()
            cosine = torch.nn.functional.cosine_similarity(before, after, dim=-1)
            expected = {
                "norm_mean": after.norm(dim=-1).mean(),
                "update_norm_mean": (after - before).norm(dim=-1).mean(),
                "cosine_prev_mean": cosine.mean(),
                "angle_mean_rad": cosine.clamp(-1, 1).arccos().mean(),
            }
            for key, value in expected.items():
                assert layer[modality][key] == pytest.approx(value.item(), rel=1e-5)


def test_small_angles_are_exact():
    """acos would lose a turn of 1e-9 rad, which tokens of a large norm make."""
    before = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    layer = _Layer()
    layer.add(before, before + torch.tensor([[0.0, 1e-9]], dtype=torch.float64))
    assert layer.angle.mean == pytest.approx(1e-9, rel=1e-6)


def test_moments_match_numpy_in_one_pass():
    values = torch.randn(1000, dtype=torch.float64) + 5
    moments = Moments()
    for part in values.split(77):
        moments.add(part)
    assert (moments.mean, moments.std) == pytest.approx((values.mean().item(), values.std(correction=0).item()))


def test_hooks_are_gone_and_mode_is_kept_also_after_an_error(composed, images, monkeypatch):
    model, processor = composed
    before = hooks_on(model)
    inspect_model(model, processor, images[:1])
    assert hooks_on(model) == before and not model.training
    monkeypatch.setattr(model.lm_head, "forward", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        inspect_model(model, processor, images[:1])
    assert hooks_on(model) == before and not model.training


def test_report_is_saved_with_its_figure(composed, images, tmp_path):
    report = inspect_model(*composed, images[:1])
    report.save(tmp_path / "new" / "folder")
    saved = json.loads((tmp_path / "new" / "folder" / "report.json").read_text())
    assert saved == report.to_dict()
    assert set(saved) >= {"schema", "model", "text_embedding_norm", "interface", "ratio", "layers", "verdict"}
    assert (tmp_path / "new" / "folder" / "norms.png").stat().st_size > 10_000


def test_verdict_names_the_gap_and_the_gain_that_would_close_it(composed, images):
    from normalign import compose

    _, processor = composed
    model, _ = compose("mini-vision", "mini-language", {"kind": "none"}, seed=0)
    report = inspect_model(model, processor, images).to_dict()
    assert report["ratio"] > 5
    gain = report["text_embedding_norm"] / model.config.text_config.hidden_size**0.5
    assert "Norm gap" in report["verdict"] and f"{gain:.4g}" in report["verdict"]
    assert "re-alignment" in report["verdict"]


def test_nothing_to_inspect_and_a_model_without_parts_are_named(composed, images):
    from transformers import LlamaConfig, LlamaForCausalLM

    with pytest.raises(NormalignError, match="at least one image"):
        inspect_model(*composed, [])
    with pytest.raises(NormalignError, match="got 2 for 3"):
        inspect_model(*composed, images, ["a", "b"])
    text = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=8)
    )
    with pytest.raises(NormalignError, match="LlamaForCausalLM.*image_token_id.*multi_modal_projector"):
        inspect_model(text, composed[1], images)
