"""`transformers serve` answers chat requests about pictures with an export, as the model itself does."""

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from normalign.evaluation.generation import answer

from .load_exports import GENERATION


pytestmark = [
    pytest.mark.skipif(
        GENERATION == 4, reason="the server of transformers 4.57 takes no models with code of their own"
    ),
    pytest.mark.skipif(
        not all(find_spec(name) for name in ("fastapi", "uvicorn", "openai")),
        reason='the server is not installed: pip install "normalign[serve]"',
    ),
]
QUESTION = "What shape is it?"
SECONDS = 90


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    file = tmp_path_factory.mktemp("picture") / "picture.png"
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(file)
    return file


@pytest.fixture(scope="module")
def server(mini_export, tmp_path_factory):
    """The address of a server on a free port of loopback, as the command line starts it; offline, with an empty cache."""
    work = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = Path(sys.executable).with_name("transformers")
    arguments = ["serve", mini_export, "--trust-remote-code", "--device", "cpu", "--host", "127.0.0.1", "--port", port]
    environment = {**os.environ, "HF_HOME": str(work / "hf"), "HF_HUB_OFFLINE": "1"}
    with (work / "log").open("w") as log:
        process = subprocess.Popen(
            [str(part) for part in (command, *arguments)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=work,
            env=environment,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        end = time.monotonic() + SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5) as response:
                    assert json.load(response) == {"status": "ok"}
                break
            except OSError:
                assert process.poll() is None, (work / "log").read_text()
                assert time.monotonic() < end, (work / "log").read_text()
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(work)


def ask(address, folder, content):
    """The server's answer to one user turn, greedy, of at most 12 tokens."""
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps(
            {
                "model": str(folder),
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": 12,
            }
        ).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return json.load(response)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        pytest.fail(f"{error}: {error.read().decode()}")


def test_the_server_answers_about_a_picture_as_the_model_does(server, mini_export, picture):
    url = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    message = ask(server, mini_export, content)
    assert message["role"] == "assistant"
    assert message["content"].strip() == answer(str(mini_export), QUESTION, [picture], max_new_tokens=12)
    # it has seen the picture
    assert message["content"].strip() != answer(str(mini_export), QUESTION, max_new_tokens=12)


def test_the_server_answers_text_alone(server, mini_export):
    message = ask(server, mini_export, QUESTION)
    assert message["content"].strip() == answer(str(mini_export), QUESTION, max_new_tokens=12)


def test_the_served_model_is_listed(server, mini_export):
    with urllib.request.urlopen(f"{server}/v1/models", timeout=30) as response:
        assert [model["id"].split("@")[0] for model in json.load(response)["data"]] == [str(mini_export)]
