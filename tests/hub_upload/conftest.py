"""A checkpoint as a trainer leaves it, its export, and what the model in memory says to two questions."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlavaProcessor, PreTrainedTokenizerFast, SiglipImageProcessor

from normalign.hub_upload import export
from normalign.hub_upload.ask_model import ask


TRAINING_FILES = (
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "scaler.pt",
    "training_args.bin",
    "trainer_state.json",
)
MAX_NEW_TOKENS = 4
IMAGE_TOKEN_ID = 60


CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- message['role'] + ' ' -}}
{%- for part in message['content'] -%}
{{- '<image> ' if part['type'] == 'image' else part['text'] + ' ' -}}
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant ' -}}{%- endif -%}
"""


@pytest.fixture(scope="session")
def processor():
    """The processor that fits `tiny_config`: 64 words, `<image>` among them, pictures of 16 x 16 in 4 patches."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", "user", "assistant"]
    vocabulary = {word: i for i, word in enumerate(words)}
    vocabulary |= {f"w{i}": i for i in range(len(words), 64) if i != IMAGE_TOKEN_ID}
    vocabulary["<image>"] = IMAGE_TOKEN_ID
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
        model_input_names=["input_ids", "attention_mask"],
    )
    return LlavaProcessor(
        image_processor=SiglipImageProcessor(size={"height": 16, "width": 16}),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
        image_token="<image>",
        num_additional_image_tokens=0,
    )


@pytest.fixture(scope="session")
def make_model(tiny_config):
    """A function that makes a model with a gain that training has moved and weights that answer more than one word."""
    from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration

    def make(**options):
        torch.manual_seed(0)
        model = NormAlignLlavaForConditionalGeneration(tiny_config(**options)).eval()
        if model.get_aligned_norm() is not None:
            # as compose does; a model of random weights keeps no T
            model.initialize_aligned_norm_()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "aligned_norm" in name:
                    parameter.add_(torch.rand_like(parameter) * 0.01)
                elif parameter.dim() > 1:
                    parameter.mul_(4)
        return model

    return make


@pytest.fixture(scope="session")
def model(make_model):
    return make_model()


@pytest.fixture(scope="session")
def make_checkpoint(processor):
    """A function that saves a model as a trainer's checkpoint: with optimizer, arguments and TRL's own card."""

    def make(model, folder):
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        for name in TRAINING_FILES:
            (folder / name).write_bytes(b"{}")
        (folder / "README.md").write_text("# Model Card for None\n\nThis model is a fine-tuned version of [None].")
        config = folder / "tokenizer_config.json"
        local = {"name_or_path": str(folder), "is_local": True, "tokenizer_file": str(folder / "tokenizer.json")}
        config.write_text(json.dumps({**json.loads(config.read_text()), **local}))
        return folder

    return make


@pytest.fixture(scope="session")
def checkpoint(model, make_checkpoint, tmp_path_factory):
    return make_checkpoint(model, tmp_path_factory.mktemp("training") / "checkpoint-20")


@pytest.fixture(scope="session")
def exported(checkpoint, tmp_path_factory):
    return export(checkpoint, tmp_path_factory.mktemp("exports") / "tiny-aligned")


@pytest.fixture(scope="session")
def mini_export(composed, tmp_path_factory):
    """The export of the mini backbones, whose widths are whole blocks of 64 and whose answers are words."""
    work = tmp_path_factory.mktemp("mini")
    for part in composed:
        part.save_pretrained(work / "source")
    return export(work / "source", work / "export")


@pytest.fixture(scope="session")
def sharded(exported, tmp_path_factory):
    """The export with its weights in four files, as a large model has them."""
    folder = tmp_path_factory.mktemp("sharded") / "export"
    shutil.copytree(exported, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map = {}
    for i in range(4):
        file = f"model-{i + 1:05}-of-00004.safetensors"
        part = {name: weights[name].clone() for name in names[i::4]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="session")
def questions(tmp_path_factory):
    """Paths of pictures (the second question has none) and prompts."""
    picture = tmp_path_factory.mktemp("pictures") / "picture.png"
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(picture)
    return [str(picture), None], ["w10 w11 w12", "w20 w21"]


@pytest.fixture(scope="session")
def expected(model, processor, questions):
    """Answers and logits of the model in memory, which was never saved."""
    return ask(model, processor, *questions, max_new_tokens=MAX_NEW_TOKENS)
