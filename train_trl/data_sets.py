"""Reads the data that a recipe names as rows of one form, one at a time and without decoding an image.

A row has `messages` (content always in parts: {"type": "text" or "image", "text": ...}), `images` (undecoded: bytes and path),
`row` (its number in its source, from 0) and `source` (the file's or data set's name).
"""

from __future__ import annotations

import codecs
import json
import os
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from ..configuration.errors import NormalignError
from .images import name_of_row
from .recipe import DataSource, Recipe, RecipeError


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

IMAGE_MARK = "<image>"
ROLES = ("system", "user", "assistant")

_LLAVA_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_READ_AT_ONCE = 1 << 22
_LONGEST_ROW = 1 << 26
_SHUFFLED_AT_ONCE = 1000


class MalformedRow(NormalignError):
    """A row that is no conversation; the message says in what, `row` and `source` where."""

    def __init__(self, row: Mapping[str, Any], reason: str):
        super().__init__(f"{name_of_row(row)} is malformed: {reason}")
        self.row, self.source = row["row"], row["source"]


def load_data(recipe: Recipe) -> Dataset | IterableDataset:
    """The rows that the recipe trains on; see this module's first lines for their form.

    The Dataset holds numbers only (`origin` and `row`, to which columns such as a length can be added); a row is read and
    brought into form when it is asked for. Of a mixture, each row of a source of weight 1 is there once, of weight 2 twice,
    and of weight 0.5 every other one, drawn by the recipe's seed. An IterableDataset comes of `streaming: true`; its
    sources are drawn from by weight until the last of them has been read whole.

    Raises:
        NormalignError: the data are not there, or are no data; names the place. A row that is wrong raises when it is read.
        RecipeError: the recipe's keys do not fit together.
    """
    sources = recipe.data.sources()
    streaming = {source.streaming for source in sources}
    if not sources or len(streaming) > 1:
        raise RecipeError(
            "data.mixture is empty. List the data sets to mix."
            if not sources
            else "In data.mixture, some data sets have streaming: true and others have not. Stream all of them or none."
        )
    for source in sources:
        check_source(source)
    if streaming == {True}:
        if recipe.max_steps is None:
            raise RecipeError(
                "data.streaming needs max_steps: how many rows a stream has is not known before its end, so neither are "
                "the steps of an epoch."
            )
        return _stream(sources, recipe.seed)
    return _mapped(sources, recipe.seed)


def check_source(source: DataSource, key: str = "data") -> None:
    """Raises RecipeError where a block of the recipe, called `key`, cannot be a data set."""
    if source.name == "digit_scenes":
        if source.streaming:
            raise RecipeError(
                f"{key}.streaming is for data sets on disk or on the Hub; digit_scenes is drawn at once."
            )
    elif not source.path or not source.path.strip():
        raise RecipeError(
            f"{key}.name: {source.name} needs {key}.path: a JSON, JSONL or parquet file, a folder, or a Hub id (owner/name)."
        )
    if not source.weight > 0 or (source.rows is not None and source.rows < 1):
        raise RecipeError(f"{key}.weight and {key}.rows must be above 0, got {source.weight} and {source.rows}.")
    if source.images is not None and not Path(source.images).expanduser().is_dir():
        raise RecipeError(f"{key}.images: there is no folder {source.images}.")


# --- one source


