"""An export loaded in 4 bits by bitsandbytes on the CPU: the language model alone is quantized, and all else holds."""

import copy
from importlib.util import find_spec

import pytest
import torch
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig

from normalign.modeling.modeling_normalign_llava import _with_parts_left_whole


needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason='bitsandbytes is not installed: pip install "normalign[quant]"'
)
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def load(folder, auto_class=AutoModelForImageTextToText, dtype=torch.float32, **settings):
    quantization = BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=dtype, **settings)
    return auto_class.from_pretrained(folder, trust_remote_code=True, dtype=dtype, quantization_config=quantization)


def layers_by_part(model):
    """Names of the classes of linear layers, by the part of the model that they are in."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            parts = ("vision_tower", "multi_modal_projector", "language_model", "lm_head")
            (part,) = [part for part in parts if part in name.split(".")]
            found.setdefault(part, set()).add(type(module).__name__)
    return found


@pytest.fixture(scope="module")
def inputs(mini_export):
    processor = AutoProcessor.from_pretrained(mini_export, trust_remote_code=True)
    picture = (torch.arange(3 * 40 * 60) % 251).reshape(40, 60, 3).to(torch.uint8).numpy()
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "What shape is it?"}]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


@pytest.fixture(scope="module")
def quantized(mini_export):
    return load(mini_export)


@needs_bitsandbytes
@pytest.mark.both_generations
@pytest.mark.parametrize("as_dict", [False, True])
def test_settings_of_bitsandbytes_say_what_to_leave_whole_unless_the_user_does(as_dict):
    given = dict(NF4) if as_dict else BitsAndBytesConfig(**NF4)
    before = copy.deepcopy(given)
    skipped = _with_parts_left_whole(given).llm_int8_skip_modules
    assert {"lm_head", "model.vision_tower", "model.multi_modal_projector"} <= set(skipped)
    assert (given if as_dict else vars(given)) == (before if as_dict else vars(before))
    own = {**NF4, "llm_int8_skip_modules": ["lm_head"]}
    assert _with_parts_left_whole(own if as_dict else BitsAndBytesConfig(**own)).llm_int8_skip_modules == ["lm_head"]


@pytest.mark.both_generations
def test_settings_of_other_quantizers_are_left_as_they_are():
    for settings in ({"quant_method": "gptq", "bits": 4}, object()):
        assert _with_parts_left_whole(settings) is settings


@needs_bitsandbytes
@pytest.mark.both_generations
@pytest.mark.parametrize("auto_class", [AutoModelForImageTextToText, AutoModel])
def test_the_language_models_layers_alone_become_4_bit(mini_export, auto_class):
    model = load(mini_export, auto_class)
    assert model.is_loaded_in_4bit
    head = {"lm_head": {"Linear"}} if auto_class is AutoModelForImageTextToText else {}
    assert layers_by_part(model) == {
        "vision_tower": {"Linear"},
        "multi_modal_projector": {"Linear"},
        "language_model": {"Linear4bit"},
        **head,
    }
    assert {p.dtype for p in model.get_aligned_norm().parameters()} == {torch.float32}


@needs_bitsandbytes
@pytest.mark.both_generations
def test_the_user_can_quantize_more(mini_export):
    found = layers_by_part(load(mini_export, llm_int8_skip_modules=["lm_head"]))
    assert found == {
        "vision_tower": {"Linear4bit"},
        "multi_modal_projector": {"Linear4bit"},
        "language_model": {"Linear4bit"},
        "lm_head": {"Linear"},
    }


@needs_bitsandbytes
@pytest.mark.both_generations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_logits_are_near_those_of_the_whole_model_and_it_generates(mini_export, inputs, composed, dtype):
    model = load(mini_export, dtype=dtype)
    its_inputs = inputs.to(dtype)
    logits = model(**its_inputs).logits.float()
    expected = composed[0](**inputs.to(torch.float32)).logits
    assert torch.isfinite(logits).all()
    assert cosine_similarity(logits[0, -1], expected[0, -1], dim=0) > 0.98
    assert (logits - expected).abs().max() > 0.01  # it is quantized
    answer = model.generate(**its_inputs, max_new_tokens=2, do_sample=False)
    assert answer.shape[1] == inputs["input_ids"].shape[1] + 2


@needs_bitsandbytes
@pytest.mark.both_generations
@torch.no_grad()
def test_visual_tokens_still_have_the_text_norm(quantized, inputs, composed):
    features = torch.cat(features_of(quantized, inputs))
    T = quantized.config.aligned_norm["target_norm"]
    torch.testing.assert_close(features.norm(dim=-1), torch.full(features.shape[:1], T), rtol=1e-5, atol=0)
    torch.testing.assert_close(features, torch.cat(features_of(composed[0], inputs)), rtol=1e-5, atol=1e-6)


def features_of(model, inputs):
    features = model.get_image_features(pixel_values=inputs["pixel_values"])
    return getattr(features, "pooler_output", features)


@needs_bitsandbytes
@pytest.mark.both_generations
def test_gradients_pass_through_4_bit_layers_and_gwc_divides_what_stands_before_the_norm(mini_export, inputs):
    """As QLoRA trains: the projector's gradient is 1/mu of the one without GWC, the gain's is the same."""
    gradients = {}
    for gwc in (True, False):
        model = load(mini_export).train()
        norm = model.get_aligned_norm()
        norm.gwc, mu = gwc, norm.weight.detach().abs().mean()
        model.requires_grad_(False)
        model.base_model.multi_modal_projector.requires_grad_(True)
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients[gwc] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients[True]) == 6 and gradients[True].keys() == gradients[False].keys()
    for name, without in gradients[False].items():
        assert without.norm() > 0, name
        expected = without if "aligned_norm" in name else without / mu
        torch.testing.assert_close(gradients[True][name], expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@needs_bitsandbytes
@pytest.mark.both_generations
@torch.no_grad()
def test_a_4_bit_model_that_is_saved_before_use_loads_again_the_same(mini_export, inputs, tmp_path):
    model = load(mini_export)
    model.save_pretrained(tmp_path)
    again, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path, trust_remote_code=True, dtype=torch.float32, output_loading_info=True
    )
    assert {key: list(value) for key, value in info.items() if value} == {}
    assert layers_by_part(again) == layers_by_part(model)
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)


@needs_bitsandbytes
@pytest.mark.both_generations
@torch.no_grad()
def test_a_4_bit_model_laid_out_anew_for_the_cpu_is_not_saved_wrong(mini_export, inputs, tmp_path):
    model = load(mini_export)
    expected = model(**inputs).logits
    if any(getattr(getattr(p, "quant_state", None), "packing_format_for_cpu", False) for p in model.parameters()):
        with pytest.raises(ValueError, match="Load the model again and save it before it is used"):
            model.save_pretrained(tmp_path)
        assert not list(tmp_path.iterdir())
        return
    # bitsandbytes does so only on CPUs with bfloat16 instructions
    model.save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path, trust_remote_code=True, dtype=torch.float32)
    assert torch.equal(again(**inputs).logits, expected)
