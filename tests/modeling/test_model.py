"""The model on both generations of transformers: initialisation, saving, loading, merging, generation."""

import json
import logging
import math
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, DynamicCache, GenerationMixin, LlavaForConditionalGeneration, PreTrainedModel

from normalign.modeling.aligned_norm import AlignedNorm, text_embedding_norm
from normalign.modeling.configuration_normalign_llava import NormAlignLlavaConfig
from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration, NormAlignLlavaModel


pytestmark = pytest.mark.both_generations

if transformers.__version__ < "5":
    from transformers import AutoModelForVision2Seq as AutoImageTextModel
else:
    from transformers import AutoModelForImageTextToText as AutoImageTextModel

IMAGE_TOKEN = 60
LOADERS = {
    "local": NormAlignLlavaForConditionalGeneration.from_pretrained,
    "remote code": lambda folder, **options: AutoImageTextModel.from_pretrained(
        folder, trust_remote_code=True, **options
    ),
}


def weights(model):
    return model.get_aligned_norm().weight.detach()


def edit_weights(folder, change):
    """Rewrites the folder's safetensors file with `change(tensors)`."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, **aligned_norm):
    config = json.loads((folder / "config.json").read_text())
    config["aligned_norm"].update(aligned_norm)
    (folder / "config.json").write_text(json.dumps(config))


def without_norm(tensors):
    return {key: value for key, value in tensors.items() if "aligned_norm" not in key}


# --- initialisation


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm", "scale"])
def test_new_model_starts_at_the_text_norm(tiny_config, kind):
    model = NormAlignLlavaForConditionalGeneration(tiny_config(aligned_norm={"kind": kind}))
    T = text_embedding_norm(model.get_input_embeddings())
    assert T > 0
    torch.testing.assert_close(weights(model), torch.full_like(weights(model), T / math.sqrt(48)))
    assert model.get_aligned_norm().bias is None or not model.get_aligned_norm().bias.any()


@pytest.mark.parametrize(
    ("settings", "gain"), [({"gain_init": 1}, 1.0), ({"target_norm": 1.09}, 1.09 / math.sqrt(48))]
)
def test_gain_init_and_target_norm_of_the_config_are_used(tiny_config, settings, gain):
    model = NormAlignLlavaForConditionalGeneration(tiny_config(aligned_norm=settings))
    torch.testing.assert_close(weights(model), torch.full((48,), float(gain)))


def test_T_of_random_weights_is_not_kept(tiny_config):
    """Weights that are put in later have another T, and so has a second model of the same config."""
    config = tiny_config()
    model = NormAlignLlavaForConditionalGeneration(config)
    assert config.aligned_norm["target_norm"] is None
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(7)
    T = text_embedding_norm(model.get_input_embeddings())
    assert model.initialize_aligned_norm_() == pytest.approx(T / math.sqrt(48))
    assert config.aligned_norm["target_norm"] == T


def test_projected_tokens_have_the_text_norm(tiny_model, tiny_batch):
    T = text_embedding_norm(tiny_model.get_input_embeddings())
    seen = []
    projector = tiny_model.model.multi_modal_projector
    torch.nn.init.normal_(projector.linear_2.weight)  # far above eps
    projector.register_forward_hook(lambda module, args, output: seen.append(output))
    tiny_model(**tiny_batch)
    torch.testing.assert_close(seen[0].norm(dim=-1), torch.full((2, 4), T), rtol=1e-3, atol=0)


def test_construction_on_the_meta_device_computes_nothing(tiny_config):
    with torch.device("meta"):
        model = NormAlignLlavaForConditionalGeneration(tiny_config())
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.config.aligned_norm["target_norm"] is None


def test_embedding_table_with_zero_rows_leaves_T_alone(tiny_config):
    model = NormAlignLlavaForConditionalGeneration(tiny_config())
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table[50:] = 0
    T = table[1:50].norm(dim=-1).mean().item()  # row 0 is the padding token's, zero
    assert model.initialize_aligned_norm_() == pytest.approx(T / math.sqrt(48), rel=1e-6)


def test_all_zero_embedding_table_raises(tiny_model):
    torch.nn.init.zeros_(tiny_model.get_input_embeddings().weight)
    with pytest.raises(ValueError, match="cannot be measured"):
        tiny_model.initialize_aligned_norm_()


def test_scaled_embeddings_count_after_their_scale(tiny_config, tiny_batch):
    """R75: Gemma 3 multiplies inside its embedding module, before visual tokens are put in."""
    model = NormAlignLlavaForConditionalGeneration(tiny_config("gemma3_text", {"head_dim": 12}))
    table = model.get_input_embeddings().weight
    assert weights(model)[0].item() * math.sqrt(48) == pytest.approx(
        table[1:].norm(dim=-1).mean().item() * math.sqrt(48), rel=0.02
    )
    seen = []
    model.get_decoder().layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        model(**tiny_batch)
    is_image = tiny_batch["input_ids"] == IMAGE_TOKEN
    everywhere = model.get_input_embeddings()(torch.arange(1, 64)).norm(dim=-1).mean().item()
    assert seen[0][is_image].norm(dim=-1).mean().item() == pytest.approx(everywhere, rel=0.05)


def test_norm_frozen_by_config_stays_frozen_when_loaded(tiny_config, tmp_path):
    model = NormAlignLlavaForConditionalGeneration(tiny_config(aligned_norm={"trainable": False}))
    assert [p.requires_grad for p in model.get_aligned_norm().parameters()] == [False, False]
    model.save_pretrained(tmp_path)
    for load in LOADERS.values():
        loaded = load(tmp_path)
        assert [p.requires_grad for p in loaded.get_aligned_norm().parameters()] == [False, False]
        assert loaded.model.multi_modal_projector.linear_1.weight.requires_grad


@pytest.mark.parametrize("tie", [True, False])
def test_post_init_has_run_and_tied_weights_share_storage_after_reload(tiny_config, tmp_path, tie):
    """R15, R16: no missing attribute, no missing key reported, one storage where tied."""
    model = NormAlignLlavaForConditionalGeneration(tiny_config(tie=tie))
    if transformers.__version__ >= "5":
        assert set(model.all_tied_weights_keys) == ({"lm_head.weight"} if tie else set())
    model.save_pretrained(tmp_path)
    loaded, info = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    shared = loaded.lm_head.weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()
    assert shared is tie


# --- kind none


def plain_llava(tiny_config, **options):
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(tiny_config(config_class=transformers.LlavaConfig, **options)).eval()


def test_kind_none_is_bit_for_bit_llava(tiny_config, tiny_batch):
    llava = plain_llava(tiny_config)
    ours = NormAlignLlavaForConditionalGeneration(tiny_config(aligned_norm={"kind": "none"})).eval()
    ours.load_state_dict(llava.state_dict())
    assert set(ours.state_dict()) == set(llava.state_dict())
    with torch.no_grad():
        assert torch.equal(ours(**tiny_batch).logits, llava(**tiny_batch).logits)
    assert ours.get_aligned_norm() is None
    with pytest.raises(ValueError, match="none"):
        ours.initialize_aligned_norm_()


def test_only_the_norm_is_added_to_llavas_parameter_names(tiny_config, tiny_model):
    added = set(tiny_model.state_dict()) - set(plain_llava(tiny_config).state_dict())
    prefix = "model.multi_modal_projector.aligned_norm."
    assert added == {prefix + "weight", prefix + "bias"}


def test_construction_allocates_no_more_than_llava(tiny_config):
    """One language model, one projector: peak memory of construction within 5 % of plain LLaVA's."""

    def peak(build):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            model = build()
        live = highest = 0
        for event in recorded.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                highest = max(highest, live)
        assert sum(p.numel() for p in model.parameters()) * 4 <= highest
        return highest

    wide = {"text": {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}}
    peak(lambda: plain_llava(tiny_config, **wide))
    plain = peak(lambda: plain_llava(tiny_config, **wide))
    ours = peak(lambda: NormAlignLlavaForConditionalGeneration(tiny_config(**wide)))
    assert ours <= 1.05 * plain


