"""Runs the ablations that docs/evidence.md tells of, in the mini settings, and records what they came to.

    python benchmarks/evidence.py OUT [--seeds 5] [--processes 2] [--only summary|scratch|encoder]

In the first setting encoder and language model are pretrained, and training has two stages (recipes evidence/stage1 and
evidence/stage2). In the second the language model starts from random weights (evidence/scratch). In the third both are
pretrained and the encoder is trained too (evidence/encoder). OUT holds the runs; a program that was stopped goes on.
Writes benchmarks/results/evidence/{summary,scratch,encoder}.json and docs/images/evidence_*.png.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from record import machine, versions
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

from normalign.configuration.backbones import resolve_backbone
from normalign.train_trl.ablate import ablate


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "evidence"
# what docs/evidence.md shows of each
FIGURES = {
    "summary": ("accuracy", "curve_accuracy", "curve_caption_loss", "differences"),
    "scratch": ("accuracy",),
    "encoder": ("accuracy", "curve_accuracy", "differences"),
}
ARMS = ("none", "default", "aligned", "aligned_gwc")
ENCODER_ARMS = ("none", "aligned", "aligned_gwc")  # what reaches the encoder depends on the gain and on GWC


def random_language_model(folder: Path) -> Path:
    """The mini language model with its tokenizer, its weights drawn anew."""
    if not (folder / "config.json").exists():
        mini = resolve_backbone("mini-language")
        set_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(mini), dtype=torch.float32)
        AutoTokenizer.from_pretrained(mini).save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def run(name: str, recipe: str, arms: tuple, changes: dict, out: Path, arguments: argparse.Namespace) -> None:
    """One ablation with a bar, and its record."""
    start = time.perf_counter()
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns) as bars:
        task = bars.add_task("")
        ablate(
            recipe,
            arms,
            arguments.seeds,
            out / name,
            changes,
            curve_rows=48,
            measure_every=50,
            processes=arguments.processes,
            progress=lambda last, done, total: bars.update(task, completed=done, total=total, description=last),
        )
    seconds = sum(
        json.loads(file.read_text(encoding="utf-8"))["seconds"] for file in (out / name).glob("runs/*/*/result.json")
    )
    summary = json.loads((out / name / "summary.json").read_text(encoding="utf-8"))
    # the folder of the random language model is this machine's
    summary["settings"]["overrides"] = dict.fromkeys(summary["settings"]["overrides"], "random weights")
    recorded = {"machine": machine(), "versions": versions(), "seconds_of_all_runs": round(seconds), **summary}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    for figure in FIGURES[name]:
        source = out / name / "figures" / f"{figure}.png"
        shutil.copyfile(source, ROOT / "docs" / "images" / f"evidence_{name}_{figure}.png")
    print(f"{name}: {time.perf_counter() - start:.0f} s now, {seconds:.0f} s of all runs")


def main() -> None:
    """Runs the settings, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where the runs are kept")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", choices=("summary", "scratch", "encoder"))
    arguments = parser.parse_args()
    if arguments.only in (None, "summary"):
        run("summary", "evidence/stage2", ARMS, {}, arguments.out, arguments)
    if arguments.only in (None, "encoder"):
        run("encoder", "evidence/encoder", ENCODER_ARMS, {}, arguments.out, arguments)
    if arguments.only in (None, "scratch"):
        language = random_language_model(arguments.out / "random-language")
        run("scratch", "evidence/scratch", ARMS, {"compose.text": str(language)}, arguments.out, arguments)


if __name__ == "__main__":
    main()
