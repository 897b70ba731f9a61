"""Data sets of every form become the same rows; files, mixtures, streams, and what is said of those that do not do."""

import io
import json
import re
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from normalign.configuration.errors import NormalignError
from normalign.train_trl import data_sets, train
from normalign.train_trl.data_sets import JsonRows, MalformedRow, drawn_rows, load_data
from normalign.train_trl.images import open_images
from normalign.train_trl.recipe import DataSettings, DataSource, Recipe, RecipeError


COLOURS = ("red", "green", "blue", "white")


def recipe_of(mixture=None, max_steps=None, **source):
    data = DataSettings(**source, mixture=mixture and [DataSource(**one) for one in mixture])
    return Recipe(output_dir="out", model="model", data=data, max_steps=max_steps)


def png(colour):
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10), colour).save(buffer, "PNG")
    return buffer.getvalue()


def text(words):
    return {"type": "text", "text": words}


def turns(*words):
    """A dialogue of user and assistant in turn, in our form; None stands for an image."""
    content = [[part if part is None else text(part) for part in ([w] if isinstance(w, str) else w)] for w in words]
    image = {"type": "image", "text": None}
    return [
        {"role": ("user", "assistant")[index % 2], "content": [image if part is None else part for part in parts]}
        for index, parts in enumerate(content)
    ]


def colours_of(row):
    return [picture.getpixel((3, 3)) for picture in open_images(row)]


