"""Images of training rows: every mode, odd sizes, broken files, and that the row and the file are named."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from transformers import CLIPImageProcessor, SiglipImageProcessor

from normalign.configuration.errors import NormalignError
from normalign.train_trl.images import LONGEST_SIDE, MOST_PIXELS, open_image_for_training, open_images


RED = (200, 30, 30)


def encoded(picture, format="PNG", **options):
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def opened(image):
    return open_image_for_training(image, "Row 3 of rows.json")


def mean_colour(picture):
    return tuple(np.asarray(picture).reshape(-1, 3).mean(0).round().astype(int).tolist())


def palette_with_transparency():
    picture = Image.new("P", (8, 6), 1)
    picture.putpalette([0, 0, 0, *RED])
    picture.paste(0, (0, 0, 8, 3))
    return encoded(picture, transparency=0)


IN_EVERY_MODE = {
    "1": (Image.new("1", (8, 6), 1), (255, 255, 255)),
    "L": (Image.new("L", (8, 6), 80), (80, 80, 80)),
    "LA, half clear": (Image.new("LA", (8, 6), (0, 128)), (127, 127, 127)),
    "P": (Image.new("RGB", (8, 6), RED).convert("P", palette=Image.Palette.ADAPTIVE), RED),
    "P with a clear half": (palette_with_transparency(), tuple((255 + value + 1) // 2 for value in RED)),
    "RGBA, clear": (Image.new("RGBA", (8, 6), (*RED, 0)), (255, 255, 255)),
    "CMYK": (Image.new("CMYK", (8, 6), (0, 255, 255, 0)), (255, 0, 0)),
    "CMYK as JPEG": (encoded(Image.new("CMYK", (8, 6), (0, 255, 255, 0)), "JPEG"), (254, 0, 0)),
    "I;16": (Image.new("I;16", (8, 6), 40 * 257), (40, 40, 40)),
    "I;16 as PNG": (encoded(Image.new("I;16", (8, 6), 40 * 257)), (40, 40, 40)),
    "I of 16 bits": (Image.new("I", (8, 6), 60000), (233, 233, 233)),
    "I of 8 bits": (Image.new("I", (8, 6), 60), (60, 60, 60)),
    "F of 0 to 1": (Image.new("F", (8, 6), 0.5), (128, 128, 128)),
    "F of 0 to 255": (Image.new("F", (8, 6), 80.0), (80, 80, 80)),
    "F of NaN": (Image.new("F", (8, 6), float("nan")), (0, 0, 0)),
    "array of one channel": (np.full((6, 8), 80, np.uint8), (80, 80, 80)),
    "array of three": (np.full((6, 8, 3), RED, np.uint8), RED),
    "array of bools": (np.ones((6, 8), bool), (255, 255, 255)),
    "array of floats": (np.full((6, 8, 3), 0.5, np.float32), (128, 128, 128)),
    "array of 16 bits": (np.full((6, 8, 1), 257 * 9, np.uint16), (9, 9, 9)),
}


@pytest.mark.parametrize("case", IN_EVERY_MODE)
def test_every_mode_is_rgb_of_the_same_colour_and_makes_finite_pixels(case):
    """R36."""
    image, colour = IN_EVERY_MODE[case]
    picture = opened(image)
    assert picture.mode == "RGB" and picture.size == (8, 6)
    assert np.abs(np.subtract(mean_colour(picture), colour)).max() <= 1
    pixels = SiglipImageProcessor(size={"height": 16, "width": 16})(picture, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 16, 16) and torch.isfinite(pixels).all()


def test_a_picture_is_turned_as_its_exif_data_say(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = Image.new("RGB", (8, 6), RED)
    picture.save(tmp_path / "turned.jpg", exif=exif)
    for image in (tmp_path / "turned.jpg", encoded(picture, "JPEG", exif=exif)):
        assert opened(image).size == (6, 8)


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (1, 40), (3, 2), (50, 1)])
@pytest.mark.parametrize("processor", [SiglipImageProcessor, CLIPImageProcessor])
def test_sides_of_one_to_three_pixels_work(size, processor):
    """R36: a side of 1 or 3 may be taken for the colour channels."""
    picture = opened(Image.new("RGB", size, RED))
    assert picture.size == tuple(max(side, 4) for side in size) and mean_colour(picture) == RED
    pixels = processor()(picture, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 224, 224)
    assert all(pixels[0, channel].std() < 1e-5 for channel in range(3))


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_long_sides_are_bounded(format):
    picture = opened(encoded(Image.new("RGB", (3 * LONGEST_SIDE, 600), RED), format))
    assert picture.size == (LONGEST_SIDE, 200)
    assert np.abs(np.subtract(mean_colour(picture), RED)).max() <= 2


def png_of_size(width, height):
    """A PNG whose header says so, and whose data are empty."""
    chunks = [b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT"]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )


WHOLE = encoded(Image.effect_noise((64, 64), 50), "JPEG")
BROKEN = {
    "cut.jpg": (WHOLE[: len(WHOLE) // 2], "truncated"),
    "empty.png": (b"", "no image|0 bytes"),
    "text.png": (b"<html>not found</html>", "no image"),
    "bomb.png": (png_of_size(60000, 60000), "pixels"),
    "large.png": (png_of_size(9500, 9500), f"9500 x 9500 pixels; at most {MOST_PIXELS:,} are read"),
    "header.png": (png_of_size(8, 8), ""),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_cannot_be_read_names_the_row_and_the_file(tmp_path, name):
    """R37: in a file and as bytes, with no global switch of Pillow's."""
    content, words = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    for image in (tmp_path / name, {"bytes": content, "path": name}):
        with pytest.raises(
            NormalignError, match=rf"^Row 3 of rows.json: the image \S*{name} cannot be read: .*({words})"
        ):
            opened(image)
    with pytest.raises(NormalignError, match="^Row 3 of rows.json: an image given as bytes cannot be read"):
        opened(content)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("/nowhere/cat.png", "the image /nowhere/cat.png cannot be read: No such file"),
        ("https://example.com/cat.png", "download it first"),
        ({"bytes": None, "path": None}, "give a file's path"),
        (7, "an image given as int cannot be read: give a file's path"),
        (np.zeros((3, 8, 8), np.uint8), r"array of shape \(3, 8, 8\) is no picture"),
        (np.zeros((0, 8), np.uint8), r"array of shape \(0, 8\)"),
    ],
)
def test_what_is_missing_or_no_image_is_told(image, words):
    """R37."""
    with pytest.raises(NormalignError, match=words):
        opened(image)


def test_the_images_of_a_row_are_opened_in_order(tmp_path):
    Image.new("L", (9, 9)).save(tmp_path / "a.png")
    row = {"images": [{"bytes": encoded(Image.new("RGB", (5, 7))), "path": None}, str(tmp_path / "a.png")]}
    assert [picture.size for picture in open_images(row)] == [(5, 7), (9, 9)]
    assert open_images({"images": []}) == open_images({"images": None}) == open_images({}) == []
    with pytest.raises(NormalignError, match="^Row 12 of x.parquet: the image gone.png cannot be read"):
        open_images({"images": ["gone.png"], "row": 12, "source": "x.parquet"})
    with pytest.raises(NormalignError, match="^A row of the data: "):
        open_images({"images": ["gone.png"]})
