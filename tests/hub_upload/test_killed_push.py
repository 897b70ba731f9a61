"""A push that is killed at random points and started again: real processes, SIGKILL, against a Hub on loopback."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field

import pytest

from .stub_hub import REPO, WRITER, Drop, StubHub, arrived, contents, key_of_upload


SEED = int(os.environ.get("NORMALIGN_KILL_SEED", "20261201"))
# what an update from one weight file to four sends, beside the four
CHANGED = ["generation_config.json", "model.safetensors.index.json"]

# Imports once, then forks: each push is a process and a group of its own, and no kill is spent on imports.
FORKS_PUSHES = """
import os
import sys

from huggingface_hub import constants

from normalign import cli, hub_upload

for line in sys.stdin:
    if (pid := os.fork()) == 0:
        os.setsid()
        os.dup2(2, 1)
        sys.argv = line.rstrip("\\n").split("\\t")
        constants.HF_HUB_DISABLE_XET = sys.argv[0] == "lfs"
        cli.main()
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Pushes:
    """Starts `normalign push` as often as it is asked to; `pid` is that of the one that runs."""

    def __init__(self, hub, home, log):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": WRITER, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
        environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_XET_XORB_COMPRESSION_POLICY": "none"}
        self.home, self.log, self.pid, self.started = home, log, None, threading.Event()
        command = [sys.executable, "-c", FORKS_PUSHES]
        pipe = subprocess.PIPE
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, env=environment, text=True
            )

    def run(self, folder, transfer):
        """Runs one to its end and gives its exit status, negative for a signal."""
        words = [transfer, "push", str(folder), REPO, "--revision", "v1.0", "--no-load-check"]
        self.started.clear()
        self.process.stdin.write("\t".join(words) + "\n")
        self.process.stdin.flush()
        self.pid = int(self.process.stdout.readline())
        self.started.set()
        return int(self.process.stdout.readline())

    def kill(self):
        """Kills the one that runs, which may have sent a request before its number was read here."""
        assert self.started.wait(timeout=30)
        os.killpg(self.pid, signal.SIGKILL)

    def said(self):
        return self.log.read_text()[-3000:]


@pytest.fixture(scope="module")
def hub_and_pushes(tmp_path_factory):
    home = tmp_path_factory.mktemp("killed")
    with StubHub() as hub:
        pushes = Pushes(hub, home / "hf", home / "log")
        yield hub, pushes
        pushes.process.stdin.close()
        pushes.process.wait(timeout=30)


class Tape:
    """How far a push is in all: the steps that were not seen before, each block of each request being one.

    A step that is taken again after a kill does not move the tape, so a point on the tape of an undisturbed push is one
    on the tape of a push that was killed before.
    """

    def __init__(self, at_step=None):
        self.steps, self.at_step = [], at_step
        self._seen = set()

    def watch(self, request, state):
        digest = hashlib.sha1(request.body).hexdigest() if state in ("handled", "answered") else ""
        step = (request.command, request.route, request.headers.get("Content-Length"), state, digest)
        if step in self._seen:
            return
        self._seen.add(step)
        self.steps.append(step)
        if self.at_step:
            self.at_step(request, state)


@dataclass
class Cut:
    """What kills cut off: where, and by key of `bytes_received` the bytes that come again, surely or perhaps."""

    places: list[str] = field(default_factory=list)
    partly: Counter = field(default_factory=Counter)
    perhaps: Counter = field(default_factory=Counter)

    def note(self, hub, request, state):
        self.places.append(f"{request.command} {request.route} {state}")
        key = key_of_upload(request.route)
        if key and isinstance(state, int):
            self.partly[key] += state
        elif key and "/xorbs/" in request.route or request.route.endswith("/shards"):
            # xet takes a piece in two requests; the client remembers it from the answer to the second on
            name, chunks = list(hub.xorbs.items())[-1]
            self.perhaps[name] += size_of_xorb(chunks)


def size_of_xorb(chunks):
    return sum(8 + len(chunk) for chunk in chunks)