RED, GREEN, BLUE, WHITE = (Image.new("RGB", (1, 1), name).getpixel((0, 0)) for name in COLOURS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same kinds of rows in every form: image files, LLaVA's JSON and parquet, TRL's JSONL, parquet and saved folder."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "pictures").mkdir()
    for colour in COLOURS:
        (folder / "pictures" / f"{colour}.png").write_bytes(png(colour))
    human, gpt = (lambda value, who=who: {"from": who, "value": value} for who in ("human", "gpt"))
    llava = [
        {
            "id": 7,
            "image": "red.png",
            "conversations": [human("<image>\nWhich?"), gpt("Red."), human("Sure?"), gpt("Yes")],
        },
        {"id": "text", "conversations": [{"from": "system", "value": "Short."}, human("2 + 2 ü€"), gpt("4")]},
        {
            "id": "two",
            "image": ["green.png", "blue.png"],
            "conversations": [human("Look: <image> Which?"), gpt("Green"), human("And\n<image>"), gpt("Blue")],
        },
    ]
    (folder / "llava.json").write_text(json.dumps(llava, indent=1, ensure_ascii=False), encoding="utf-8")
    struct = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    turn = {"from": datasets.Value("string"), "value": datasets.Value("string")}
    columns = {
        "id": [str(row["id"]) for row in llava[:2]],
        "image": [{"bytes": png("red"), "path": "red.png"}, None],
        "conversations": [row["conversations"] for row in llava[:2]],
        "data_source": ["x", "y"],
    }
    string = datasets.Value("string")
    for name, image in (("next", datasets.Image()), ("plain", struct)):
        features = {"id": string, "image": image, "conversations": datasets.List(turn), "data_source": string}
        (folder / name).mkdir()
        datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet(
            folder / name / "train-00000.parquet"
        )
    trl = [
        {
            "messages": [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Red."}],
            "images": ["red.png"],
        },
        {"messages": turns([None, "A", None, "B"], "C"), "images": ["green.png", "blue.png"]},
        {"messages": turns("2 + 2", "4")},
        {"prompt": "Which?", "completion": "White", "image": "white.png"},
    ]
    (folder / "trl.jsonl").write_text("\n".join(json.dumps(row) for row in trl) + "\n\n")
    saved = datasets.Dataset.from_dict(
        {
            "messages": [turns([None, "Which?"], "Red."), turns("2 + 2", "4")],
            "images": [[Image.new("RGB", (20, 10), "red")], []],
        },
        features=datasets.Features(
            {
                "messages": datasets.List(
                    {"role": string, "content": datasets.List({"type": string, "text": string})}
                ),
                "images": datasets.List(datasets.Image()),
            }
        ),
    )
    saved.save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(folder / "splits")
    return folder


# --- forms


def test_llavas_json_with_one_several_and_no_images(folder):
    rows = load_data(recipe_of(name="llava", path=str(folder / "llava.json"), images=str(folder / "pictures")))
    assert len(rows) == 3
    first, second, third = rows
    assert first["messages"] == turns([None, "Which?"], "Red.", "Sure?", "Yes")
    assert second["messages"] == [{"role": "system", "content": [text("Short.")]}, *turns("2 + 2 ü€", "4")]
    assert third["messages"] == turns(["Look: ", None, " Which?"], "Green", ["And\n", None], "Blue")
    assert [colours_of(row) for row in rows] == [[RED], [], [GREEN, BLUE]]
    assert first["images"] == [{"bytes": None, "path": str(folder / "pictures" / "red.png")}]
    assert [(row["row"], row["source"]) for row in rows] == [(i, str(folder / "llava.json")) for i in range(3)]


@pytest.mark.parametrize("name", ["next", "plain", "next/train-00000.parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_llava_next_parquet_mapped_and_streamed(folder, name, streaming):
    """Images are bytes until they are opened."""
    rows = load_data(recipe_of(name="llava", path=str(folder / name), streaming=streaming, max_steps=1))
    assert isinstance(rows, datasets.IterableDataset if streaming else datasets.Dataset)
    first, second = sorted(rows, key=lambda row: row["row"])
    assert first["messages"] == turns([None, "Which?"], "Red.", "Sure?", "Yes")
    assert first["images"] == [{"bytes": png("red"), "path": "red.png"}] and colours_of(first) == [RED]
    assert second["images"] == [] and [message["role"] for message in second["messages"]] == [
        "system",
        "user",
        "assistant",
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_trls_rows_of_strings_parts_and_prompt_with_completion(folder, streaming):
    path = str(folder / "trl.jsonl")
    rows = load_data(
        recipe_of(path=path, name="trl", images=str(folder / "pictures"), streaming=streaming, max_steps=1)
    )
    rows = sorted(rows, key=lambda row: row["row"])
    assert [row["messages"] for row in rows] == [
        turns([None, "Which?"], "Red."),
        turns([None, "A", None, "B"], "C"),
        turns("2 + 2", "4"),
        turns([None, "Which?"], "White"),
    ]
    assert [colours_of(row) for row in rows] == [[RED], [GREEN, BLUE], [], [WHITE]]


@pytest.mark.parametrize(
    ("name", "split", "count"), [("saved", "train", 2), ("splits", "train", 2), ("splits", "test", 1)]
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_save_to_disk(folder, name, split, count, streaming):
    rows = load_data(recipe_of(name="trl", path=str(folder / name), split=split, streaming=streaming, max_steps=1))
    rows = sorted(rows, key=lambda row: row["row"])
    assert len(rows) == count and rows[0]["messages"] == turns([None, "Which?"], "Red.")
    assert isinstance(rows[0]["images"][0]["bytes"], bytes) and colours_of(rows[0]) == [RED]
    if not streaming and split == "train":
        with pytest.raises(RecipeError, match="has the splits train, test, not 'val'"):
            load_data(recipe_of(name="trl", path=str(folder / "splits"), split="val"))


def test_nothing_is_decoded_before_the_images_are_opened(folder, monkeypatch):
    monkeypatch.setattr(Image, "open", lambda *args, **options: pytest.fail("an image was opened"))
    for source in ({"name": "digit_scenes", "rows": 3}, {"name": "trl", "path": str(folder / "saved")}):
        assert all(row["images"] is not None for row in load_data(recipe_of(**source)))


def test_the_built_in_scenes_are_as_they_are_drawn():
    from normalign.train_trl.digit_scenes import digit_scene_rows

    rows = load_data(recipe_of(name="digit_scenes", rows=12, seed=3, stage=2))
    drawn = digit_scene_rows(12, seed=3, stage=2)
    for row, expected in zip(rows, drawn, strict=True):
        assert [np.asarray(p).tolist() for p in open_images(row)] == [
            np.asarray(p).tolist() for p in expected["images"]
        ]
        assert row["messages"][1] == expected["messages"][1]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("name", "file"), [("llava", "llava.json"), ("trl", "trl.jsonl"), ("llava", "next")])
def test_rows_takes_the_first(folder, name, file, streaming):
    recipe = recipe_of(name=name, path=str(folder / file), rows=1, streaming=streaming, max_steps=1)
    assert [row["row"] for row in load_data(recipe)] == [0]


def test_a_stream_goes_through_the_rows_in_another_order_each_time(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"messages": turns(str(i), "a")}) + "\n" for i in range(60)))
    rows = load_data(recipe_of(name="trl", path=str(tmp_path / "x.jsonl"), streaming=True, max_steps=1))
    orders = []
    for epoch in range(2):
        rows.set_epoch(epoch)
        orders.append([row["row"] for row in rows])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(60))
    assert orders[0] != orders[1] and orders[0] != list(range(60))


def test_an_image_within_a_message_is_found_and_a_mark_in_a_string_is_its_place(tmp_path):
    (tmp_path / "a.png").write_bytes(png("red"))
    own = {"role": "user", "content": [{"type": "image", "path": "a.png"}, text("Which?")]}
    rows = [
        {"messages": [own, *turns("", "Red")[1:]]},
        {"messages": [{"role": "user", "content": "See <image>\nWhich?"}, *turns("", "Red")[1:]], "image": "a.png"},
    ]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    first, second = load_data(recipe_of(name="trl", path=str(tmp_path / "x.json")))
    assert first["messages"] == turns([None, "Which?"], "Red") and colours_of(first) == [RED]
    assert second["messages"] == turns(["See ", None, "Which?"], "Red") and colours_of(second) == [RED]


# --- rows that are no conversation


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "a message of role 'robot'; roles are system, user, assistant",
        ),
        ({"messages": "hello"}, "no list of messages, but the keys messages"),
        ({"text": "hello"}, "no list of messages, but the keys text"),
        ({"messages": ["x"]}, "a message of role of str"),
        ({"messages": [{"role": "user", "content": None}]}, "a turn whose text is None"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "a part of content .*video"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a part of content"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "a message of role"),
        ({"prompt": 5, "completion": "x"}, "int"),
        ({"messages": turns("a", "b"), "images": 5, "prompt": "x"}, "an image of int"),
        ([1, 2], "a list, not a mapping"),
        ("{broken", "Expecting property name"),
    ],
)
def test_a_row_that_is_no_conversation_is_named_when_it_is_read(tmp_path, row, words):
    line = row if isinstance(row, str) else json.dumps(row)
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": turns("a", "b")}) + f"\n{line}\n")
    rows = load_data(recipe_of(name="trl", path=str(tmp_path / "x.jsonl")))
    assert rows[0]["messages"] == turns("a", "b")
    with pytest.raises(MalformedRow, match=f"^Row 1 of .*x.jsonl is malformed: .*{words}"):
        rows[1]


