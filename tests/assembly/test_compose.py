"""compose: what the composed model is, for every family of vision encoder and language model that was tried."""

import logging
import math

import pytest
import torch
import transformers
from PIL import Image
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer, GenerationConfig

from normalign.assembly import check_pair, compose
from normalign.assembly.compose import generated_images
from normalign.assembly.pairing import visual_tokens
from normalign.modeling.aligned_norm import text_embedding_norm
from normalign.modeling.configuration_normalign_llava import NormAlignLlavaConfig


TEXT = ["llama3", "smollm2", "qwen2", "qwen3", "gemma", "gemma3"]
VISION = ["siglip", "siglip_vision", "clip", "dinov2", "dinov2_registers"]
AutoModelForImages = transformers.AutoModelForImageTextToText


def picture(colour="red", size=(50, 40)):
    return Image.new("RGB", size, colour)


def question(*images, text="What is in the image?"):
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def encode(processor, conversation, **options):
    return processor.apply_chat_template(
        conversation, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", **options
    )


@torch.no_grad()
def norms_at_layer_0(model, processor):
    """Mean L2 norm of all text tokens and of one image's visual tokens where they enter the first layer."""
    inputs = processor(images=picture(), text=processor.image_token, return_tensors="pt", add_special_tokens=False)
    words = [i for i in range(len(processor.tokenizer)) if i != processor.image_token_id]
    inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([words])], dim=1)
    inputs.pop("attention_mask")
    seen = []
    layer = model.model.language_model.layers[0]
    hook = layer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    model(**inputs)
    hook.remove()
    norms = seen[0][0].norm(dim=-1)
    visual = inputs["input_ids"][0] == processor.image_token_id
    return norms[~visual].mean().item(), norms[visual].mean().item()


@pytest.mark.both_generations
@pytest.mark.parametrize("text", TEXT)
def test_visual_tokens_enter_layer_0_at_the_norm_of_text_tokens(composed, text):
    model, processor = composed(text=text)
    text_norm, visual_norm = norms_at_layer_0(model, processor)
    assert visual_norm == pytest.approx(text_norm, rel=0.05)


@pytest.mark.parametrize("vision", VISION)
def test_every_vision_family_is_aligned(composed, vision):
    text_norm, visual_norm = norms_at_layer_0(*composed(vision=vision))
    assert visual_norm == pytest.approx(text_norm, rel=0.05)


@pytest.mark.parametrize("text", TEXT)
def test_target_norm_is_the_bare_language_models_over_its_real_vocabulary(composed, backbone, text):
    model, _ = composed(text=text)
    bare = AutoModelForCausalLM.from_pretrained(backbone(text))
    vocabulary = len(AutoTokenizer.from_pretrained(backbone(text)))
    embeddings = bare.get_input_embeddings()
    expected = embeddings(torch.arange(vocabulary)).norm(dim=-1).mean().item()
    assert model.config.aligned_norm["target_norm"] == pytest.approx(expected, rel=1e-5)
    gain = model.get_aligned_norm().weight
    assert gain.tolist() == pytest.approx([expected / math.sqrt(model.config.text_config.hidden_size)] * 32, rel=1e-5)


def test_target_norm_of_a_scaled_embedding_is_measured_after_the_scale(composed):
    model, _ = composed(text="gemma3")
    table = model.get_input_embeddings().weight
    assert model.config.aligned_norm["target_norm"] == pytest.approx(
        text_embedding_norm(table, vocab_size=320) * math.sqrt(32), rel=1e-4
    )


@pytest.mark.both_generations
@pytest.mark.parametrize("text", TEXT)
def test_reloaded_model_gives_the_same_logits_bit_for_bit(composed, saved, text):
    model, processor = composed(text=text)
    loaded, info = AutoModelForImages.from_pretrained(
        saved(text=text), trust_remote_code=True, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    inputs = encode(AutoProcessor.from_pretrained(saved(text=text), trust_remote_code=True), question(picture()))
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, loaded.eval()(**inputs).logits)
    assert torch.equal(model.get_aligned_norm().weight, loaded.get_aligned_norm().weight)


@pytest.mark.parametrize("vision", VISION)
def test_every_vision_family_reloads_bit_for_bit(composed, saved, vision):
    model, processor = composed(vision=vision)
    loaded = AutoModelForImages.from_pretrained(saved(vision=vision), trust_remote_code=True).eval()
    inputs = encode(processor, question(picture()))
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, loaded(**inputs).logits)


