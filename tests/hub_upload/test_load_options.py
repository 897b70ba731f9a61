"""An export answers the same however it is loaded: dtype, device map, attention, compiled, in batches, without pictures."""

import inspect

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from normalign.hub_upload import load_in_clean_process
from normalign.hub_upload.clean_process import OPTIONAL_PACKAGES

from . import load_options
from .load_options import DEVICE_MAPS, GENERATION, PROMPTS, TEXT, answers_of, logits_of


SCRIPT = """
import runpy, numpy as np
names = runpy.run_path(ARGUMENTS["load_options"])
RESULT["facts"], logits = names["load_with_options"](FOLDER, ARGUMENTS["work"])
np.savez(ARGUMENTS["arrays"], **logits)
"""
LOADED = ["float32", *(f"device_map {name}" for name in DEVICE_MAPS), "eager", "sdpa"]


@pytest.fixture(scope="module")
def loaded(exported, tmp_path_factory):
    """What a clean process, which has accelerate for the device maps, found with each option."""
    work = tmp_path_factory.mktemp("work")
    arguments = {
        "load_options": inspect.getfile(load_options),
        "work": str(work),
        "arrays": str(work / "arrays.npz"),
    }
    blocked = tuple(name for name in OPTIONAL_PACKAGES if name != "accelerate")
    report = load_in_clean_process(exported, SCRIPT, arguments, blocked=blocked)
    assert report["network_attempts"] == []
    return report["result"]["facts"], dict(np.load(work / "arrays.npz"))


@pytest.fixture(scope="module")
def logits(model, processor):
    """What the model in memory, which was never saved, says to each prompt."""
    return logits_of(model, processor)


pytestmark = pytest.mark.both_generations


@pytest.mark.parametrize("option", LOADED)
def test_logits_are_those_of_the_model_in_memory(loaded, logits, option):
    facts, arrays = loaded
    np.testing.assert_allclose(arrays[option], logits, rtol=0, atol=1e-5)
    assert facts[option]["dtypes"] == facts[option]["norm_dtypes"] == ["torch.float32"]


def test_bfloat16_keeps_the_norm_in_float32_and_is_near_float32(loaded, logits):
    facts, arrays = loaded
    assert facts["bfloat16"]["dtypes"] == ["torch.bfloat16"]
    assert facts["bfloat16"]["norm_dtypes"] == ["torch.float32"]
    assert np.isfinite(arrays["bfloat16"]).all()
    assert 0 < np.abs(arrays["bfloat16"] - logits[:1]).max() < 0.05 * np.abs(logits[:1]).max()


@pytest.mark.parametrize("name", DEVICE_MAPS)
def test_every_device_map_answers_the_same(loaded, model, processor, name):
    """R54: also where blocks, the projector with its norm, and the last norm are fetched from the disk for each call."""
    facts = loaded[0][f"device_map {name}"]
    assert facts["answers"] == answers_of(model, processor, PROMPTS)
    on_disk = {part for part, device in facts["device_map"].items() if device == "disk"}
    if name == "disk":
        assert on_disk == {part for part, device in DEVICE_MAPS["disk"].items() if device == "disk"}
        assert facts["offloaded"] > 10
    else:
        assert not on_disk and facts["offloaded"] == 0


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_attention_is_the_one_that_was_asked_for_in_every_part(loaded, name):
    assert loaded[0][name]["attention"] == [name] * 3


def test_an_unknown_attention_is_refused_by_name(loaded):
    message = loaded[0]["unknown attention"]
    assert "quick" in message and "sdpa" in message and "eager" in message


def test_a_compiled_model_gives_the_logits_of_the_one_that_is_not(loaded, logits):
    facts, arrays = loaded
    assert facts["whole graph"] == (GENERATION > 4)
    np.testing.assert_allclose(arrays["compiled"], logits[:1], rtol=0, atol=1e-5)


def test_a_batch_padded_on_the_left_answers_as_each_prompt_alone(loaded, model, processor):
    """Prompts with one picture, two and none, each with its own pictures."""
    facts = loaded[0]
    assert facts["in one batch"] == facts["one by one"] == answers_of(model, processor, PROMPTS)
    assert len({tuple(answer) for answer in facts["one by one"]}) == len(PROMPTS)
    assert facts["text alone in one batch"] == [facts["one by one"][1]] * 2


def test_text_likelihoods_of_auto_model_for_causal_lm_are_the_bare_language_models(loaded, model, processor):
    """R74: so lm-eval's text tasks score the language model, and need no image."""
    facts, arrays = loaded
    assert facts["causal class"] == "NormAlignLlavaForConditionalGeneration"
    bare = LlamaForCausalLM(model.config.text_config).eval()
    bare.model.load_state_dict(model.get_decoder().state_dict())
    bare.lm_head.load_state_dict(model.lm_head.state_dict())
    inputs = processor.tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad():
        expected = bare(**inputs).logits[0].log_softmax(-1)
    found = torch.from_numpy(arrays["text"]).log_softmax(-1)
    following = inputs["input_ids"][0, 1:, None]
    assert following.numel() == 6
    torch.testing.assert_close(found[:-1].gather(1, following), expected[:-1].gather(1, following), rtol=0, atol=1e-5)
