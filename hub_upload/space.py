"""Writes the folder of a Gradio app for a Hugging Face Space: a chat with a model that shows the norms of its tokens."""

import json
import os
import re
import shutil
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, SpaceCard, SpaceCardData, get_token
from huggingface_hub.errors import HFValidationError

from ..assembly.saving import check_target, named_folder, written_in_full
from ..configuration.errors import NormalignError
from .hub_errors import HubFailure
from .preflight import check_folder


SPACE_MARK = "<!-- a Space written by normalign -->"
# The Hub installs this very version; requirements.txt has the lower bound for other machines.
GRADIO_VERSION = "6.31.0"
MODEL_FOLDER = "model"

_TEMPLATES = Path(__file__).parent / "templates" / "space"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def export_space(
    model: str | os.PathLike,
    out: str | os.PathLike,
    *,
    repo_id: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes the Gradio app of a model to the folder `out`: app.py, settings.json, requirements.txt, README.md.

    The app needs gradio, torch, transformers and Pillow, not this package. The folder of an export goes into it as
    `model/`, so that the app runs alone; a model of the Hub is loaded from there, at one revision.

    Args:
        model: the folder of an export, or a Hub id.
        out: the folder to write.
        repo_id: where the Hub has what is in the folder `model`; the app loads it from there, nothing is copied.
        revision: the commit, tag or branch of the repository; None takes its newest commit. What is no full commit hash
            is looked up on the Hub, so that the app runs the code of that one commit for ever.
        overwrite: replace a folder with other files, or an earlier Space.

    Returns:
        `out`, with `~` resolved.

    Raises:
        NormalignError: there is no such model, the folder is not a whole export, the commit cannot be looked up, or
            `out` may not be written.
    """
    out = named_folder(out)
    source = _local_folder(model)
    if source is None:
        if repo_id not in (None, str(model)):
            raise NormalignError(f"The model is {model}, and the repository {repo_id}: name one of them.")
        repo_id = str(model)
    if repo_id is None and revision is not None:
        raise NormalignError(
            f"A revision belongs to a repository of the Hub, and {model} is a folder. Name the repository too, "
            f"--repo-id OWNER/NAME (in Python repo_id=), or leave the revision out."
        )
    # an earlier Space has one folder of its own, which may go with it
    own = {MODEL_FOLDER} if overwrite and _is_earlier_space(out) else set()
    check_target(out, sources=[source] if source else [], overwrite=overwrite, own_folders=own)
    files = check_folder(source, load=False) if source else []
    if repo_id is None:
        title, license = "Chat with an aligned model", _license_of(source / "README.md")
    else:
        revision = _commit_of(repo_id, revision)
        title, license = f"Chat with {repo_id.partition('/')[2]}", {"license": "apache-2.0"}
    with written_in_full(out) as folder:
        for name in ("app.py", "requirements.txt"):
            shutil.copyfile(_TEMPLATES / name, folder / name)
        settings = {"title": title, "repo_id": repo_id, "revision": revision}
        (folder / "settings.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        _card(title, license, repo_id, revision).save(folder / "README.md")
        if repo_id is None:
            for name in files:
                (folder / MODEL_FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, folder / MODEL_FOLDER / name)
    return out


def _local_folder(model: str | os.PathLike) -> Path | None:
    """The folder of a model, or None for a Hub id."""
    if not str(model).strip():
        raise NormalignError("The model has no name: '' was given. Name the folder of an export, or a Hub id.")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not _HUB_ID.fullmatch(str(model)):
        what = "is a file" if folder.exists() else "does not exist"
        raise NormalignError(f"{model} {what}. Name the folder of an export, or a Hub id.")
    return None


def _is_earlier_space(folder: Path) -> bool:
    card = folder / "README.md"
    return card.is_file() and SPACE_MARK in card.read_text(encoding="utf-8", errors="replace")


def _commit_of(repo_id: str, revision: str | None) -> str:
    """The full commit hash of a revision, looked up on the Hub unless it is one."""
    if not _HUB_ID.fullmatch(repo_id):
        raise NormalignError(f"'{repo_id}' is no name of a repository on the Hub. Name it as OWNER/NAME.")
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    what = f"the revision {revision}" if revision else "the newest commit"
    remedy = "Check the name, the network and your access to it, or give the full commit hash as --revision."
    try:
        return HfApi().model_info(repo_id, revision=revision).sha
    except HFValidationError as error:
        raise NormalignError(f"'{repo_id}' is no name of a repository on the Hub: {error}") from error
    except Exception as error:
        failure = HubFailure.of(error, get_token())
        if failure is None:
            raise
        reason = "HF_HUB_OFFLINE is set" if failure.offline else failure.short
        raise NormalignError(f"The Hub did not tell {what} of {repo_id}: {reason}. {remedy}") from error


def _license_of(card: Path) -> dict[str, str]:
    """The license fields of a model's card: a Space that holds the model has its license."""
    data = ModelCard.load(card).data.to_dict()
    return {key: data[key] for key in ("license", "license_name", "license_link") if data.get(key)}


def _card(title: str, license: dict[str, str], repo_id: str | None, revision: str | None) -> SpaceCard:
    data = SpaceCardData(
        title=title,
        emoji="📏",
        colorFrom="yellow",
        colorTo="purple",
        sdk="gradio",
        sdk_version=GRADIO_VERSION,
        app_file="app.py",
        pinned=False,
        short_description="Ask about an image and see its token norms",
        models=[repo_id] if repo_id else None,
        tags=["normalign", "aligned-norm"],
        **license,
    )
    return SpaceCard.from_template(
        data,
        template_path=str(_TEMPLATES / "README.md.jinja"),
        mark=SPACE_MARK,
        title=title,
        repo_id=repo_id,
        revision=revision,
    )
