"""Loads an export as a stranger does: in a process without normalign, without network, with an empty module cache."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from ..configuration.errors import NormalignError


_HERE = Path(__file__).parent
# What a user of a published model need not have: everything we depend on beyond torch, transformers and Pillow.
OPTIONAL_PACKAGES = (
    "normalign",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "evaluate",
    "deepspeed",
    "flash_attn",
    "bitsandbytes",
    "torchvision",
    "matplotlib",
    "sklearn",
)
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR", "TEMP", "TMP", "LANG", "LC_ALL")

_CHECK_SCRIPT = """
import runpy
import numpy as np
import transformers
from transformers import AutoModelForImageTextToText, AutoProcessor, pipeline

questions = runpy.run_path(ARGUMENTS["ask_model"])
asked = ARGUMENTS["image_paths"], ARGUMENTS["prompts"], ARGUMENTS["max_new_tokens"]

processor = AutoProcessor.from_pretrained(FOLDER, trust_remote_code=True)
model = AutoModelForImageTextToText.from_pretrained(FOLDER, trust_remote_code=True, dtype="auto")
answers, logits = questions["ask"](model, processor, *asked)
np.save(ARGUMENTS["logits_file"], logits)

pipe = pipeline("image-text-to-text", model=FOLDER, trust_remote_code=True, dtype="auto")
RESULT["answers"] = answers
RESULT["pipeline_answers"] = questions["ask_pipeline"](pipe, *asked)
RESULT["model_class"] = type(model).__name__
RESULT["model_module"] = type(model).__module__
RESULT["pipeline_model_class"] = type(pipe.model).__name__
RESULT["transformers_version"] = transformers.__version__
"""


def load_in_clean_process(
    folder: str | os.PathLike,
    script: str,
    arguments: dict | None = None,
    *,
    blocked: tuple[str, ...] = OPTIONAL_PACKAGES,
    environment: dict[str, str] | None = None,
    python: str | os.PathLike = sys.executable,
    timeout: float = 900,
) -> dict:
    """Runs `script` on `folder` in a new Python process in which the packages `blocked` do not exist.

    The process starts in an empty folder with closed standard input, an empty Hugging Face cache and no user settings;
    every connection is refused. It runs on the CPU with this process's number of threads, so logits can be compared
    bit for bit.

    Args:
        folder: the folder to load, given to the script as FOLDER (an absolute path).
        script: Python source; it finds FOLDER, ARGUMENTS and RESULT, a dict to fill with what JSON can hold.
        arguments: given to the script as ARGUMENTS.
        blocked: top-level packages that cannot be imported.
        environment: more environment variables.
        python: the interpreter.
        timeout: seconds.

    Returns:
        `result` (what the script left in RESULT), `blocked`, `network_attempts` (refused connections), `stdout` and
        `stderr`.

    Raises:
        NormalignError: the script failed or took too long; its whole output is the cause.
    """
    with tempfile.TemporaryDirectory(prefix="normalign-clean-") as scratch:
        work = Path(scratch)
        (work / "cwd").mkdir()
        (work / "script.py").write_text(script, encoding="utf-8")
        job = {
            "folder": str(Path(folder).resolve()),
            "script": str(work / "script.py"),
            "arguments": arguments or {},
            "blocked": list(blocked),
            "report": str(work / "report.json"),
        }
        (work / "job.json").write_text(json.dumps(job), encoding="utf-8")
        try:
            done = subprocess.run(
                [str(python), "-I", str(_HERE / "clean_process_main.py"), str(work / "job.json")],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                cwd=work / "cwd",
                env={**_environment(work), **(environment or {})},
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as error:
            raise NormalignError(
                f"Loading {folder} in a process of its own took more than {timeout:g} seconds."
            ) from error
        if done.returncode or not (work / "report.json").exists():
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise NormalignError(
                f"{folder} cannot be used in a process of its own, without normalign and without network: {last}"
            ) from RuntimeError(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        report = json.loads((work / "report.json").read_text(encoding="utf-8"))
    return {**report, "stdout": done.stdout, "stderr": done.stderr}


def _environment(work: Path) -> dict[str, str]:
    """A fresh user's environment: nothing of this one but what Python needs to start."""
    threads = str(torch.get_num_threads())
    return {
        **{name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
        "HOME": str(work),
        "USERPROFILE": str(work),
        "HF_HOME": str(work / "hf"),
        "HF_MODULES_CACHE": str(work / "hf" / "modules"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }


def check_export(
    folder: str | os.PathLike,
    image_paths: list[str | os.PathLike | None],
    prompts: list[str],
    *,
    max_new_tokens: int = 32,
    logits_file: str | os.PathLike | None = None,
    timeout: float = 900,
) -> dict:
    """Asks an export about pictures in a clean process, through AutoModelForImageTextToText and through `pipeline`.

    Args:
        folder: what `export` wrote.
        image_paths: one picture, or None for none, for each prompt.
        prompts: the user's turns.
        max_new_tokens: of each greedy answer.
        logits_file: where to keep the logits (.npy); None keeps no file.
        timeout: seconds.

    Returns:
        `answers` and `pipeline_answers` (one string a prompt), `logits` (float32 array of shape (prompts, vocabulary),
        of the token after each prompt; `ask_model.ask` computes the same for a model in memory), `logits_file` (path or
        None), `model_class`, `model_module`, `transformers_version`, `normalign_importable` (always False: the process
        refuses to go on otherwise) and `network_attempts` (empty).

    Raises:
        NormalignError: the folder does not load or answer there, or tried to reach the network.
    """
    if len(image_paths) != len(prompts):
        raise ValueError(
            f"check_export needs one picture (or None) a prompt, got {len(image_paths)} and {len(prompts)}."
        )
    with tempfile.TemporaryDirectory(prefix="normalign-logits-") as scratch:
        kept = Path(logits_file).resolve() if logits_file is not None else Path(scratch) / "logits.npy"
        arguments = {
            "ask_model": str(_HERE / "ask_model.py"),
            "image_paths": [None if path is None else str(Path(path).resolve()) for path in image_paths],
            "prompts": list(prompts),
            "max_new_tokens": max_new_tokens,
            "logits_file": str(kept),
        }
        report = load_in_clean_process(folder, _CHECK_SCRIPT, arguments, timeout=timeout)
        logits = np.load(kept)
    if report["network_attempts"]:
        raise NormalignError(f"Loading {folder} tried to reach the network: {'; '.join(report['network_attempts'])}.")
    return {
        **report["result"],
        "logits": logits,
        "logits_file": None if logits_file is None else str(kept),
        "normalign_importable": False,
        "network_attempts": [],
    }