@pytest.mark.both_generations
@pytest.mark.parametrize(("text", "tied"), [("smollm2", True), ("gemma3", True), ("llama3", False)])
def test_head_and_embeddings_share_storage_after_reload_exactly_where_they_did_before(composed, saved, text, tied):
    loaded = AutoModelForImages.from_pretrained(saved(text=text), trust_remote_code=True)
    for model in (composed(text=text)[0], loaded):
        assert (model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()) is tied


@pytest.mark.parametrize("text", TEXT)
def test_text_alone_gets_the_bare_language_models_logits(composed, backbone, text):
    model, processor = composed(text=text)
    bare = AutoModelForCausalLM.from_pretrained(backbone(text)).eval()
    ids = processor.tokenizer("What is in the image?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        ours, theirs = model(input_ids=ids).logits, bare(input_ids=ids).logits
    assert torch.allclose(ours[..., :320], theirs[..., :320], rtol=1e-5, atol=1e-6)


@pytest.mark.both_generations
def test_generates_for_one_image_two_images_none_and_a_left_padded_batch(composed):
    model, processor = composed()
    conversations = [
        question(picture()),
        question(picture("blue"), picture("green"), text="What is in the images? Say it in a few words."),
        question(text="Is it?"),
    ]
    alone = [
        model.generate(**encode(processor, conversation), max_new_tokens=4, min_new_tokens=4, do_sample=False)[0, -4:]
        for conversation in conversations
    ]
    prompts = [processor.apply_chat_template(c, add_generation_prompt=True) for c in conversations]
    images = [picture(), picture("blue"), picture("green")]
    batch = processor(text=prompts, images=images, padding=True, return_tensors="pt", add_special_tokens=False)
    assert batch["attention_mask"][2, 0] == 0 and batch["attention_mask"][:, -1].all()
    together = model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)[:, -4:]
    assert torch.equal(together, torch.stack(alone))


def test_answer_depends_on_the_image(composed):
    model, processor = composed()
    with torch.no_grad():
        red, blue = (model(**encode(processor, question(picture(colour)))).logits[0, -1] for colour in ("red", "blue"))
    assert not torch.allclose(red, blue)


def test_image_token_is_never_generated(composed):
    model, processor = composed()
    inputs = encode(processor, question(picture()))
    head = model.lm_head.weight
    row = head[processor.image_token_id].clone()
    hook = model.model.language_model.norm.register_forward_hook(lambda module, args, output: torch.ones_like(output))
    with torch.no_grad():
        head[processor.image_token_id] = 100.0
        tokens = model.generate(**inputs, max_new_tokens=3, do_sample=False)[0, -3:]
        assert model(**inputs).logits[0, -1].argmax() == processor.image_token_id
        head[processor.image_token_id] = row
    hook.remove()
    assert processor.image_token_id not in tokens


@pytest.mark.both_generations
@pytest.mark.parametrize("text", TEXT)
def test_vocabulary_size_embedding_rows_and_head_rows_agree(composed, text):
    model, processor = composed(text=text)
    rows = model.get_input_embeddings().weight.shape[0]
    assert rows == model.lm_head.weight.shape[0] == model.config.text_config.vocab_size
    assert rows >= len(processor.tokenizer) > processor.image_token_id == model.config.image_token_id


def test_table_with_spare_rows_is_not_resized_and_a_full_one_grows_by_zero_rows(composed):
    assert composed(text="qwen2")[0].config.text_config.vocab_size == 352
    model, processor = composed(text="smollm2")
    assert model.config.text_config.vocab_size == 328
    assert not model.get_input_embeddings().weight[320:].any()
    assert model.generation_config.suppress_tokens == list(range(320, 328))
    assert composed(text="qwen2")[0].generation_config.suppress_tokens == [320]


@pytest.mark.both_generations
def test_tokens_added_later_leave_target_norm_gain_and_reload_as_they_are(backbone, tmp_path):
    model, processor = compose(backbone("siglip"), backbone("smollm2"), seed=0)
    before = model.config.aligned_norm["target_norm"], model.get_aligned_norm().weight.clone()
    processor.tokenizer.add_tokens(["<box>", "<point>", "<mask>"])
    model.resize_token_embeddings(len(processor.tokenizer), pad_to_multiple_of=64, mean_resizing=False)
    inputs = encode(processor, question(picture()))
    optimizer = torch.optim.SGD(model.model.multi_modal_projector.linear_1.parameters(), lr=0.1)
    model(**inputs, labels=inputs["input_ids"].masked_fill(inputs["input_ids"] == 320, -100)).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImages.from_pretrained(tmp_path, trust_remote_code=True).eval()
    rows = loaded.get_input_embeddings().weight.shape[0]
    assert rows == 384 == loaded.lm_head.weight.shape[0] == loaded.config.text_config.vocab_size
    assert loaded.config.aligned_norm["target_norm"] == before[0]
    assert torch.equal(loaded.get_aligned_norm().weight, before[1])
    assert torch.equal(loaded.generate(**inputs, max_new_tokens=3), model.eval().generate(**inputs, max_new_tokens=3))


