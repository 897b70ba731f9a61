"""Tells what a model's folder or Hub repository would run under `trust_remote_code`, and whether all in it is right.

Nothing of the folder is run, imported or unpickled: code is read as text and syntax trees, weights as safetensors
headers.
"""

import ast
import difflib
import json
import math
import os
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import __version__
from ..assembly.adapters import is_adapter
from ..assembly.loading import explained, quiet_transformers, read_config
from ..configuration.errors import NormalignError
from .card_check import Problem, check_card
from .export import code_files
from .hub_errors import chain_of
from .source import MODEL_CLASSES


_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".ckpt", ".pickle", ".joblib"}
_CODE_SUFFIXES = {".py", ".pyc", ".pyd", ".so", ".dll", ".dylib"}
# What is fetched of a repository: all that is read below, and no pickle.
_FETCHED = ["*.json", "*.py", "*.jinja", "*.md", "*.safetensors"]
# Settings that make transformers fetch or run something else than the classes of this release; they are taken out of
# the config before our own classes are built from it.
_LEADING_ELSEWHERE = ("auto_map", "custom_pipelines", "quantization_config", "transformers_weights")
_LEADING_ELSEWHERE += ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_LEADING_ELSEWHERE += ("experts_implementation", "_experts_implementation", "_experts_implementation_internal")
_BACKBONE_KEYS = ("backbone", "use_pretrained_backbone", "architecture")
_DIFF_LINES = 40
_FULL_HASH = re.compile(r"[0-9a-f]{40}")


@dataclass
class CodeFile:
    """A file of code: how it compares with this release, and whether `trust_remote_code=True` runs it.

    `state` is `identical`, `differs`, `missing` or `added`; `diff` has the lines of a unified diff from this release's
    file to the folder's.
    """

    file: str
    state: str
    runs: bool
    diff: list[str] = field(default_factory=list)


@dataclass
class Weights:
    """The tensors in the safetensors files against those that the config asks for."""

    files: list[str] = field(default_factory=list)
    tensors: int = 0
    parameters: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong_shape: list[dict] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)


@dataclass
class Verification:
    """What `verify` found. `verdict` is `passes` without `reasons`, else `fails`; `notes` do not count.

    `revision` is the commit hash of a Hub repository, None for a local folder; `elsewhere` names code and weights that
    would come from outside the folder; `packages` what the code that runs imports beyond the standard library.
    """

    source: str
    revision: str | None
    model_type: str
    normalign_version: str = __version__
    code: list[CodeFile] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)
    pickles: list[str] = field(default_factory=list)
    weights: Weights = field(default_factory=Weights)
    aligned_norm: dict[str, Any] = field(default_factory=dict)
    has_card: bool = False
    card: list[Problem] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """`passes` or `fails`."""
        return "fails" if self.reasons else "passes"

    @property
    def runs(self) -> list[str]:
        """The files that `trust_remote_code=True` runs."""
        return [file.file for file in self.code if file.runs]

    @property
    def identical_to(self) -> str | None:
        """The version of normalign whose code this is, line endings aside; None when it is not this release's."""
        same = all(file.state == "identical" for file in self.code)
        return self.normalign_version if same and self.code else None

    def to_dict(self) -> dict[str, Any]:
        """All of it as values that JSON can hold."""
        first = {"source": self.source, "revision": self.revision, "verdict": self.verdict}
        return {**first, "identical_to": self.identical_to, "runs": self.runs, **asdict(self)}


def verify(folder_or_repo: str | os.PathLike, *, revision: str | None = None) -> Verification:
    """Compares a model's folder or Hub repository with this release, without running anything of it.

    Of a repository the JSON, Python, card and safetensors files are fetched into the cache that `from_pretrained` reads
    as well; pickles are not.

    Args:
        folder_or_repo: a local folder or a Hub id.
        revision: branch, tag or commit hash of a Hub id; None is its main branch.

    Raises:
        NormalignError: there is no such model, its config.json or a safetensors file is broken, or it is of a type
            that normalign does not ship.
    """
    folder, names, found = _opened(folder_or_repo, revision)
    model_class = MODEL_CLASSES[found.model_type]
    settings = read_config(folder)
    _look_at_code(folder, names, model_class, found)
    _look_for_pickles(folder, names, found)
    config = _built_config(model_class, settings, found)
    _look_at_auto_map(settings, config, found)
    _look_at_weights(folder, model_class, config, settings, found)
    _look_at_card(folder, names, found)
    return found


