"""Tiny random backbones as folders, of every family that compose was tried with, and models composed from them."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BitImageProcessor,
    CLIPImageProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
)


WIDTH = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
PICTURE = {"image_size": 32, "patch_size": 8}
VOCABULARY = 320

SQUARE = {"height": 32, "width": 32}
VISION_FAMILIES = {
    "siglip": ("siglip", lambda: SiglipImageProcessor(size=SQUARE)),
    "siglip_vision": ("siglip_vision_model", lambda: SiglipImageProcessor(size=SQUARE)),
    "clip": ("clip", lambda: CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SQUARE)),
    "dinov2": ("dinov2", lambda: BitImageProcessor(size={"shortest_edge": 40}, crop_size=SQUARE)),
    "dinov2_registers": (
        "dinov2_with_registers",
        lambda: BitImageProcessor(size={"shortest_edge": 40}, crop_size=SQUARE),
    ),
}
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|finetune_right_pad_id|>"]
GEMMA = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
# model type, special tokens, tokenizer settings, whether a bos token is put first, config settings
TEXT_FAMILIES = {
    "llama3": ("llama", LLAMA3, {"bos_token": LLAMA3[0], "eos_token": "<|eot_id|>"}, True, {}),
    "smollm2": (
        "llama",
        CHATML,
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
        False,
        {"tie_word_embeddings": True},
    ),
    "qwen2": (
        "qwen2",
        CHATML,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        False,
        {"vocab_size": VOCABULARY + 32},  # spare rows, as Qwen's table has
    ),
    "qwen3": (
        "qwen3",
        CHATML,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        False,
        {"tie_word_embeddings": True, "head_dim": 24, "rope_theta": 500000.0},
    ),
    "gemma": (
        "gemma",
        GEMMA,
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
        True,
        {"head_dim": 16, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "gemma3_text",
        GEMMA,
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
        True,
        {"head_dim": 16, "tie_word_embeddings": True, "sliding_window": 16},
    ),
    "gemma2": (
        "gemma2",
        GEMMA,
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
        True,
        {"head_dim": 16, "tie_word_embeddings": True},
    ),
    "plain": ("llama", ["<s>", "</s>", "<unk>"], {"bos_token": "<s>", "eos_token": "</s>"}, True, {}),
}
TRIED = ["llama3", "smollm2", "qwen2", "qwen3", "gemma", "gemma3"]


def save_vision(family: str, folder) -> None:
    model_type, image_processor = VISION_FAMILIES[family]
    options = {**WIDTH, **PICTURE}
    if model_type in ("siglip", "clip"):
        text = {**WIDTH, "vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2}
        config = AutoConfig.for_model(model_type, text_config=text, vision_config=options)
    else:
        config = AutoConfig.for_model(model_type, **options)
    AutoModel.from_config(config).save_pretrained(folder)
    image_processor().save_pretrained(folder)


def save_tokenizer(special: list[str], options: dict, starts_with_bos: bool, folder) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "The picture shows a red house. What is in the image? user assistant system model USER ASSISTANT: A seven."
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 4, trainer)
    if starts_with_bos:
        bos = options["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(folder)


def save_text(family: str, folder) -> None:
    model_type, special, options, starts_with_bos, settings = TEXT_FAMILIES[family]
    save_tokenizer(special, options, starts_with_bos, folder)
    ids = {f"{name}_token_id": special.index(options[f"{name}_token"]) for name in ("eos",)}
    settings = {**WIDTH, "vocab_size": VOCABULARY, "num_key_value_heads": 1, "bos_token_id": None, **ids, **settings}
    if model_type == "llama" or model_type.startswith("qwen"):
        settings.setdefault("tie_word_embeddings", False)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, pad_token_id=None, max_position_embeddings=256, **settings)
    )
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8)
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def backbone(tmp_path_factory):
    """A function that gives the folder of a tiny backbone, by family; each is made once."""
    root, made = tmp_path_factory.mktemp("backbones"), {}

    def folder_of(family: str) -> str:
        if family not in made:
            torch.manual_seed(len(family))
            (save_vision if family in VISION_FAMILIES else save_text)(family, root / family)
            made[family] = str(root / family)
        return made[family]

    return folder_of


@pytest.fixture(scope="session")
def composed(backbone):
    """A function that composes tiny backbones, each pair once; tests must not change the result."""
    from normalign.assembly import compose

    made = {}

    def pair(vision: str = "siglip", text: str = "smollm2"):
        if (vision, text) not in made:
            made[vision, text] = compose(backbone(vision), backbone(text), seed=0)
        return made[vision, text]

    return pair


@pytest.fixture(scope="session")
def saved(composed, tmp_path_factory):
    """A function that gives the folder of a composed pair, saved with its processor."""
    made = {}

    def folder_of(vision: str = "siglip", text: str = "smollm2"):
        if (vision, text) not in made:
            folder = tmp_path_factory.mktemp(f"{vision}_{text}")
            model, processor = composed(vision, text)
            model.save_pretrained(folder)
            processor.save_pretrained(folder)
            made[vision, text] = folder
        return made[vision, text]

    return folder_of
