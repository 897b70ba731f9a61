"""What this generation of transformers exports, the other one loads: the same inputs, logits and answers."""

import inspect
import json
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, BitImageProcessor, CLIPImageProcessor, LlavaProcessor, SiglipImageProcessor

from normalign.hub_upload import export, load_in_clean_process
from normalign.hub_upload.both_generations import (
    TRIED_TEXT_TYPES,
    TRIED_VISION_TYPES,
    config_for_both,
    limits_of_the_other_generation,
    older_name,
    processor_config_for_both,
    rope_for_4,
    tokenizer_config_for_both,
    write_for_both_generations,
)
from normalign.modeling.configuration_normalign_llava import NormAlignLlavaConfig
from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration

from ..conftest import IMAGE_TOKEN, TINY_TEXT, TINY_VISION
from . import load_exports
from .conftest import CHAT_TEMPLATE
from .load_exports import GENERATION, seen_and_said


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# as transformers 4 takes them; 5 reads them too
GEMMA3 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_theta": 5e5,
    "rope_local_base_freq": 2e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def rope(theta, scaling=None):
    """Settings of rotary embeddings as this generation takes them."""
    if GENERATION == 4:
        return {"rope_theta": theta, "rope_scaling": scaling}
    return {"rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": theta}}


CASES = {
    "clip": {"vision": "clip_vision_model", "every_way": True},
    "dinov2": {"vision": "dinov2", "every_way": True},
    "theta_500000": {"text": rope(500000.0), "shard": "50KB"},
    "theta_500000_tied": {"text": rope(500000.0), "tie": True},
    "llama3": {"text": rope(500000.0, LLAMA3), "every_way": True},
    "llama3_tied": {"text": rope(500000.0, LLAMA3), "tie": True},
    "yarn": {"text": rope(10000.0, YARN)},
    "qwen2_tied": {"language": "qwen2", "text": rope(1e6), "tie": True},
    "gemma3_linear": {"language": "gemma3_text", "text": GEMMA3},
    "bfloat16": {"text": rope(500000.0, LLAMA3), "dtype": torch.bfloat16},
}
# Rewritten alone, without the rest of an export: many families, and many shards.
REWRITTEN = {
    "sharded": {"shard": "20KB"},
    **{f"vision_{name}": {"vision": name} for name in sorted(TRIED_VISION_TYPES)},
    **{f"text_{name}": {"language": name} for name in sorted(TRIED_TEXT_TYPES)},
}
EVERY_WAY = ["composed", *(name for name, case in CASES.items() if case.get("every_way"))]
WITHOUT_CLASS_TOKEN = ("siglip_vision_model", "aimv2_vision_model")
FURTHER_TOKENS = {"dinov2_with_registers": 4, "deit": 1}


def make_model(vision="siglip_vision_model", language="llama", text=None, tie=False, dtype=torch.float32, **_):
    """A random model of these parts with a processor, whose weights answer more than one word."""
    sizes = {**TINY_VISION, "use_mask_token": False}
    vision_config = AutoConfig.for_model(vision, **sizes)
    text_config = AutoConfig.for_model(language, **{**TINY_TEXT, **(text or {}), "tie_word_embeddings": tie})
    class_token = vision not in WITHOUT_CLASS_TOKEN
    further = FURTHER_TOKENS.get(vision, 0)
    config = NormAlignLlavaConfig(
        vision_config=vision_config.to_dict(),
        text_config=text_config.to_dict(),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=4 + further,
        vision_feature_select_strategy="default" if class_token else "full",
        tie_word_embeddings=tie,
    )
    torch.manual_seed(0)
    model = NormAlignLlavaForConditionalGeneration(config).eval()
    model.initialize_aligned_norm_()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.to(dtype)


def make_processor(processor, model):
    """The processor that tests share, with the image processor that such an encoder has and its number of tokens."""
    vision = model.config.vision_config.model_type
    if vision == "clip_vision_model":
        image_processor = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16)
    elif vision == "dinov2":
        image_processor = BitImageProcessor(size={"shortest_edge": 16}, crop_size=16)
    else:
        image_processor = SiglipImageProcessor(size={"height": 16, "width": 16})
    strategy = model.config.vision_feature_select_strategy
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=processor.tokenizer,
        patch_size=8,
        vision_feature_select_strategy=strategy,
        chat_template=CHAT_TEMPLATE,
        image_token="<image>",
        num_additional_image_tokens=(strategy == "default") + FURTHER_TOKENS.get(vision, 0),
    )


def save(model, processor, folder, **options):
    model.save_pretrained(folder, **options)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exported(processor, composed, tmp_path_factory):
    """The folder of all exports, and what each model in memory saw and said."""
    root, sources = tmp_path_factory.mktemp("exports"), tmp_path_factory.mktemp("sources")
    expected = {"composed": seen_and_said(*composed)}
    export(save(*composed, sources / "composed"), root / "composed")
    for name, case in CASES.items():
        model = make_model(**case)
        its_processor = make_processor(processor, model)
        export(save(model, its_processor, sources / name), root / name, max_shard_size=case.get("shard"))
        if "dtype" in case:
            # a model that was cast in memory has rotary embeddings of that precision too, one that is loaded has not
            model = NormAlignLlavaForConditionalGeneration.from_pretrained(sources / name, dtype="auto").eval()
        expected[name] = seen_and_said(model, its_processor)
    for name, case in REWRITTEN.items():
        model = make_model(**case)
        its_processor = make_processor(processor, model)
        expected[name] = seen_and_said(model, its_processor)
        write_for_both_generations(save(model, its_processor, root / name, max_shard_size=case.get("shard", "1GB")))
    return root, expected