class _Source:
    """Rows of one data set, by number, in the form of this module."""

    def __init__(self, source: DataSource, rows: Any):
        self.kind = source.name
        self.name = source.name if source.path is None else source.path
        folder = Path(source.path or "").expanduser()
        folder = folder if folder.is_dir() else folder.parent
        self.folder = Path(source.images).expanduser() if source.images else folder
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        raw = self.rows[number]
        # of Arrow, columns of images give bytes and path
        return self.formed(raw if isinstance(raw, bytes) else raw.to_pylist()[0], number)

    def formed(self, raw: Any, number: int) -> dict[str, Any]:
        """One row as it stands in the source, in our form.

        Raises:
            MalformedRow: it is no conversation.
        """
        row = {"row": number, "source": self.name}
        try:
            if isinstance(raw, str | bytes):
                raw = json.loads(raw)
            if not isinstance(raw, Mapping):
                raise ValueError(f"it is a {type(raw).__name__}, not a mapping of keys to values")
            messages, images = (_from_llava if self.kind == "llava" else _from_trl)(raw)
            images = [self._undecoded(image) for image in images]
        # a list where a text should be is a TypeError here and there
        except (ValueError, TypeError) as error:
            raise MalformedRow(row, str(error)) from error
        return {"messages": messages, "images": images, **row}

    def _undecoded(self, image: Any) -> Any:
        """A path as the struct of `datasets`, seen from the folder of images."""
        if isinstance(image, str | Path):
            image = {"bytes": None, "path": str(image)}
        if isinstance(image, Mapping) and image.get("bytes") is None and image.get("path"):
            path = str(image["path"])
            if not path.startswith(("http://", "https://")):
                path = str(self.folder / Path(path).expanduser())
            return {"bytes": None, "path": path}
        if not isinstance(image, Mapping | bytes):
            raise ValueError(
                f"it has an image of {type(image).__name__}; images are paths, bytes, or both in a struct"
            )
        return {"bytes": image, "path": None} if isinstance(image, bytes) else image


def _from_llava(raw: Mapping[str, Any]) -> tuple[list[dict], list]:
    """LLaVA's `conversations`, and `image`: a path, several, a struct of bytes, or none."""
    turns = raw.get("conversations")
    if not isinstance(turns, list | tuple):
        hint = ". Rows of messages are data.name: trl" if "messages" in raw else ""
        raise ValueError(f"it has no list of conversations, but the keys {', '.join(map(str, raw)) or '(none)'}{hint}")
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping) or turn.get("from") not in _LLAVA_ROLES:
            given = repr(turn.get("from")) if isinstance(turn, Mapping) else f"of {type(turn).__name__}"
            raise ValueError(f"it has a turn from {given}; turns are from human, gpt or system")
        role = _LLAVA_ROLES[turn["from"]]
        messages.append({"role": role, "content": _parts_of_text(turn.get("value"), marks=role != "assistant")})
    return messages, _images_of(raw)


def _from_trl(raw: Mapping[str, Any]) -> tuple[list[dict], list]:
    """TRL's `messages`, or `prompt` and `completion`, with `images` or `image`."""
    turns = raw.get("messages")
    if turns is None and raw.get("prompt") is not None and raw.get("completion") is not None:
        turns = [*_turns_of(raw["prompt"], "user"), *_turns_of(raw["completion"], "assistant")]
    if not isinstance(turns, list | tuple):
        hint = ". Rows of conversations are data.name: llava" if "conversations" in raw else ""
        raise ValueError(f"it has no list of messages, but the keys {', '.join(map(str, raw)) or '(none)'}{hint}")
    images, inside = _images_of(raw), []
    has_parts = any(
        isinstance(part, Mapping) and str(part.get("type")).startswith("image")
        for turn in turns
        if isinstance(turn, Mapping) and isinstance(turn.get("content"), list | tuple)
        for part in turn["content"]
    )
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping) or turn.get("role") not in ROLES:
            given = repr(turn.get("role")) if isinstance(turn, Mapping) else f"of {type(turn).__name__}"
            raise ValueError(f"it has a message of role {given}; roles are {', '.join(ROLES)}")
        content = turn.get("content")
        if isinstance(content, list | tuple):
            parts = [_part(part, inside) for part in content]
        else:
            marks = bool(images) and not has_parts and turn["role"] != "assistant"
            parts = _parts_of_text(content, marks)
        messages.append({"role": turn["role"], "content": parts})
    images = images or inside
    if images and not has_parts and not any(part["type"] == "image" for m in messages for part in m["content"]):
        # as in TRL: images that have no place stand before the first question
        for message in messages:
            if message["role"] == "user":
                message["content"] = [{"type": "image", "text": None} for _ in images] + message["content"]
                break
    return messages, images


