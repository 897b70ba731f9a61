"""An adapter is merged into its base model and exported whole, or refused in one paragraph."""

import json
import re
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from normalign.assembly import load_adapter
from normalign.configuration.errors import NormalignError
from normalign.hub_upload import export
from normalign.hub_upload.ask_model import ask
from normalign.hub_upload.source import open_source
from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration

from .conftest import MAX_NEW_TOKENS


def make_adapter(base, folder, **settings):
    """An adapter on the folder `base` whose weights have all moved."""
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(base, dtype="auto")
    settings = {"target_modules": r".*language_model.*(q_proj|down_proj)", **settings}
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["multi_modal_projector", None])
def adapter(request, checkpoint, tmp_path_factory):
    saved = [request.param] if request.param else None
    return make_adapter(checkpoint, tmp_path_factory.mktemp("adapter") / "lora", modules_to_save=saved)


@pytest.fixture
def broken(checkpoint, tmp_path):
    """An adapter's folder that a test may spoil, and a function that puts other weights in it."""
    folder = make_adapter(checkpoint, tmp_path / "lora", modules_to_save=["multi_modal_projector"])

    def spoil(change):
        weights = load_file(folder / "adapter_model.safetensors")
        save_file(
            dict(change(*item) for item in weights.items() if change(*item)), folder / "adapter_model.safetensors"
        )

    return folder, spoil


def refusal(folder, out):
    with pytest.raises(NormalignError) as caught:
        export(folder, out)
    assert "\n" not in str(caught.value) and not out.exists()
    return str(caught.value)


@pytest.mark.both_generations
def test_an_adapter_becomes_a_whole_model_with_the_same_logits(adapter, checkpoint, processor, questions, tmp_path):
    """R61, R33, R57: a merged folder has its processor and stands alone, with full saved modules and without."""
    out = export(adapter, tmp_path / "out")
    unmerged = load_adapter(NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint), adapter)
    base = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint).eval()
    merged = AutoModelForImageTextToText.from_pretrained(out, trust_remote_code=True).eval()
    its_processor = AutoProcessor.from_pretrained(out, trust_remote_code=True)
    answers, logits = ask(merged, its_processor, *questions, max_new_tokens=MAX_NEW_TOKENS)
    expected_answers, expected = ask(unmerged, processor, *questions, max_new_tokens=MAX_NEW_TOKENS)
    of_base = ask(base, processor, *questions, max_new_tokens=MAX_NEW_TOKENS)[1]
    for found, wanted, without in zip(logits, expected, of_base, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=1e-5)
        assert abs(found - without).max() > 0.1
    assert answers == expected_answers
    assert not list(out.glob("adapter_*"))
    assert {"processor_config.json", "chat_template.jinja", "tokenizer.json"} <= {file.name for file in out.iterdir()}
    weights = load_file(out / "model.safetensors")
    assert weights.keys() == load_file(export(checkpoint, tmp_path / "plain") / "model.safetensors").keys()


def test_the_processor_that_an_adapter_was_saved_with_is_taken(adapter, processor, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "lora")
    processor.save_pretrained(folder)
    template = processor.chat_template + "{# of the adapter #}"
    (folder / "chat_template.jinja").write_text(template)
    assert (export(folder, tmp_path / "out") / "chat_template.jinja").read_text() == template


def test_a_bfloat16_base_keeps_its_number_formats(make_model, make_checkpoint, tmp_path):
    base = make_checkpoint(make_model().to(torch.bfloat16), tmp_path / "base")
    folder = make_adapter(base, tmp_path / "lora", modules_to_save=["multi_modal_projector"])
    weights = load_file(export(folder, tmp_path / "out") / "model.safetensors")
    formats = {"aligned_norm" in key: value.dtype for key, value in weights.items()}
    assert formats == {True: torch.float32, False: torch.bfloat16}


def test_a_base_model_from_the_hub_is_the_cards_base_model(exported, adapter, tmp_path):
    repo = Path(huggingface_hub.constants.HF_HUB_CACHE) / "models--someone--base"
    if not repo.exists():
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text("1" * 40)
        shutil.copytree(exported, repo / "snapshots" / ("1" * 40))
    folder = shutil.copytree(adapter, tmp_path / "lora")
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "someone/base"}))
    card = (export(folder, tmp_path / "out") / "README.md").read_text(encoding="utf-8")
    assert "base_model:\n- someone/base\n" in card
    assert "a PEFT adapter, which is merged into these weights" in card
    assert "adapter" not in (exported / "README.md").read_text(encoding="utf-8")
    assert "license_link: https://huggingface.co/someone/base\n" in card


