"""graft: the norm in a finished LLaVA model, with every weight in its place."""

import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
)

from normalign.assembly import compose, graft
from normalign.configuration.errors import NormalignError


@pytest.fixture
def llava(composed, tmp_path):
    """A folder with a transformers LLaVA of random weights and its processor, and the model."""
    ours, processor = composed(text="qwen2")
    config = LlavaConfig(
        vision_config=ours.config.vision_config.to_dict(),
        text_config=ours.config.text_config.to_dict(),
        image_token_index=processor.image_token_id,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    return tmp_path, model


@pytest.mark.both_generations
@pytest.mark.parametrize("loaded", [False, True])
def test_grafted_llava_has_all_its_weights_and_says_the_text_norm(llava, composed, loaded, caplog):
    folder, model = llava
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if loaded:
        new, processor = graft(model, processor=composed(text="qwen2")[1])
    else:
        new, processor = graft(str(folder))
    after = new.state_dict()
    added = {"model.multi_modal_projector.aligned_norm.weight", "model.multi_modal_projector.aligned_norm.bias"}
    assert after.keys() - before.keys() == added
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    T = model.get_input_embeddings().weight[: len(processor.tokenizer)].norm(dim=-1).mean().item()
    assert new.config.aligned_norm["target_norm"] == pytest.approx(T, rel=1e-5)
    assert f"T = {new.config.aligned_norm['target_norm']:.6g}" in caplog.text and "re-alignment" in caplog.text
    assert new.config.image_seq_length == 16


@pytest.mark.both_generations
def test_grafted_model_reloads_and_generates(llava, tmp_path):
    new, processor = graft(str(llava[0]))
    new.save_pretrained(tmp_path / "new")
    processor.save_pretrained(tmp_path / "new")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "new", trust_remote_code=True).eval()
    inputs = processor(images=[picture()], text="<image>What?", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(new(**inputs).logits, loaded(**inputs).logits)
    assert loaded.generate(**inputs, max_new_tokens=2).shape[1] == inputs["input_ids"].shape[1] + 2


def picture():
    return Image.new("RGB", (40, 40), "green")


def test_grafting_none_leaves_the_logits_as_they_were_and_says_so(llava, caplog):
    folder, model = llava
    new, processor = graft(str(folder), {"kind": "none"})
    assert "Nothing was inserted" in caplog.text and "re-alignment" not in caplog.text
    inputs = processor(images=[picture()], text="<image>What?", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(new(**inputs).logits, model(**inputs).logits)


def test_the_norm_scale_is_measured_on_the_images_that_are_given(llava, caplog):
    ours, _ = graft(str(llava[0]), {"kind": "scale"}, calibration_images=[picture()])
    assert "generated" not in caplog.text
    theirs, _ = graft(str(llava[0]), {"kind": "scale"})
    assert "measured on 4 generated images and may be off on real ones" in caplog.text
    assert not torch.equal(ours.get_aligned_norm().weight, theirs.get_aligned_norm().weight)


def test_model_of_ours_without_a_norm_gets_one_and_one_with_a_norm_is_refused(backbone, saved, tmp_path):
    model, processor = compose(backbone("siglip"), backbone("smollm2"), {"kind": "none"}, seed=0)
    T = model.config.aligned_norm["target_norm"]
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    new, _ = graft(str(tmp_path), {"kind": "rmsnorm"})
    assert new.config.aligned_norm["kind"] == "rmsnorm"
    assert new.config.aligned_norm["target_norm"] == pytest.approx(T, rel=0.01)
    assert new.lm_head.weight.data_ptr() == new.get_input_embeddings().weight.data_ptr()
    with pytest.raises(NormalignError, match="has an aligned norm already"):
        graft(str(saved()))


def test_other_families_are_refused_with_those_that_work(composed, tmp_path):
    ours, _ = composed()
    config = LlavaNextConfig(
        vision_config=ours.config.vision_config.to_dict(), text_config=ours.config.text_config.to_dict()
    )
    LlavaNextForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(NormalignError, match="'llava_next'.*supported are 'llava'"):
        graft(str(tmp_path))
