"""Keeps the outputs of a frozen vision encoder on disk, so that each image is encoded once for all epochs and runs."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PretrainedConfig, ProcessorMixin
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..configuration.errors import NormalignError
from .images import open_images


if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

SETTINGS_NAME = "cache.json"
_SHARD_BYTES = 256 * 2**20
_IMAGES_AT_ONCE = 16
_KEY_BYTES = 16
_NOT_OF_THE_ENCODER = ("transformers_version", "_name_or_path", "dtype", "architectures")


@dataclass
class VisionCache:
    """The kept outputs of an encoder: safetensors shards of `features` (images, layers * tokens * width) and `keys`.

    Args:
        folder: where the shards are.
        shape: layers, tokens and width of one image's features.
        visual_tokens: placeholders of one image in the language model's input.
        places: for each image's key its shard and row there.
    """

    folder: Path
    shape: tuple[int, int, int]
    visual_tokens: int
    places: dict[bytes, tuple[str, int]] = field(default_factory=dict)

    def __post_init__(self):
        self._open: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # a data worker maps the shards by itself
        return {**self.__dict__, "_open": {}}

    def read(self, images: Iterable[Any]) -> torch.Tensor:
        """The features of images, (images, layers * tokens * width).

        Raises:
            NormalignError: an image is not in the cache.
        """
        return torch.stack([self._read_one(image) for image in images])

    def _read_one(self, image: Any) -> torch.Tensor:
        place = self.places.get(image_key(image))
        if place is None:
            raise NormalignError(
                f"An image of the data is not in the vision cache {self.folder}: it has changed since the run began. "
                f"Start the run again; images that are missing are then encoded."
            )
        shard, row = place
        if shard not in self._open:
            self._open[shard] = safe_open(self.folder / shard, "pt").get_slice("features")
        return self._open[shard][row]


def image_key(image: Any) -> bytes:
    """A hash of an image's content: of its file's bytes where there is a file, so that it need not be decoded, else of
    its pixels.

    Args:
        image: a path, bytes, {"bytes": ..., "path": ...}, a PIL picture or an array.
    """
    if isinstance(image, Mapping):
        image = image["bytes"] or image["path"]
    if isinstance(image, str | os.PathLike):
        image = Path(image).read_bytes()
    if isinstance(image, bytes):
        return hashlib.blake2b(image, digest_size=_KEY_BYTES, person=b"file").digest()
    picture = open_images({"images": [image]})[0]
    content = repr(picture.size).encode() + picture.tobytes()
    return hashlib.blake2b(content, digest_size=_KEY_BYTES, person=b"pixels").digest()


def without_decoding(dataset: Dataset) -> Dataset:
    """The data set with the images of its rows as {"bytes", "path"}, not decoded."""
    import datasets

    column = dataset.features.get("images")
    image = getattr(column, "feature", None)
    if not isinstance(image, datasets.Image) or not image.decode:
        return dataset
    return dataset.cast_column("images", type(column)(datasets.Image(decode=False)))


def encoder_of(model: nn.Module) -> nn.Module:
    """The vision encoder, also of a model that PEFT has wrapped."""
    return next(module for name, module in model.named_modules() if name.rpartition(".")[2] == "vision_tower")


def fill_cache(
    model: nn.Module, processor: ProcessorMixin, dataset: Dataset, folder: str | Path, bfloat16: bool = False
) -> VisionCache:
    """Encodes those images of the data that the cache lacks, and opens the cache for reading.

    Of several processes each encodes a share, and all wait for one another. Shards appear whole or not at all, so that
    a run that was killed goes on where it was. Memory holds one shard.

    Args:
        dataset: rows with `images`; best `without_decoding`.
        bfloat16: encode under autocast and keep bfloat16, to which the projector would round its input.

    Raises:
        NormalignError: the encoder is trained or sharded, the rows are streamed, the folder's features are another
            encoder's, the disk has not the room, or an image is broken.
    """
    from accelerate import PartialState

    encoder, folder, processes = encoder_of(model), Path(folder), PartialState()
    _refuse_encoders_that_change(encoder)
    if not hasattr(dataset, "__len__"):
        raise NormalignError(
            "cache_vision_features encodes all images before the first step, which streamed rows do not allow. Write "
            "data.streaming: false, or cache_vision_features: false."
        )
    home = next(encoder.parameters()).device
    encoder.to(processes.device)
    try:
        features = _Features(encoder, model.config, processor, bfloat16)
        cache = _open_cache(features, folder)
        missing = _missing_images(dataset, cache, processes.is_main_process)
        if missing:
            _check_room(cache, len(missing), features.dtype, processes.is_main_process)
        mine = {key: at for key, at in missing.items() if key[0] % processes.num_processes == processes.process_index}
        _encode(features, dataset, mine, cache, processes.is_main_process)
    finally:
        encoder.to(home)
    processes.wait_for_everyone()
    cache.places = _places(cache)
    if lost := len(missing.keys() - cache.places.keys()):
        raise NormalignError(
            f"{lost:,} images that another process encoded are not in the vision cache {folder}. Name a cache_dir that the "
            f"processes of all machines see."
        )
    return cache


def read_from_cache(model: nn.Module, cache: VisionCache) -> None:
    """Lets the vision encoder pass on features that stand where pixel values do, (images, layers * tokens * width).

    Pixel values are encoded as before, and the encoder's weights and their names stay as they are.
    """
    encoder, layers = encoder_of(model), _layer_list(model.config)

    def forward(self: nn.Module, pixel_values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if pixel_values.ndim != 2:
            return type(self).forward(self, pixel_values, *args, **kwargs)
        features = pixel_values.unflatten(1, cache.shape)
        return BaseModelOutputWithPooling(hidden_states={layer: features[:, i] for i, layer in enumerate(layers)})

    # bound, so that a copy of the model has its own
    encoder.forward = MethodType(forward, encoder)


class _Features:
    """The encoder's hidden states that the projector takes, of any images: (images, layers * tokens * width)."""

    def __init__(self, encoder: nn.Module, config: PretrainedConfig, processor: ProcessorMixin, bfloat16: bool):
        self.encoder, self.config, self.bfloat16 = encoder, config, bfloat16
        self.image_processor = processor.image_processor
        blank = self._layers([Image.new("RGB", (8, 8))])
        self.shape, self.dtype = tuple(blank.shape[1:]), blank.dtype
        # the class token, which the model leaves out
        self.visual_tokens = blank.shape[2] - (config.vision_feature_select_strategy == "default")

    def __call__(self, images: list[Image.Image]) -> torch.Tensor:
        return self._layers(images).flatten(1).cpu()

    @torch.no_grad()
    def _layers(self, images: list[Image.Image]) -> torch.Tensor:
        encoder, weight = self.encoder, next(self.encoder.parameters())
        pixels = self.image_processor(images=images, return_tensors="pt")["pixel_values"].to(weight.device)
        encoder.eval()
        with torch.autocast(weight.device.type, torch.bfloat16, enabled=self.bfloat16):
            states = encoder(pixels, output_hidden_states=True, return_dict=True).hidden_states
        chosen = torch.stack([states[layer] for layer in _layer_list(self.config)], dim=1)
        return chosen.to(torch.bfloat16) if self.bfloat16 else chosen

    def settings(self) -> dict[str, Any]:
        """What the features depend on, as JSON: weights and config of the encoder, layers, image processor, number type."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.encoder.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        config = self.encoder.config.to_diff_dict()
        settings = {
            "encoder": {key: value for key, value in config.items() if key not in _NOT_OF_THE_ENCODER},
            "encoder's weights": digest.hexdigest(),
            "layers": _layer_list(self.config),
            "image processor": self.image_processor.to_dict(),
            "number type": str(self.dtype).removeprefix("torch."),
        }
        return json.loads(json.dumps(settings, default=str))


def _layer_list(config: PretrainedConfig) -> list[int]:
    layers = config.vision_feature_layer
    return [layers] if isinstance(layers, int) else list(layers)


def _refuse_encoders_that_change(encoder: nn.Module) -> None:
    if any(parameter.requires_grad for parameter in encoder.parameters()):
        raise NormalignError(
            "cache_vision_features keeps the outputs of an encoder that does not change, but the vision encoder is "
            "trained (tune.vision). Write tune.vision: frozen, or cache_vision_features: false."
        )
    if any(parameter.device.type == "meta" or not parameter.numel() for parameter in encoder.parameters()):
        raise NormalignError(
            "cache_vision_features needs the vision encoder whole in each process, but its weights are split over the "
            "processes (ZeRO-3, or FSDP's memory-saving loading). Fill the cache by a run without them (--max_steps 1), "
            "or write cache_vision_features: false."
        )


def _open_cache(features: _Features, folder: Path) -> VisionCache:
    """The cache in a folder, new or old, with what it already holds."""
    settings, path = features.settings(), folder / SETTINGS_NAME
    if path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept != settings:
            raise NormalignError(
                f"The vision cache {folder} is that of another encoder or image size: {_differences(kept, settings)}. Name "
                f"another cache_dir, or remove that folder."
            )
    else:
        text = json.dumps(settings, indent=2)
        _write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))
    cache = VisionCache(folder, features.shape, features.visual_tokens)
    cache.places = _places(cache)
    return cache


def _differences(kept: dict[str, Any], now: dict[str, Any]) -> str:
    """`image processor.size {'height': 64} there, {'height': 128} here; ...`, the first three."""
    found = []
    for key in (key for key in now if kept.get(key) != now[key]):
        there, here = kept.get(key), now[key]
        if key == "encoder's weights":
            found.append("the encoder's weights are not the same")
        elif isinstance(there, dict):
            names = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
            found += [f"{key}.{name} is {there.get(name)} there, {here.get(name)} here" for name in names]
        else:
            found.append(f"{key} is {there} there, {here} here")
    return "; ".join(found[:3])


def _places(cache: VisionCache) -> dict[bytes, tuple[str, int]]:
    """Where each kept image is. A shard that cannot be read is removed, and said so: its images are encoded again."""
    places = {}
    for path in sorted(cache.folder.glob("features-*.safetensors")):
        try:
            with safe_open(path, "pt") as shard:
                keys = shard.get_tensor("keys").numpy()
                whole = shard.get_slice("features").get_shape() == [len(keys), math.prod(cache.shape)]
        except (SafetensorError, OSError):
            whole = False
        if not whole:
            logger.warning(f"{path} is not whole; it is removed, and its images are encoded again.")
            path.unlink(missing_ok=True)
            continue
        places |= {key.tobytes(): (path.name, row) for row, key in enumerate(keys)}
    return places


def _missing_images(dataset: Dataset, cache: VisionCache, show: bool) -> dict[bytes, tuple[int, int]]:
    """The keys that the cache lacks, each with the row and the number of one such image."""
    missing = {}
    with _bar("vision cache: looking for images", len(dataset), show) as advance:
        for row in range(len(dataset)):
            for number, image in enumerate(dataset[row]["images"] or ()):
                key = image_key(image)
                if key not in cache.places:
                    missing.setdefault(key, (row, number))
            advance(1)
    return missing


@contextmanager
def _bar(task: str, total: int, show: bool) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not show) as bars:
        number = bars.add_task(task, total=total)
        yield lambda count: bars.advance(number, count)


def _check_room(cache: VisionCache, images: int, dtype: torch.dtype, show: bool) -> None:
    """Finds how much will be written, and says it where `show`.

    Raises:
        NormalignError: the disk has less.
    """
    layers, tokens, width = cache.shape
    need, free = images * layers * tokens * width * dtype.itemsize, shutil.disk_usage(cache.folder).free
    size = (
        f"{images:,} images x {layers * tokens:,} tokens x {width:,} values x {dtype.itemsize} bytes = {_size(need)}"
    )
    if need > free:
        raise NormalignError(
            f"The vision cache {cache.folder} needs {size}, but its disk has {_size(free)} left. Name a cache_dir on "
            f"another disk, or write cache_vision_features: false."
        )
    if show:
        logger.warning(f"The vision cache {cache.folder} will take {size}; {_size(free)} are free.")


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _encode(
    features: _Features, dataset: Dataset, missing: dict[bytes, tuple[int, int]], cache: VisionCache, show: bool
) -> None:
    """Encodes images and writes them, a shard at a time."""
    each = math.prod(cache.shape) * features.dtype.itemsize
    keys = list(missing)
    per_shard = max(1, _SHARD_BYTES // each)
    with _bar("vision cache: encoding", len(keys), show) as advance:
        for start in range(0, len(keys), per_shard):
            shard, encoded = keys[start : start + per_shard], []
            for first in range(0, len(shard), _IMAGES_AT_ONCE):
                some = [missing[key] for key in shard[first : first + _IMAGES_AT_ONCE]]
                rows = [({"row": at, **dataset[at]}, number) for at, number in some]
                pictures = [open_images({**row, "images": [row["images"][number]]})[0] for row, number in rows]
                encoded.append(features(pictures))
                advance(len(some))
            _write_shard(cache.folder, shard, torch.cat(encoded))


def _write_shard(folder: Path, keys: list[bytes], features: torch.Tensor) -> None:
    name = hashlib.blake2b(b"".join(keys), digest_size=_KEY_BYTES).hexdigest()
    tensors = {"features": features, "keys": torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8)}
    tensors["keys"] = tensors["keys"].view(len(keys), _KEY_BYTES)
    _write_whole(folder / f"features-{name}.safetensors", lambda part: save_file(tensors, part))


def _write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """The file is there as a whole or not at all, whatever becomes of the process or the machine."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, SafetensorError) as error:
        raise NormalignError(
            f"The vision cache {path.parent} could not be written ({error}). What is in it stays and is used again. Make "
            f"room, or name another cache_dir."
        ) from error
    finally:
        part.unlink(missing_ok=True)