# --- saving and loading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loader", LOADERS)
def test_saved_gain_survives_reload(tiny_model, tmp_path, loader, dtype):
    """A gain of 0.5, and one that bfloat16 cannot hold, come back exactly; the norm stays float32."""
    with torch.no_grad():
        weights(tiny_model).fill_(0.5)[0] = 1.0009765
        tiny_model.get_aligned_norm().bias.fill_(0.25)
    tiny_model.save_pretrained(tmp_path)
    loaded = LOADERS[loader](tmp_path, dtype=dtype)
    assert torch.equal(weights(loaded), weights(tiny_model))
    assert weights(loaded).dtype == torch.float32
    assert loaded.get_aligned_norm().bias.tolist() == [0.25] * 48
    assert loaded.get_input_embeddings().weight.dtype == dtype
    assert loaded.config.aligned_norm == tiny_model.config.aligned_norm


def test_weights_loaded_into_a_model_made_on_the_meta_device(tiny_model):
    with torch.no_grad():
        weights(tiny_model).fill_(0.5)
    with torch.device("meta"):
        model = NormAlignLlavaForConditionalGeneration(tiny_model.config)
    model.load_state_dict(tiny_model.state_dict(), assign=True)
    assert torch.equal(weights(model), torch.full((48,), 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("known_T", [True, False])
@pytest.mark.parametrize("loader", LOADERS)
def test_gain_missing_from_the_checkpoint_is_set_from_T(tiny_model, tmp_path, caplog, loader, known_T, dtype):
    """R18, R97: never NaN, 0 or 1 by accident, whatever loads it; and it is said."""
    tiny_model.save_pretrained(tmp_path)
    edit_weights(tmp_path, without_norm)
    edit_config(tmp_path, target_norm=3.0 if known_T else None)
    transformers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        loaded = LOADERS[loader](tmp_path, dtype=dtype)
    T = 3.0 if known_T else text_embedding_norm(loaded.get_input_embeddings())
    torch.testing.assert_close(weights(loaded), torch.full((48,), T / math.sqrt(48)))
    assert not loaded.get_aligned_norm().bias.any()
    assert loaded.config.aligned_norm["target_norm"] == T
    assert f"T = {T:.6g}" in caplog.text


def test_loading_twenty_times_gives_the_same_state(tiny_model, tmp_path):
    """R19: the norm keeps nothing in buffers, which loading would leave as garbage."""
    assert list(tiny_model.model.multi_modal_projector.buffers()) == []
    tiny_model.save_pretrained(tmp_path)
    for _ in range(20):
        loaded = NormAlignLlavaModel.from_pretrained(tmp_path)
        assert torch.equal(loaded.multi_modal_projector.aligned_norm.weight, weights(tiny_model))


def test_base_model_loads_from_the_full_checkpoint(tiny_model, tiny_batch, tmp_path):
    tiny_model.save_pretrained(tmp_path)
    base = NormAlignLlavaModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = tiny_model.model(**tiny_batch).last_hidden_state
        assert torch.equal(base(**tiny_batch).last_hidden_state, expected)


def test_checkpoint_with_norm_does_not_load_without_it(tiny_model, tmp_path):
    """R97: the reverse mismatch names both sides."""
    tiny_model.save_pretrained(tmp_path)
    edit_config(tmp_path, kind="none")
    with pytest.raises(ValueError, match=r"holds an aligned norm's bias and weight, .*kind is 'none'"):
        NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("saved", "asked", "error"),
    [("layernorm", "rmsnorm", "aligned norm's bias, .*'rmsnorm'"), ("rmsnorm", "layernorm", "random .*norm.bias")],
)
def test_another_kind_of_norm_is_an_error(tiny_config, tmp_path, saved, asked, error):
    """R97: never half a norm."""
    NormAlignLlavaForConditionalGeneration(tiny_config(aligned_norm={"kind": saved})).save_pretrained(tmp_path)
    edit_config(tmp_path, kind=asked)
    with pytest.raises(ValueError, match=error):
        NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path)


