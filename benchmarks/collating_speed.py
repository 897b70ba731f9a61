"""Whether data workers keep up: batches a second from two workers against the model's own appetite, in the demo's stage 1.

    OMP_NUM_THREADS=1 python benchmarks/collating_speed.py [--batches 20] [--workers 2] [--out PATH]

The workers decode, resize and tokenise; the model's appetite is the batches a second it trains on when they lie ready.
`ratio` is the workers' rate over that appetite: above 1 the model never waits. One process's rate stands beside it; the
workers are timed while nothing else runs, since in a real run the model has its own cores or GPU.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from record import write_result
from torch.utils.data import DataLoader

from normalign.train_trl import load_recipe
from normalign.train_trl.parts import freeze
from normalign.train_trl.training import build_trainer, load_data, load_or_compose


RECIPE = Path(__file__).parents[1] / "configuration" / "recipes" / "demo" / "stage1.yaml"


def seconds_a_batch(trainer, workers: int, batches: int) -> list[float]:
    """From the second batch on, so that starting the workers is left out."""
    loader = DataLoader(
        trainer.train_dataset,
        batch_size=trainer.args.per_device_train_batch_size,
        collate_fn=trainer.data_collator,
        num_workers=workers,
    )
    # workers go ahead by two batches each: those that were ready before the clock started would be counted too fast
    ahead = 1 + 2 * workers
    times = []
    for number, _ in enumerate(loader):
        times.append(time.perf_counter())
        if number == batches + ahead:
            break
    return [(times[-1] - times[ahead]) / (len(times) - 1 - ahead)]


def seconds_a_step(trainer, batches: list[dict]) -> list[float]:
    """Forward, backward and optimizer step on batches that are there already; the first warms up."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()
    seconds = []
    for batch in batches:
        start = time.perf_counter()
        supervised = (batch["labels"][:, 1:] != -100).sum()
        trainer.training_step(trainer.model, dict(batch), supervised.to(trainer.args.device))
        trainer.optimizer.step()
        trainer.model.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def main() -> None:
    """Measures in turn and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "collating_speed.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = 32 * (args.batches + 2 + 2 * args.workers)
        recipe = load_recipe(RECIPE, {"output_dir": folder, "data.rows": rows})
        data = load_data(recipe)
        model, processor = load_or_compose(recipe, data)
        freeze(model, recipe.tune)
        trainer = build_trainer(model, processor, data, recipe)
        size = trainer.args.per_device_train_batch_size
        ready = [trainer.data_collator([data[i * size + j] for j in range(size)]) for i in range(6)]
        found = {"the model's own step": [], f"collating, {args.workers} workers": [], "collating, one process": []}
        for _ in range(args.repeats):
            steps, many, one = found.values()
            steps += seconds_a_step(trainer, ready)
            many += seconds_a_batch(trainer, args.workers, args.batches)
            one += seconds_a_batch(trainer, 0, args.batches)
    medians = {case: statistics.median(seconds) for case, seconds in found.items()}
    appetite = medians["the model's own step"]
    results = [{"case": case, "seconds_median": s, "ratio": appetite / s} for case, s in medians.items()]
    for row in results:
        print(f"{row['case']:<24} {row['seconds_median'] * 1e3:8.1f} ms a batch  {row['ratio']:.2f}x the appetite")
    write_result(args.out, results, batches=args.batches, workers=args.workers, rows_in_a_batch=size)


if __name__ == "__main__":
    main()