# --- where it is


def _opened(source: str | os.PathLike, revision: str | None) -> tuple[Path, list[str], Verification]:
    """The folder, the names of all files (of a repository also of those not fetched), and the report's head."""
    name = str(source)
    folder, hub_names, notes, commit = Path(source).expanduser(), None, [], None
    if not name.strip():
        raise NormalignError("The model has no name: '' was given. Name the folder of a model, or its Hub id.")
    if folder.is_dir():
        if revision is not None:
            raise NormalignError(f"{name} is a local folder, which has no revisions. Leave --revision {revision} out.")
    elif folder.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        what = "is a file" if folder.exists() else "does not exist"
        raise NormalignError(f"{name} {what}. Name the folder of a model, or its Hub id (owner/name).")
    else:
        folder, hub_names, notes = _fetched(name, revision)
        commit = folder.name
    here = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    here = [file for file in here if not file.startswith(".git/")]
    model_type = _model_type(folder, name)
    found = Verification(name, commit, model_type, notes=notes)
    return folder, sorted({*here, *(hub_names or [])}), found


def _fetched(repo: str, revision: str | None) -> tuple[Path, list[str] | None, list[str]]:
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=_FETCHED))
    except (OSError, ValueError, HFValidationError) as error:
        raise NormalignError(_why_not_fetched(repo, revision, error)) from error
    notes = []
    if not _FULL_HASH.fullmatch(revision or ""):
        asked = f"'{revision}'" if revision else "the main branch"
        notes.append(f"{asked} can move: load with revision='{folder.name}', which is what was looked at")
    try:
        return folder, HfApi().list_repo_files(repo, revision=folder.name), notes
    except Exception:  # offline, or the client's own errors, which have no common class across its versions
        notes.append("the Hub could not be asked for the names of all files: only the copy in the cache was looked at")
        return folder, None, notes


def _why_not_fetched(repo: str, revision: str | None, error: BaseException) -> str:
    causes, endpoint = chain_of(error), HfApi().endpoint
    if any(isinstance(cause, RevisionNotFoundError) for cause in causes):
        return (
            f"The Hub's {repo} has no branch, tag or commit '{revision}'. See {endpoint}/{repo}/commits/main for what it "
            f"has."
        )
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return (
            f"{repo} is shown only to those whom its owner lets in. Ask for access at {endpoint}/{repo}, log in with "
            f"`hf auth login`, and run the same again."
        )
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return (
            f"{repo} is no local folder, and the Hub has no model of that name or does not show it to you. Check the "
            f"name; for a private one log in with `hf auth login` or set HF_TOKEN."
        )
    at = f" at revision '{revision}'" if revision else ""
    return (
        f"{repo}{at} is neither a local folder nor a model that can be had from the Hub now: "
        f"{str(error).splitlines()[0]} Check the name, the revision, the network and your access to it."
    )


def _model_type(folder: Path, name: str) -> str:
    if is_adapter(folder):
        raise NormalignError(
            f"{name} holds a PEFT adapter, which brings no code and no model of its own. Merge it into its base model with "
            f"`normalign export {name} --out DIR`, and verify DIR."
        )
    if not (folder / "config.json").is_file():
        raise NormalignError(f"{name} has no config.json, so it is not a model. Name the folder that holds it.")
    model_type = read_config(folder).get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_CLASSES:
        raise NormalignError(
            f"{name} is a model of type {model_type!r}, and this release of normalign ships the code of "
            f"{', '.join(map(repr, MODEL_CLASSES))} only, so there is nothing to compare it with."
        )
    return model_type


# --- code


def _look_at_code(folder: Path, names: list[str], model_class: type, found: Verification) -> None:
    release = {file.name: file for file in code_files(model_class)}
    runs = _followed(folder, names, found)
    present = {name for name in names if PurePosixPath(name).suffix.lower() in _CODE_SUFFIXES} | runs
    for name in sorted(release.keys() | present):
        found.code.append(_compared(name, release.get(name), folder / name, name in runs))
    for file in found.code:
        if file.state == "differs":
            found.reasons.append(f"{file.file} is not that of normalign {__version__}")
        elif file.state == "missing":
            found.reasons.append(f"{file.file} is missing")
        elif file.state == "added":
            what = "runs when the model is loaded" if file.runs else "is not part of normalign's code"
            found.reasons.append(f"{file.file} was added and {what}")
    if any(file.state == "differs" for file in found.code) and (version := _version_of_card(folder)):
        found.notes.append(f"the card says that normalign {version} wrote it: compare with that release")