def test_the_base_model_is_taken_at_the_revision_that_the_adapter_was_trained_on(
    exported, adapter, tmp_path, monkeypatch
):
    asked = []

    def fetched(name, *, revision, allow_patterns):
        asked.append((name, revision))
        return str(exported)

    monkeypatch.setattr(sys.modules[open_source.__module__], "snapshot_download", fetched)
    folder = shutil.copytree(adapter, tmp_path / "lora")
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings |= {"base_model_name_or_path": "someone/pinned", "revision": "v1"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    assert open_source(folder).base == exported and asked == [("someone/pinned", "v1")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda key, value: (f"x.{key}", value), r"0 fit"),
        (lambda key, value: (key, value[:0] if "lora_B" in key else value), r"of its weights are empty"),
        (
            lambda key, value: None if "projector" in key else (key, value),
            r"weights are missing.*multi_modal_projector",
        ),
        (lambda key, value: None if "lora" in key else (key, value), r"weights are missing.*lora"),
    ],
    ids=["no key matches", "empty tensors", "no projector", "no LoRA"],
)
def test_an_adapter_that_did_not_arrive_whole_is_refused(broken, tmp_path, change, words):
    """R57, R82: never a base model that is exported as if it were trained."""
    folder, spoil = broken
    spoil(change)
    message = refusal(folder, tmp_path / "out")
    assert re.search(words, message) and "does not fit" in message


def test_weights_that_are_not_finite_are_refused(broken, tmp_path):
    folder, spoil = broken
    spoil(lambda key, value: (key, value * float("nan") if "lora_B" in key else value))
    assert "NaNs detected" in refusal(folder, tmp_path / "out")


def test_a_base_model_that_has_moved_is_said(broken, tmp_path):
    folder, _ = broken
    settings = json.loads((folder / "adapter_config.json").read_text())
    moved = {**settings, "base_model_name_or_path": str(tmp_path / "gone")}
    (folder / "adapter_config.json").write_text(json.dumps(moved))
    message = refusal(folder, tmp_path / "out")
    assert "cannot be merged without its base model" in message and "gone does not exist" in message
    assert "base_model_name_or_path" in message


def test_a_quantised_base_model_is_refused(broken, checkpoint, tmp_path):
    """An adapter that was trained on 4-bit weights names the plain model, which is loaded in its own format."""
    folder, _ = broken
    base = shutil.copytree(checkpoint, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (base / "config.json").write_text(json.dumps(quantised))
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": str(base)}))
    assert "stored quantised (bitsandbytes" in refusal(folder, tmp_path / "out")
    assert "stored quantised (bitsandbytes" in refusal(base, tmp_path / "out")


def test_an_adapter_that_has_no_weights_of_the_model_is_refused(checkpoint, tmp_path):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    model.config.num_hidden_layers = model.config.text_config.num_hidden_layers
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"):
        setattr(model.config, name, getattr(model.config.text_config, name))
    adapted = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    adapted.save_pretrained(tmp_path / "prompts")
    message = refusal(tmp_path / "prompts", tmp_path / "out")
    assert "PROMPT_TUNING" in message and "cannot be merged" in message


def test_an_adapter_on_one_of_two_tied_weights_is_refused(make_model, make_checkpoint, tmp_path):
    """Merging into lm_head would move the embeddings too."""
    base = make_checkpoint(make_model(tie=True), tmp_path / "base")
    folder = make_adapter(base, tmp_path / "lora", target_modules=["lm_head"])
    message = refusal(folder, tmp_path / "out")
    assert "tied" in message and "was not exported" in message


def test_a_folder_with_a_model_and_an_adapter_is_refused(checkpoint, adapter, tmp_path):
    both = shutil.copytree(checkpoint, tmp_path / "both")
    shutil.copyfile(adapter / "adapter_config.json", both / "adapter_config.json")
    assert "holds a whole model" in refusal(both, tmp_path / "out")


def test_a_training_folder_is_told_its_newest_adapter(adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "run" / "checkpoint-5")
    assert "checkpoint-5: export that" in refusal(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("place", ["adapter", "base"])
def test_neither_the_adapter_nor_its_base_model_is_replaced(broken, checkpoint, place):
    folder, _ = broken
    out = {"adapter": folder, "base": checkpoint}[place]
    before = sorted(out.iterdir())
    with pytest.raises(NormalignError, match="would replace what it is made from"):
        export(folder, out, overwrite=True)
    assert sorted(out.iterdir()) == before