@pytest.mark.parametrize("vision", VISION)
def test_processor_and_model_count_the_same_visual_tokens(composed, saved, vision):
    """R01."""
    model, _ = composed(vision=vision)
    processor = AutoProcessor.from_pretrained(saved(vision=vision), trust_remote_code=True)
    registers = 4 if vision == "dinov2_registers" else 0
    assert check_pair(model, processor) == 16 + registers == model.config.image_seq_length
    has_class_token = vision in ("clip", "dinov2", "dinov2_registers")
    assert processor.num_additional_image_tokens == has_class_token + registers
    strategy = "default" if has_class_token else "full"
    assert processor.vision_feature_select_strategy == model.config.vision_feature_select_strategy == strategy
    assert processor.patch_size == 8


def test_feature_layer_is_the_second_to_last_and_for_dinov2_the_last(composed, backbone):
    layers = {vision: composed(vision=vision)[0].config.vision_feature_layer for vision in VISION}
    assert layers == {"siglip": -2, "siglip_vision": -2, "clip": -2, "dinov2": -1, "dinov2_registers": -1}
    model, _ = compose(backbone("siglip"), backbone("smollm2"), vision_feature_layer=-1)
    assert model.config.vision_feature_layer == -1


@pytest.mark.both_generations
@pytest.mark.parametrize("vision", ["siglip", "siglip_vision"])
def test_last_layer_model_has_no_pooling_head_and_text_weights(backbone, vision):
    model, _ = compose(backbone(vision), backbone("smollm2"), vision_feature_layer=-1)
    tower = [name for name, _ in model.model.vision_tower.named_parameters()]
    assert not any("head" in name or "text" in name for name in tower)


def test_projector_starts_as_torch_linear_and_says_so(composed):
    model, _ = composed()
    projector = model.model.multi_modal_projector
    assert model.config.projector_init == "torch_linear"
    for linear in (projector.linear_1, projector.linear_2):
        bound = 1 / math.sqrt(linear.in_features)
        assert 0.9 * bound < linear.weight.abs().max() <= bound
        assert 0 < linear.bias.abs().max() <= bound


