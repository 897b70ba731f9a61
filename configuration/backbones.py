"""Short names for vision encoders and language models that `compose` takes in place of a Hub id or a folder."""

from pathlib import Path


MINI_BACKBONES = Path(__file__).resolve().parent / "mini_backbones"

VISION_ENCODERS = {
    "mini-vision": str(MINI_BACKBONES / "vision"),
    "siglip-so400m-384": "google/siglip-so400m-patch14-384",
    "siglip-base-224": "google/siglip-base-patch16-224",
    "siglip2-base-224": "google/siglip2-base-patch16-224",
    "siglip2-so400m-384": "google/siglip2-so400m-patch14-384",
    "clip-base-224": "openai/clip-vit-base-patch32",
    "clip-large-336": "openai/clip-vit-large-patch14-336",
    "dinov2-base": "facebook/dinov2-base",
    "dinov2-large": "facebook/dinov2-large",
}

LANGUAGE_MODELS = {
    "mini-language": str(MINI_BACKBONES / "language"),
    "llama-3.2-1b-instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b-instruct": "meta-llama/Llama-3.2-3B-Instruct",
    "qwen2.5-0.5b-instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-7b-instruct": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-1.7b-instruct": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "gemma-2b-it": "google/gemma-2b-it",
    "gemma-3-1b-it": "google/gemma-3-1b-it",
}

BACKBONES = {**VISION_ENCODERS, **LANGUAGE_MODELS}


def resolve_backbone(name: str) -> str:
    """The folder or Hub id that a preset name stands for; any other string is returned as it is."""
    return BACKBONES.get(name, name)
