"""What compose says when something does not fit: one paragraph that names what, where, and what to do."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from normalign.assembly import check_pair, compose
from normalign.configuration.errors import NormalignError


def refusal(*args, **options) -> str:
    with pytest.raises(NormalignError) as caught:
        compose(*args, **options)
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?")) and len(message) < 1200
    return message


@pytest.fixture
def copied(backbone, tmp_path):
    """A function that copies a backbone into a folder that the test may damage."""

    def copy(family: str) -> Path:
        return Path(shutil.copytree(backbone(family), tmp_path / family))

    return copy


def test_language_model_as_vision_encoder(backbone):
    message = refusal(backbone("llama3"), backbone("llama3"))
    assert backbone("llama3") in message and "not a vision encoder" in message and "'llama'" in message


def test_vision_encoder_as_language_model(backbone):
    message = refusal(backbone("siglip"), backbone("dinov2"))
    assert backbone("dinov2") in message and "not a causal language model" in message and "'dinov2'" in message
    assert "not a language model" in refusal(backbone("siglip"), backbone("clip"))


def test_encoder_decoder_and_masked_language_model(backbone, tmp_path):
    tiny = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 320}
    T5ForConditionalGeneration(T5Config(**tiny)).save_pretrained(tmp_path / "t5")
    assert "not a causal language model" in refusal(backbone("siglip"), str(tmp_path / "t5"))
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(**tiny, vocab_size=320)).save_pretrained(tmp_path / "bert")
    AutoTokenizer.from_pretrained(backbone("plain")).save_pretrained(tmp_path / "bert")
    message = refusal(backbone("siglip"), str(tmp_path / "bert"))
    assert str(tmp_path / "bert") in message and "cls.predictions" in message


def test_language_model_that_caps_its_logits(backbone):
    message = refusal(backbone("siglip"), backbone("gemma2"))
    assert "'gemma2'" in message and "soft-capping" in message


@pytest.mark.both_generations
def test_no_tokenizer(backbone, copied):
    folder = copied("smollm2")
    for file in folder.glob("*token*"):
        file.unlink()
    message = refusal(backbone("siglip"), str(folder))
    assert str(folder) in message and "no tokenizer" in message


def test_no_image_processor(backbone, copied):
    folder = copied("siglip")
    (folder / "preprocessor_config.json").unlink()
    message = refusal(str(folder), backbone("smollm2"))
    assert str(folder) in message and "image processor" in message


def test_folder_that_is_not_there_or_has_no_config(backbone, tmp_path):
    missing = str(tmp_path / "nothing")
    assert missing in (message := refusal(missing, backbone("smollm2"))) and "no such folder" in message
    tmp_path.joinpath("empty").mkdir()
    assert "without a config.json" in refusal(backbone("siglip"), str(tmp_path / "empty"))


@pytest.mark.both_generations
def test_repository_that_cannot_be_reached(backbone):
    message = refusal("google/siglip-so400m-patch14-384", backbone("smollm2"))
    assert "'google/siglip-so400m-patch14-384'" in message
    assert "HF_HUB_OFFLINE" in message and "gated" in message
    assert "'meta-llama/Llama-3.2-3B-Instruct'" in refusal(backbone("siglip"), "llama-3.2-3b-instruct")


def test_unknown_norm_key_and_value(backbone):
    assert "'gain'" in refusal(backbone("siglip"), backbone("smollm2"), {"gain": 1})
    assert "batchnorm" in refusal(backbone("siglip"), backbone("smollm2"), {"kind": "batchnorm"})


@pytest.mark.parametrize("layer", [3, -4])
def test_feature_layer_out_of_range(backbone, layer):
    message = refusal(backbone("siglip"), backbone("smollm2"), vision_feature_layer=layer)
    assert f"vision_feature_layer is {layer}" in message and "has 2 layers" in message and "from -3 to 2" in message


def test_dtype_that_is_none(backbone):
    assert "'int8'" in refusal(backbone("siglip"), backbone("smollm2"), dtype="int8")


def test_checkpoint_with_weights_missing(backbone, copied, capfd):
    folder = copied("llama3")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    capfd.readouterr()
    message = refusal(backbone("siglip"), str(folder))
    assert "lacks 1 weight of LlamaForCausalLM" in message and "model.layers.1.mlp.up_proj.weight" in message
    # transformers 5 would print a table of its own before
    assert "up_proj" not in capfd.readouterr().err


def test_file_that_is_cut_off(backbone, copied):
    folder = copied("llama3")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    message = refusal(backbone("siglip"), str(folder))
    assert f"{folder / 'model.safetensors'} is truncated or corrupt" in message


@pytest.mark.both_generations
@pytest.mark.parametrize("family", ["llama3", "smollm2", "siglip", "siglip_vision", "clip", "dinov2"])
def test_checkpoint_with_more_layers_than_its_config(backbone, copied, family):
    folder = copied(family)
    config = json.loads((folder / "config.json").read_text())
    config.get("vision_config", config)["num_hidden_layers"] = 1
    for key in ("out_features", "out_indices", "stage_names"):  # of DINOv2, by layer
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    is_text = family in ("llama3", "smollm2")
    message = refusal(backbone("siglip"), str(folder)) if is_text else refusal(str(folder), backbone("smollm2"))
    assert str(folder) in message and "has more layers than its config.json says" in message
    assert any(name in message for name in ("layers.1.", "layer.1."))


@pytest.mark.parametrize(("content", "words"), [("[1]", "holds a list"), ("{", "is broken"), ("", "is empty")])
def test_config_that_is_no_block_of_settings(backbone, copied, content, words):
    folder = copied("llama3")
    (folder / "config.json").write_text(content)
    message = refusal(backbone("siglip"), str(folder))
    assert str(folder / "config.json") in message and words in message


def test_names_that_are_empty_or_a_file(backbone):
    assert "The vision encoder has no name" in refusal("", backbone("smollm2"))
    assert "The language model has no name" in refusal(backbone("siglip"), " ")
    assert "is a file. Give the folder that it lies in" in refusal(f"{backbone('siglip')}/config.json", "x")


def test_a_seed_that_torch_does_not_take(backbone):
    for seed in (-1, 2**63):
        assert "seed must be from 0" in refusal(backbone("siglip"), backbone("smollm2"), seed=seed)


def test_a_whole_model_as_a_part(backbone, saved):
    for arguments in ((str(saved()), backbone("smollm2")), (backbone("siglip"), str(saved()))):
        assert "is already a vision-language model (model type 'normalign_llava')" in refusal(*arguments)


@pytest.mark.both_generations
def test_hidden_state_0_is_that_of_the_embeddings(backbone):
    """transformers 5 takes a 0 for "none are wanted" where LLaVA reads the encoder."""
    model, processor = compose(backbone("siglip"), backbone("smollm2"), {"kind": "none"}, vision_feature_layer=0)
    inputs = processor(images=Image.effect_noise((32, 32), 90).convert("RGB"), text="<image>", return_tensors="pt")
    with torch.no_grad():
        states = model.model.vision_tower(inputs["pixel_values"], output_hidden_states=True).hidden_states
        features = model.get_image_features(pixel_values=inputs["pixel_values"])
        features = getattr(features, "pooler_output", features)
        assert torch.equal(features[0], model.model.multi_modal_projector(states[0])[0])
    assert check_pair(model, processor) == 16


def test_embedding_table_that_is_all_zero(backbone, copied):
    folder = copied("llama3")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"].zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = refusal(backbone("siglip"), str(folder))
    assert str(folder) in message and "no row" in message


def test_image_processor_without_a_fixed_size(backbone, copied):
    folder = copied("clip")
    config = folder / "preprocessor_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"do_center_crop": False}))
    message = refusal(str(folder), backbone("smollm2"))
    assert str(folder) in message and "depends on the image" in message


@pytest.mark.both_generations
@pytest.mark.parametrize("field", ["patch_size", "vision_feature_select_strategy"])
def test_processor_that_lacks_a_field_is_refused_by_its_name(composed, field):
    model, processor = composed()
    value = getattr(processor, field)
    setattr(processor, field, None)
    try:
        with pytest.raises(NormalignError, match=f"The processor lacks {field}"):
            check_pair(model, processor)
    finally:
        setattr(processor, field, value)


def test_processor_that_counts_one_token_more_than_the_model_is_refused_with_both_numbers(composed):
    model, processor = composed()
    processor.num_additional_image_tokens = 1
    try:
        with pytest.raises(NormalignError, match="17 placeholders.* makes 16 visual tokens"):
            check_pair(model, processor)
    finally:
        processor.num_additional_image_tokens = 0


def test_processor_and_tokenizer_with_different_chat_templates_are_refused(composed):
    model, processor = composed()
    template = processor.tokenizer.chat_template
    processor.tokenizer.chat_template = "other"
    try:
        with pytest.raises(NormalignError, match="different chat templates"):
            check_pair(model, processor)
    finally:
        processor.tokenizer.chat_template = template


def test_projector_of_another_model_is_refused_with_both_shapes(backbone, saved, tmp_path):
    weights = load_file(saved() / "model.safetensors")
    wide = {
        "model.multi_modal_projector.linear_1.weight": torch.zeros(32, 48),
        "model.multi_modal_projector.extra.weight": torch.zeros(3),
    }
    save_file(weights | wide, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(saved() / "config.json", tmp_path)
    message = refusal(backbone("siglip"), backbone("smollm2"), projector=str(tmp_path))
    assert "linear_1.weight is (32, 48) in it and (32, 32) in the model" in message
    assert "extra.weight has no place" in message
    message = refusal(backbone("siglip"), backbone("smollm2"), {"kind": "none"}, projector=str(saved()))
    assert "aligned_norm.weight has no place in the model" in message and "'none'" in message
    assert "has no projector" in refusal(backbone("siglip"), backbone("smollm2"), projector=backbone("llama3"))


def test_projector_of_a_saved_model_is_used_with_its_norm(backbone, composed, saved):
    theirs = composed()[0].model.multi_modal_projector
    model, _ = compose(backbone("siglip"), backbone("smollm2"), projector=str(saved()), seed=5)
    ours = model.model.multi_modal_projector
    assert torch.equal(ours.linear_1.weight, theirs.linear_1.weight)
    assert torch.equal(ours.aligned_norm.weight, theirs.aligned_norm.weight)
    assert model.config.projector_init == "checkpoint"


@pytest.mark.both_generations
def test_backbones_saved_by_transformers_5_are_read_by_4_too(backbone, copied):
    vision, text = copied("siglip_vision"), copied("smollm2")
    weights = load_file(vision / "model.safetensors")
    flat = {key.removeprefix("vision_model."): value for key, value in weights.items()}
    save_file(flat, vision / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((text / "config.json").read_text())
    for key in ("rope_theta", "rope_scaling"):
        config.pop(key, None)
    config["rope_parameters"] = {"rope_theta": 5000.0, "rope_type": "default"}
    (text / "config.json").write_text(json.dumps(config))
    settings = json.loads((text / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|im_start|>"]}
    (text / "tokenizer_config.json").write_text(json.dumps(settings))
    model, processor = compose(str(vision), str(text))
    rotary = model.model.language_model.rotary_emb.inv_freq
    assert rotary[1].item() == pytest.approx(5000.0 ** (-2 / 16))
    assert processor.image_token_id == 320
    assert processor.decode(processor.tokenizer("<|im_start|>a")["input_ids"], skip_special_tokens=True) == "a"
