"""Sends an exported folder to the Hub: looked through first, in pieces that survive an interruption, pinned at the end."""

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import get_session, hf_raise_for_status

from .. import __version__
from ..configuration.errors import NormalignError
from .hub_errors import HubFailure, explained_failure, without_secrets
from .preflight import check_folder


logger = logging.getLogger(__name__)

# A repository is loadable once it has a config, and found once it has a card: both come with the last commit.
_LAST = ("config.json", "README.md")
# A name that a loader reads by itself: left from an earlier push, it would be read in the place of the new weights.
_OLD_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
_WAITS = (2.0, 10.0)  # seconds before the second and third try of one request
_LONGEST_WAIT = 300.0

Progress = Callable[[str, int, int], None]


@dataclass
class PushResult:
    """What a push did, or would do.

    `commit` is the full hash to pin, None in a dry run; `compared` is False where a dry run could not ask the Hub.
    """

    repo_id: str
    url: str
    commit: str | None = None
    tag: str | None = None
    created: bool = False
    dry_run: bool = False
    compared: bool = True
    sent: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def bytes_sent(self) -> int:
        """Size of the files in `sent`."""
        return sum(self.sizes[name] for name in self.sent)

    @property
    def snippet(self) -> str:
        """Python that loads exactly what was pushed, whatever becomes of the repository later."""
        return (
            "from transformers import AutoModelForImageTextToText, AutoProcessor\n\n"
            f'repo_id = "{self.repo_id}"\n'
            f'revision = "{self.commit or "FULL_COMMIT_HASH"}"\n'
            "processor = AutoProcessor.from_pretrained(repo_id, revision=revision, trust_remote_code=True)\n"
            "model = AutoModelForImageTextToText.from_pretrained(repo_id, revision=revision, trust_remote_code=True)\n"
        )

    def to_dict(self) -> dict:
        """All of it, for JSON."""
        return {**asdict(self), "bytes_sent": self.bytes_sent, "snippet": self.snippet}


def push(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
    token: str | None = None,
    progress: Progress | None = None,
    load_check: bool = True,
) -> PushResult:
    """Sends what `export` wrote to the model repository `repo_id`, which is made if there is none.

    The folder is looked through first (`preflight.check_folder`), and its card is shown to the Hub. Files that the
    repository has with the same content are not sent. In a new repository every weight file is a commit of its own,
    then come the other files, and config.json and README.md last: until then it does not look complete, and a push
    that was cut goes on where it stopped. In a repository that has a config already, all becomes visible in one
    commit; the contents of large files are sent before it and kept by the Hub. A branch that someone else has changed
    meanwhile is left alone.

    Args:
        folder: what `export` wrote.
        repo_id: `owner/name`, or a name under the token's own account.
        private: make a new repository private.
        revision: a tag to put on the result; one that exists and points elsewhere is never moved.
        dry_run: look through the folder and compare, but send nothing.
        token: an access token with the right to write; None takes the one of `hf auth login` or HF_TOKEN.
        progress: called with what is being sent, bytes done and bytes in all.
        load_check: load the folder in a clean process before anything is sent.

    Raises:
        NormalignError: the folder is not fit to be published or the Hub refuses; the message says what was kept.
    """
    folder = Path(folder).expanduser()
    _check_names(repo_id, revision)
    token = token or get_token()
    if token is None and not dry_run:
        raise NormalignError(
            "There is no access token, so nothing was sent. Make one with the right to write at "
            "https://huggingface.co/settings/tokens and log in with `hf auth login`, or set HF_TOKEN."
        )
    files = check_folder(folder, load=load_check)
    with _logs_without_secrets(token):
        hub = _Hub(folder, files, repo_id, token)
        return hub.plan(revision) if dry_run else hub.push(private, revision, progress or _no_progress)


def _no_progress(name: str, done: int, total: int) -> None:
    pass


