"""Opens the images of a training row."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from PIL import Image as PillowImage
from PIL import ImageOps


if TYPE_CHECKING:
    from PIL import Image


def open_images(row: Mapping[str, Any]) -> list[Image.Image]:
    """The images of a row as RGB, in order; an empty list for a row of text alone."""
    return [_open(image) for image in row.get("images") or ()]


def _open(image: Any) -> Image.Image:
    if isinstance(image, Mapping):
        image = image["bytes"] or image["path"]
    if isinstance(image, bytes):
        image = io.BytesIO(image)
    picture = image if isinstance(image, PillowImage.Image) else PillowImage.open(image)
    return ImageOps.exif_transpose(picture).convert("RGB")
