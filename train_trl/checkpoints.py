"""Keeps a run so that it can go on: whole checkpoints told from torn ones, the recipe beside them, a stop on SIGTERM."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import TrainerCallback

from ..assembly.licenses import copy_licenses
from ..configuration.errors import NormalignError, RunStopped
from . import processes
from .recipe import Recipe
from .recipe_reading import recipe_as_yaml


logger = logging.getLogger(__name__)

RECIPE_NAME = "recipe.yaml"
BASE_NAME = "base"
# Written last into a checkpoint, with the size of every file in it.
SEAL_NAME = "checkpoint_files.json"
_UNFINISHED_SAVE = ".finished.partial"
_NOT_FOR_THE_HUB = ("training_args.bin", "README.md")
# What does not change what is learned.
_MAY_DIFFER = {"output_dir", "overwrite", "resume", "report_to", "logging_steps", "save_steps", "save_total_limit"}
_MAY_DIFFER |= {"dataloader_workers", "cache_dir", "eval_generation", "eval_steps", "eval_data"}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# torch writes its archives without telling errno; safetensors gives the system's words alone
_FULL_WORDS = re.compile(r"no space left|file too large|quota exceeded|PytorchStreamWriter|inline_container", re.I)


# --- checkpoints


def checkpoints_of(output_dir: str | Path) -> list[Path]:
    """The folders `checkpoint-N`, whole or torn, the newest first."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted((path for path in found if path.is_dir()), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def seal(checkpoint: Path) -> None:
    """Marks a checkpoint as whole: the last file that is written into it says how long each other one is.

    All are on the disk by then, so that a power cut leaves no file of the right length with nothing in it.
    """
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != SEAL_NAME)
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sizes = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}
    partial = checkpoint / f"{SEAL_NAME}.partial"
    partial.write_text(json.dumps(sizes, indent=1), encoding="utf-8")
    partial.replace(checkpoint / SEAL_NAME)