def _compared(name: str, ours: Path | None, theirs: Path, runs: bool) -> CodeFile:
    if not theirs.is_file():
        # of a repository, a compiled file is known by name alone
        return CodeFile(_shown(name), "missing" if ours else "added", runs)
    if ours is None:
        return CodeFile(_shown(name), "added", runs)
    old, new = (_with_plain_line_ends(file.read_bytes()) for file in (ours, theirs))
    if old == new:
        return CodeFile(name, "identical", runs)
    lines = [data.decode("utf-8", errors="backslashreplace").split("\n") for data in (old, new)]
    labels = f"normalign {__version__}/{name}", f"found/{name}"
    diff = [_shown(line) for line in difflib.unified_diff(*lines, *labels, n=1, lineterm="")]
    if len(diff) > _DIFF_LINES:
        diff = [*diff[:_DIFF_LINES], f"... {len(diff) - _DIFF_LINES} more lines"]
    return CodeFile(name, "differs", runs, diff)


def _with_plain_line_ends(data: bytes) -> bytes:
    # a lone carriage return ends a line for Python too: what follows one in a comment is code
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _shown(text: str) -> str:
    """Characters that a terminal acts on, or that change the order of reading, are written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _version_of_card(folder: Path) -> str | None:
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    named = re.search(r"Written by normalign (\d+[\w.]*\w)", text)
    return named.group(1) if named and named.group(1) != __version__ else None


def _followed(folder: Path, names: list[str], found: Verification) -> set[str]:
    """The files that loading with `trust_remote_code=True` runs: those that auto_map names and what these import."""
    to_read = _entry_points(folder, names, found)
    runs, packages = set(), set()
    while to_read:
        name = to_read.pop()
        if name in runs:
            continue
        runs.add(name)
        if not (folder / name).is_file():
            found.reasons.append(f"{_shown(name)} is named as code and is not there")
            continue
        try:
            tree = ast.parse((folder / name).read_bytes())
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            found.reasons.append(f"{name} is not Python that can be read ({error}), so its imports cannot be followed")
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                packages |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                packages.add(node.module.split(".")[0])
            elif isinstance(node, ast.ImportFrom):
                to_read += _siblings(name, node, folder)
    found.packages = sorted(packages - set(sys.stdlib_module_names))
    return {name for name in runs if (folder / name).is_file()}


def _siblings(name: str, node: ast.ImportFrom, folder: Path) -> list[str]:
    """The files behind `from .a import b` and `from . import a`, relative to the folder."""
    base = PurePosixPath(name).parent
    for _ in range(node.level - 1):
        base = base.parent
    modules = [node.module] if node.module else [alias.name for alias in node.names]
    paths = [base / module.replace(".", "/") for module in modules]
    return [f"{path}/__init__.py" if (folder / path).is_dir() else f"{path}.py" for path in paths]


def _entry_points(folder: Path, names: list[str], found: Verification) -> list[str]:
    entries = ["custom_generate/generate.py"] if "custom_generate/generate.py" in names else []
    for name in names:
        if not name.endswith(".json") or not (folder / name).is_file():
            continue
        for where, reference in _references(_read_json(folder / name)):
            where = _shown(f"{name}: {where}")
            if "--" in reference:
                repo = _shown(reference.split("--")[0])
                found.elsewhere.append(f"{where} -> {repo}")
                found.reasons.append(f"{where} runs code of another repository, {repo}, by no fixed revision")
                continue
            module = reference.rpartition(".")[0]
            path = os.path.normpath(f"{module}.py").replace(os.sep, "/")
            if not module or path.startswith(("../", "/")) or os.path.isabs(path):
                found.reasons.append(f"{where} names {_shown(reference)!r}, which is no class of a file in the folder")
            else:
                entries.append(path)
    return entries


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise NormalignError(
            f"The file {file} is broken ({' '.join(str(error).split())}). Copy or download it again from where the "
            f"model came from."
        ) from error


def _references(content: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Every class that the settings name as code to load, in auto_map or custom_pipelines, at any depth."""
    if isinstance(content, list):
        for item in content:
            yield from _references(item, where)
    elif isinstance(content, dict):
        for key, value in content.items():
            place = f"{where}.{key}" if where else str(key)
            if key in ("auto_map", "impl"):
                yield from ((f"{place}{inner}", text) for inner, text in _texts(value))
            else:
                yield from _references(value, place)