def _check_names(repo_id: str, tag: str | None) -> None:
    if not re.fullmatch(r"([\w][\w.-]*/)?[\w][\w.-]{0,95}", repo_id) or ".." in repo_id or "--" in repo_id:
        raise NormalignError(
            f"{repo_id!r} is no name of a Hub repository. Write owner/name with letters, digits, '-', '_' and '.'."
        )
    if tag is None:
        return
    if not re.fullmatch(r"\w[\w.+-]*", tag) or ".." in tag or re.fullmatch(r"main|refs|HEAD|[0-9a-f]{40}", tag):
        raise NormalignError(
            f"{tag!r} cannot be a tag: write a short name such as v1.0, not a branch or a commit hash."
        )


@contextmanager
def _logs_without_secrets(token: str | None) -> Iterator[None]:
    """huggingface_hub logs the addresses it retries, and those of storage are signed: keep both out of its log."""

    def clean(record: logging.LogRecord) -> bool:
        record.msg, record.args = without_secrets(record.getMessage(), token), ()
        return True

    handlers = list(logging.getLogger("huggingface_hub").handlers)
    for handler in handlers:
        handler.addFilter(clean)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(clean)


class _Hub:
    """One folder, one repository, and what is known of the repository: its last commit and its files."""

    def __init__(self, folder: Path, files: list[str], repo_id: str, token: str | None):
        self.folder, self.files, self.repo_id, self.token = folder, files, repo_id, token
        self.api = HfApi(token=token, library_name="normalign", library_version=__version__)
        self.sizes = {name: (folder / name).stat().st_size for name in files}
        self.head: str | None = None
        self.tree: dict = {}
        self._hashes: dict[str, tuple[str, str]] = {}
        self._operations: dict[str, CommitOperationAdd] = {}

    # --- the two ways through

    def plan(self, tag: str | None) -> PushResult:
        """What a push would do, by reading alone."""
        result = PushResult(self.repo_id, self._url(), tag=tag, dry_run=True, sizes=self.sizes)
        try:
            if "/" not in self.repo_id and self.token is not None:
                self._take_account()
            result.repo_id, result.url = self.repo_id, self._url()
            result.created = self._request(self._look) is None
        except NormalignError as error:
            if not isinstance(error.__cause__, HubFailure) or not error.__cause__.unreachable:
                raise
            result.compared = False
        if self.head is not None and tag is not None:
            self._check_tag(tag)
        result.sent, result.deleted = self._to_send(), self._to_delete()
        result.skipped = [name for name in self.files if name not in result.sent]
        return result

    def push(self, private: bool, tag: str | None, progress: Progress) -> PushResult:
        """Sends what is not there."""
        self._take_account()
        self._check_card()
        created = self._find_or_create(private)
        if tag is not None:
            self._check_tag(tag)
        sent, deleted = self._to_send(), self._to_delete()
        pieces = self._pieces(sent)
        total, done = sum(self.sizes[name] for name in sent), 0
        visible_at_once = "config.json" in self.tree
        for i, piece in enumerate(pieces, 1):
            progress(f"{i} of {len(pieces)}: {_short(piece)}", done, total)
            if visible_at_once:
                self._store(piece)
            else:
                self._commit(piece, deleted if i == len(pieces) else [])
            done += sum(self.sizes[name] for name in piece)
        if visible_at_once or not pieces:
            self._commit(sent, deleted)
        progress("checking", done, total)
        self._check_arrived()
        if tag is not None:
            self._put_tag(tag)
        return PushResult(
            self.repo_id,
            self._url(),
            commit=self.head,
            tag=tag,
            created=created,
            sent=sent,
            skipped=[name for name in self.files if name not in sent],
            deleted=deleted,
            sizes=self.sizes,
        )

    # --- what is there and what is to do

    def _url(self) -> str:
        return f"{self.api.endpoint}/{self.repo_id}"

    def _take_account(self) -> None:
        """Completes the repository's name, and refuses a token that may only read before anything long is done."""
        account = self._request(self.api.whoami)
        if "/" not in self.repo_id:
            self.repo_id = f"{account['name']}/{self.repo_id}"
        role = ((account.get("auth") or {}).get("accessToken") or {}).get("role")
        if role == "read":
            raise NormalignError(
                f"The access token of {account['name']} may only read, so nothing was sent. Make one with the right to "
                f"write at {self.api.endpoint}/settings/tokens and log in with `hf auth login`, or set HF_TOKEN."
            )

    def _look(self):
        """Reads the repository's last commit and files; None where there is no such repository."""
        try:
            info = self.api.repo_info(self.repo_id, repo_type="model", revision="main")
        except RepositoryNotFoundError as error:
            # the same class stands for a token that the Hub does not know
            if self.token is not None and getattr(error.response, "status_code", 404) == 401:
                raise
            self.head, self.tree = None, {}
            return None
        entries = self.api.list_repo_tree(self.repo_id, repo_type="model", revision=info.sha, recursive=True)
        self.head, self.tree = info.sha, {entry.path: entry for entry in entries if hasattr(entry, "blob_id")}
        return info

    def _find_or_create(self, private: bool) -> bool:
        info = self._request(self._look)
        created = info is None
        if created:
            self._request(
                lambda: self.api.create_repo(self.repo_id, repo_type="model", private=private or None, exist_ok=True)
            )
            info = self._request(self._look)
            if info is None:
                raise NormalignError(
                    f"The Hub made {self.repo_id}, but does not show it yet. Wait a minute and run the same again."
                )
        if private and not info.private:
            raise NormalignError(
                f"{self.repo_id} exists and is public, so nothing was sent to it as private. Make it private under "
                f"{self._url()}/settings, or leave --private out."
            )
        return created

    def _is_there(self, name: str) -> bool:
        """Whether the repository has this file with this content."""
        entry = self.tree.get(name)
        if entry is None or entry.size != self.sizes[name]:
            return False
        sha256, git_sha1 = self._hash(name)
        return entry.lfs.sha256 == sha256 if entry.lfs is not None else entry.blob_id == git_sha1

    def _hash(self, name: str) -> tuple[str, str]:
        """SHA-256, as of an LFS object, and the SHA-1 of a git blob."""
        if name not in self._hashes:
            sha256, git = hashlib.sha256(), hashlib.sha1(usedforsecurity=False)
            git.update(f"blob {self.sizes[name]}\0".encode())
            with (self.folder / name).open("rb") as file:
                while block := file.read(1 << 20):
                    sha256.update(block)
                    git.update(block)
            self._hashes[name] = sha256.hexdigest(), git.hexdigest()
        return self._hashes[name]

    def _to_send(self) -> list[str]:
        """The files that are not there, in the order in which they go."""
        missing = [name for name in self.files if not self._is_there(name)]
        return sorted(missing, key=lambda name: _LAST.index(name) + 2 if name in _LAST else not _is_weights(name))

    def _to_delete(self) -> list[str]:
        return sorted(name for name in self.tree if _OLD_WEIGHTS.fullmatch(name) and name not in self.files)

    @staticmethod
    def _pieces(names: list[str]) -> list[list[str]]:
        """Each weight file by itself, then all other files, then config and card."""
        weights = [[name] for name in names if _is_weights(name)]
        others = [name for name in names if not _is_weights(name) and name not in _LAST]
        return [*weights, *filter(None, [others, [name for name in names if name in _LAST]])]

    # --- what changes the repository

    def _operation(self, name: str) -> CommitOperationAdd:
        if name not in self._operations:
            self._operations[name] = CommitOperationAdd(name, str(self.folder / name))
        return self._operations[name]

    def _store(self, names: list[str]) -> None:
        """Sends the contents of large files, which stay invisible until a commit names them."""
        additions = [self._operation(name) for name in names]
        self._request(lambda: self.api.preupload_lfs_files(self.repo_id, additions=additions, repo_type="model"))

    def _commit(self, names: list[str], deleted: list[str]) -> None:
        """One commit on top of the one that was last seen, or none where all of it is there."""
        message = f"{_short(names) if names else 'Remove weights of an earlier push'} (normalign {__version__})"
        tries = 0

        def commit() -> None:
            nonlocal tries
            parent, tries = self.head, tries + 1
            if tries > 1:
                # the first try may have arrived with its answer lost on the way back
                self._look()
            missing = [name for name in names if not self._is_there(name)]
            leaving = [name for name in deleted if name in self.tree]
            if not missing and not leaving:
                return
            self.head = parent
            operations = [self._operation(name) for name in missing]
            operations += [CommitOperationDelete(name, is_folder=False) for name in leaving]
            done = self.api.create_commit(
                self.repo_id, operations, commit_message=message, repo_type="model", parent_commit=parent
            )
            self.head = done.oid

        self._request(commit)

    def _check_card(self) -> None:
        """Shows the card to the Hub before hours of upload, as the last commit will."""
        content = (self.folder / "README.md").read_text(encoding="utf-8")

        def validate():
            response = get_session().post(
                f"{self.api.endpoint}/api/validate-yaml",
                json={"content": content, "repoType": "model"},
                headers={"authorization": f"Bearer {self.token}"},
            )
            if response.status_code == 400:
                return response.json().get("errors") or [{"message": "no reason given"}]
            hf_raise_for_status(response)
            return []

        if errors := self._request(validate):
            reasons = "; ".join(str(error.get("message")) for error in errors)
            raise NormalignError(
                f"The Hub rejects the card's metadata, so nothing was sent: {without_secrets(reasons, self.token)}. "
                f"Correct the block between the lines of --- in {self.folder / 'README.md'} and push again."
            )

    def _check_arrived(self) -> None:
        """Compares all files with the commit that will be pinned."""
        pinned = self.head
        self._request(self._look)
        if self.head != pinned:
            raise NormalignError(
                f"Someone else has committed to {self.repo_id} after this push, which is whole at {pinned}. Look at "
                f"{self._url()}/commits/main and pin the commit that you mean."
            )
        if missing := self._to_send():
            raise NormalignError(
                f"The Hub took the commits, but {self.repo_id} has no or another content for {_short(missing)}. A "
                f".gitignore in the repository leaves files out: take those lines out and push again."
            )

    # --- tags

    def _tagged(self, tag: str) -> str | None:
        def find():
            try:
                return self.api.repo_info(self.repo_id, repo_type="model", revision=tag).sha
            except RevisionNotFoundError:
                return None

        return self._request(find)

    def _check_tag(self, tag: str) -> None:
        """A tag that moves would change what others have pinned."""
        target = self._tagged(tag)
        if target is not None and (target != self.head or self._to_send() or self._to_delete()):
            raise NormalignError(
                f"{self.repo_id} has a tag or branch {tag} at {target}, and it is never moved, so nothing was sent. "
                f"Choose another tag."
            )

    def _put_tag(self, tag: str) -> None:
        def put():
            if self._tagged(tag) != self.head:
                self.api.create_tag(self.repo_id, tag=tag, revision=self.head, repo_type="model")

        self._request(put)

    # --- every request

    def _request(self, call: Callable):
        """Runs `call`, again where the Hub is busy or the connection breaks, and explains what it cannot mend."""
        for wait in (*_WAITS, None):
            try:
                return call()
            except NormalignError:
                raise
            except Exception as error:
                failure = HubFailure.of(error, self.token)
                if failure is None:
                    raise
                asked = failure.retry_after
                if wait is None or not failure.may_pass or (asked or 0) > _LONGEST_WAIT:
                    raise NormalignError(explained_failure(failure, self.repo_id, self.api.endpoint)) from failure
                wait = wait if asked is None else asked + 1
                logger.warning("%s; trying again in %g seconds.", failure.short, wait)
                time.sleep(wait)


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def _short(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
