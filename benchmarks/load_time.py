"""Time to load an export by its own code against transformers' LLaVA with the same weights.

    python benchmarks/load_time.py [--runs 11] [--sizes mini,large] [--out benchmarks/results/load_time.json]

Each load is a new process without normalign; the three ways take turns, so that the ratios hold on a noisy machine:
transformers' LlavaForConditionalGeneration, the export with an empty cache of modules (a user's first load), and the export
afterwards. `seconds` run from just before from_pretrained to the model in memory, when torch, transformers and the modules of
LLaVA, Llama and SigLIP are imported; `cpu_seconds` are the processor's in the same stretch, which other programs do not stretch;
`process_seconds` run from the start of Python to its end. Weights are float32, and random in the large model.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from record import write_result
from transformers import LlavaConfig, LlavaForConditionalGeneration

from normalign.assembly import compose
from normalign.hub_upload import export
from normalign.modeling.configuration_normalign_llava import NormAlignLlavaConfig
from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration


LARGE_TEXT = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16}
LARGE_TEXT |= {"num_key_value_heads": 16, "head_dim": 64, "vocab_size": 8192}
LARGE_VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 12}
LLAVA, FIRST, LATER = "transformers' LLaVA", "export, first load", "export, later loads"

CHILD = """
import json, sys, time
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.llama import modeling_llama
from transformers.models.llava import modeling_llava
from transformers.models.siglip import modeling_siglip

folder, own_code = sys.argv[1], sys.argv[2] == "own code"
start, cpu_start = time.perf_counter(), time.process_time()
if own_code:
    model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)
else:
    model = modeling_llava.LlavaForConditionalGeneration.from_pretrained(folder)
times = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}
parameters = sum(p.numel() for p in model.parameters())
print(json.dumps({**times, "parameters": parameters, "class": type(model).__name__}))
"""


def build(size: str, folder: Path) -> None:
    """Writes folder/export and folder/llava, which has the same weights but for the aligned norm."""
    model, processor = compose("mini-vision", "mini-language", seed=0, dtype=torch.float32)
    if size == "large":
        settings = model.config.to_dict()
        settings["text_config"] |= LARGE_TEXT
        settings["vision_config"] |= LARGE_VISION
        torch.manual_seed(0)
        model = NormAlignLlavaForConditionalGeneration(NormAlignLlavaConfig(**settings)).eval()
        model.initialize_aligned_norm_()
    for part in (model, processor):
        part.save_pretrained(folder / "source")
    export(folder / "source", folder / "export")
    shutil.rmtree(folder / "source")
    settings = {key: value for key, value in model.config.to_dict().items() if key in LlavaConfig().to_dict()}
    settings = {
        key: value for key, value in settings.items() if key not in ("model_type", "architectures", "auto_map")
    }
    with torch.device("meta"):
        llava = LlavaForConditionalGeneration(LlavaConfig(**settings))
    weights = {name: value for name, value in model.state_dict().items() if "aligned_norm" not in name}
    llava.load_state_dict(weights, assign=True)
    llava.save_pretrained(folder / "llava")


def load(folder: Path, own_code: bool, cache: Path) -> dict:
    """Loads the folder in a new process: `seconds` and `cpu_seconds` of from_pretrained, `process_seconds` of all of it."""
    environment = {
        **os.environ,
        "HF_HOME": str(cache),
        "HF_MODULES_CACHE": str(cache / "modules"),
        "HF_HUB_OFFLINE": "1",
    }
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-I", "-c", CHILD, str(folder), "own code" if own_code else "library"]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=folder)
    process_seconds = time.perf_counter() - start
    return {**json.loads(done.stdout.splitlines()[-1]), "process_seconds": process_seconds}


def measure(size: str, runs: int) -> list[dict]:
    """Rows of the three ways for one size of model."""
    found = {LLAVA: [], FIRST: [], LATER: []}
    with tempfile.TemporaryDirectory(prefix="load-time-") as scratch:
        folder = Path(scratch)
        build(size, folder)
        # both folders and all libraries in the memory of the system, as after a download
        load(folder / "llava", False, folder / "kept")
        load(folder / "export", True, folder / "kept")
        for _ in range(runs):
            with tempfile.TemporaryDirectory(dir=folder) as empty:
                found[LLAVA].append(load(folder / "llava", False, folder / "kept"))
                found[FIRST].append(load(folder / "export", True, Path(empty)))
                found[LATER].append(load(folder / "export", True, folder / "kept"))
    rows = []
    for way, loads in found.items():
        row = {"case": f"{size}, {way}", "parameters": loads[0]["parameters"], "class": loads[0]["class"]}
        for key, ratio in (("seconds", "ratio"), ("cpu_seconds", "cpu_ratio"), ("process_seconds", "process_ratio")):
            row[f"{key}_median"] = statistics.median(one[key] for one in loads)
            row[ratio] = row[f"{key}_median"] / statistics.median(one[key] for one in found[LLAVA])
        rows.append(row)
        print(
            f"{row['case']:<32} {row['seconds_median'] * 1e3:8.0f} ms {row['ratio']:.3f}x   processor "
            f"{row['cpu_seconds_median'] * 1e3:8.0f} ms {row['cpu_ratio']:.3f}x   whole process "
            f"{row['process_seconds_median']:6.2f} s {row['process_ratio']:.3f}x   {row['parameters'] / 1e6:.1f} million",
            flush=True,
        )
    return rows


def main() -> None:
    """Measures every size and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--sizes", default="mini,large")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "load_time.json")
    args = parser.parse_args()
    rows = [row for size in args.sizes.split(",") for row in measure(size, args.runs)]
    write_result(args.out, rows, runs=args.runs)


if __name__ == "__main__":
    main()
