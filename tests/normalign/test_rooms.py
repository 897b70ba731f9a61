"""The rules of the house: which room may import which, what may be imported at all, docstrings, no machine's paths."""

import ast
import configparser
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from normalign.evaluation.metrics import METRICS


CHECKOUT = Path(__file__).parents[2]
ROOMS = [
    "modeling",
    "configuration",
    "assembly",
    "inspection",
    "evaluation",
    "train_trl",
    "hub_upload",
    "normalign",
]
MODULES = [path for room in ROOMS for path in sorted((CHECKOUT / room).rglob("*.py"))]
TEXT_FILES = {".py", ".md", ".cfg", ".toml", ".txt", ".yaml", ".yml", ".json", ".jsonl", ".jinja", ".cff", ".ipynb"}


def name_of(path: Path) -> str:
    return path.relative_to(CHECKOUT).as_posix()


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def absolute_imports(path: Path) -> Iterator[str]:
    """Top-level names of the packages that a module imports, anywhere in it."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]


def is_metric(path: Path) -> bool:
    """Whether `evaluate` loads this file: it copies it out of the package first, so that only absolute imports work."""
    return path.stem in METRICS and path.parent == CHECKOUT / "evaluation" / "metrics"


def imported_rooms(path: Path) -> Iterator[str]:
    """Rooms that a module reaches by relative imports (`from ..modeling.aligned_norm import AlignedNorm`).

    Those of a metric are reached by absolute ones.
    """
    if is_metric(path):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("normalign."):
                yield node.module.split(".")[1]
    room, *folders = path.relative_to(CHECKOUT).parts[:-1]
    # the folders are subpackages of normalign, except for normalign itself, which is the top
    package = [*folders] if room == "normalign" else [room, *folders]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            assert node.level - 1 <= len(package), f"{name_of(path)}:{node.lineno} imports from outside of normalign"
            base = package[: len(package) - (node.level - 1)]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            # the version stands at the top of the package, which every import of a room loads anyway
            names = [name for name in names if base or name != "__version__"]
            for name in names:
                first = [*base, *name.split(".")][0]
                yield first if first in ROOMS else "normalign"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_rooms_before_it(room):
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    wrong = {
        f"{name_of(path)} imports {other}"
        for path in MODULES
        if path.is_relative_to(CHECKOUT / room)
        for other in imported_rooms(path)
        if other not in allowed
    }
    assert not wrong


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_rooms_import_each_other_relatively(path):
    assert not {"normalign", *ROOMS} & set(absolute_imports(path)) - ({"normalign"} if is_metric(path) else set())


def test_modeling_imports_torch_transformers_and_siblings_alone():
    for path in sorted((CHECKOUT / "modeling").rglob("*.py")):
        assert path.parent == CHECKOUT / "modeling", "modeling is flat: all files lie side by side on the Hub"
        packages = set(absolute_imports(path)) - sys.stdlib_module_names
        assert packages <= {"torch", "transformers"}, name_of(path)
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.level > 0:
                sibling = node.module is not None and (path.parent / f"{node.module}.py").is_file()
                assert node.level == 1 and sibling, f"{name_of(path)}:{node.lineno}: write `from .name import Thing`"


def test_every_package_that_is_imported_is_a_declared_dependency():
    setup = configparser.ConfigParser()
    setup.read(CHECKOUT / "setup.cfg", encoding="utf-8")
    declared = setup["options"]["install_requires"].splitlines()
    for extra, lines in setup["options.extras_require"].items():
        declared += [] if extra == "dev" else lines.splitlines()
    names = {normalised(re.match(r"[\w.-]*", line.strip()).group()) for line in declared}
    distributions = packages_distributions()
    undeclared = {
        f"{name_of(path)} imports {package}"
        for path in MODULES
        for package in set(absolute_imports(path)) - sys.stdlib_module_names - {"__future__", "normalign"}
        if not names & {normalised(name) for name in [package, *distributions.get(package, [])]}
    }
    assert not undeclared


def normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_opens_with_what_it_is_for(path):
    assert ast.get_docstring(parsed(path)), "the file opens with a docstring of one sentence"


def test_no_file_names_a_path_of_one_machine():
    folders = [*ROOMS, "tests", "benchmarks", "docs", ".ci"]
    files = [path for folder in folders for path in (CHECKOUT / folder).rglob("*")]
    files += [path for path in CHECKOUT.iterdir() if not path.name.startswith(".venv")]
    # /home/me is the example of tests that look for paths themselves
    machine_path = re.compile(r"(?<![\w.:/~-])/(?:home(?!/me\b)|root|Users|tmp|opt|mnt|srv|work|workspace)/[\w.]")
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in files
        if path.is_file() and (path.suffix in TEXT_FILES or path.name in {"Makefile", "run"})
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if machine_path.search(line)
    ]
    assert not found
