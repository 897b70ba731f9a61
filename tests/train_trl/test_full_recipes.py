"""The full-scale recipes with tiny random backbones of the same classes, and a small LLaVA JSON, in place of the real ones."""

import json
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoProcessor

from normalign.modeling.aligned_norm import text_embedding_norm
from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign.train_trl import load_recipe, train
from normalign.train_trl.parts import PARTS, part_of
from normalign.train_trl.training import load_or_compose


LOG_KEYS = {"step", "loss", "clip_factor", "norm/visual_in", "norm/visual_out", "norm/text", "norm/ratio"}
LOG_KEYS |= {f"aligned_norm/{name}" for name in ("gain_abs_mean", "gain_l2", "mu")}
LOG_KEYS |= {f"{figure}/{part}" for figure in ("grad_norm", "update") for part in PARTS}
CODE = {"aligned_norm.py", "configuration_normalign_llava.py", "modeling_normalign_llava.py"}

# as Llama-3.2's in its turns and its end of turn; the system's date is left out
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """SigLIP and Llama of the classes of SigLIP-SO400M and Llama-3.2, with two layers, and captions for two steps of 256."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        SiglipImageProcessor,
        SiglipVisionConfig,
        SiglipVisionModel,
    )

    folder = tmp_path_factory.mktemp("stand_ins")
    torch.manual_seed(0)
    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    SiglipVisionModel(vision).save_pretrained(folder / "vision")
    SiglipImageProcessor(size={"height": 28, "width": 28}).save_pretrained(folder / "vision")
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"]
    specials += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*letters, *specials])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=specials[0], eos_token=specials[5], chat_template=LLAMA3
    ).save_pretrained(folder / "text")
    text = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        bos_token_id=vocabulary[specials[0]],
        eos_token_id=[vocabulary[name] for name in ("<|end_of_text|>", "<|eot_id|>")],
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(text).save_pretrained(folder / "text")

    rows = []
    for i in range(12):
        Image.new("RGB", (20 + 3 * i, 40 - 2 * i), (20 * i, 255 - 20 * i, 90)).save(folder / f"{i}.jpg")
    for i in range(512):
        turns = [{"from": "human", "value": "What?\n<image>"}, {"from": "gpt", "value": "x" * (1 + i % 24)}]
        rows.append({"id": str(i), "image": f"{i % 12}.jpg", "conversations": turns})
    (folder / "captions.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture(scope="module")
def stage1(stand_ins, tmp_path_factory):
    """Two steps of the recipe: its folder, and the weights at the start."""
    overrides = {
        "compose.vision": str(stand_ins / "vision"),
        "compose.text": str(stand_ins / "text"),
        "data.path": str(stand_ins / "captions.json"),
        "data.images": str(stand_ins),
        "max_steps": 2,
        "output_dir": str(tmp_path_factory.mktemp("runs") / "stage1"),
    }
    recipe = load_recipe("llava15_llama32_3b/stage1", overrides)
    model, _ = load_or_compose(recipe, [])
    return SimpleNamespace(recipe=recipe, start=model, out=train("llava15_llama32_3b/stage1", overrides))


def test_stage_1_of_the_paper_runs_as_it_is_written(stage1):
    """Nothing is changed but the backbones, the data and their number of steps."""
    recipe, out = stage1.recipe, stage1.out
    assert (recipe.batch_size, recipe.per_device_batch_size, recipe.batching) == (256, 16, "padding_free")
    assert (recipe.precision, recipe.group_by_length, recipe.arm) == ("bfloat16", True, "aligned_gwc")
    assert {file.name for file in out.iterdir()} >= CODE | {"config.json", "processor_config.json", "recipe.yaml"}
    assert AutoProcessor.from_pretrained(out).chat_template
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(out)
    start, end = (dict(some.named_parameters()) for some in (stage1.start, model))
    moved = {(part_of(name), not torch.equal(end[name], start[name])) for name in start}
    assert start.keys() == end.keys()
    assert moved == {("vision", False), ("projector", True), ("norm", True), ("language", False)}
    gain, T = stage1.start.get_aligned_norm().weight, model.config.aligned_norm["target_norm"]
    expected = text_embedding_norm(stage1.start.get_input_embeddings())
    assert pytest.approx(expected, rel=1e-6) == T
    assert torch.equal(gain, torch.full_like(gain, T / 32**0.5))
    assert {value.dtype for name, value in load_file(out / "model.safetensors").items() if "aligned_norm" in name} == {
        torch.float32
    }
    [record] = map(json.loads, (out / "train_log.jsonl").read_text().splitlines())
    assert record.keys() >= LOG_KEYS and all(record[key] is not None for key in LOG_KEYS)
    assert (record["step"], record["epoch"], record["padding_share"]) == (2, 1.0, 0)
    assert record["aligned_norm/gwc_fired"] is True