def what_is_torn(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None if it is whole."""
    try:
        sizes = json.loads((checkpoint / SEAL_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {SEAL_NAME}: its writing was broken off"
    except ValueError:
        return f"its {SEAL_NAME} cannot be read"
    for name, size in sizes.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes of {size:,}"
    return None


def find_resume(output_dir: str | Path) -> Path | None:
    """The newest whole checkpoint of a run, or None; torn ones that are newer are named in the log and passed over."""
    for checkpoint in checkpoints_of(output_dir):
        problem = what_is_torn(checkpoint)
        if problem is None:
            return checkpoint
        logger.warning(f"{checkpoint} is torn and is passed over: {problem}.")
    return None


def remove_older(output_dir: str | Path, keep: int | None) -> None:
    """Removes all but the `keep` newest whole checkpoints, and torn ones older than these; None keeps all."""
    whole = [checkpoint for checkpoint in checkpoints_of(output_dir) if what_is_torn(checkpoint) is None]
    if keep is None or len(whole) <= keep:
        return
    oldest_kept = step_of(whole[keep - 1])
    for checkpoint in checkpoints_of(output_dir):
        if step_of(checkpoint) < oldest_kept:
            # without its seal it is torn from the first moment on
            (checkpoint / SEAL_NAME).unlink(missing_ok=True)
            shutil.rmtree(checkpoint)


@contextmanager
def sealed(checkpoint: Path, trainer: Any, keep: int | None) -> Iterator[None]:
    """Around the writing of a checkpoint by all processes: it is sealed at the end, or removed where that fails."""
    first = trainer.is_world_process_zero()
    if first and checkpoint.exists():
        shutil.rmtree(checkpoint)
    trainer.accelerator.wait_for_everyone()
    try:
        yield
        trainer.accelerator.wait_for_everyone()
        if first:
            seal(checkpoint)
    except Exception:
        if first:
            shutil.rmtree(checkpoint, ignore_errors=True)
        raise
    if first:
        remove_older(checkpoint.parent, keep)


def complete_folder(folder: Path, recipe: Recipe) -> None:
    """Adds recipe and licenses to a folder that the trainer has saved, and takes away what names this machine or says
    nothing."""
    for name in _NOT_FOR_THE_HUB:
        (folder / name).unlink(missing_ok=True)
    write_recipe(recipe, folder)
    compose = recipe.compose
    copy_licenses([recipe.start_folder()] if compose is None else [compose.vision, compose.text], folder)


# --- the finished folder


def is_finished(output_dir: str | Path) -> bool:
    """Whether a run has left its finished model or adapter; its config is the last file to arrive."""
    return any((Path(output_dir) / name).is_file() for name in ("config.json", "adapter_config.json"))


def save_finished(trainer: Any, output_dir: str | Path) -> Path:
    """Saves the trained model beside its place, then moves it there file by file, the config last."""
    out = Path(output_dir)
    work = out / _UNFINISHED_SAVE
    first = trainer.is_world_process_zero()
    if first:
        shutil.rmtree(work, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    try:
        trainer.save_model(str(work))
        with processes.agreement():
            if first:
                processes.refuse_empty_tensors(work)
        if first:
            for path in sorted(work.iterdir(), key=lambda path: path.name in ("config.json", "adapter_config.json")):
                path.replace(out / path.name)
    finally:
        if first:
            shutil.rmtree(work, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    return out


# --- one recipe, one folder


def write_recipe(recipe: Recipe, folder: str | Path) -> None:
    """The resolved recipe as `recipe.yaml`."""
    (Path(folder) / RECIPE_NAME).write_text(recipe_as_yaml(recipe), encoding="utf-8")


def goes_on(recipe: Recipe) -> bool:
    """Whether `output_dir` holds an unfinished run of this recipe, which is to be gone on with.

    Raises:
        NormalignError: it holds an unfinished run of another recipe. Names the keys that differ.
    """
    folder = Path(recipe.output_dir)
    file = folder / RECIPE_NAME
    if recipe.overwrite or recipe.resume == "never" or not file.is_file() or is_finished(folder):
        return False
    there, here = _flat(_read(file)), _flat(yaml.safe_load(recipe_as_yaml(recipe)))
    differ = [
        f"{key} ({there.get(key, 'not set')} there, {here.get(key, 'not set')} here)"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key) and key.partition(".")[0] not in _MAY_DIFFER
    ]
    if differ:
        raise NormalignError(
            f"output_dir {folder} holds an unfinished run of another recipe; {'these keys differ' if len(differ) > 1 else 'this key differs'}: "
            f"{'; '.join(differ)}. Go on with the recipe that it was started with ({file}), name another folder with "
            f"--output_dir, or have the run replaced with --overwrite true."
        )
    return True


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise NormalignError(
            f"{file}, the recipe of the run in this folder, cannot be read, so it is not known whether the run is the "
            f"same. Name another folder with --output_dir, or have the run replaced with --overwrite true."
        ) from error
    return content if isinstance(content, dict) else {}


def _flat(block: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in block.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def cut_log(path: Path, step: int) -> None:
    """Takes the lines after `step`, and one that was broken off, out of a log that is gone on with."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["step"] <= step:
            kept.append(line + "\n")
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(path)


# --- what ends a run early


class StopOnSigterm(TrainerCallback):
    """Ends the run after the step in which SIGTERM came, with a checkpoint. Launchers may send it twice.

    Used as a context around the training. `stopped_at` is the step, or None where the run went to its end.
    """

    def __init__(self):
        self.stopped_at: int | None = None
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> StopOnSigterm:
        # Python allows handlers in the main thread alone
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        if self.requested and isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
            raise RunStopped(
                "Stopped by SIGTERM, which has also ended the processes that prepare batches, so the step could not be "
                "finished. Run the same command again to go on from the newest checkpoint."
            ) from error

    def _note(self, number: int, frame: Any) -> None:
        self.requested = True

    def on_train_begin(self, args, state, control, **kwargs):
        """Takes the intervals of this recipe, not those of the checkpoint that is gone on from."""
        state.compute_steps(args, state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):
        """Asks for a checkpoint and the end, in all processes at the same step."""
        stop = self.requested
        if args.world_size > 1:
            flag = torch.tensor(int(stop), device=args.device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            stop = bool(flag.item())
        if stop and state.global_step < state.max_steps:
            self.stopped_at = state.global_step
            control.should_save = control.should_training_stop = True
        return control


@contextmanager
def full_disk_explained(output_dir: str | Path) -> Iterator[None]:
    """Turns a write that failed for want of space into one paragraph that says from where the run will go on."""
    try:
        yield
    # safetensors' error has no common class with OSError, torch raises a bare RuntimeError
    except Exception as error:
        if not _is_full(error):
            raise
        newest = find_resume(output_dir)
        place = f"from step {step_of(newest)} ({newest.name} is whole)" if newest else "from the beginning"
        folder = Path(output_dir)
        raise NormalignError(
            f"The run stopped because a file could not be written to {folder}: {' '.join(str(error).split())[:300]}. The disk "
            f"or the quota is full ({shutil.disk_usage(folder).free / 2**30:.1f} GiB are free); what was half written was "
            f"removed. Make room, and run the same command again: it goes on {place}. save_total_limit keeps fewer "
            f"checkpoints."
        ) from error


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if not isinstance(error, NormalignError) and _FULL_WORDS.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
