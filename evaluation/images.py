"""Opens what stands for an image (a file, bytes, an array, a picture) as RGB, by one rule for evaluation and training."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..configuration.errors import NormalignError


if TYPE_CHECKING:
    from PIL import Image

_SIXTEEN_BITS = 65535


def open_image(
    image: Any, where: str = "", *, most_pixels: int | None = None, longest: int | None = None
) -> Image.Image:
    """An image as RGB: turned as its EXIF data says, transparency laid on white.

    Sixteen bits become eight. Grey values of 32 bits or floats, and float arrays, have no range of their own: the largest
    value tells it, as the least of 1 (floats alone), 255, 65535 and itself; values below 0, NaN and infinity are black.
    Of an animation the first picture is taken.

    Args:
        image: a path, the bytes of a file, {"bytes": ..., "path": ...} as in `datasets`, a PIL picture, or an array of
            shape (height, width) or (height, width, 1, 3 or 4).
        where: what the error begins with, such as "Row 3 of data.json".
        most_pixels: a file whose header names more is refused before it is decoded.
        longest: a picture with a longer side is made smaller to fit.

    Raises:
        NormalignError: the file is missing, or no image that can be read; names `where` and the file.
    """
    from PIL import Image, UnidentifiedImageError

    name = name_of_image(image)
    try:
        if isinstance(image, Image.Image):
            return _as_rgb(image, longest)
        if isinstance(image, np.ndarray):
            return _as_rgb(_picture_of(image), longest)
        with Image.open(_file_of(image)) as file:
            if most_pixels is not None and file.width * file.height > most_pixels:
                raise ValueError(f"it has {file.width} x {file.height} pixels; at most {most_pixels:,} are read")
            if longest is not None:
                # a JPEG is decoded at a half, a quarter or an eighth of its size where that is enough
                file.draft(None, (longest, longest))
            return _as_rgb(file, longest)
    # what a broken file makes Pillow's many readers raise has no common class
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = "it is no image" if isinstance(error, UnidentifiedImageError) else reason
        message = f"{name} cannot be read: {reason or type(error).__name__}"
        raise NormalignError(f"{where}: {message}" if where else message[0].upper() + message[1:]) from error


def name_of_image(image: Any) -> str:
    """`the image FILE`, or what else is known of it."""
    path = image.get("path") if isinstance(image, Mapping) else image if isinstance(image, str | Path) else None
    path = path or getattr(image, "filename", None)
    return f"the image {path}" if path else f"an image given as {type(image).__name__}"


def _file_of(image: Any) -> Any:
    """What Pillow can open."""
    if isinstance(image, Mapping):
        image = image.get("path") if image.get("bytes") is None else image["bytes"]
    if isinstance(image, bytes | bytearray | memoryview):
        if not len(image):
            raise ValueError("it has 0 bytes")
        return io.BytesIO(image)
    if isinstance(image, str) and image.startswith(("http://", "https://")):
        raise FileNotFoundError("it is an address on the web, and only files are read; download it first")
    if isinstance(image, str | Path) and str(image).strip():
        return Path(image).expanduser()
    raise TypeError("give a file's path, the bytes of one, a PIL picture or an array")


def _picture_of(array: np.ndarray) -> Image.Image:
    from PIL import Image

    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.size == 0 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))):
        raise ValueError(
            f"an array of shape {array.shape} is no picture: it needs (height, width) or (height, width, 3)"
        )
    if array.dtype == np.uint8:
        return Image.fromarray(array)
    if array.dtype == bool:
        return Image.fromarray(array.astype(np.uint8) * 255)
    return Image.fromarray(_eight_bits(array, _SIXTEEN_BITS if array.dtype == np.uint16 else None))


def _as_rgb(picture: Image.Image, longest: int | None) -> Image.Image:
    from PIL import ExifTags, Image, ImageOps

    picture.load()
    # exif_transpose copies a picture that stands upright, too
    if picture.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith(("I", "F")):
        full = _SIXTEEN_BITS if picture.mode.startswith("I;16") else None
        picture = Image.fromarray(_eight_bits(np.asarray(picture), full))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    picture = picture.convert("RGB")
    if longest is not None and max(picture.size) > longest:
        picture.thumbnail((longest, longest), Image.Resampling.BICUBIC)
    return picture


def _eight_bits(values: np.ndarray, full: float | None) -> np.ndarray:
    """`values` from 0 to `full` as 0 to 255; without `full`, their largest value tells what it is."""
    whole = not np.issubdtype(values.dtype, np.floating)
    values = values.astype(np.float64)
    values = np.where(np.isfinite(values), values, 0).clip(min=0)
    if full is None:
        largest = values.max()
        full = 1 if largest <= 1 and not whole else 255 if largest <= 255 else max(_SIXTEEN_BITS, largest)
    return (values * (255 / full)).round().clip(max=255).astype(np.uint8)
