"""Adapters: LoRA, projector and norm come back together, in a new process too; anything less is an error."""

import json
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from normalign.assembly.adapters import load_adapter
from normalign.configuration.errors import NormalignError
from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration


@pytest.fixture
def trained(tiny_config, tiny_batch, tmp_path):
    """A base model's folder, an adapter trained on it for two steps (LoRA, projector and norm), and its logits."""
    torch.manual_seed(0)
    base = NormAlignLlavaForConditionalGeneration(tiny_config())
    base.save_pretrained(tmp_path / "base")
    base = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path / "base")
    settings = LoraConfig(
        task_type="CAUSAL_LM", target_modules=r".*language_model.*q_proj", modules_to_save=["multi_modal_projector"]
    )
    adapted = get_peft_model(base, settings)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        adapted(**tiny_batch, labels=tiny_batch["input_ids"]).loss.backward()
        optimizer.step()
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        logits = adapted.eval()(**tiny_batch).logits
    return tmp_path, logits


def load(folder):
    return load_adapter(NormAlignLlavaForConditionalGeneration.from_pretrained(folder / "base"), folder / "adapter")


def test_projector_and_norm_of_an_adapter_come_back_in_a_new_process(trained, tiny_batch):
    """R26."""
    folder, logits = trained
    torch.save(tiny_batch, folder / "batch.pt")
    script = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from normalign.assembly.adapters import load_adapter\n"
        "from normalign import NormAlignLlavaForConditionalGeneration as Model\n"
        "folder = Path(sys.argv[1])\n"
        "model = load_adapter(Model.from_pretrained(folder / 'base'), folder / 'adapter').eval()\n"
        "with torch.no_grad(): torch.save(model(**torch.load(folder / 'batch.pt')).logits, folder / 'logits.pt')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True, capture_output=True)
    assert torch.equal(torch.load(folder / "logits.pt"), logits)
    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    base = load_file(folder / "base" / "model.safetensors")
    for name in ("linear_1.weight", "linear_2.bias", "aligned_norm.weight", "aligned_norm.bias"):
        (key,) = (key for key in saved if key.endswith(f"multi_modal_projector.{name}"))
        assert not torch.equal(saved[key], base[f"model.multi_modal_projector.{name}"])


@pytest.mark.parametrize("lost", ["multi_modal_projector", "aligned_norm", "lora_B"])
def test_an_adapter_without_some_of_its_weights_is_refused(trained, lost):
    """R26: never a projector that is fresh noise."""
    folder, _ = trained
    file = folder / "adapter" / "adapter_model.safetensors"
    save_file({key: value for key, value in load_file(file).items() if lost not in key}, file)
    with pytest.raises(NormalignError, match=f"missing.*{lost}"):
        load(folder)


def test_an_adapter_whose_keys_match_nothing_is_refused(trained):
    folder, _ = trained
    file = folder / "adapter" / "adapter_model.safetensors"
    save_file({key.replace("language_model", "text_model"): value for key, value in load_file(file).items()}, file)
    with pytest.raises(NormalignError, match=r"missing.*no place.*text_model"):
        load(folder)


def test_merged_adapter_is_a_whole_folder(trained, tiny_batch):
    folder, logits = trained
    load(folder).merge_and_unload().save_pretrained(folder / "merged")
    merged = NormAlignLlavaForConditionalGeneration.from_pretrained(folder / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(**tiny_batch).logits, logits, rtol=1e-4, atol=1e-5)
    assert (folder / "merged" / "modeling_normalign_llava.py").is_file()
    assert "AutoModelForImageTextToText" in json.loads((folder / "merged" / "config.json").read_text())["auto_map"]


def test_a_folder_that_is_no_adapter_is_named(trained):
    folder, _ = trained
    with pytest.raises(NormalignError, match="base is not the folder of an adapter"):
        load_adapter(None, folder / "base")


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_file_of_an_adapter_that_is_cut_off_is_named(trained, file):
    folder, _ = trained
    whole = (folder / "adapter" / file).read_bytes()
    (folder / "adapter" / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(NormalignError, match="adapter' could not be loaded") as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    if file.endswith(".safetensors"):
        assert f"{folder / 'adapter' / file} is truncated or corrupt" in str(caught.value)
