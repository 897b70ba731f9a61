"""The README: its Python examples run as they stand, its commands and its map of rooms are true."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from normalign.cli import app


CHECKOUT = Path(__file__).parents[2]
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Fenced blocks, each after as many empty lines as stand before it, so that tracebacks name the README's lines."""
    found = re.finditer(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    return ["\n" * README.count("\n", 0, match.start(1)) + match.group(1) for match in found]


def test_the_python_examples_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = blocks("python")
    assert examples
    names = {"__name__": "readme"}
    for example in examples:
        exec(compile(example, str(CHECKOUT / "README.md"), "exec"), names)


def test_no_python_example_is_longer_than_a_glance():
    assert max(len(example.strip().splitlines()) for example in blocks("python")) <= 12


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^normalign (\w+)", README, flags=re.MULTILINE))))
def test_every_command_in_the_readme_exists(command):
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_every_local_link_leads_somewhere():
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", README)
    assert links
    assert [link for link in links if not (CHECKOUT / link).exists()] == []


def test_every_make_target_in_the_readme_exists():
    makefile = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    assert [
        name for name in re.findall(r"^make ([\w-]+)", README, flags=re.MULTILINE) if f"\n{name}:" not in makefile
    ] == []
