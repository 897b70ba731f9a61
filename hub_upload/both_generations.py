"""Rewrites the files of a saved model so that transformers 4.57 and transformers 5 load the same model from them.

Each generation reads what the other wrote only in part: what is tried, and therefore written, is in the functions here.
"""

import json
import re
import shutil
import struct
from pathlib import Path


# Encoders whose weights transformers 4.57 looks for one level deeper, `vision_tower.vision_model.X`; 5 reads both.
_DEEPER_VISION_TYPES = {"siglip_vision_model", "clip_vision_model", "chinese_clip_vision_model"}
# Families that tests load on both generations with the same weights, inputs, logits and answers.
TRIED_VISION_TYPES = _DEEPER_VISION_TYPES | {
    "aimv2_vision_model",
    "beit",
    "data2vec-vision",
    "deit",
    "dinov2",
    "dinov2_with_registers",
    "vit",
    "vit_msn",
}
TRIED_TEXT_TYPES = {
    "arcee",
    "ernie4_5",
    "exaone4",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt_neox",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
}
# Families whose code differs between the generations, which no file can make up for.
_OTHER_TEXT_TYPES = dict.fromkeys(
    ("gemma", "gemma2"), "transformers 4.57 multiplies visual tokens, too, by Gemma's factor for text embeddings"
)
# The scalings of rotary embeddings that transformers 4.57 has.
_ROPE_TYPES = {"default", "linear", "dynamic", "yarn", "longrope", "llama3"}
# Gemma 3 alone has two settings on 4.57 that stand for the two kinds of layer.
_ROPE_BY_LAYER_KIND = {"gemma3_text": ("full_attention", "sliding_attention")}

_TOKENS_OF_EVERY_TOKENIZER = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}


def write_for_both_generations(folder: Path) -> None:
    """Rewrites config, tokenizer and processor settings and the names of weights in a folder of `save_pretrained`.

    Works on the output of either generation, and again on its own. What 4.57 has no setting for stays as it is, see
    `limits_of_the_other_generation`.
    """
    config = _read(folder / "config.json")
    _write(folder / "config.json", config_for_both(config))
    _rename_weights(folder, config["vision_config"]["model_type"])
    if (folder / "tokenizer.json").exists():
        file = folder / "tokenizer_config.json"
        _write(file, tokenizer_config_for_both(_read(file)))
    image_file = folder / "preprocessor_config.json"
    image_settings = _read(image_file) if image_file.exists() else {}
    settings, image_settings = processor_config_for_both(_read(folder / "processor_config.json"), image_settings)
    _write(folder / "processor_config.json", settings)
    _write(image_file, image_settings)


def limits_of_the_other_generation(config: dict) -> list[str]:
    """What speaks against loading a model on the generation that it was not saved with, in words; empty for what was
    tried on both.

    Args:
        config: the content of config.json, of either generation.
    """
    text, vision = config["text_config"], config["vision_config"]
    limits = []
    if vision["model_type"] not in TRIED_VISION_TYPES:
        limits.append(f"the vision encoder `{vision['model_type']}` was not tried on both")
    if text["model_type"] in _OTHER_TEXT_TYPES:
        limits.append(_OTHER_TEXT_TYPES[text["model_type"]])
    elif text["model_type"] not in TRIED_TEXT_TYPES:
        limits.append(f"the language model `{text['model_type']}` was not tried on both")
    rope = text.get("rope_parameters")
    if rope and rope_for_4(text["model_type"], rope) is None:
        kind = f"`{rope['rope_type']}`" if isinstance(rope.get("rope_type"), str) else "several, by kind of layer"
        limits.append(f"transformers 4.57 has no setting for its rotary embeddings ({kind})")
    return limits


# --- config.json


def config_for_both(config: dict) -> dict:
    """config.json with the keys of both generations: dtype and rotary embeddings, in the parts too."""
    both = {**config, **_dtype_for_both(config)}
    for part in ("text_config", "vision_config"):
        both[part] = {**config[part], **_dtype_for_both(config[part])}
    text = both["text_config"]
    if rope := text.get("rope_parameters"):
        text.update(rope_for_4(text["model_type"], rope) or {})
    return dict(sorted(both.items()))


def _dtype_for_both(config: dict) -> dict:
    dtype = config.get("dtype", config.get("torch_dtype"))
    return {} if dtype is None else {"dtype": dtype, "torch_dtype": dtype}