def other_python() -> Path:
    """The interpreter of the other generation; the test is skipped where there is none."""
    checkout = Path(__file__).parents[2]
    folder = ".venv" if GENERATION == 4 else ".venv-transformers4"
    named = os.environ.get("NORMALIGN_OTHER_PYTHON")
    python = Path(named) if named else checkout / folder / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {python}, so no other generation of transformers: `make test` makes it")
    return python


SCRIPT = """
import runpy, numpy as np
names = runpy.run_path(ARGUMENTS["load_exports"])
RESULT["generation"] = names["GENERATION"]
RESULT["reports"], arrays = names["load_all"](FOLDER, ARGUMENTS["every_way"])
np.savez(ARGUMENTS["arrays"], **arrays)
"""


@pytest.fixture(scope="module")
def loaded(exported, tmp_path_factory):
    """What the other generation found, in one process without normalign and without network for all exports."""
    python = other_python()
    arrays = tmp_path_factory.mktemp("loaded") / "arrays.npz"
    arguments = {"load_exports": inspect.getfile(load_exports), "every_way": EVERY_WAY, "arrays": str(arrays)}
    report = load_in_clean_process(exported[0], SCRIPT, arguments, python=python)
    result = report["result"]
    if result["generation"] == GENERATION:
        pytest.skip(f"{python} has transformers {GENERATION} as well; NORMALIGN_OTHER_PYTHON names the other one")
    assert report["network_attempts"] == []
    return result["reports"], dict(np.load(arrays))


pytestmark = pytest.mark.both_generations


# --- exported here, loaded there


