"""docs/hub.md: its commands and Python examples run as they stand, from top to bottom, against a Hub on loopback."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from .stub_hub import WRITER, StubHub


PAGE = Path(__file__).parents[2] / "docs" / "hub.md"

# One process for all of the page, since each import of transformers takes seconds. That a folder loads in a process of
# its own is tested with the push itself.
RUNS_A_PAGE = """
import json
import sys

from typer.testing import CliRunner

from normalign import cli, hub_upload

sys.modules["normalign.hub_upload.preflight"]._check_it_loads = lambda folder: None
names, said = {"__name__": "page"}, []
for language, example in json.load(sys.stdin):
    if language == "python":
        exec(compile(example, "docs/hub.md", "exec"), names)
        continue
    for command in example:
        done = CliRunner().invoke(cli.app, command)
        said.append([command, done.exit_code, done.stdout])
        if done.exit_code:
            sys.exit(f"{command}: {done.exit_code} {done.output}")
revision, answer = names["revision"], names["ask"](text=names["messages"], max_new_tokens=8, return_full_text=False)
json.dump({"said": said, "revision": revision, "answer": answer[0]["generated_text"]}, open("said.json", "w"))
"""


def examples():
    """The commands of the page as lists of words, and its Python as text, in order."""
    found = re.findall(r"^```(bash|python)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for language, text in found:
        text = text.replace("YOUR_NAME", "someone")
        if language == "python":
            yield language, text
            continue
        lines = [shlex.split(line) for line in text.splitlines()]
        assert all(words[0] == "normalign" for words in lines)
        yield language, [words[1:] for words in lines]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """What the page's commands said, and the Hub as they left it."""
    place = tmp_path_factory.mktemp("page")
    Image.fromarray(np.zeros((64, 64, 3), dtype=np.uint8)).save(place / "photo.png")
    with StubHub() as hub:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": WRITER,
            "HF_HOME": str(place / "hf"),
            "NO_PROXY": "127.0.0.1",
        }
        environment |= {
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": str(PAGE.parents[1]),
        }
        done = subprocess.run(
            [sys.executable, "-c", RUNS_A_PAGE],
            input=json.dumps(list(examples())),
            env=environment,
            cwd=place,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        yield json.loads((place / "said.json").read_text()), hub, place


def test_the_page_ends_with_a_private_repository_that_is_whole_and_tagged(page):
    said, hub, place = page
    repo = hub.repos["someone/my-model"]
    assert repo.private and repo.tags == {"v1.0": repo.head} and said["revision"] == repo.head
    files = {file.name: file.read_bytes() for file in (place / "my-export").iterdir()}
    assert {name: blob.content for name, blob in repo.files.items() if name != ".gitattributes"} == files
    assert isinstance(said["answer"], str)


def test_the_page_names_the_files_of_an_export(page):
    _, _, place = page
    named = " ".join(re.findall(r"^\| (`.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    patterns = re.findall(r"`([\w.*]+)`", named)
    missing = [file.name for file in (place / "my-export").iterdir() if not any(file.match(p) for p in patterns)]
    assert missing == []


def test_the_page_explains_every_option_of_export():
    from normalign.cli import app

    text = PAGE.read_text(encoding="utf-8")
    commands = {command.callback.__name__: command.callback for command in app.registered_commands}
    options = set(commands["export"].__annotations__) - {"model", "out", "as_json", "return"}
    assert [name for name in sorted(options) if f"`--{name.replace('_', '-')}" not in text] == []
