"""Lets license and notice files travel with a model: from its parts to what is made of them, stage by stage."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..configuration.backbones import resolve_backbone


_LICENSE_FILE = re.compile(r"(licen[sc]e|notice)[\w-]*(\.txt|\.md)?", re.IGNORECASE)


def is_license_file(name: str) -> bool:
    """Whether a file is called as licenses and notices are: LICENSE, LICENSE.txt, NOTICE, ..."""
    return bool(_LICENSE_FILE.fullmatch(name))


def licenses_in(folder: str | os.PathLike) -> list[Path]:
    """The license and notice files in a folder, by name; none where there is no such folder."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.is_file() and is_license_file(file.name))


def copy_licenses(sources: Sequence[str | os.PathLike], folder: Path) -> None:
    """Copies the files that came with what a model is made from.

    Args:
        sources: folders, presets or Hub ids; of several, each one's files get its name (LICENSE-vit.txt).
        folder: where the model is saved.
    """
    for source in sources:
        place = Path(resolve_backbone(str(source))).expanduser()
        for file in licenses_in(place):
            part = re.sub(r"[^\w-]+", "-", place.resolve().name)
            name = file.name if len(sources) == 1 else f"{file.stem}-{part}{file.suffix}"
            shutil.copyfile(file, folder / name)
