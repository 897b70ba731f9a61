"""Looks through an exported folder before it is sent: is it whole, is its card valid, does it give anything away?"""

import ast
import json
import os
import re
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..configuration.errors import NormalignError
from .card_check import account_name, check_card
from .clean_process import load_in_clean_process
from .eval_results import EVAL_RESULTS, eval_result_problems


INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npz", ".npy", ".msgpack", ".h5"}
# What an operating system, an editor or a download leaves in a folder; it is not sent.
LEFT_OUT = {".git", ".cache", "__pycache__", ".ipynb_checkpoints", ".DS_Store", "Thumbs.db"}

_SECRETS = {
    "a Hugging Face token": re.compile(rb"\b(?:hf|api_org)_[A-Za-z0-9]{30,}"),
    "a private key": re.compile(rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----"),
    "an AWS access key": re.compile(rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a GitHub token": re.compile(rb"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{30,})"),
}
_SECRET_FILES = re.compile(r"\.env(\..*)?|\.netrc|\.pypirc|id_(rsa|dsa|ecdsa|ed25519)|.*\.(pem|key|p12|pfx)")
# In a vocabulary, `/home/` and the like are words of the language, not places.
_VOCABULARIES = {"tokenizer.json", "vocab.json", "vocab.txt", "merges.txt"}
_TEXT_SUFFIXES = {
    "",
    ".json",
    ".jsonl",
    ".md",
    ".py",
    ".jinja",
    ".txt",
    ".yaml",
    ".yml",
    ".html",
    ".csv",
    ".cfg",
    ".toml",
}
_ADDRESS = re.compile(r"\bhttps?://[^\s)>\"']+")
_HOMES = re.compile(r"(?<![\w.:/~-])(?:/home/|/Users/)[\w.-]+/|\b[A-Za-z]:\\{1,2}Users\\{1,2}[\w.-]+")

_LOAD_SCRIPT = """
from transformers import AutoModelForImageTextToText, AutoProcessor

AutoProcessor.from_pretrained(FOLDER, trust_remote_code=True)
_, info = AutoModelForImageTextToText.from_pretrained(
    FOLDER, trust_remote_code=True, dtype="auto", output_loading_info=True
)
RESULT["problems"] = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
"""


def check_folder(folder: Path, *, load: bool = True) -> list[str]:
    """Refuses a folder that is not a whole, safe export.

    Args:
        folder: what `export` wrote.
        load: also load it in a process of its own, without normalign and without network.

    Returns:
        the files to send, as paths with `/` within the folder, in order of name.

    Raises:
        NormalignError: one paragraph with all that is wrong; a secret is named by its file and line, never shown.
    """
    if not folder.is_dir():
        raise NormalignError(f"{folder} is no folder. Write one with `normalign export MODEL --out {folder}`.")
    files = shipped_files(folder)
    problems = [
        *_config_problems(folder, files),
        *_weight_problems(folder, files),
        *_pickle_problems(folder, files),
        *_card_file_problems(folder, files),
        *_inner_file_problems(folder, files),
        *secret_problems(folder, files),
        *path_problems(folder, files, [folder.resolve(), folder.resolve().parent]),
    ]
    if problems:
        raise NormalignError(
            f"{folder} is not fit to be published, and nothing was sent: {'; '.join(problems)}. Put it right where the "
            f"model was exported from and write it again with `normalign export`; what you wrote into README.md by hand, there."
        )
    if load:
        _check_it_loads(folder)
    return files


def shipped_files(folder: Path) -> list[str]:
    """The files of a folder that go to the Hub, as paths with `/`, in order of name."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        found += [(Path(place) / name).relative_to(folder).as_posix() for name in names if name not in LEFT_OUT]
    return sorted(found)


# --- the model


def _config_problems(folder: Path, files: list[str]) -> list[str]:
    if "config.json" not in files:
        return ["it has no config.json, so it is not the folder of a model"]
    config = _json(folder / "config.json")
    auto_map = config.get("auto_map") if isinstance(config, dict) else None
    if not isinstance(auto_map, dict) or not auto_map:
        return ["its config.json has no auto_map, so nobody could load it without normalign: it is not an export"]
    problems = []
    for target in sorted({str(name) for name in auto_map.values()}):
        module = target.partition(".")[0]
        if "--" in target:
            problems.append(f"its auto_map takes {target} from another repository, whose code can change")
        elif f"{module}.py" not in files:
            problems.append(f"its auto_map names {module}.py, which is missing")
    return problems + _sibling_problems(folder, files)


def _sibling_problems(folder: Path, files: list[str]) -> list[str]:
    """Modules that the code imports from beside itself, but which are not there."""
    missing = set()
    for name in (name for name in files if name.endswith(".py") and "/" not in name):
        try:
            tree = ast.parse((folder / name).read_bytes())
        except (SyntaxError, ValueError) as error:
            return [f"{name} is not valid Python ({error})"]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level and node.module:
                sibling = f"{node.module.partition('.')[0]}.py"
                if sibling not in files:
                    missing.add(f"{name} imports {sibling}, which is missing")
    return sorted(missing)


def _weight_problems(folder: Path, files: list[str]) -> list[str]:
    weights = [name for name in files if name.endswith(".safetensors")]
    if not weights:
        return ["it has no .safetensors file"]
    problems, found = [], {}
    for name in weights:
        try:
            with safe_open(folder / name, framework="numpy") as file:
                found[name] = set(file.keys())
        except (SafetensorError, OSError) as error:
            problems.append(f"{name} is cut or damaged ({error})")
    if INDEX_FILE not in files:
        if weights != ["model.safetensors"] and not problems:
            problems.append(f"{', '.join(weights)} need {INDEX_FILE}, which is missing")
        return problems
    index = _json(folder / INDEX_FILE)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        return [*problems, f"{INDEX_FILE} has no weight_map"]
    problems += [f"{INDEX_FILE} names {name}, which is missing" for name in sorted({*weight_map.values()} - {*files})]
    absent = sorted(key for key, name in weight_map.items() if name in found and key not in found[name])
    if absent:
        problems.append(f"{INDEX_FILE} looks for {absent[0]} in {weight_map[absent[0]]}, where it is not")
    return problems


def _pickle_problems(folder: Path, files: list[str]) -> list[str]:
    """Files that run code when they are read, by name or by how they begin."""
    problems = []
    for name in files:
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is a link to a file that is not there")
        elif path.suffix.lower() in PICKLE_SUFFIXES or _is_pickle(path):
            problems.append(f"{name} is a pickle or another format than safetensors")
    return problems


def _is_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(4)
    if start.startswith(b"PK\x03\x04"):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    return len(start) > 1 and start[0] == 0x80 and 2 <= start[1] <= 5


def _check_it_loads(folder: Path) -> None:
    try:
        report = load_in_clean_process(folder, _LOAD_SCRIPT)
    except NormalignError as error:
        raise NormalignError(f"{error} Nothing was sent.") from error.__cause__
    if problems := report["result"]["problems"]:
        raise NormalignError(
            f"The weights of {folder} do not fit its code ({problems}), so nothing was sent. Export the model again."
        )
    if report["network_attempts"]:
        raise NormalignError(
            f"Loading {folder} tried to reach the network ({'; '.join(report['network_attempts'])}), so it does not "
            f"stand by itself and nothing was sent. Export the model again."
        )


# --- the card


def _card_file_problems(folder: Path, files: list[str]) -> list[str]:
    if "README.md" not in files:
        return ["it has no README.md, the model card"]
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ["README.md is not UTF-8"]
    # local paths and tokens in its lines are looked for in every file alike, below
    return [f"README.md: {problem}" for problem in check_card(text) if not problem.field.startswith("line ")]


def _inner_file_problems(folder: Path, files: list[str]) -> list[str]:
    """Files in folders, of which an export has one: results in the Hub's format."""
    problems, strange = [], []
    for name in (name for name in files if "/" in name):
        if not re.fullmatch(rf"{re.escape(EVAL_RESULTS)}/[^/]+\.yaml", name):
            strange.append(name)
        else:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            problems += [f"{name}: {problem}" for problem in eval_result_problems(text)]
    if strange:
        more = f" and {len(strange) - 3} more files" if len(strange) > 3 else ""
        lie = "lies" if len(strange) == 1 else "lie"
        problems.append(
            f"{', '.join(strange[:3])}{more} {lie} in a folder, and an export is flat but for {EVAL_RESULTS}/*.yaml"
        )
    return problems


# --- what it gives away


def secret_problems(folder: Path, files: list[str]) -> list[str]:
    """Secrets in files of a folder (of weights in their header), by file and line; a secret itself is never shown."""
    problems = []
    for name in files:
        if _SECRET_FILES.fullmatch(name.rpartition("/")[2]):
            problems.append(f"{name} is a file that usually holds secrets")
            continue
        content = _readable_bytes(folder / name)
        for kind, pattern in _SECRETS.items():
            if found := pattern.search(content):
                line = content.count(b"\n", 0, found.start()) + 1
                problems.append(f"{name} holds {kind} in line {line}: take it out, and revoke it if others saw it")
    return problems


def _readable_bytes(path: Path) -> bytes:
    """All of a file, but of weights only the header, where metadata stands; random numbers have no secrets."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            return file.read(min(int.from_bytes(file.read(8), "little"), 100_000_000))
        return file.read()


def path_problems(folder: Path, files: list[str], places: list[Path]) -> list[str]:
    """Places of this machine, or of any user's home, and the account's name in a path, in files that people read.

    Args:
        places: folders, resolved, that the files must not name, beside the home folder.
    """
    home, account = Path.home(), account_name()
    # one folder below the root, such as `/data`, is no secret and may well stand in a card's example
    places = [place for place in dict.fromkeys(places) if len(place.parts) > 2]
    needles = [re.escape(form) + r"(?![\w.-])" for place in places for form in _forms(place)]
    if len(home.parts) > 1:
        needles += [re.escape(form) + r"(?=[/\\])" for form in _forms(home)]
    local = re.compile("|".join([*needles, _HOMES.pattern]))
    in_a_path = re.compile(rf"[/\\]{re.escape(account)}(?=[/\\])") if account else None
    problems = []
    for name in files:
        path = folder / name
        if path.suffix.lower() not in _TEXT_SUFFIXES or path.name in _VOCABULARIES or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if found := local.search(text):
            problems.append(f"{name} names the local path {found[0]}")
        # an owner on the Hub may be called as the account is
        elif in_a_path and in_a_path.search(_ADDRESS.sub("", text)):
            problems.append(f"{name} names the account {account} of this machine in a path")
    return problems


def _forms(place: Path) -> set[str]:
    """A path as it is, and as JSON writes one with backslashes."""
    return {str(place), json.dumps(str(place))[1:-1]}


def _json(path: Path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
