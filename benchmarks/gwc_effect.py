"""Takes apart what GWC does: how it changes the steps of each part, by optimizer, clipping and what is trained.

    python benchmarks/gwc_effect.py [--steps 12] [--only sgd]

Two copies of the composed mini model, alike but for GWC, are trained on the same batches of questions with the same
optimizer. Measured is the mean over the steps of the relative update |dW|/|W| of each part, with GWC divided by without.
Predicted, from the run without GWC alone: an optimizer that does not notice a constant factor keeps every step (1x); one
that does (SGD) takes the steps of what stands before the norm 1/mu times as large, and all steps by what clipping then
leaves. Also measured: how far the gain moves when it is held in float32 and in bfloat16.
Writes benchmarks/results/gwc_effect.json.
"""

import argparse
import math
from itertools import product
from pathlib import Path
from statistics import fmean
from time import perf_counter

import bitsandbytes
import torch
from record import write_result
from rich.progress import track

from normalign import compose
from normalign.train_trl.digit_scenes import digit_scene_rows
from normalign.train_trl.held_out import batch_of_rows
from normalign.train_trl.parts import PARTS, parameters_by_part, total_norm


BATCH = 16
FLOOR = 1e-3
MAX_NORM = 1.0
BEFORE_THE_NORM = ("vision", "projector")


