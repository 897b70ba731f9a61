"""Writes a folder in full or not at all, and never over what it should not: the rules for all that is saved whole."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from ..configuration.backbones import resolve_backbone
from ..configuration.errors import NormalignError
from .licenses import copy_licenses


if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

# Where huggingface_hub keeps its notes on a folder it downloads or uploads.
_FOLDERS_OF_THE_HUB = {".cache"}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def save_whole(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    out: str | os.PathLike,
    *,
    sources: Sequence[str | os.PathLike] = (),
    overwrite: bool = False,
) -> Path:
    """Saves a model with its code, processor and licenses as the folder `out`, which is there in full or as it was.

    Args:
        sources: what the model was made from (folders, Hub ids or presets); a folder among them is never replaced, and
            its license files are copied.
        overwrite: replace a folder that holds files.

    Returns:
        `out`, with `~` resolved.

    Raises:
        NormalignError: `out` may not be written, see `check_target`.
    """
    out = check_target(out, sources=sources, overwrite=overwrite)
    with written_in_full(out) as folder:
        write_parts(model, processor, folder)
        copy_licenses(sources, folder)
    return out


def write_parts(
    model: PreTrainedModel, processor: ProcessorMixin, folder: Path, max_shard_size: str | int | None = None
) -> None:
    """Weights, code, config and processor into a folder; whoever may read the config may read the weights.

    Args:
        max_shard_size: as of save_pretrained ("5GB", or bytes); None leaves it to transformers.
    """
    model.save_pretrained(folder, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    processor.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        # safetensors lets the owner alone read its files
        shutil.copymode(folder / "config.json", file)


def check_target(
    out: str | os.PathLike,
    *,
    sources: Sequence[str | os.PathLike] = (),
    overwrite: bool = False,
    earlier: Callable[[Path], bool] = lambda folder: False,
    own_folders: Collection[str] = (),
) -> Path:
    """The folder `out` with `~` resolved, if it may be written: to be asked before the long work, and again after it.

    Args:
        sources: what is read (folders, Hub ids or presets): neither they nor a folder above them is replaced.
        overwrite: a folder that holds files, but no folders, may be replaced.
        earlier: says of a folder with files that it may be replaced without being told so.
        own_folders: folders in it that may be replaced with it.

    Raises:
        NormalignError: names what is in the way.
    """
    folder = named_folder(out)
    for source in sources:
        kept = Path(resolve_backbone(str(source))).expanduser()
        if kept.is_dir() and is_at_or_above(folder, kept):
            raise NormalignError(f"Writing {folder} would replace what it is made from ({kept}). Name another folder.")
    if not folder.exists():
        return folder
    entries = list(folder.iterdir())
    inner = sorted({entry.name for entry in entries if entry.is_dir()} - _FOLDERS_OF_THE_HUB - {*own_folders})
    if inner:
        raise NormalignError(
            f"{folder} holds the folder{'s' if len(inner) > 1 else ''} {', '.join(inner[:3])}, and a folder with folders in "
            f"it is never replaced. Name another one."
        )
    if entries and not overwrite and not earlier(folder):
        raise NormalignError(
            f"{folder} is not empty. Name another folder, empty it, or have it replaced with --overwrite (in Python "
            f"overwrite=True)."
        )
    return folder


def named_folder(out: str | os.PathLike) -> Path:
    """`out` with `~` resolved; it may be there already or not.

    Raises:
        NormalignError: it is empty, a file, or a link that leads nowhere.
    """
    if not os.fspath(out):
        raise NormalignError("The folder to write has no name: '' was given. Name a folder.")
    folder = Path(out).expanduser()
    if folder.is_symlink() and not folder.exists():
        raise NormalignError(
            f"{folder} is a link to {os.readlink(folder)}, which is not there. Make that folder, or name another."
        )
    if folder.exists() and not folder.is_dir():
        raise NormalignError(f"{folder} is a file. Name a folder to write.")
    return folder


def is_at_or_above(folder: Path, kept: Path) -> bool:
    """Whether replacing `folder` would take `kept` away."""
    inner, outer = kept.resolve(), folder.resolve()
    return inner == outer or outer in inner.parents


@contextmanager
def written_in_full(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that takes its place at the end, or is removed when anything goes wrong.

    Raises:
        NormalignError: the folder cannot be made, or the disk is full.
    """
    # a link keeps pointing to the folder, and "." has a name
    out = out.resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    except OSError as error:
        raise NormalignError(
            f"The folder {out} cannot be made ({error.strerror}). Name one in a folder that is there and that you may "
            f"write to."
        ) from error
    try:
        folder = work / out.name
        folder.mkdir()
        yield folder
        if out.exists():
            out.rename(work / "replaced")
            try:
                folder.rename(out)
            except BaseException:
                (work / "replaced").rename(out)
                raise
        else:
            folder.rename(out)
    except (OSError, SafetensorError) as error:
        # safetensors gives the system's error in words alone
        if getattr(error, "errno", None) in _NO_ROOM or any(f"(os error {code})" in str(error) for code in _NO_ROOM):
            raise NormalignError(
                f"There is no room on the disk for {out}, so nothing was left of it. Make room, or name a folder on "
                f"another disk."
            ) from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
