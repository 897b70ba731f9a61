"""The folder that a run writes: its own, nobody else's, and begun anew or gone on with."""

from __future__ import annotations

import inspect
import logging
import re
import shutil
from pathlib import Path

from ..assembly.licenses import is_license_file
from ..assembly.saving import is_at_or_above, named_folder
from ..configuration.backbones import resolve_backbone
from ..configuration.errors import NormalignError
from ..modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from . import processes
from .checkpoints import (
    BASE_NAME,
    RECIPE_NAME,
    cut_log,
    goes_on,
    is_finished,
    step_of,
    write_recipe,
)
from .recipe import Recipe


logger = logging.getLogger(__name__)

LOG_NAME = "train_log.jsonl"
EVAL_ROWS_NAME = "eval_generation_rows.json"
# What a run leaves beside its checkpoints: weights, configs, the processor's files and the log.
_WRITTEN = ("*.safetensors", "*config.json", "*.index.json", LOG_NAME, "chat_template.jinja", "training_args.bin")
_WRITTEN += ("tokenizer.*", "*tokens*.json", "vocab.*", "merges.txt", RECIPE_NAME, EVAL_ROWS_NAME)
_CODE = {file.name for file in Path(inspect.getfile(NormAlignLlavaForConditionalGeneration)).parent.glob("*.py")}


def check_output(recipe: Recipe) -> None:
    """Makes sure that the run gets a folder of its own: a new or empty one, or one that `clear_output` may empty.

    Raises:
        NormalignError: the folder holds what the run starts from, is not empty, is no earlier run's, or holds an
            unfinished run of another recipe.
    """
    folder = named_folder(recipe.output_dir)
    starts = [recipe.compose.vision, recipe.compose.text] if recipe.compose else [recipe.start_folder()]
    for start in (Path(resolve_backbone(start)).expanduser() for start in starts):
        if start.is_dir() and is_at_or_above(folder, start):
            raise NormalignError(
                f"output_dir {folder} holds the model that the run starts from ({start}), which would be lost. Name "
                f"another folder with --output_dir."
            )
    if goes_on(recipe):
        return
    # of the processes of one run, the first may have begun to write already
    if not processes.is_first() or not folder.exists() or not any(folder.iterdir()):
        return
    if not recipe.overwrite:
        what = " (it holds a finished run)" if (folder / LOG_NAME).is_file() and is_finished(folder) else ""
        raise NormalignError(
            f"output_dir {folder} is not empty{what}, and a run does not mix with what is there. Name another folder with "
            f"--output_dir, or have an earlier run in it replaced with --overwrite true."
        )
    if not (folder / LOG_NAME).is_file():
        raise NormalignError(
            f"output_dir {folder} has no {LOG_NAME}, so it is not the folder of an earlier run and is not replaced. Name "
            f"another one with --output_dir."
        )
    strange = sorted(path.name for path in folder.iterdir() if not _is_of_a_run(path))
    if strange:
        raise NormalignError(
            f"output_dir {folder} is not replaced, because it holds {', '.join(strange[:3])}, which training does not write. "
            f"Move that away, or name another folder with --output_dir."
        )


def clear_output(recipe: Recipe) -> None:
    """Empties the folder of an earlier run, where `check_output` has found that it is one; its log goes last."""
    folder = Path(recipe.output_dir)
    if not recipe.overwrite or not processes.is_first() or not folder.exists():
        return
    for path in sorted(folder.iterdir(), key=lambda path: path.name == LOG_NAME):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _is_of_a_run(path: Path) -> bool:
    if path.is_dir():
        # `runs` is TensorBoard's
        return re.fullmatch(rf"checkpoint-\d+|runs|{BASE_NAME}|\.finished\.partial", path.name) is not None
    return path.name in _CODE or is_license_file(path.name) or any(path.match(pattern) for pattern in _WRITTEN)


def begin_folder(recipe: Recipe, resume: Path | None, base: Path | None) -> None:
    """Makes `output_dir` ready: the recipe, an adapter's base, and a log that ends where the run goes on."""
    folder = Path(recipe.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if base is not None:
        shutil.rmtree(folder / BASE_NAME, ignore_errors=True)
        shutil.move(base, folder / BASE_NAME)
    write_recipe(recipe, folder)
    cut_log(folder / LOG_NAME, 0 if resume is None else step_of(resume))
    if resume is not None:
        logger.warning(f"{recipe.name} goes on from {resume}.")