def test_llavas_turns_are_checked(tmp_path):
    rows = [
        {"conversations": [{"from": "bot", "value": "x"}]},
        {"conversations": [{"from": ["human"], "value": "x"}]},
        {"image": "a.png"},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "an <image> is literal here"}]},
    ]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    rows = load_data(recipe_of(name="llava", path=str(tmp_path / "x.json")))
    with pytest.raises(MalformedRow, match="a turn from 'bot'; turns are from human, gpt or system"):
        rows[0]
    with pytest.raises(MalformedRow, match="Row 1 of .*unhashable"):
        rows[1]
    with pytest.raises(MalformedRow, match="no list of conversations, but the keys image"):
        rows[2]
    assert rows[3]["messages"] == turns("a", "an <image> is literal here")


# --- files


@pytest.mark.parametrize("at_once", [7, 64, 1 << 22])
@pytest.mark.parametrize("layout", ["list", "indented", "lines", "bom"])
def test_json_is_read_by_place_whatever_its_layout(tmp_path, monkeypatch, at_once, layout):
    """Pieces of the file may end within a row or a letter."""
    monkeypatch.setattr(data_sets, "_READ_AT_ONCE", at_once)
    rows = [{"n": n, "text": '€ü😀 } ] [ , " \\ \n' * (n % 5), "deep": [{"x": [n]}, []]} for n in range(40)]
    path = tmp_path / "rows.json"
    dumped = [json.dumps(row, ensure_ascii=n % 2 == 0) for n, row in enumerate(rows)]
    content = {
        "list": "[" + ",".join(dumped) + "]\n",
        "indented": json.dumps(rows, indent=2, ensure_ascii=False),
        "lines": "\n".join(dumped),
        "bom": "\ufeff" + json.dumps(rows),
    }[layout]
    path.write_text(content, encoding="utf-8")
    found = JsonRows(path)
    assert [json.loads(found[n]) for n in range(len(found))] == rows
    assert len(JsonRows(path, most=3)) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"hello", "is no JSON"),
        (b'{"rows": [\n1]}', "is one JSON object or broken"),
        (b'[{"a": 1}, {"b": ', "is broken near byte 11: row 1 cannot be read"),
        (b'[{"a": 1}, ', "is broken near byte 11: it ends after 1 rows"),
        (b'[{"a": 1}, {"b": \xff}]', "is no UTF-8 text, after byte"),
    ],
)
def test_a_broken_json_file_is_named_with_the_place(tmp_path, content, words):
    (tmp_path / "rows.json").write_bytes(content)
    with pytest.raises(NormalignError, match=f"The data file .*rows.json {words}"):
        load_data(recipe_of(name="llava", path=str(tmp_path / "rows.json")))


