"""Works out, without a GPU, what the full recipes need in memory and time on one and on eight GPUs of 80 GB.

    python benchmarks/recipe_costs.py

Parameters are counted on models of the real configs, built without memory. Bytes that a layer keeps for its backward pass
are counted on a real layer of an eighth of the width, under bfloat16 autocast. The rest is the arithmetic below, with the
ASSUMED figures; docs/training.md shows it. Writes benchmarks/results/recipe_costs.json.
"""

from dataclasses import replace
from pathlib import Path

import torch
from record import write_result
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModel

from normalign import NormAlignLlavaConfig, NormAlignLlavaForConditionalGeneration
from normalign.train_trl import Recipe, load_recipe
from normalign.train_trl.parts import parameters_by_part


SIGLIP_SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}
LANGUAGE_MODELS = {
    "llama32_3b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "qwen25_7b": (
        "qwen2",
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
    ),
}
# Rows of the two data sets by their own cards; text tokens a row are our guess, to be replaced by what `--check` counts.
ASSUMED = {
    "rows": {"stage1": 558_128, "stage2": 779_289},
    "text_tokens_per_row": {"stage1": 50, "stage2": 350},
    "gpu_memory_gb": 80,
    "gpu_flops": 312e12,
    "share_of_gpu_flops": 0.4,
    "reserve_gb": 3,
}
VISUAL_TOKENS = (384 // 14) ** 2
WIDTH_DIVISOR = 8


def parameters(kind: str, text: dict) -> dict[str, int]:
    """How many parameters each part has."""
    config = NormAlignLlavaConfig(
        vision_config=AutoConfig.for_model("siglip_vision_model", **SIGLIP_SO400M).to_dict(),
        text_config=AutoConfig.for_model(kind, **text).to_dict(),
        image_seq_length=VISUAL_TOKENS,
        vision_feature_select_strategy="full",
        tie_word_embeddings=text["tie_word_embeddings"],
        aligned_norm={"target_norm": 1.0},
    )
    with torch.device("meta"):
        model = NormAlignLlavaForConditionalGeneration(config)
    if text["tie_word_embeddings"]:
        model.tie_weights()
    return {part: sum(p.numel() for _, p in found) for part, found in parameters_by_part(model).items()}


def kept_bytes_per_token(kind: str, text: dict) -> float:
    """What one layer of the language model keeps of each token for its backward pass, in bytes, at full width."""
    heads = text["num_attention_heads"]
    small = {
        **text,
        "vocab_size": 64,
        "hidden_size": text["hidden_size"] // WIDTH_DIVISOR,
        "intermediate_size": text["intermediate_size"] // WIDTH_DIVISOR,
        "head_dim": text["hidden_size"] // heads // WIDTH_DIVISOR,
        "num_hidden_layers": 2,
    }
    # differences, so that what does not grow with layers or tokens (copies of weights, masks) falls out
    one, two = (_kept_bytes(kind, {**small, "num_hidden_layers": layers}) for layers in (1, 2))
    return (two - one) * WIDTH_DIVISOR


def _kept_bytes(kind: str, text: dict) -> float:
    model = AutoModel.from_config(AutoConfig.for_model(kind, **text), attn_implementation="sdpa").requires_grad_(False)
    sums = []
    for count in (64, 128):
        storages: dict[int, int] = {}
        held = []

        def keep(tensor: torch.Tensor, storages=storages, held=held) -> torch.Tensor:
            held.append(tensor)
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        tokens = torch.randn(1, count, text["hidden_size"], requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", torch.bfloat16):
            model(inputs_embeds=tokens, use_cache=False)
        sums.append(sum(storages.values()))
    return (sums[1] - sums[0]) / 64


def memory_gb(recipe: Recipe, counts: dict[str, int], text: dict, kept: float, shards: int) -> dict[str, float]:
    """Of one GPU, by what it is for. `shards` is over how many GPUs weights, gradients and optimizer are split."""
    tuned = vars(recipe.tune)
    trained = sum(count for part, count in counts.items() if tuned[part] == "full")
    layers, width = text["num_hidden_layers"], text["hidden_size"]
    tokens = recipe.per_device_batch_size * (VISUAL_TOKENS + ASSUMED["text_tokens_per_row"][recipe.name])
    if recipe.gradient_checkpointing:
        activations = tokens * (layers * width * 4 + kept)
    else:
        activations = tokens * layers * kept
    largest_layer = (counts["language"] - text["vocab_size"] * width) / layers * 2
    found = {
        "weights_float32": 4 * sum(counts.values()) / shards,
        "gradients": 4 * trained / shards,
        "adamw": 8 * trained / shards,
        # autocast's, of each weight: kept for the backward pass, or with checkpointing until the forward pass ends
        "bfloat16_copies": 2
        * (counts["language"] if shards == 1 or not recipe.gradient_checkpointing else largest_layer),
        "activations": activations,
    }
    found = {name: value / 1e9 for name, value in found.items()} | {"reserve": float(ASSUMED["reserve_gb"])}
    return {**found, "total": sum(found.values())}


def hours(recipe: Recipe, counts: dict[str, int], text: dict, gpus: int) -> float:
    """Of one epoch, from floating point operations at the assumed share of the GPU's peak."""
    rows = ASSUMED["rows"][recipe.name]
    tokens = VISUAL_TOKENS + ASSUMED["text_tokens_per_row"][recipe.name]
    # forward and the gradient of the activations, always, as the projector stands before it; then that of the weights
    passes = 2 + (recipe.tune.language == "full") + recipe.gradient_checkpointing
    attention = 2 * 2 * text["num_hidden_layers"] * text["hidden_size"] * tokens / 2
    language = passes * tokens * (2 * counts["language"] + attention)
    vision = VISUAL_TOKENS * 2 * counts["vision"] * (3 if recipe.tune.vision == "full" else 1)
    return rows * (language + vision) / (ASSUMED["gpu_flops"] * ASSUMED["share_of_gpu_flops"] * gpus) / 3600


def main() -> None:
    """Works out every case and writes them."""
    rows = []
    for name, (kind, text) in LANGUAGE_MODELS.items():
        counts, kept = parameters(kind, text), kept_bytes_per_token(kind, text)
        for stage in ("stage1", "stage2"):
            recipe = load_recipe(f"llava15_{name}/{stage}")
            for gpus, how, shards in ((1, "one", 1), (8, "ddp", 1), (8, "fsdp2 or zero3", 8)):
                memory = memory_gb(recipe, counts, text, kept, shards)
                small = memory_gb(replace(recipe, per_device_batch_size=1), counts, text, kept, shards)
                room = ASSUMED["gpu_memory_gb"] - (memory["total"] - memory["activations"])
                rows.append(
                    {
                        "case": f"llava15_{name}/{stage}, {gpus}x80 GB, {how}",
                        "seconds_median": None,
                        "ratio": None,
                        "recipe": f"llava15_{name}/{stage}",
                        "gpus": gpus,
                        "how": how,
                        "parameters": counts,
                        "kept_bytes_per_token_and_layer": kept,
                        "memory_gb": memory,
                        "most_rows_at_once": max(0, int(room / small["activations"])),
                        "fits": memory["total"] <= ASSUMED["gpu_memory_gb"],
                        "hours": hours(recipe, counts, text, gpus),
                    }
                )
                print(rows[-1]["case"], {key: round(value, 1) for key, value in memory.items()}, rows[-1]["hours"])
    write_result(Path(__file__).parent / "results" / "recipe_costs.json", rows, assumed=ASSUMED)


if __name__ == "__main__":
    main()
