"""Opens the images of a training row: any kind and mode as RGB of a size that image processors can take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..evaluation.images import open_image


if TYPE_CHECKING:
    from PIL import Image

MOST_PIXELS = 89_000_000
"""More pixels than these, told from the header, are a bad image. Decoding so many takes about 0.7 GB for a moment."""

LONGEST_SIDE = 2048
"""A longer side is reduced to this: a LLaVA's encoder sees at most half as many pixels a side."""

SHORTEST_SIDE = 4
"""A shorter side is stretched to this. With 1 or 3 pixels some image processors take a side for the colours, and those that
scale the shorter side up would make of a line of pixels a picture of gigabytes."""


def open_image_for_training(image: Any, where: str) -> Image.Image:
    """An image of a row as RGB, 4 to 2048 pixels a side; otherwise as in `normalign.evaluation.images.open_image`.

    Args:
        image: a path, bytes, {"bytes": ..., "path": ...}, a PIL picture or an array.
        where: the row, as "Row 3 of data.json".

    Raises:
        NormalignError: missing, broken, or of more than MOST_PIXELS pixels; names the row and the file.
    """
    picture = open_image(image, where, most_pixels=MOST_PIXELS, longest=LONGEST_SIDE)
    if min(picture.size) < SHORTEST_SIDE:
        picture = picture.resize(tuple(max(side, SHORTEST_SIDE) for side in picture.size), 0)
    return picture


def open_images(row: Mapping[str, Any]) -> list[Image.Image]:
    """The opened images of a training row, in order; an empty list for a row of text alone.

    Args:
        row: has `images` (a list, or None), and for the error's words perhaps `row` and `source`.

    Raises:
        NormalignError: an image is missing or broken.
    """
    where = name_of_row(row)
    return [open_image_for_training(image, where) for image in row.get("images") or ()]


def name_of_row(row: Mapping[str, Any]) -> str:
    """`Row 3 of data.json`, as far as it is known."""
    number = "A row" if row.get("row") is None else f"Row {row['row']}"
    return f"{number} of {row.get('source') or 'the data'}"
