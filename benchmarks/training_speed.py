"""What the aligned norm with GWC, and the training log, add to the time of a training step.

    python benchmarks/training_speed.py [--rounds 15]

Two copies of a model, one without a norm and one with the aligned norm and GWC, take optimizer steps on the same batch in
turn. Then two trainers of the demo's second stage, one with the log and one without, train the same few steps in turn (the
log measures every tenth step, as the recipes have it). Ratios are of processor time, which other work on the machine hardly
changes. Writes benchmarks/results/training_speed.json.
"""

import argparse
import copy
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from record import write_result
from rich.progress import track
from transformers import AutoConfig

from normalign import NormAlignLlavaConfig, NormAlignLlavaForConditionalGeneration, compose
from normalign.train_trl import load_recipe
from normalign.train_trl.callbacks import TrainLog
from normalign.train_trl.parts import freeze
from normalign.train_trl.training import build_trainer, load_data


STEPS_A_RUN = 20
WIDTHS = {"mini (width 192)": None, "width 512, 8 layers": 512}


def model_of(kind: str, width: int | None):
    """A model of the mini backbones, or a larger one with random weights; `kind` is that of the norm."""
    if width is None:
        return compose("mini-vision", "mini-language", {"kind": kind}, seed=0)[0]
    text = {
        "vocab_size": 8192,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    vision = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6}
    config = NormAlignLlavaConfig(
        vision_config=AutoConfig.for_model("siglip_vision_model", image_size=128, patch_size=16, **vision).to_dict(),
        text_config=AutoConfig.for_model("llama", **text).to_dict(),
        image_token_index=8191,
        image_seq_length=64,
        vision_feature_select_strategy="full",
        aligned_norm={"kind": kind},
    )
    torch.manual_seed(0)
    return NormAlignLlavaForConditionalGeneration(config)


def batch_of(model) -> dict[str, torch.Tensor]:
    """Four rows of one image and 48 text tokens."""
    config, generator = model.config, torch.Generator().manual_seed(1)
    images = [config.image_token_id] * config.image_seq_length
    text = torch.randint(5, min(200, config.image_token_id), (4, 48), generator=generator)
    ids = torch.cat([torch.tensor([images] * 4), text], 1)
    size = config.vision_config.image_size
    pixels = torch.randn(4, 3, size, size, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "labels": ids.masked_fill(ids == config.image_token_id, -100)}


def step_time(model, optimizer, batch) -> float:
    """Processor seconds of one step."""
    start = time.process_time()
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - start


def norm_rows(rounds: int) -> list[dict]:
    """A step with the norm and GWC against one without."""
    rows = []
    for name, width in WIDTHS.items():
        times: dict[str, list[float]] = {"none": [], "layernorm": []}
        models = {kind: model_of(kind, width).train() for kind in times}
        optimizers = {kind: torch.optim.AdamW(model.parameters(), lr=1e-5) for kind, model in models.items()}
        for turn in track(range(3 * rounds + 2), f"norm, {name}"):
            for kind, model in models.items():
                seconds = step_time(model, optimizers[kind], batch_of(model))
                if turn > 1:
                    times[kind].append(seconds)
        base = median(times["none"])
        ratio = median(a / b for a, b in zip(times["layernorm"], times["none"]))
        rows.append({"case": f"step without a norm, {name}", "seconds_median": base, "ratio": 1.0})
        rows.append(
            {"case": f"step with norm and GWC, {name}", "seconds_median": median(times["layernorm"]), "ratio": ratio}
        )
    return rows


def log_rows(rounds: int) -> list[dict]:
    """A run with the training log against one without."""
    model, processor = compose("mini-vision", "mini-language", seed=0)
    times: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        changes = {"max_steps": STEPS_A_RUN, "model": "mini", "data.rows": 32 * STEPS_A_RUN, "output_dir": folder}
        recipe = load_recipe("demo/stage2", changes)
        dataset = load_data(recipe)
        for turn in track(range(rounds + 1), "log"):
            for logged in times:
                own = copy.deepcopy(model)
                freeze(own, recipe.tune)
                trainer = build_trainer(own, processor, dataset, recipe)
                if not logged:
                    trainer.remove_callback(TrainLog)
                start = time.process_time()
                trainer.train()
                if turn:
                    times[logged].append(time.process_time() - start)
    ratio = median(a / b for a, b in zip(times[True], times[False]))
    return [
        {"case": f"{STEPS_A_RUN} steps without the log", "seconds_median": median(times[False]), "ratio": 1.0},
        {"case": f"{STEPS_A_RUN} steps with the log", "seconds_median": median(times[True]), "ratio": ratio},
    ]


def main() -> None:
    """Measures and records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    rows = norm_rows(rounds) + log_rows(rounds)
    for row in rows:
        print(f"{row['case']:50} {row['seconds_median'] * 1e3:8.1f} ms  {row['ratio']:.3f}x")
    write_result(Path(__file__).parent / "results" / "training_speed.json", rows, rounds=rounds)


if __name__ == "__main__":
    main()