@pytest.mark.parametrize("loader", LOADERS)
def test_settings_given_on_loading_change_only_themselves(tiny_model, tmp_path, loader):
    tiny_model.initialize_aligned_norm_()
    tiny_model.save_pretrained(tmp_path)
    loaded = LOADERS[loader](tmp_path, aligned_norm={"gwc": False})
    assert loaded.config.aligned_norm == {**tiny_model.config.aligned_norm, "gwc": False}
    assert not loaded.get_aligned_norm().gwc
    with pytest.raises(ValueError, match="'gcw'"):
        LOADERS[loader](tmp_path, aligned_norm={"gcw": False})


def test_config_changed_to_something_invalid_is_not_saved(tiny_model, tmp_path):
    tiny_model.config.aligned_norm["kind"] = "foo"
    with pytest.raises(ValueError, match="'foo'"):
        tiny_model.save_pretrained(tmp_path)


def test_gain_that_is_offloaded_cannot_be_set_and_says_so(tiny_config):
    with torch.device("meta"):
        model = NormAlignLlavaForConditionalGeneration(tiny_config())
    with pytest.raises(ValueError, match="not in memory"):
        model.initialize_aligned_norm_(1.0)


def test_missing_weight_is_an_error_not_random(tiny_model, tmp_path):
    tiny_model.save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if "linear_2" not in k})
    with pytest.raises(ValueError, match=r"2 weights .* would be random .*linear_2"):
        NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path)