def test_a_parquet_file_that_breaks_off_within_a_stream_is_named(folder, tmp_path):
    whole = (folder / "next" / "train-00000.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:200] + bytes(len(whole) - 600) + whole[-400:])
    with pytest.raises(NormalignError, match="The data .*cut.parquet could not be opened"):
        list(load_data(recipe_of(name="llava", path=str(tmp_path / "cut.parquet"), streaming=True, max_steps=1)))


def test_data_that_are_not_there_get_one_paragraph(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "table.csv").write_text("a,b\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no parquet")
    for source, words in (
        ({"name": "trl"}, "data.name: trl needs data.path"),
        ({"name": "trl", "path": str(tmp_path / "gone.json")}, "gone.json is not there: no such file or folder"),
        ({"name": "trl", "path": "gone.jsonl"}, "gone.jsonl is not there"),
        (
            {"name": "trl", "path": str(tmp_path / "empty")},
            "is no JSON, JSONL or parquet file, and no folder with parquet",
        ),
        ({"name": "trl", "path": str(tmp_path / "table.csv")}, "is no JSON, JSONL or parquet file"),
        (
            {"name": "trl", "path": str(tmp_path / "broken.parquet")},
            "broken.parquet could not be opened: .*may be broken",
        ),
        ({"name": "trl", "path": "nobody/no-such-data"}, "nobody/no-such-data could not be opened.*without a network"),
        (
            {"name": "llava", "path": str(folder / "llava.json"), "images": "/nowhere"},
            "data.images: there is no folder",
        ),
        ({"name": "digit_scenes", "streaming": True}, "digit_scenes is drawn at once"),
        ({"name": "trl", "path": str(folder / "trl.jsonl"), "streaming": True}, "data.streaming needs max_steps"),
    ):
        with pytest.raises(NormalignError, match=words) as caught:
            load_data(recipe_of(**source))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 900


def test_the_examples_of_the_docs_are_read(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    (tmp_path / "photos").mkdir()
    for name, colour in (("apple", "red"), ("pear", "green")):
        Image.new("RGB", (9, 9), colour).save(tmp_path / "photos" / f"{name}.jpg", quality=100)
    counts = {}
    for name, block in zip(("trl", "llava"), re.findall(r"```json\n(.*?)```", page, re.DOTALL), strict=True):
        (tmp_path / f"{name}.json").write_text(block)
        rows = list(load_data(recipe_of(name=name, path=str(tmp_path / f"{name}.json"))))
        for row in rows:
            marks = [part["type"] for message in row["messages"] for part in message["content"]].count("image")
            assert marks == len(open_images(row)) and row["messages"][-1]["role"] == "assistant"
        counts[name] = [len(row["images"]) for row in rows]
    assert counts == {"trl": [1, 0, 1], "llava": [1, 2, 0]}


# --- mixtures


def test_a_mixture_has_each_row_as_often_as_its_weight_says(folder):
    sources = [
        {"name": "llava", "path": str(folder / "llava.json"), "images": str(folder / "pictures")},
        {"name": "trl", "path": str(folder / "trl.jsonl"), "images": str(folder / "pictures"), "weight": 2.5},
        {"name": "digit_scenes", "rows": 40, "weight": 0.25},
    ]
    rows = load_data(recipe_of(mixture=sources))
    counts = Counter((row["source"], row["row"]) for row in rows)
    assert len(rows) == 3 + 10 + 10
    assert [counts[str(folder / "llava.json"), n] for n in range(3)] == [1, 1, 1]
    assert sorted(counts[str(folder / "trl.jsonl"), n] for n in range(4)) == [2, 2, 3, 3]
    digits = [n for source, n in counts if source == "digit_scenes"]
    assert len(digits) == 10 and digits != list(range(10))
    assert [row["row"] for row in load_data(recipe_of(mixture=sources))] == [row["row"] for row in rows]


def test_the_rows_that_are_drawn_follow_from_the_seed():
    assert drawn_rows(100, 0.5, "1") == drawn_rows(100, 0.5, "1") != drawn_rows(100, 0.5, "2")
    assert drawn_rows(3, 1, "1") == [0, 1, 2]
    assert len(set(drawn_rows(100, 0.5, "1"))) == 50


def test_a_mixture_of_streams_draws_by_weight(tmp_path):
    for name in "ab":
        lines = [json.dumps({"messages": turns(name, "x")}) for _ in range(300)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources = [
        {"name": "trl", "path": str(tmp_path / f"{name}.jsonl"), "streaming": True, "weight": weight}
        for name, weight in (("a", 3.0), ("b", 1.0))
    ]
    rows = load_data(recipe_of(mixture=sources, max_steps=1))
    first = [row["messages"][0]["content"][0]["text"] for row in rows.take(400)]
    assert 0.68 < first.count("a") / len(first) < 0.82
    with pytest.raises(RecipeError, match="Stream all of them or none"):
        load_data(recipe_of(mixture=[sources[0], {**sources[1], "streaming": False}], max_steps=1))
    with pytest.raises(RecipeError, match="data.mixture is empty"):
        load_data(recipe_of(mixture=[]))


# --- training on them


def log_of(folder):
    return [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("form", ["trl", "llava", "next", "mixture", "stream", "text"])
def test_two_steps_on_every_form(folder, recipe_file, tmp_path, form):
    """Text-only and multi-image rows mixed; a data set of text alone (R05, R12)."""
    pictures = str(folder / "pictures")
    trl = {"name": "trl", "path": str(folder / "trl.jsonl"), "images": pictures}
    llava = {"name": "llava", "path": str(folder / "llava.json"), "images": pictures}
    parquet = {"name": "llava", "path": str(folder / "next")}
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"messages": turns(str(n), "x")}) for n in range(5)))
    data = {
        "trl": trl,
        "llava": llava,
        "next": parquet,
        "mixture": {"mixture": [trl, llava, parquet, {"name": "digit_scenes", "rows": 4}]},
        "stream": {**parquet, "streaming": True},
        "text": {"name": "trl", "path": str(tmp_path / "text.jsonl")},
    }[form]
    path = recipe_file(1, tmp_path, data=data, batch_size=2, max_steps=2, tune={"language": "full"})
    records = log_of(train(path))
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["loss"] > 0 and record["update/language"] > 0 for record in records)
    assert any(record["update/projector"] > 0 for record in records) == (form != "text")