def key_of(name, content):
    return hashlib.sha256(content).hexdigest() if name.endswith(".safetensors") else name


def killed_and_finished(hub, pushes, folder, transfer, points):
    """Starts the push again and again, kills it when the tape reaches each of `points`, and lets the last one end."""
    left, tape, cut = sorted(points), Tape(), Cut()

    def kill(request, state):
        if left and len(tape.steps) >= left[0]:
            left.pop(0)
            cut.note(hub, request, state)
            pushes.kill()
            raise Drop

    tape.at_step = kill
    hub.watch = tape.watch
    for _ in points:
        assert pushes.run(folder, transfer) == -signal.SIGKILL, pushes.said()
    assert pushes.run(folder, transfer) == 0, pushes.said()
    return cut


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork and no SIGKILL")
@pytest.mark.parametrize(("kind", "transfer", "kills"), [("new repository", "lfs", 10), ("update", "xet", 4)])
def test_a_push_killed_at_random_points_ends_complete_and_sends_no_piece_twice(
    hub_and_pushes, sharded, exported, tmp_path, kind, transfer, kills
):
    """R64: weights come first, config and card last, and what has arrived whole is never sent again."""
    hub, pushes = hub_and_pushes
    dice = random.Random(f"{SEED} {kind} {transfer}")
    print(f"NORMALIGN_KILL_SEED={SEED}")  # shown when the test fails: set it to meet the same points again
    folder, other = shutil.copytree(sharded, tmp_path / "export"), tmp_path / "other"
    if kind == "update":
        shutil.copytree(exported, other)
        (other / "generation_config.json").write_text("{}")

    def before():
        hub.forget()
        # what the client remembers of its uploads
        shutil.rmtree(pushes.home, ignore_errors=True)
        if kind == "update":
            assert pushes.run(other, transfer) == 0, pushes.said()
            hub.repos[REPO].tags.clear(), hub.bytes_received.clear(), hub.times_whole.clear()

    before()
    undisturbed = Tape()
    hub.watch = undisturbed.watch
    assert pushes.run(folder, transfer) == 0, pushes.said()
    points = dice.sample(range(1, len(undisturbed.steps) + 1), kills)

    before()
    old = len(hub.repos[REPO].commits) if kind == "update" else 0
    cut = killed_and_finished(hub, pushes, folder, transfer, points)
    print(*cut.places, sep="\n")
    assert len(cut.places) == kills
    repo, expected = hub.repos[REPO], contents(folder)
    assert arrived(hub) == expected and repo.tags == {"v1.0": repo.head}

    # until the last commit `main` has the old version, or nothing that looks like a model
    *earlier, last = list(repo.commits.values())[old:]
    assert last == repo.files and not any("config.json" in tree or "README.md" in tree for tree in earlier)
    weights = sorted(name for name in expected if name.endswith(".safetensors"))
    if kind == "update":
        assert earlier == []
    else:
        assert [sorted({*tree} - {".gitattributes"}) for tree in earlier[:5]] == [weights[:i] for i in range(5)]

    # a piece comes again where a kill has cut it, by as much as had come of it until then, and never else
    sizes = {key_of(name, content): len(content) for name, content in expected.items()}
    if kind == "update":
        sizes = {key: size for key, size in sizes.items() if key in CHANGED or key not in expected}
    if transfer == "xet":
        names_of_weights = {key_of(name, expected[name]) for name in weights}
        sizes = {key: size for key, size in sizes.items() if key not in names_of_weights}
        for name, chunks in hub.xorbs.items():
            if hashlib.sha256(b"".join(chunks)).hexdigest() in names_of_weights:
                sizes[name] = size_of_xorb(chunks)
        assert len(sizes) == len(CHANGED) + len(weights)
    assert hub.bytes_received.keys() == sizes.keys()
    for key, size in sizes.items():
        at_least = size + cut.partly[key]
        assert at_least <= hub.bytes_received[key] <= at_least + cut.perhaps[key], key
        assert hub.times_whole[key] == 1 or cut.perhaps[key], key
