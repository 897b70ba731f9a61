"""The Makefile: its help names every target, and a Python that does not fit is named in one line."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest


CHECKOUT = Path(__file__).parents[2]
CONSTRAINTS = ["constraints.txt", "constraints-transformers4.txt", "constraints-eval.txt"]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    # a make that runs these tests must not hand its own flags on
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def empty_clone(tmp_path) -> Path:
    """A clone in which no environment was made yet."""
    for name in ["Makefile", "setup.cfg", "pyproject.toml", *CONSTRAINTS]:
        shutil.copy(CHECKOUT / name, tmp_path)
    return tmp_path


def test_make_alone_lists_every_target_with_what_it_does(empty_clone):
    done = make(empty_clone)
    assert done.returncode == 0
    assert re.findall(r"^  make ([\w-]+) +\S.*", done.stdout, flags=re.MULTILINE) == [
        "help",
        "demo",
        "test",
        "test-eval",
        "lint",
        "format",
        "clean",
    ]


@pytest.mark.parametrize("target", ["demo", "test", "test-eval"])
def test_a_python_that_is_too_old_is_named_in_one_line(empty_clone, target):
    old = empty_clone / "python-old"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.1"\nexit 1\n')
    old.chmod(0o755)
    done = make(empty_clone, target, f"PYTHON={old}")
    assert done.returncode == 2
    assert "normalign needs Python 3.10-3.13" in done.stderr
    assert f"{old} is Python 3.9.1; name another: make PYTHON=python3.12" in done.stderr
    assert not list(empty_clone.glob(".venv*"))


def test_a_missing_python_is_named_in_one_line(empty_clone):
    done = make(empty_clone, "test", "PYTHON=no-such-python")
    assert done.returncode == 2
    assert "There is no no-such-python here: install Python 3.10-3.13" in done.stderr