def test_seed_makes_the_projector_reproducible_and_leaves_the_global_state_alone(backbone):
    folders = backbone("siglip"), backbone("smollm2")
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    first, second, other = (
        compose(*folders, seed=seed)[0].model.multi_modal_projector.linear_1.weight for seed in (3, 3, 4)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_parts_are_built_once_and_hold_values(composed):
    model, _ = composed(text="gemma3")
    tensors = [*model.parameters(), *model.buffers()]
    assert not any(tensor.is_meta for tensor in tensors)
    assert model.config.text_config is model.model.language_model.config
    assert model.config.vision_config is model.model.vision_tower.config
    assert model.model.language_model.config._attn_implementation == "sdpa"


@pytest.mark.both_generations
@pytest.mark.parametrize("text", ["smollm2", "gemma3"])
def test_no_split_modules_are_in_the_model(composed, text):
    """R55."""
    model, _ = composed(text=text)
    classes = {type(module).__name__ for module in model.modules()}
    assert set(model._no_split_modules) <= classes
    assert type(model.model.language_model.layers[0]).__name__ in model._no_split_modules


@pytest.mark.both_generations
@pytest.mark.parametrize("text", ["llama3", "qwen2", "qwen3", "gemma3"])
def test_config_survives_a_round_trip_attribute_by_attribute(composed, saved, text):
    config = composed(text=text)[0].config
    reread = {
        "dict": NormAlignLlavaConfig.from_dict(config.to_dict()),
        "file": NormAlignLlavaConfig.from_pretrained(saved(text=text)),
        "remote code": AutoConfig.from_pretrained(saved(text=text), trust_remote_code=True),
    }
    skipped = {"transformers_version", "auto_map", "_name_or_path"}
    for way, other in reread.items():
        for part in ("vision_config", "text_config"):
            ours, theirs = getattr(config, part), getattr(other, part)
            assert type(theirs).__name__ == type(ours).__name__, way
            assert _plain(theirs, skipped) == _plain(ours, skipped), way
        assert _plain(other, skipped) == _plain(config, skipped), way
        assert other.aligned_norm == config.aligned_norm


def test_config_with_other_settings_than_the_defaults_survives_a_round_trip(composed, tmp_path):
    norm = {"kind": "rmsnorm", "gain_init": 0.5, "target_norm": 1.25, "eps": 1e-5, "trainable": False, "gwc": False}
    config = NormAlignLlavaConfig.from_dict(
        composed(text="qwen3")[0].config.to_dict() | {"vision_feature_layer": [-2, -1], "aligned_norm": norm}
    )
    config.save_pretrained(tmp_path)
    reread = NormAlignLlavaConfig.from_pretrained(tmp_path)
    assert _plain(reread, {"_name_or_path"}) == _plain(config, {"_name_or_path"})
    assert reread.vision_feature_layer == [-2, -1]
    assert reread.aligned_norm == norm | {"gwc_floor": 1e-3}


def _plain(config, skipped):
    return {key: value for key, value in config.to_dict().items() if key not in skipped}


def test_nothing_saved_names_a_folder_of_this_machine(saved, backbone):
    for file in saved().iterdir():
        if file.suffix in (".json", ".jinja"):
            assert str(backbone("siglip")).rsplit("/", 1)[0] not in file.read_text(), file.name
    assert NormAlignLlavaConfig.from_pretrained(saved()).composed_from == {"vision": "siglip", "text": "smollm2"}


@pytest.mark.parametrize(
    ("text", "stops"), [("llama3", ["<|eot_id|>"]), ("gemma", ["<eos>", "<end_of_turn>"]), ("qwen2", ["<|im_end|>"])]
)
def test_generation_stops_at_the_language_models_eos_and_the_templates_end_of_turn(composed, saved, text, stops):
    _, processor = composed(text=text)
    ids = processor.tokenizer.convert_tokens_to_ids(stops)
    found = GenerationConfig.from_pretrained(saved(text=text)).eos_token_id
    assert (found if isinstance(found, list) else [found]) == ids


def test_missing_pad_token_is_set_to_one_that_does_not_end_a_turn(composed):
    assert composed(text="llama3")[1].tokenizer.pad_token == "<|finetune_right_pad_id|>"
    assert composed(text="plain")[1].tokenizer.pad_token == "<unk>"


def test_image_token_is_special_and_one_that_is_there_is_reused(composed, backbone, saved, tmp_path):
    _, processor = composed()
    assert processor.decode(processor.tokenizer("a<image>b")["input_ids"], skip_special_tokens=True) == "ab"
    text = tmp_path / "text"
    AutoModelForCausalLM.from_pretrained(backbone("qwen2")).save_pretrained(text)
    tokenizer = AutoTokenizer.from_pretrained(backbone("qwen2"))
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(text)
    model, processor = compose(backbone("siglip"), str(text))
    assert len(processor.tokenizer) == 321 and processor.image_token_id == 320
    assert model.get_input_embeddings().weight[320].any(), "a row that was trained is kept"


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm", "scale"])
def test_every_kind_of_norm_starts_at_the_text_norm(backbone, kind, caplog):
    with caplog.at_level(logging.INFO, logger="normalign"):
        images = None if kind != "scale" else [picture()]
        model, processor = compose(
            backbone("siglip"), backbone("llama3"), {"kind": kind}, seed=0, calibration_images=images
        )
    text_norm, visual_norm = norms_at_layer_0(model, processor)
    assert visual_norm == pytest.approx(text_norm, rel=0.05)
    assert "text norm T" in caplog.text


def test_scale_without_calibration_images_measures_generated_ones_and_says_so(backbone, caplog):
    with caplog.at_level(logging.INFO, logger="normalign"):
        model, processor = compose(backbone("siglip"), backbone("llama3"), {"kind": "scale"}, seed=0)
    pixels = processor.image_processor(images=generated_images(), return_tensors="pt")["pixel_values"]
    visual_norm = visual_tokens(model, pixels).norm(dim=-1).mean().item()
    assert visual_norm == pytest.approx(model.config.aligned_norm["target_norm"], rel=1e-4)
    assert "4 generated images" in caplog.text


def test_norm_none_and_a_numeric_gain_are_respected(backbone):
    model, _ = compose(backbone("siglip"), backbone("smollm2"), {"kind": "none"}, seed=0)
    assert isinstance(model.model.multi_modal_projector.aligned_norm, nn.Identity)
    assert model.config.aligned_norm["target_norm"] > 0
    model, _ = compose(backbone("siglip"), backbone("smollm2"), {"gain_init": 1, "gwc": False}, seed=0)
    assert model.get_aligned_norm().weight.eq(1).all() and not model.get_aligned_norm().gwc


def test_half_precision_keeps_the_norm_in_float32(backbone):
    model, _ = compose(backbone("siglip"), backbone("smollm2"), dtype="float16")
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if ".aligned_norm." not in name} == {torch.float16}
    assert {dtype for name, dtype in dtypes.items() if ".aligned_norm." in name} == {torch.float32}