def muon(parameters: list[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest, as Muon's authors use it."""
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    rest = [parameter for parameter in parameters if parameter.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-4), torch.optim.AdamW(rest, lr=1e-4, weight_decay=0.0)]


# name -> (makes the optimizers, whether a constant factor on a gradient passes through to the step)
OPTIMIZERS = {
    "AdamW": (lambda p: [torch.optim.AdamW(p, lr=1e-4, weight_decay=0.0)], False),
    "SGD, momentum 0.9": (lambda p: [torch.optim.SGD(p, lr=1e-5, momentum=0.9)], True),
    "Lion": (lambda p: [bitsandbytes.optim.Lion(p, lr=1e-5)], False),
    "Adafactor": (lambda p: [torch.optim.Adafactor(p, lr=1e-4)], False),
    "Muon": (muon, False),
}


def batches(processor, count: int, stage: int) -> list[tuple[dict, torch.Tensor]]:
    """Inputs and labels of `count` batches of training rows: captions (1), or questions with a few of text alone (2)."""
    rows = digit_scene_rows(count * BATCH, seed=5, stage=stage)
    made = [batch_of_rows(processor, rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)]
    return [(inputs, labels) for _, labels, inputs in made]


def train(gwc: bool, make, data, clip: bool, vision: bool) -> list[dict]:
    """One record a step: gradient norm and relative update of each part, the clipping factor, mu."""
    model, _ = compose("mini-vision", "mini-language", {"gwc": gwc}, seed=0)
    model.train()
    model.model.vision_tower.requires_grad_(vision)
    parts = {
        part: [p for _, p in parameters if p.requires_grad] for part, parameters in parameters_by_part(model).items()
    }
    trained = [parameter for parameters in parts.values() for parameter in parameters]
    optimizers = make(trained)
    records = []
    for inputs, labels in data:
        model(**inputs, labels=labels).loss.backward()
        mu = max(model.get_aligned_norm().weight.abs().mean().item(), FLOOR)
        norms = {part: total_norm([p.grad for p in ps if p.grad is not None]) for part, ps in parts.items()}
        factor = min(1.0, MAX_NORM / (math.hypot(*norms.values()) + 1e-6)) if clip else 1.0
        if clip:
            torch.nn.utils.clip_grad_norm_(trained, MAX_NORM)
        before = {part: [p.detach().clone() for p in ps] for part, ps in parts.items()}
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        updates = {
            part: total_norm([p.detach() - b for p, b in zip(ps, before[part])]) / total_norm(before[part])
            for part, ps in parts.items()
            if ps
        }
        records.append({"gradients": norms, "clip_factor": factor, "mu": mu, "updates": updates})
    return records


def predicted(plain: list[dict], scales: bool, clip: bool) -> dict[str, float]:
    """The ratio of each part's update with GWC to without, from the run without it."""
    if not scales:
        return dict.fromkeys(PARTS, 1.0)
    ratios = {part: [] for part in PARTS}
    for record in plain:
        grown = {
            part: norm / (record["mu"] if part in BEFORE_THE_NORM else 1) for part, norm in record["gradients"].items()
        }
        factor = min(1.0, MAX_NORM / (math.hypot(*grown.values()) + 1e-6)) if clip else 1.0
        for part in PARTS:
            growth = 1 / record["mu"] if part in BEFORE_THE_NORM else 1.0
            ratios[part].append(growth * factor / record["clip_factor"])
    return {part: fmean(values) for part, values in ratios.items()}


def gain_movement(data, steps: int) -> list[dict]:
    """How far AdamW at 1e-3 moves the gain, from the text norm and from 1, held in float32 and rounded to bfloat16."""
    rows = []
    for gain_init, dtype in product(("text", 1.0), (torch.float32, torch.bfloat16)):
        model, _ = compose("mini-vision", "mini-language", {"gwc": False, "gain_init": gain_init}, seed=0)
        model.requires_grad_(False)
        model.model.multi_modal_projector.requires_grad_(True)
        gain = model.get_aligned_norm().weight
        with torch.no_grad():
            gain.copy_(gain.to(dtype))
        start = gain.detach().clone()
        optimizer = torch.optim.AdamW(model.model.multi_modal_projector.parameters(), lr=1e-3, weight_decay=0.0)
        for step in range(steps):
            inputs, labels = data[step % len(data)]
            model(**inputs, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                gain.copy_(gain.to(dtype))
        moved = (gain.detach() - start).abs()
        rows.append(
            {
                "gain_init": gain_init,
                "dtype": str(dtype).removeprefix("torch."),
                "steps": steps,
                "start_abs_mean": start.abs().mean().item(),
                "moved_abs_mean": moved.mean().item(),
                "channels_that_moved": (moved > 0).float().mean().item(),
            }
        )
    return rows


def main() -> None:
    """Runs every setting and writes them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="", help="part of an optimizer's name; nothing is written then")
    arguments = parser.parse_args()
    _, processor = compose("mini-vision", "mini-language", seed=0)
    data = batches(processor, arguments.steps, 2)
    chosen = [name for name in OPTIMIZERS if arguments.only.lower() in name.lower()]
    rows = []
    for name, clip, vision in track(list(product(chosen, (True, False), (True, False))), "settings"):
        make, scales = OPTIMIZERS[name]
        began = perf_counter()
        plain, gwc = (train(on, make, data, clip, vision) for on in (False, True))
        trained = [part for part in PARTS if part in plain[0]["updates"]]
        expected = predicted(plain, scales, clip)
        measured = {
            part: fmean(step["updates"][part] for step in gwc) / fmean(step["updates"][part] for step in plain)
            for part in trained
        }
        rows.append(
            {
                "case": f"{name}, {'clipped' if clip else 'not clipped'}, encoder {'trained' if vision else 'frozen'}",
                "seconds_median": (perf_counter() - began) / (2 * len(data)),
                "ratio": measured["vision" if vision else "projector"],
                "optimizer": name,
                "clipped": clip,
                "encoder_trained": vision,
                "measured": measured,
                "predicted": {part: expected[part] for part in trained},
                "clip_factor": {
                    "plain": fmean(s["clip_factor"] for s in plain),
                    "gwc": fmean(s["clip_factor"] for s in gwc),
                },
                "inverse_mu": fmean(1 / s["mu"] for s in gwc),
            }
        )
        print(rows[-1]["case"], rows[-1]["measured"], rows[-1]["predicted"], rows[-1]["clip_factor"])
    if not arguments.only:
        gain = gain_movement(batches(processor, 20, 1), 60)
        result = Path(__file__).parent / "results" / "gwc_effect.json"
        write_result(result, rows, steps=arguments.steps, batch=BATCH, max_grad_norm=MAX_NORM, gain=gain)


if __name__ == "__main__":
    main()