@pytest.mark.parametrize("name", ["composed", *CASES, *REWRITTEN])
def test_the_other_generation_sees_and_says_the_same(exported, loaded, name):
    expected, (reports, arrays) = exported[1][name], loaded
    classes = [case.split("/")[1] for case in reports if case.startswith(f"{name}/") and "class" in reports[case]]
    assert len(classes) == (3 if name in EVERY_WAY else 1)
    for auto_class in classes:
        report = reports[f"{name}/{auto_class}"]
        assert report["problems"] == {}
        assert report["dtype"] == str(CASES.get(name, {}).get("dtype", torch.float32))
        found = {key: arrays.get(f"{name}/{auto_class}/{key}") for key in expected}
        if auto_class != "AutoModel":
            assert np.array_equal(found["input_ids"], expected["input_ids"])
            assert np.array_equal(found["pixel_values"], expected["pixel_values"])
            # mixtures of experts and Chinese-CLIP add in another order; the others are equal bit for bit
            np.testing.assert_allclose(found["logits"], expected["logits"], rtol=0, atol=1e-5)
            assert np.array_equal(found["answer"], expected["answer"])
        np.testing.assert_allclose(found["hidden_states"], expected["hidden_states"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", EVERY_WAY)
def test_the_other_generations_pipeline_answers_the_same(exported, loaded, name, processor, composed):
    tokenizer = (composed[1] if name == "composed" else processor).tokenizer
    expected = exported[1][name]
    answer = tokenizer.decode(expected["answer"][0, expected["input_ids"].shape[1] :], skip_special_tokens=True)
    assert loaded[0][f"{name}/pipeline"]["answer"].strip() == answer.strip()


def test_the_other_generation_uses_its_own_classes(loaded):
    assert {f"llama3/{name}" for name in load_exports.AUTO_CLASSES[9 - GENERATION]} <= set(loaded[0])
    for case, report in loaded[0].items():
        if "class" in report:
            without_head = case.endswith("/AutoModel")
            assert report["class"] == f"NormAlignLlava{'Model' if without_head else 'ForConditionalGeneration'}"


def test_an_export_is_exported_again_without_a_change(exported, tmp_path):
    again = export(exported[0] / "llama3", tmp_path / "again")
    for file in again.iterdir():
        assert file.read_bytes() == (exported[0] / "llama3" / file.name).read_bytes(), file.name


def test_cards_say_that_both_generations_load_it(exported):
    for name in ("composed", *CASES):
        card = (exported[0] / name / "README.md").read_text(encoding="utf-8")
        assert "loads with transformers 5 and 4.57" in card


def test_what_the_other_generation_cannot_have_is_in_the_card_and_the_export_works(processor, tmp_path):
    model = make_model(language="gemma")
    source = save(model, make_processor(processor, model), tmp_path / "source")
    card = (export(source, tmp_path / "out") / "README.md").read_text(encoding="utf-8")
    assert "loads with transformers 5 and 4.57" not in card
    assert f"not {9 - GENERATION}: transformers 4.57 multiplies visual tokens, too, by Gemma's factor" in card


# --- the pieces


def test_names_of_weights_get_a_level_only_where_the_older_generation_has_one():
    new, old = "model.vision_tower.encoder.layers.0.weight", "model.vision_tower.vision_model.encoder.layers.0.weight"
    assert older_name(new, "siglip_vision_model") == older_name(old, "clip_vision_model") == old
    assert older_name("vision_tower.x", "siglip_vision_model") == "vision_tower.vision_model.x"
    assert older_name(new, "dinov2") == new
    assert older_name("lm_head.weight", "siglip_vision_model") == "lm_head.weight"


def test_renamed_weights_keep_values_metadata_and_alignment(exported):
    folder = exported[0] / "sharded"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    expected = dict(make_model().named_parameters())
    for file in files:
        assert struct.unpack("<Q", file.read_bytes()[:8])[0] % 8 == 0
        with safe_open(file, framework="pt") as weights:
            assert weights.metadata() == {"format": "pt"}
            for name in weights.keys():  # noqa: SIM118 - it is no dict
                assert index["weight_map"][name] == file.name
                here = name if name in expected else name.replace("vision_tower.vision_model.", "vision_tower.")
                assert torch.equal(weights.get_tensor(name), expected.pop(here))
    assert expected == {}
    assert not list(folder.glob("*.renamed"))


@pytest.mark.parametrize(
    ("rope_parameters", "expected"),
    [
        ({"rope_theta": 5e5, "rope_type": "default"}, {"rope_theta": 5e5, "rope_scaling": None}),
        ({"rope_theta": 5e5, **LLAMA3}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
        (
            {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_scaling": None},
        ),
        ({"rope_theta": 1e4, "rope_type": "proportional"}, None),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, None),
    ],
)
def test_rope_settings_of_the_older_generation(rope_parameters, expected):
    assert rope_for_4("llama", rope_parameters) == expected


def test_gemma_3_has_rope_settings_for_both_kinds_of_layers():
    parameters = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    assert rope_for_4("gemma3_text", parameters) == {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }


def config(vision="siglip_vision_model", text="llama", **settings):
    return {
        "dtype": "float32",
        "vision_config": {"model_type": vision},
        "text_config": {"model_type": text, **settings},
    }


def test_config_keeps_what_the_older_generation_has_no_setting_for():
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    both = config_for_both(config(text="olmo3", rope_parameters=nested))
    assert both["text_config"] == {"model_type": "olmo3", "rope_parameters": nested}
    assert both["dtype"] == both["torch_dtype"] == "float32"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"vision": "hiera"}, ["`hiera` was not tried on both"]),
        ({"text": "olmo3"}, ["`olmo3` was not tried on both"]),
        ({"text": "gemma2"}, ["multiplies visual tokens"]),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            ["rotary embeddings (several, by kind of layer)"],
        ),
        (
            {"rope_parameters": {"rope_type": "new", "rope_theta": 1e6}},
            ["no setting for its rotary embeddings (`new`)"],
        ),
    ],
)
def test_limits_of_the_other_generation_are_named(settings, expected):
    limits = limits_of_the_other_generation(config(**settings))
    assert len(limits) == len(expected)
    for limit, part in zip(limits, expected):
        assert part in limit


def test_tokenizer_settings_hold_lists_and_names_of_tokens_where_both_read_them():
    written_by_5 = {
        "backend": "tokenizers",
        "tokenizer_class": "TokenizersBackend",
        "extra_special_tokens": ["<row>"],
        "eos_token": "</s>",
        "image_token": "<image>",
        "add_bos_token": True,
    }
    both = tokenizer_config_for_both(written_by_5)
    assert both == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<row>"],
        "extra_special_tokens": {"image_token": "<image>"},
        "eos_token": "</s>",
        "image_token": "<image>",
        "add_bos_token": True,
    }
    assert tokenizer_config_for_both(both) == both


def test_image_processor_has_a_file_of_its_own_and_a_name_that_both_know():
    written_by_5 = {
        "processor_class": "LlavaProcessor",
        "patch_size": 8,
        "image_processor": {"image_processor_type": "SiglipImageProcessorPil", "size": {"height": 16, "width": 16}},
    }
    processor, image_processor = processor_config_for_both(written_by_5, {})
    assert processor == {"processor_class": "LlavaProcessor", "patch_size": 8}
    assert image_processor == {
        "image_processor_type": "SiglipImageProcessor",
        "processor_class": "LlavaProcessor",
        "size": {"height": 16, "width": 16},
    }
    assert processor_config_for_both(processor, image_processor) == (processor, image_processor)


def test_another_python_of_this_generation_is_no_other_generation(monkeypatch):
    monkeypatch.setenv("NORMALIGN_OTHER_PYTHON", sys.executable)
    assert other_python() == Path(sys.executable)
    monkeypatch.setenv("NORMALIGN_OTHER_PYTHON", "/no/such/python")
    with pytest.raises(pytest.skip.Exception, match="there is no /no/such/python"):
        other_python()
