"""Speed of a later epoch of training with the encoder's outputs kept, against one that encodes its images again.

    OMP_NUM_THREADS=1 python benchmarks/vision_cache_speed.py [--epochs 2] [--rows 320] [--out PATH]

What the cache saves is the encoder's forward pass, and decoding and resizing; the language model's forward and backward
pass remain, also where it is frozen. With E weights in the encoder and V visual tokens, and L weights in the language
model and T tokens in a row, that is a gain of about 1 + E V / (2 L T). So two pairs are measured: that of the demo's stage
1 as it is (E = L, T = 3.5 V), and random ones in the proportions of SigLIP-SO400M and SmolLM2-135M (E = 3 L). Each is
trained through whole epochs by our trainer, with the cache and without it in turn; the first epoch warms up. The time to
build the trainer, which fills the cache, is given beside it.
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
from normalign.train_trl.length_groups import row_lengths
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
    """A random encoder with three times the language model's weights, and 144 visual tokens of a picture."""
    model, processor = compose("mini-vision", "mini-language", seed=0)
    side = 192
    config = model.config.to_dict()
    config["vision_config"] = SiglipVisionConfig(
        hidden_size=256,
        intermediate_size=896,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=side,
        patch_size=16,
    ).to_dict()
    config["image_seq_length"] = (side // 16) ** 2
    processor.image_processor.size = {"height": side, "width": side}
    torch.manual_seed(0)
    return NormAlignLlavaForConditionalGeneration(NormAlignLlavaConfig(**config)), processor


def trained_epochs(make, cached: bool, epochs: int, rows: int, folder: str) -> tuple[list[float], dict]:
    """Seconds of each epoch after the first, and what else stands in the result: sizes, seconds to build the trainer."""
    overrides = {"output_dir": f"{folder}/{cached}", "epochs": epochs, "data.rows": rows, "logging_steps": 1000}
    recipe = load_recipe(RECIPE, {**overrides, "cache_vision_features": cached})
    data = load_data(recipe)
    model, processor = make(recipe, data)
    freeze(model, recipe.tune)
    start = time.perf_counter()
    trainer = build_trainer(model, processor, data, recipe)
    sizes = {
        "seconds_building": time.perf_counter() - start,
        "mean_tokens_of_a_row": statistics.mean(row_lengths(data, processor)),
        "weights": {part: sum(w.numel() for _, w in some) for part, some in parameters_by_part(model).items()},
    }
    clock = EpochSeconds()
    trainer.add_callback(clock)
    trainer.train()
    return clock.seconds[1:], sizes


def main() -> None:
    """Measures both pairs and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2, help="epochs that are measured, after the first")
    parser.add_argument("--rows", type=int, default=320)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "vision_cache_speed.json")
    args = parser.parse_args()
    rows = []
    for name, make in (
        ("demo stage 1", demo_pair),
        ("encoder three times the language model", pair_with_a_large_encoder),
    ):
        seconds, sizes = {False: [], True: []}, {}
        for _ in range(args.repeats):
            for cached in seconds:
                with tempfile.TemporaryDirectory() as folder:
                    found, sizes[cached] = trained_epochs(make, cached, args.epochs + 1, args.rows, folder)
                seconds[cached] += found
        plain = statistics.median(seconds[False])
        for cached, found in seconds.items():
            median = statistics.median(found)
            case = f"{name}, {'cached' if cached else 'encoded again'}"
            rows.append({"case": case, "seconds_median": median, "ratio": plain / median, **sizes[cached]})
            print(f"{case:<54} {median:7.2f} s an epoch  {plain / median:.2f}x")
    write_result(args.out, rows, epochs=args.epochs, repeats=args.repeats, images=args.rows)


if __name__ == "__main__":
    main()