def rope_for_4(model_type: str, rope_parameters: dict) -> dict | None:
    """The keys in which transformers 4.57 reads `rope_parameters` of transformers 5; None if it has none for them."""
    by_kind = {key: value for key, value in rope_parameters.items() if isinstance(value, dict)}
    local = {}
    if by_kind:
        everywhere, sliding = _ROPE_BY_LAYER_KIND.get(model_type, (None, None))
        if set(by_kind) != {everywhere, sliding} or by_kind[sliding].get("rope_type", "default") != "default":
            return None
        rope_parameters = by_kind[everywhere]
        local = {"rope_local_base_freq": by_kind[sliding]["rope_theta"]}
    kind = rope_parameters.get("rope_type", "default")
    if kind not in _ROPE_TYPES or "rope_theta" not in rope_parameters:
        return None
    apart = ("rope_theta", "partial_rotary_factor")
    settings = {key: rope_parameters[key] for key in apart if key in rope_parameters}
    scaling = {key: value for key, value in rope_parameters.items() if key not in apart}
    return {**settings, **local, "rope_scaling": None if kind == "default" else scaling}


# --- weights


def older_name(key: str, vision_type: str) -> str:
    """The name of a weight as transformers 4.57 looks for it."""
    if vision_type not in _DEEPER_VISION_TYPES:
        return key
    return re.sub(r"(^|\.)vision_tower\.(?!vision_model\.)", r"\1vision_tower.vision_model.", key)


def _rename_weights(folder: Path, vision_type: str) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        _rename_in_file(file, vision_type)
    index_file = folder / "model.safetensors.index.json"
    if index_file.exists():
        index = _read(index_file)
        index["weight_map"] = {older_name(key, vision_type): name for key, name in index["weight_map"].items()}
        _write(index_file, index)


def _rename_in_file(file: Path, vision_type: str) -> None:
    """Writes a safetensors file anew with other names: the header changes, the data are copied as bytes.

    A header is its length in 8 bytes, then JSON, filled up with spaces to a multiple of 8
    (https://github.com/huggingface/safetensors#format).
    """
    with open(file, "rb") as source:
        (length,) = struct.unpack("<Q", source.read(8))
        header = json.loads(source.read(length))
        renamed = {older_name(key, vision_type): entry for key, entry in header.items()}
        if renamed == header:
            return
        text = json.dumps(renamed, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        text += b" " * (-len(text) % 8)
        # a reader of the old file keeps it: the new one takes its name only when it is whole
        new = file.with_suffix(".renamed")
        with open(new, "wb") as target:
            target.write(struct.pack("<Q", len(text)) + text)
            shutil.copyfileobj(source, target, 16 * 2**20)
    shutil.copymode(file, new)
    new.replace(file)


# --- tokenizer and processor


def tokenizer_config_for_both(settings: dict) -> dict:
    """tokenizer_config.json for a folder with a tokenizer.json, which alone says how text becomes tokens.

    A class of its own would build a pipeline of its own, another one in each generation. Under `extra_special_tokens`
    transformers 5 writes a list and 4.57 takes a dict of names alone; its key for the list is read by both.
    """
    both = {key: value for key, value in settings.items() if key != "backend"}
    both["tokenizer_class"] = "PreTrainedTokenizerFast"
    extra = both.get("extra_special_tokens") or {}
    if isinstance(extra, list):
        both["additional_special_tokens"] = extra
        extra = {}
    named = {key: value for key, value in both.items() if _is_named_token(key, value)}
    both["extra_special_tokens"] = {**named, **extra}
    return dict(sorted(both.items()))


def _is_named_token(key: str, value) -> bool:
    """Whether a setting is a special token that only this tokenizer has, such as `image_token`."""
    return key.endswith("_token") and key not in _TOKENS_OF_EVERY_TOKENIZER and isinstance(value, str | dict)


def processor_config_for_both(processor: dict, image_processor: dict) -> tuple[dict, dict]:
    """processor_config.json and preprocessor_config.json as 4.57 has them, from either generation's.

    transformers 5 writes the image processor into processor_config.json and reads it from both places.
    """
    settings = {key: value for key, value in processor.items() if key != "image_processor"}
    image_processor = {**image_processor, **processor.get("image_processor", {})}
    # transformers 5's class for machines without torchvision, whose name 4.57 does not know
    image_processor["image_processor_type"] = image_processor["image_processor_type"].removesuffix("Pil")
    image_processor.setdefault("processor_class", settings.get("processor_class"))
    return settings, dict(sorted(image_processor.items()))


# --- files


def _read(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def _write(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
