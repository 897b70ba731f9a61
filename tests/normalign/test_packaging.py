"""The wheel: one package `normalign` with every file of every room, its program and its metadata."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

import normalign


CHECKOUT = Path(__file__).parents[2]
ROOMS = ["modeling", "configuration", "assembly", "inspection", "evaluation", "train_trl", "hub_upload"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that the checkout stays as it is; with the setuptools that is installed, so offline."""
    copy = tmp_path_factory.mktemp("copy") / "normalign"
    copy.mkdir()
    for name in ["setup.cfg", "pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(CHECKOUT / name, copy)
    for room in ["normalign", *ROOMS]:
        shutil.copytree(CHECKOUT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "dist").mkdir()
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [built] = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_holds_every_file_of_every_room_and_nothing_else(wheel):
    expected = set()
    for room in ["normalign", *ROOMS]:
        prefix = "normalign" if room == "normalign" else f"normalign/{room}"
        for path in (CHECKOUT / room).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                expected.add(f"{prefix}/{path.relative_to(CHECKOUT / room).as_posix()}")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == expected, "what is missing from the wheel is to be named in setup.cfg under package_data"


def test_the_wheel_has_one_top_level_package(installed):
    assert sorted(path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")) == ["normalign"]


def test_the_wheel_works_without_the_checkout(installed, tmp_path):
    code = (
        "import normalign; from normalign.modeling import aligned_norm; from normalign import configuration;"
        "print(normalign.__file__, aligned_norm.__file__, configuration.__file__, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert all(Path(line).is_relative_to(installed) for line in done.stdout.splitlines())


def test_a_checkout_works_as_it_is_also_beside_an_installed_wheel(installed):
    # -S: without the site-packages, so that no editable install helps
    code = "import normalign; from normalign.configuration import errors; print(normalign.__file__, errors.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        str(CHECKOUT / "normalign" / "__init__.py"),
        str(CHECKOUT / "configuration" / "errors.py"),
    ]


def test_the_metadata_names_version_program_and_python(installed):
    [folder] = installed.glob("*.dist-info")
    distribution = PathDistribution(folder)
    assert distribution.version == normalign.__version__
    assert {(entry.group, entry.name, entry.value) for entry in distribution.entry_points} == {
        ("console_scripts", "normalign", "normalign.cli:main"),
        ("lmms_eval.models", "normalign", "normalign.evaluation.lmms_manifest:manifest"),
    }
    assert distribution.metadata["Requires-Python"] == "<3.14,>=3.10"
    extras = ["flash", "quant", "eval", "deepspeed", "serve", "space", "log", "dev", "browser"]
    assert distribution.metadata.get_all("Provides-Extra") == extras
    assert "Apache License" in (folder / "licenses" / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("constraints.txt", ["dev"]),
        ("constraints-transformers4.txt", ["dev"]),
        ("constraints-eval.txt", ["dev", "eval"]),
    ],
)
def test_a_constraint_set_pins_every_direct_dependency(name, extras):
    setup = configparser.ConfigParser()
    setup.read(CHECKOUT / "setup.cfg", encoding="utf-8")
    lists = [setup["options"]["install_requires"], *(setup["options.extras_require"][extra] for extra in extras)]
    wanted = {re.match(r"[\w.-]+", line).group().lower() for line in "".join(lists).split()}
    pins = (CHECKOUT / name).read_text(encoding="utf-8").lower()
    assert {package for package in wanted if f"\n{package}==" not in pins} == set()


def test_pyproject_holds_the_build_system_alone():
    sections = [line for line in (CHECKOUT / "pyproject.toml").read_text().splitlines() if line.startswith("[")]
    assert sections == ["[build-system]"]