def test_gain_alone_missing_is_an_error(tiny_model, tmp_path):
    tiny_model.save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if "aligned_norm.weight" not in k})
    with pytest.raises(ValueError, match=r"would be random .*aligned_norm.weight"):
        NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path)


def test_native_llava_checkpoint_is_refused_and_points_to_graft(tiny_config, tiny_model, tmp_path):
    """A native checkpoint's names differ; without this check its language model would be random."""
    tiny_model.save_pretrained(tmp_path)
    edit_weights(
        tmp_path,
        lambda tensors: {k.replace("model.language_model.", "language_model.model."): v for k, v in tensors.items()},
    )
    with pytest.raises(ValueError, match="normalign graft"):
        NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path)


def test_other_hidden_size_is_an_error(tiny_config, tiny_model, tmp_path):
    """R97: shapes that do not fit are named, nothing is drawn anew."""
    tiny_model.save_pretrained(tmp_path)
    other = tiny_config(text={"hidden_size": 64, "head_dim": 16})
    with pytest.raises(RuntimeError, match="(?s)mismatch"):
        NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path, config=other)


def test_saving_a_model_loaded_by_remote_code_gives_a_folder_that_loads(tiny_model, tiny_batch, tmp_path):
    tiny_model.save_pretrained(tmp_path / "a")
    first = LOADERS["remote code"](tmp_path / "a")
    first.save_pretrained(tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    auto_map = json.loads((tmp_path / "b" / "config.json").read_text())["auto_map"]
    assert not any("--" in value for value in auto_map.values())
    second = LOADERS["remote code"](tmp_path / "b").eval()
    with torch.no_grad():
        assert torch.equal(second(**tiny_batch).logits, tiny_model(**tiny_batch).logits)


# --- vocabulary


@pytest.mark.parametrize("tie", [True, False])
def test_resized_vocabulary_keeps_T_and_reloads(tiny_config, tiny_batch, tmp_path, tie):
    """R22: config, embedding and head agree after a plain resize; T is that of the real rows; a step, save, reload."""
    model = NormAlignLlavaForConditionalGeneration(tiny_config(tie=tie))
    model.initialize_aligned_norm_()
    T, gain = model.config.aligned_norm["target_norm"], weights(model).clone()
    model.resize_token_embeddings(64 + 3, pad_to_multiple_of=64)
    assert model.config.text_config.vocab_size == 128
    assert model.get_input_embeddings().weight.shape[0] == model.lm_head.weight.shape[0] == 128
    assert text_embedding_norm(model.get_input_embeddings(), vocab_size=64) == pytest.approx(T, rel=1e-6)
    assert torch.equal(weights(model), gain)
    model.train()
    model(**tiny_batch, labels=tiny_batch["input_ids"]).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    model.save_pretrained(tmp_path)
    loaded = LOADERS["remote code"](tmp_path).eval()
    assert loaded.config.aligned_norm["target_norm"] == T
    assert torch.equal(weights(loaded), weights(model))
    out = loaded.generate(**tiny_batch, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    assert out.shape == (2, 10)


# --- config


def test_model_type_is_our_own_and_registration_can_be_repeated(tiny_model, tmp_path):
    """R42: also after the same class was loaded as remote code."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert NormAlignLlavaConfig.model_type == "normalign_llava"
    assert NormAlignLlavaConfig.model_type not in CONFIG_MAPPING_NAMES
    tiny_model.save_pretrained(tmp_path)
    remote = type(AutoConfig.from_pretrained(tmp_path, trust_remote_code=True))
    assert remote is not NormAlignLlavaConfig
    for config_class in (remote, NormAlignLlavaConfig, NormAlignLlavaConfig):
        AutoConfig.register("normalign_llava", config_class, exist_ok=True)
    try:
        assert isinstance(AutoConfig.for_model("normalign_llava"), NormAlignLlavaConfig)
    finally:
        transformers.models.auto.configuration_auto.CONFIG_MAPPING._extra_content.pop("normalign_llava")


FAMILIES = {
    "llama": {"head_dim": 20, "rope_theta": 500000.0} if transformers.__version__ < "5" else {"head_dim": 20},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"head_dim": 20},
    "gemma": {"head_dim": 20},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_config_round_trip_is_exact(tiny_config, tmp_path, family):
    """R44: attribute by attribute, with values that are not the defaults, a list of feature layers, our block."""
    norm = {"kind": "rmsnorm", "gain_init": 0.02, "target_norm": 1.09, "eps": 1e-5, "trainable": False}
    norm |= {"gwc": False, "gwc_floor": 0.01}
    config = tiny_config(family, FAMILIES[family], aligned_norm=norm)
    config.vision_feature_layer = [-3, -2]
    config.save_pretrained(tmp_path)
    again = [
        NormAlignLlavaConfig.from_pretrained(tmp_path),
        NormAlignLlavaConfig.from_dict(config.to_dict()),
        AutoConfig.from_pretrained(tmp_path, trust_remote_code=True),
    ]
    skip = {"_name_or_path", "transformers_version", "name_or_path", "_commit_hash"}
    for other in again:
        assert other.aligned_norm == norm
        assert other.text_config.head_dim == config.text_config.head_dim if "head_dim" in FAMILIES[family] else True
        for part in (lambda c: c, lambda c: c.text_config, lambda c: c.vision_config):
            one, two = part(config).to_dict(), part(other).to_dict()
            assert type(part(other)).__name__ == type(part(config)).__name__
            assert {k: v for k, v in one.items() if k not in skip} == {k: v for k, v in two.items() if k not in skip}
    assert NormAlignLlavaConfig().aligned_norm["kind"] == "layernorm"


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"knd": "layernorm", "gwcc": 1}, "'gwcc', 'knd'"),
        ({"kind": "batchnorm"}, "aligned_norm.kind must be one of"),
        ({"gain_init": "txt"}, "aligned_norm.gain_init"),
        ({"gain_init": 0}, "aligned_norm.gain_init"),
        ({"gain_init": -1.0}, "aligned_norm.gain_init"),
        ({"target_norm": 0}, "aligned_norm.target_norm"),
        ({"target_norm": float("nan")}, "aligned_norm.target_norm"),
        ({"eps": "1e-6"}, "aligned_norm.eps"),
        ({"gwc": "yes"}, "aligned_norm.gwc must be true or false"),
        ({"gwc_floor": -1}, "aligned_norm.gwc_floor"),
        ({"trainable": 1}, "aligned_norm.trainable"),
        ("layernorm", "a dict"),
    ],
)
def test_config_refuses_what_does_not_fit_by_name(tiny_config, block, named):
    with pytest.raises(ValueError, match=named):
        tiny_config(aligned_norm=block)


# --- merging, gradients, generation


def test_different_images_give_different_logits(tiny_model, tiny_batch):
    """R39."""
    images = [torch.full((2, 3, 16, 16), value) for value in (-1.0, 1.0)] + [tiny_batch["pixel_values"]]
    with torch.no_grad():
        logits = [tiny_model(**{**tiny_batch, "pixel_values": image}).logits for image in images]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (logits[a] - logits[b]).abs().max() > 1e-4


@pytest.mark.parametrize("cache", [False, True])
def test_vision_tower_runs_once_at_prefill_and_never_in_decoding(tiny_model, tiny_batch, cache):
    """R39: also when an empty cache is passed."""
    calls = []
    tiny_model.model.vision_tower.register_forward_hook(lambda *args: calls.append(1))
    more = {"past_key_values": DynamicCache(config=tiny_model.config.text_config)} if cache else {}
    tiny_model.generate(**tiny_batch, **more, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert calls == [1]


def test_generate_comes_from_the_class_itself(tiny_model, tiny_batch):
    """R40: GenerationMixin among its own bases, after PreTrainedModel."""
    bases = NormAlignLlavaForConditionalGeneration.__bases__
    assert GenerationMixin in bases
    mro = NormAlignLlavaForConditionalGeneration.__mro__
    assert mro.index(PreTrainedModel) < mro.index(GenerationMixin)
    greedy = tiny_model.generate(**tiny_batch, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    ids, mask = tiny_batch["input_ids"], tiny_batch["attention_mask"]
    for _ in range(3):
        with torch.no_grad():
            logits = tiny_model(input_ids=ids, attention_mask=mask, pixel_values=tiny_batch["pixel_values"]).logits
        logits[:, -1, 2] = -torch.inf  # min_new_tokens forbids the end token
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    assert torch.equal(greedy, ids)


def test_text_without_image_and_wrong_number_of_placeholders(tiny_model, tiny_batch):
    with torch.no_grad():
        text = tiny_model(input_ids=torch.tensor([[1, 5, 6]])).logits
        bare = tiny_model.lm_head(tiny_model.get_decoder()(input_ids=torch.tensor([[1, 5, 6]])).last_hidden_state)
    assert torch.equal(text, bare)
    with pytest.raises((ValueError, RuntimeError), match="do not match"):
        tiny_model(**{**tiny_batch, "pixel_values": tiny_batch["pixel_values"][:1]})


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_projector_alone_trained_gets_gradient(tiny_config, tiny_batch, attention, side):
    """R51: image features stay in the graph on every way in."""
    model = NormAlignLlavaForConditionalGeneration(tiny_config())
    model.set_attn_implementation(attention)
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)
    if side == "right":
        row = torch.tensor([1, *[IMAGE_TOKEN] * 4, 8, 9, 0])
        tiny_batch["input_ids"][1] = row
        tiny_batch["attention_mask"][1] = (row != 0).long()
    model(**tiny_batch, labels=tiny_batch["input_ids"]).loss.backward()
    for name, parameter in model.named_parameters():
        trained = "multi_modal_projector" in name
        assert (parameter.grad is not None) == trained, name
        assert not trained or parameter.grad.norm() > 0, name


def test_train_step_save_reload_generate(tiny_config, tiny_batch, tmp_path):
    torch.manual_seed(0)
    model = NormAlignLlavaForConditionalGeneration(tiny_config()).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(
            **tiny_batch, labels=tiny_batch["input_ids"].masked_fill(tiny_batch["input_ids"] == 60, -100)
        ).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        # the encoder's layers behind the feature layer -2 take no part
        unused = "vision_tower" in name and ("layers.2." in name or "post_layernorm" in name)
        assert torch.equal(parameter, before[name]) == unused, name
    model.save_pretrained(tmp_path)
    loaded = LOADERS["remote code"](tmp_path).eval()
    model.eval()
    with torch.no_grad():
        assert torch.equal(loaded(**tiny_batch).logits, model(**tiny_batch).logits)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(loaded.generate(**tiny_batch, **options), model.generate(**tiny_batch, **options))


def test_gwc_changes_only_what_stands_before_the_norm(tiny_config, tiny_batch):
    """The gradients of projector and encoder grow by 1/mu; those of norm and language model are the same."""
    grads = {}
    for gwc in (False, True):
        torch.manual_seed(0)
        model = NormAlignLlavaForConditionalGeneration(tiny_config(aligned_norm={"gwc": gwc})).double()
        batch = {**tiny_batch, "pixel_values": tiny_batch["pixel_values"].double()}
        model(**batch, labels=tiny_batch["input_ids"]).loss.backward()
        grads[gwc] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    mu = model.get_aligned_norm().mu.item()
    assert mu == pytest.approx(text_embedding_norm(model.get_input_embeddings()) / math.sqrt(48), rel=1e-5)
    for name, grad in grads[False].items():
        before = "vision_tower" in name or "projector.linear" in name
        torch.testing.assert_close(grads[True][name], grad / mu if before else grad, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("trained", ["vision_tower", "multi_modal_projector", "language_model"])
def test_checkpointing_gives_gradient_to_exactly_the_trained_part(tiny_config, tiny_batch, trained, reentrant):
    """R50: and a frozen tower builds no graph."""
    torch.manual_seed(0)
    model = NormAlignLlavaForConditionalGeneration(tiny_config()).train()
    model.requires_grad_(False)
    getattr(model.model, trained).requires_grad_(True)
    expected, outputs = {}, []
    for checkpointing in (False, True):
        model.zero_grad(set_to_none=True)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        model.model.vision_tower.register_forward_hook(
            lambda m, a, o: outputs.append(o.last_hidden_state.requires_grad)
        )
        model(**tiny_batch, labels=tiny_batch["input_ids"]).loss.backward()
        assert outputs.pop() == (trained == "vision_tower")
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert grads and all(f"model.{trained}." in name for name in grads)
        expected = expected or grads
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-7)
        assert set(grads) == set(expected)


LORA = {
    "vision": r".*vision_tower.*q_proj",
    "language": r".*language_model.*q_proj",
    "projector": r".*multi_modal_projector\.linear_\d",
    "language, projector saved whole": r".*language_model.*q_proj",
}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("target", LORA)
def test_lora_with_checkpointing_gives_gradient_to_exactly_the_adapted_part(
    tiny_config, tiny_batch, target, reentrant
):
    """R50: adapters of the encoder are reached through the norm; a frozen encoder builds no graph."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = NormAlignLlavaForConditionalGeneration(tiny_config()).train()
    whole = ["multi_modal_projector"] if "whole" in target else None
    settings = peft.LoraConfig(
        target_modules=LORA[target], modules_to_save=whole, task_type="CAUSAL_LM", init_lora_weights=False
    )
    adapted = peft.get_peft_model(model, settings)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    outputs = []
    model.model.vision_tower.register_forward_hook(lambda m, a, o: outputs.append(o.last_hidden_state.requires_grad))
    adapted(**tiny_batch, labels=tiny_batch["input_ids"]).loss.backward()
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert any("aligned_norm.modules_to_save" in n or "aligned_norm.weight" in n for n in trained) == bool(whole)
    for name, parameter in adapted.named_parameters():
        # the encoder's last layer lies behind the feature layer
        reached = name in trained and "vision_tower" not in name or "lora" in name and ".layers.2." not in name
        assert (parameter.grad is not None and parameter.grad.norm() > 0) == reached, name
    assert outputs == [target == "vision"]


def test_bfloat16_model_and_upcast_norms_run(tiny_model, tiny_batch, tmp_path):
    """R52: a bfloat16 model with the float32 gain, and the same with every norm upcast as for k-bit training."""
    tiny_model.save_pretrained(tmp_path)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    exact = tiny_model(**tiny_batch).logits
    seen = []
    model.model.multi_modal_projector.register_forward_hook(lambda m, a, o: seen.append(o.dtype))
    logits = model(**tiny_batch).logits
    torch.testing.assert_close(logits.float(), exact, rtol=0.1, atol=0.05)
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.to(torch.float32)
    assert model.get_decoder().norm.weight.dtype == weights(model).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**tiny_batch, labels=tiny_batch["input_ids"]).loss.backward()
    assert seen == [torch.bfloat16] * 2
    assert model.model.multi_modal_projector.linear_1.weight.grad.isfinite().all()


def test_fully_sharded_projector_gives_the_same_gradients(tiny_model, tiny_batch, tmp_path):
    """R23: out-of-place merging and the fused backward under FSDP2 (one gloo rank), also for a view written in place."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    inner = tiny_model.model
    features = inner.vision_tower(tiny_batch["pixel_values"], output_hidden_states=True).hidden_states[-2].detach()
    labels = tiny_batch["input_ids"]
    tiny_model(**tiny_batch, labels=labels).loss.backward()
    expected = {n: p.grad.clone() for n, p in inner.multi_modal_projector.named_parameters()}
    tiny_model.zero_grad(set_to_none=True)
    inner.multi_modal_projector(features).squeeze().sin().sum().backward()
    expected_view = {n: p.grad.clone() for n, p in inner.multi_modal_projector.named_parameters()}
    tiny_model.zero_grad(set_to_none=True)
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fully_shard(inner.multi_modal_projector, mesh=init_device_mesh("cpu", (1,)))
        tiny_model(**tiny_batch, labels=labels).loss.backward()
        for name, parameter in inner.multi_modal_projector.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[name])
        tiny_model.zero_grad(set_to_none=True)
        merged = torch.zeros_like(features[..., :1]).expand(-1, -1, 48).clone()
        mask = torch.ones_like(merged, dtype=torch.bool)
        merged = merged.masked_scatter(mask, inner.multi_modal_projector(features))
        merged.sin_().sum().backward()
        for name, parameter in inner.multi_modal_projector.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), expected_view[name])
    finally:
        destroy_process_group()


def test_compiled_model_has_the_same_gradients(tiny_config, tiny_batch):
    """R48: the whole model, compiled after a first call; with GWC off the norm's own tests cover it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = NormAlignLlavaForConditionalGeneration(tiny_config())
    batch = {**tiny_batch, "labels": tiny_batch["input_ids"]}
    model(**batch).loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    torch.compile(model, backend="aot_eager")(**batch).loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(expected) <= set(grads)
    for name, grad in grads.items():
        # the encoder's layer that takes no part has no gradient in eager mode, and zeros here
        torch.testing.assert_close(grad, expected.get(name, torch.zeros_like(grad)), rtol=1e-3, atol=1e-5)


def test_optimizer_decay_leaves_the_norm_out(tiny_model):
    """R86: by its name and by rule, gain and bias are never decayed."""
    from transformers import Trainer

    decayed = Trainer.get_decay_parameter_names(None, tiny_model)
    assert any("linear_1.weight" in name for name in decayed)
    assert not any("aligned_norm" in name for name in decayed)
    assert isinstance(tiny_model.get_aligned_norm(), AlignedNorm)