def _texts(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield "", value
    elif isinstance(value, list):  # slow and fast tokenizer
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from ((f".{key}{inner}", text) for inner, text in _texts(item))


def _look_at_auto_map(settings: dict, config, found: Verification) -> None:
    theirs = settings.get("auto_map")
    theirs = theirs if isinstance(theirs, dict) else {}
    if not theirs:
        found.reasons.append("config.json has no auto_map, so the model does not load without normalign")
        return
    for name, ours in config.auto_map.items():
        if name not in theirs:
            found.reasons.append(f"config.json: auto_map lacks {name}")
        elif theirs[name] != ours and "--" not in str(theirs[name]):
            found.reasons.append(f"config.json: auto_map.{name} is {_shown(str(theirs[name]))}, not {ours}")


# --- pickles


def _look_for_pickles(folder: Path, names: list[str], found: Verification) -> None:
    for name in names:
        if PurePosixPath(name).suffix.lower() in _PICKLE_SUFFIXES or _starts_like_a_pickle(folder / name):
            found.pickles.append(_shown(name))
    if found.pickles:
        found.reasons.append(f"pickles, which run code when they are loaded: {_few(found.pickles)}")


def _starts_like_a_pickle(file: Path) -> bool:
    """Whether a file is a pickle, or a zip file as torch.save writes it, under another name."""
    # the length at the start of a safetensors file may look like a pickle's first bytes
    if file.suffix == ".safetensors" or not file.is_file():
        return False
    with file.open("rb") as stream:
        start = stream.read(2)
    if start == b"PK" and zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    return len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5


# --- weights


def _built_config(model_class: type, settings: dict, found: Verification):
    """Our own config of the folder's settings, without those that lead elsewhere."""
    for where, key, value in _leading_elsewhere(settings):
        if key == "quantization_config":
            found.reasons.append(f"{where} quantizes the weights, which cannot be compared with the code")
        elif key == "transformers_weights":
            found.elsewhere.append(f"config.json: {where} -> {_shown(str(value))}")
            found.reasons.append(f"{where} names another file of weights, {_shown(str(value))}")
        elif "implementation" in key and "/" in json.dumps(value):
            found.elsewhere.append(f"config.json: {where} -> {_shown(str(value))}")
            found.reasons.append(f"{where} runs a kernel of another repository, {_shown(str(value))}")
    with explained("The config of the model", found.source), quiet_transformers():
        return model_class.config_class.from_dict(_without_leading_elsewhere(settings))


def _leading_elsewhere(settings: Any, where: str = "") -> Iterator[tuple[str, str, Any]]:
    if isinstance(settings, dict):
        for key, value in settings.items():
            if key in _LEADING_ELSEWHERE and value:
                yield f"{where}{key}", key, value
            else:
                yield from _leading_elsewhere(value, f"{where}{key}.")


def _without_leading_elsewhere(settings: Any) -> Any:
    if not isinstance(settings, dict):
        return settings
    return {k: _without_leading_elsewhere(v) for k, v in settings.items() if k not in _LEADING_ELSEWHERE}


def _look_at_weights(folder: Path, model_class: type, config, settings: dict, found: Verification) -> None:
    if (folder / "adapter_config.json").is_file():
        found.elsewhere.append("adapter_config.json -> the base model that it names")
        found.reasons.append("adapter_config.json puts an adapter over the weights when the model is loaded")
    found.weights.files = _weight_files(folder, found)
    if not found.weights.files:
        found.reasons.append("there are no weights as safetensors")
    shapes = _headers(folder, found)
    if found.weights.files and not settings.get("quantization_config") and not _fetches_a_backbone(config, found):
        _compare_shapes(model_class, config, shapes, found)
    _look_at_norm(folder, config, settings, found)


def _fetches_a_backbone(config, found: Verification) -> bool:
    """Whether a part is of a type that downloads weights of another repository as soon as it is built."""
    for name in ("vision_config", "text_config"):
        part = getattr(config, name)
        if any(getattr(part, key, None) for key in _BACKBONE_KEYS):
            found.elsewhere.append(f"config.json: {name} -> the backbone that it names")
            found.reasons.append(f"{name} (model type {part.model_type}) takes its weights from elsewhere")
            return True
    return False


def _weight_files(folder: Path, found: Verification) -> list[str]:
    """The files that from_pretrained reads: model.safetensors, else what the index names."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    elif index.is_file():
        content = _read_json(index)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            found.reasons.append("model.safetensors.index.json has no weight_map")
            return []
        files = sorted(set(weight_map.values()))
        if strange := [name for name in files if Path(name).name != name or not name.endswith(".safetensors")]:
            found.reasons.append(f"model.safetensors.index.json leads out of the folder: {_few(map(_shown, strange))}")
        absent = [name for name in files if name not in strange and not (folder / name).is_file()]
        if absent:
            found.reasons.append(f"weight files are missing: {_few(absent)}")
        files = [name for name in files if name not in (*strange, *absent)]
    else:
        files = []
    unread = sorted(file.name for file in folder.glob("*.safetensors") if file.name not in files)
    if unread:
        found.reasons.append(f"files of weights that from_pretrained does not read: {_few(unread)}")
    return files


def _headers(folder: Path, found: Verification) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor; no tensor is read."""
    shapes, index = {}, folder / "model.safetensors.index.json"
    sharded = found.weights.files != ["model.safetensors"]
    expected = _read_json(index)["weight_map"] if sharded and found.weights.files else None
    for name in found.weights.files:
        for key, shape in _header(folder / name).items():
            if key in shapes:
                found.reasons.append(f"the tensor {key} stands in more than one file")
            elif expected is not None and expected.get(key) != name:
                found.reasons.append(f"the tensor {key} of {name} is not in model.safetensors.index.json as such")
            shapes[key] = shape
    if lost := sorted(set(expected or ()) - set(shapes)):
        found.reasons.append(f"tensors that the index names are in no file: {_few(map(_shown, lost))}")
    found.weights.tensors = len(shapes)
    found.weights.parameters = sum(math.prod(shape) for shape in shapes.values())
    found.weights.empty = sorted(_shown(key) for key, shape in shapes.items() if 0 in shape)
    if found.weights.empty:
        found.reasons.append(f"tensors without a value in them: {_few(found.weights.empty)}")
    return shapes


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118, no dict
    except (SafetensorError, OSError) as error:
        raise NormalignError(
            f"The file {file} is truncated or corrupt ({' '.join(str(error).split())}). Copy or download it again."
        ) from error


def _compare_shapes(model_class: type, config, shapes: dict[str, tuple[int, ...]], found: Verification) -> None:
    """Lets transformers' own loader match names: it knows tied weights and how each generation writes names."""
    state_dict = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with explained("The model", found.source), quiet_transformers():
            # past our own from_pretrained, which raises at the first of what is to be listed here
            model, info = PreTrainedModel.from_pretrained.__func__(
                model_class,
                None,
                config=config,
                state_dict=state_dict,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    finally:
        if bars:
            logging.enable_progress_bar()
    weights, wanted = found.weights, model.state_dict()
    weights.missing = sorted(info["missing_keys"])
    # what transformers would pass over without a word has no place either
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    passed_over = {key for key in shapes if key not in wanted and any(re.search(part, key) for part in ignored)}
    weights.unexpected = sorted(map(_shown, passed_over | set(info["unexpected_keys"])))
    for entry in info["mismatched_keys"]:  # transformers 4 gives the names alone
        name, shape = (entry[0], tuple(entry[1])) if isinstance(entry, tuple) else (entry, shapes.get(entry))
        weights.wrong_shape.append({"name": name, "found": shape, "expected": tuple(wanted[name].shape)})
    weights.wrong_shape.sort(key=lambda entry: entry["name"])
    if weights.missing:
        found.reasons.append(f"weights that the code needs are missing: {_few(weights.missing)}")
    if weights.unexpected:
        found.reasons.append(f"weights that the code has no place for: {_few(weights.unexpected)}")
    if weights.wrong_shape:
        entries = [f"{e['name']} is {e['found']}, not {e['expected']}" for e in weights.wrong_shape]
        found.reasons.append(f"weights of another shape than the code's: {_few(entries)}")


def _look_at_norm(folder: Path, config, settings: dict, found: Verification) -> None:
    block = config.aligned_norm
    found.aligned_norm = {"kind": block["kind"], "target_norm": block["target_norm"]}
    if "aligned_norm" not in settings:
        found.reasons.append("config.json has no block aligned_norm")
    if block["kind"] == "none":
        return
    if block["target_norm"] is None:
        found.reasons.append("config.json does not say the text norm T (aligned_norm.target_norm)")
    gain = None
    for name in found.weights.files:
        with safe_open(folder / name, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118, no dict
                if f".{key}".endswith((".aligned_norm.weight", ".aligned_norm.bias")):
                    values = tensors.get_tensor(key).float()
                    if not torch.isfinite(values).all():
                        found.reasons.append(f"{key} holds values that are not finite")
                    elif key.endswith("weight") and values.numel():
                        gain = found.aligned_norm["gain_abs_mean"] = values.abs().mean().item()
                        found.aligned_norm["gain_l2"] = values.norm().item()
    if gain == 0:
        found.reasons.append("the gain of the aligned norm is zero, so the language model sees no picture")


# --- card


def _look_at_card(folder: Path, names: list[str], found: Verification) -> None:
    if not (folder / "README.md").is_file():
        found.notes.append("there is no model card (README.md)")
        return
    found.has_card = True
    try:
        found.card = check_card(folder / "README.md")
    except NormalignError as error:
        found.card = [Problem("card", str(error))]
    if found.card:
        found.reasons.append(f"the model card: {_few([_shown(str(problem)) for problem in found.card])}")


def _few(items) -> str:
    items = list(items)
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")


# --- on the console


def print_verification(found: Verification, console: Console | None = None) -> None:
    """Shows what was found as a table of files, the diffs, and the verdict with its reasons."""
    console = console or Console(highlight=False)
    table = Table(box=None, title_justify="left", title="What trust_remote_code=True runs")
    for heading in ("file", "state", "runs"):
        table.add_column(heading, overflow="fold")
    for file in found.code:
        table.add_row(Text(file.file), file.state, "yes" if file.runs else "no")
    console.print(table)
    for file in found.code:
        for line in file.diff:
            style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")
            console.print(Text(f"  {line}", style=style), soft_wrap=True)
    console.print()
    for name, value in _summary(found):
        console.print(Text(f"{name:13}{value}"), soft_wrap=True)
    style = "bold red" if found.reasons else "bold green"
    console.print(Text(f"{'verdict':13}").append(found.verdict, style=style))
    for reason in found.reasons:
        console.print(Text(f"  - {reason}"), soft_wrap=True)
    for note in found.notes:
        console.print(Text(f"  note: {note}"), soft_wrap=True)


def _summary(found: Verification) -> list[tuple[str, str]]:
    weights, norm = found.weights, found.aligned_norm
    gain = f", mean |gain| {norm['gain_abs_mean']:.6g}" if "gain_abs_mean" in norm else ""
    files = f"{len(weights.files)} file{'s' if len(weights.files) != 1 else ''}"
    card = f"{len(found.card)} problem{'s' if len(found.card) != 1 else ''} found" if found.has_card else "none"
    T = "not recorded" if norm["target_norm"] is None else f"{norm['target_norm']:.6g}"
    return [
        ("model", f"{found.source} ({found.model_type})"),
        ("revision", found.revision or "none: a local folder"),
        ("code", f"identical to normalign {found.identical_to}" if found.identical_to else "not that of this release"),
        ("imports", ", ".join(found.packages) or "nothing beyond Python's own"),
        ("elsewhere", "; ".join(found.elsewhere) or "nothing is fetched from another repository"),
        ("pickles", _few(found.pickles) or "none"),
        ("weights", f"{weights.tensors} tensors, {weights.parameters:,} values in {files}"),
        ("aligned norm", norm["kind"] if norm["kind"] == "none" else f"{norm['kind']}, T {T}{gain}"),
        ("card", card),
    ]
