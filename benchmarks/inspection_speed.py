"""Speed and memory of an inspection's hooks against the plain forward pass and against keeping all hidden states.

    python benchmarks/inspection_speed.py [--runs 5] [--device cpu] [--out benchmarks/results/inspection_speed.json]

The language model has 30 layers of width 576 (SmolLM2-135M's shape) and random weights; the prompt has 1,000 tokens, 729
of them visual. The vision encoder is a small one, so that it does not hide what is measured. All three ways take turns in
one process, so that the ratios hold on a noisy machine; each is timed with and without the logits of every token, which
are the largest tensor of a plain forward pass. On a CPU one thread works and its processor time is counted, which other
programs do not stretch; on a GPU it is the time of the clock. Peak memory is what was allocated beyond the weights.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from record import peak_bytes, write_result
from torch.nn.functional import cosine_similarity

from normalign.inspection.record import record_norms
from normalign.modeling.configuration_normalign_llava import NormAlignLlavaConfig
from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration


TOKENS, VISUAL, IMAGE_TOKEN = 1000, 729, 49151
TEXT = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 378,
    "patch_size": 14,
    "vision_use_head": False,
}


def build(device: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model and a prompt with one image."""
    torch.manual_seed(0)
    config = NormAlignLlavaConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_index=IMAGE_TOKEN,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    model = NormAlignLlavaForConditionalGeneration(config).eval().to(device)
    ids = torch.randint(0, IMAGE_TOKEN, (1, TOKENS))
    ids[:, 20 : 20 + VISUAL] = IMAGE_TOKEN
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 3, 378, 378)}
    return model, {name: value.to(device) for name, value in inputs.items()}


def from_hidden_states(model: torch.nn.Module, inputs: dict[str, torch.Tensor], **options) -> list[dict[str, float]]:
    """The usual way: keep the hidden states of all layers, then compute the same figures from them."""
    states = model(**inputs, **options, output_hidden_states=True).hidden_states
    visual = inputs["input_ids"] == IMAGE_TOKEN
    figures = []
    for mask in (visual, ~visual):
        first = states[0][mask]
        for before, after in zip(states, states[1:]):
            before, after = before[mask], after[mask]
            update = after - before
            size, norm = update.norm(dim=-1), before.norm(dim=-1)
            phi = cosine_similarity(before, update, dim=-1).clamp(-1, 1).arccos()
            cosine = cosine_similarity(before, after, dim=-1)
            measures = {
                "norm": after.norm(dim=-1),
                "update_norm": size,
                "cosine_prev": cosine,
                "angle": cosine.clamp(-1, 1).arccos(),
                "update_ratio": size / norm,
                "cosine_first": cosine_similarity(first, after, dim=-1),
                "angle_formula": torch.atan2(size * phi.sin(), norm + size * phi.cos()),
                "isotropic_angle": (size / norm).arctan(),
            }
            figures.append({name: values.mean().item() for name, values in measures.items()})
    return figures


def ways(model: torch.nn.Module, inputs: dict[str, torch.Tensor], **options) -> dict[str, Callable[[], object]]:
    """The three ways, each from inputs to figures."""

    def recorded() -> dict:
        with record_norms(model) as recorder:
            model(**inputs, **options)
        return [layer.to_dicts() for layer in recorder.layers], recorder.inserted.to_dict()

    return {
        "plain forward": lambda: model(**inputs, **options),
        "record_norms": recorded,
        "output_hidden_states, then compute": lambda: from_hidden_states(model, inputs, **options),
    }


def timed(run: Callable[[], object], device: str) -> float:
    """Seconds from call to result: of the processor, or of the clock on a GPU."""
    on_gpu = device.startswith("cuda")
    clock = time.perf_counter if on_gpu else time.process_time
    start = clock()
    run()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start


def main() -> None:
    """Measures the three ways and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "inspection_speed.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, inputs = build(args.device)
    rows = []
    with torch.inference_mode():
        for name, options in (("all logits", {}), ("last logits", {"logits_to_keep": 1})):
            runs = ways(model, inputs, use_cache=False, **options)
            memory = {way: peak_bytes(run, args.device) for way, run in runs.items()}
            seconds = {way: [] for way in runs}
            for _ in range(args.runs):
                for way, run in runs.items():
                    seconds[way].append(timed(run, args.device))
            median = {way: statistics.median(values) for way, values in seconds.items()}
            for way in runs:
                rows.append(
                    {
                        "case": f"{way} ({name})",
                        "seconds_median": median[way],
                        "ratio": median[way] / median["plain forward"],
                        "peak_bytes": memory[way],
                        "memory_ratio": memory[way] / memory["plain forward"],
                    }
                )
                row = rows[-1]
                print(
                    f"{row['case']:<50} {row['seconds_median'] * 1e3:8.0f} ms  {row['ratio']:.3f}x"
                    f"  {row['peak_bytes'] / 2**20:7.1f} MiB  {row['memory_ratio']:.3f}x"
                )
    write_result(args.out, rows, device=args.device, runs=args.runs, tokens=TOKENS, visual_tokens=VISUAL)


if __name__ == "__main__":
    main()
