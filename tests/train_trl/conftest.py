"""Two tiny random backbones on disk, and recipes that train what is composed of them for a few steps."""

import pytest


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def backbones(tmp_path_factory):
    """Folders of a SigLIP encoder (4 visual tokens) and a Llama with a byte-level tokenizer and ChatML turns."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        SiglipImageProcessor,
        SiglipVisionConfig,
        SiglipVisionModel,
    )

    folder = tmp_path_factory.mktemp("backbones")
    torch.manual_seed(0)
    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=8
    )
    SiglipVisionModel(vision).save_pretrained(folder / "vision")
    SiglipImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder / "vision")

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*specials, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    ).save_pretrained(folder / "text")
    text = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(text).save_pretrained(folder / "text")
    return folder


@pytest.fixture(scope="session")
def recipe_file(backbones, tmp_path_factory):
    """A function that writes a recipe of two steps of four rows, changed by `changes`, and returns its path."""
    import yaml

    def write(stage, folder, **changes):
        recipe = {
            "name": f"stage{stage}",
            "output_dir": str(folder / f"stage{stage}"),
            "data": {"rows": 8, "stage": stage},
            "batch_size": 4,
            "logging_steps": 1,
            "schedule": "constant",
            "warmup": 0,
            "seed": 1,
            **({"from_stage": "stage1"} if stage == 2 else {}),
            **({"tune": {"language": "full"}} if stage == 2 else {}),
        }
        if stage == 1 and "model" not in changes:
            recipe["compose"] = {"vision": str(backbones / "vision"), "text": str(backbones / "text"), "seed": 0}
        recipe.update(changes)
        path = tmp_path_factory.mktemp("recipes") / f"stage{stage}.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return path

    return write
