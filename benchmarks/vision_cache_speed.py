"""Speed of a later epoch of training with the encoder's outputs kept, against one that encodes its images again.

    OMP_NUM_THREADS=1 python benchmarks/vision_cache_speed.py [--epochs 2] [--rows 320] [--out PATH]

What a frozen encoder's outputs save is its forward pass, and decoding and resizing its images; the language model's
forward and backward pass remain. So the gain is measured twice: in stage 1 of the demo as it is, and with an encoder
that is twice as large as the language model, as SigLIP-SO400M is beside SmolLM2-135M (here: both scaled down). Each is
trained through whole epochs by our trainer, with the cache and without it in turn; the first epoch of each warms up. The
time to fill the cache is given beside it.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from record import write_result
from transformers import SiglipVisionConfig, TrainerCallback

from normalign import compose
from normalign.modeling.configuration_normalign_llava import NormAlignLlavaConfig
from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign.train_trl import load_recipe
from normalign.train_trl.parts import freeze, parameters_by_part
from normalign.train_trl.training import build_trainer, load_data, load_or_compose


RECIPE = Path(__file__).parents[1] / "configuration" / "recipes" / "demo" / "stage1.yaml"


class EpochSeconds(TrainerCallback):
    """The seconds of each epoch."""

    def __init__(self):
        self.seconds: list[float] = []

    def on_epoch_begin(self, args, state, control, **kwargs):
        """Starts the clock."""
        self._start = time.perf_counter()

    def on_epoch_end(self, args, state, control, **kwargs):
        """Reads it."""
        self.seconds.append(time.perf_counter() - self._start)


def demo_pair(recipe, data):
    """The demo's model and processor."""
    return load_or_compose(recipe, data)


def pair_with_a_large_encoder(recipe, data):
    """A random encoder with twice the language model's weights, at the demo's image size and number of tokens."""
    model, processor = compose("mini-vision", "mini-language", seed=0)
    config = model.config.to_dict()
    config["vision_config"] = SiglipVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=4,
        image_size=64,
        patch_size=16,
    ).to_dict()
    torch.manual_seed(0)
    return NormAlignLlavaForConditionalGeneration(NormAlignLlavaConfig(**config)), processor


def trained_epochs(
    make, cached: bool, epochs: int, rows: int, folder: str
) -> tuple[list[float], float, dict[str, int]]:
    """Seconds of each epoch and of building the trainer (filling the cache), and the weights of each part."""
    overrides = {"output_dir": f"{folder}/{cached}", "epochs": epochs, "data.rows": rows, "logging_steps": 1000}
    recipe = load_recipe(RECIPE, {**overrides, "cache_vision_features": cached, "save_steps": 10**6})
    data = load_data(recipe)
    model, processor = make(recipe, data)
    freeze(model, recipe.tune)
    start = time.perf_counter()
    trainer = build_trainer(model, processor, data, recipe)
    built = time.perf_counter() - start
    clock = EpochSeconds()
    trainer.add_callback(clock)
    trainer.train()
    weights = {part: sum(w.numel() for _, w in some) for part, some in parameters_by_part(model).items()}
    return clock.seconds[1:], built, weights


def main() -> None:
    """Measures both pairs and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2, help="epochs that are measured, after the first")
    parser.add_argument("--rows", type=int, default=320)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "vision_cache_speed.json")
    args = parser.parse_args()
    rows = []
    for name, make in (("demo stage 1", demo_pair), ("large encoder", pair_with_a_large_encoder)):
        seconds, filling = {False: [], True: []}, []
        for _ in range(args.repeats):
            for cached in seconds:
                with tempfile.TemporaryDirectory() as folder:
                    found, built, weights = trained_epochs(make, cached, args.epochs + 1, args.rows, folder)
                seconds[cached] += found
                filling += [built] if cached else []
        plain = statistics.median(seconds[False])
        for cached, found in seconds.items():
            median = statistics.median(found)
            row = {
                "case": f"{name}, {'cached' if cached else 'encoded again'}",
                "seconds_median": median,
                "ratio": plain / median,
                "weights": weights,
            }
            rows.append({**row, "seconds_filling": statistics.median(filling)} if cached else row)
            print(f"{row['case']:<32} {median:7.2f} s an epoch  {row['ratio']:.2f}x")
    write_result(args.out, rows, epochs=args.epochs, repeats=args.repeats, images=args.rows)


if __name__ == "__main__":
    main()