def _turns_of(value: Any, role: str) -> list:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def _images_of(raw: Mapping[str, Any]) -> list:
    images = raw.get("images")
    images = raw.get("image") if images is None else images
    if images is None or (isinstance(images, str) and not images.strip()):
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def _part(part: Any, inside: list) -> dict[str, Any]:
    """A part of TRL's content; an image that it holds itself is put into `inside`."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image":
        # Arrow gives every part all keys
        own = next((part[key] for key in ("image", "path", "url") if part.get(key) is not None), None)
        if own is not None:
            inside.append(own)
        return {"type": "image", "text": None}
    raise ValueError(
        f"it has a part of content {str(part)[:100]!r}; parts are {{'type': 'text', 'text': '...'}} and {{'type': 'image'}}"
    )


def _parts_of_text(text: Any, marks: bool) -> list[dict[str, Any]]:
    """Text in parts: each <image> (and the line break after it, which the chat template writes) becomes one."""
    if not isinstance(text, str):
        raise ValueError(f"it has a turn whose text is {text!r}, not text")
    if not marks or IMAGE_MARK not in text:
        return [{"type": "text", "text": text}]
    first, *others = text.split(IMAGE_MARK)
    parts = [{"type": "text", "text": first}]
    for other in others:
        parts += [{"type": "image", "text": None}, {"type": "text", "text": other.removeprefix("\n")}]
    return [part for part in parts if part["type"] == "image" or part["text"]]


# --- files


class JsonRows:
    """The rows of a JSON list or a JSONL file, read from it by number.

    Only where each row begins is held in memory; the file must not change while it is used.

    Raises:
        NormalignError: the file is no JSON list.
    """

    def __init__(self, path: str | Path, most: int | None = None):
        self.path = Path(path)
        self._starts, self._ends = array("q"), array("q")
        for start, end in _places(self.path):
            if most is not None and len(self._starts) == most:
                break
            self._starts.append(start)
            self._ends.append(end)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> bytes:
        start, end = self._starts[number], self._ends[number]
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(end - start)


def _places(path: Path) -> Iterator[tuple[int, int]]:
    """Where each row of a JSON list or a JSONL file begins and ends, in bytes."""
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    return _places_in_list(path) if head.startswith(b"[") else _places_of_lines(path, head)


def _places_of_lines(path: Path, head: bytes) -> Iterator[tuple[int, int]]:
    if not head.startswith(b"{"):
        raise NormalignError(
            f"The data file {path} {'is empty' if not head else 'is no JSON'}. Give a JSON list of rows, or JSONL with one "
            f"row a line."
        )
    if path.suffix == ".json":
        first_line = head.splitlines()[0]
        try:
            json.loads(first_line)
        except ValueError:
            if len(first_line) < 4000:
                raise NormalignError(
                    f"The data file {path} is one JSON object or broken JSON. Give a JSON list of rows, or JSONL with one "
                    f"row a line."
                ) from None
    place = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip().removeprefix(codecs.BOM_UTF8):
                yield place + (len(codecs.BOM_UTF8) if line.startswith(codecs.BOM_UTF8) else 0), place + len(line)
            place += len(line)


def _places_in_list(path: Path) -> Iterator[tuple[int, int]]:
    decode = json.JSONDecoder().raw_decode
    utf8 = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        # `place` is where text[at] stands in the file
        place = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
        file.seek(place)
        text, at, rows, opened, ended = "", 0, 0, False, False
        while True:
            while at < len(text) and (text[at] in " \t\r\n" or text[at] == ("," if opened else "[")):
                opened |= text[at] == "["
                at, place = at + 1, place + 1
            if opened and text[at : at + 1] == "]":
                return
            try:
                _, end = decode(text, at)
            except ValueError as error:
                if ended or len(text) - at > _LONGEST_ROW:
                    reason = f"row {rows} cannot be read ({error})" if at < len(text) else f"it ends after {rows} rows"
                    raise NormalignError(
                        f"The data file {path} is broken near byte {place:,}: {reason}. Write or copy it again."
                    ) from error
                # the row may go on beyond what has been read
                chunk = file.read(max(_READ_AT_ONCE, len(text) - at))
                ended = not chunk
                try:
                    text, at = text[at:] + utf8.decode(chunk, final=ended), 0
                except UnicodeDecodeError as broken:
                    raise NormalignError(
                        f"The data file {path} is no UTF-8 text, after byte {place:,}: {broken}."
                    ) from broken
                continue
            size = len(text[at:end].encode())
            yield place, place + size
            at, place, rows = end, place + size, rows + 1


def _is_json(path: Path) -> bool:
    return path.suffix.lower() in (".json", ".jsonl")


def _open(source: DataSource, held_out: bool = False) -> Any:
    """The rows of a source as they stand in it, by number; held-out built-in scenes are test scenes, all with a picture."""
    if source.name == "digit_scenes":
        from .digit_scenes import digit_scenes_dataset

        split = {"split": "test", "text_only_share": 0.0} if held_out else {"split": "train"}
        return digit_scenes_dataset(source.rows or 1000, seed=source.seed, stage=source.stage, **split).with_format(
            "arrow"
        )
    path = Path(source.path).expanduser()
    if _is_json(path) and path.is_file():
        return JsonRows(path, source.rows)
    rows = _open_arrow(source, path).with_format("arrow")
    return rows if source.rows is None else rows.select(range(min(source.rows, len(rows))))


def _open_arrow(source: DataSource, path: Path) -> Any:
    """A parquet file, a folder of them or of Dataset.save_to_disk, or a Hub id, as `datasets` opens it."""
    import datasets

    with _opening(source.path):
        if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            rows = datasets.load_from_disk(str(path))
            if isinstance(rows, datasets.DatasetDict):
                if source.split not in rows:
                    raise RecipeError(f"{path} has the splits {', '.join(rows)}, not '{source.split}' (data.split).")
                rows = rows[source.split]
            return rows.to_iterable_dataset() if source.streaming else rows
        if path.is_file() or path.is_dir():
            files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
            if not files or any(file.suffix != ".parquet" for file in files):
                raise RecipeError(
                    f"data.path {path} is no JSON, JSONL or parquet file, and no folder with parquet files or of "
                    f"Dataset.save_to_disk."
                )
            files = [str(file) for file in files]
            return datasets.load_dataset("parquet", data_files=files, split="train", streaming=source.streaming)
        if path.is_absolute() or source.path.startswith((".", "~")) or source.path.count("/") != 1 or path.suffix:
            raise RecipeError(
                f"data.path {source.path} is not there: no such file or folder, and no Hub id (owner/name)."
            )
        return datasets.load_dataset(source.path, split=source.split, streaming=source.streaming)


@contextmanager
def _opening(name: str) -> Iterator[None]:
    """Turns an error while data are opened or read into one paragraph."""
    try:
        yield
    except NormalignError:
        raise
    # what a broken file, a missing repository or no network raises has no common class
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise NormalignError(
            f"The data {name} could not be opened: {reason[:500].rstrip('.')}. A file may be broken; without a network (or "
            f"with HF_HUB_OFFLINE=1) a Hub id must have been downloaded before."
        ) from error


# --- together


class _Rows:
    """A transform of `datasets`: from the columns `origin` and `row`, the rows of several sources."""

    def __init__(self, sources: list[_Source]):
        self.sources = sources

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        if "origin" not in batch or "row" not in batch:
            return batch  # a single column was asked for
        rows = [self.sources[origin][row] for origin, row in zip(batch["origin"], batch["row"])]
        others = {name: values for name, values in batch.items() if name not in ("origin", "row")}
        return {key: [row[key] for row in rows] for key in ("messages", "images", "row", "source")} | others


def _mapped(sources: list[DataSource], seed: int) -> Dataset:
    import datasets

    opened = [_Source(source, _open(source)) for source in sources]
    for source in opened:
        if not len(source):
            raise NormalignError(f"The data {source.name} have no rows.")
    origin, row = array("i"), array("q")
    for index, (source, settings) in enumerate(zip(opened, sources)):
        numbers = drawn_rows(len(source), settings.weight, f"{seed} {index}")
        origin.extend([index] * len(numbers))
        row.extend(numbers)
    if len(opened) > 1 and int(os.environ.get("RANK", 0)) == 0:
        from rich.console import Console

        shares = (
            f"{origin.count(index):,} draws from {len(source):,} rows of {source.name}"
            for index, source in enumerate(opened)
        )
        Console(stderr=True, highlight=False).print(f"An epoch has {', '.join(shares)}.", soft_wrap=True, markup=False)
    if not row:
        raise RecipeError("data.mixture draws no rows: its weights are too small for its data sets.")
    numbers = datasets.Dataset.from_dict(
        {"origin": origin, "row": row},
        features=datasets.Features({"origin": datasets.Value("int32"), "row": datasets.Value("int64")}),
    )
    return numbers.with_transform(_Rows(opened))


def drawn_rows(count: int, weight: float, seed: str) -> list[int]:
    """round(count * weight) row numbers: each as often as the whole part of `weight` says, the rest drawn without
    repetition."""
    whole, rest = divmod(round(count * weight), count)
    return sorted([*range(count)] * whole + Random(f"mixture {seed}").sample(range(count), rest))


def _stream(sources: list[DataSource], seed: int) -> IterableDataset:
    import datasets

    # plain structs: nothing is decoded, and an empty list of images has a type
    text = datasets.Value("string")
    features = datasets.Features(
        {
            "messages": datasets.List({"role": text, "content": datasets.List({"type": text, "text": text})}),
            "images": datasets.List({"bytes": datasets.Value("binary"), "path": text}),
            "row": datasets.Value("int64"),
            "source": text,
            "problem": text,
        }
    )
    streams = []
    for source in sources:
        shards = _shards(source)
        if source.rows is not None:
            shards = [shards]  # the first rows are those of one reader
        arguments = {"source": source, "shards": [shard if isinstance(shard, list) else [shard] for shard in shards]}
        streams.append(datasets.IterableDataset.from_generator(_read, features=features, gen_kwargs=arguments))
    mixed = streams[0]
    if len(streams) > 1:
        total = sum(source.weight for source in sources)
        mixed = datasets.interleave_datasets(
            streams,
            probabilities=[source.weight / total for source in sources],
            seed=seed,
            stopping_strategy="all_exhausted",
        )
    return mixed.shuffle(seed=seed, buffer_size=_SHUFFLED_AT_ONCE)


def _shards(source: DataSource) -> list[str | int]:
    """What can be read side by side: the files of a folder, the shards of a repository."""
    path = Path(source.path).expanduser()
    if path.is_file() and (_is_json(path) or path.suffix == ".parquet"):
        return [str(path)]
    rows = _open_arrow(source, path)
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else []
    return [str(file) for file in files] or list(range(rows.num_shards))


def _read(source: DataSource, shards: list[list[str | int]]) -> Iterator[dict[str, Any]]:
    """The rows of some shards in our form; a row that is no conversation has a `problem`, and nothing else."""
    formed, left = _Source(source, None), source.rows
    for shard in (shard for group in shards for shard in group):
        formed.name = shard if isinstance(shard, str) else f"{source.path}, shard {shard}"
        for number, raw in enumerate(_read_shard(source, shard)):
            if left is not None and (left := left - 1) < 0:
                return
            try:
                row = formed.formed(raw, number)
                yield row | {
                    "images": [{key: image.get(key) for key in ("bytes", "path")} for image in row["images"]],
                    "problem": None,
                }
            except MalformedRow as error:
                yield {"messages": [], "images": [], "row": number, "source": formed.name, "problem": str(error)}


def _read_shard(source: DataSource, shard: str | int) -> Iterator[Any]:
    if isinstance(shard, str) and _is_json(Path(shard)):
        with open(shard, "rb") as file:
            for start, end in _places(Path(shard)):
                file.seek(start)
                yield file.read(end - start)
        return
    path = shard if isinstance(shard, str) else source.path
    rows = _open_arrow(replace(source, path=path), Path(path).expanduser())
    if isinstance(shard, int):
        rows = rows.shard(rows.num_shards, shard)
    with _opening(path):
        yield from rows.decode(False)
