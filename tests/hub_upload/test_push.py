"""What `push` sends, what it refuses, and that no interruption loses or doubles anything: against a Hub on loopback."""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import huggingface_hub.utils._http
import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from normalign import push
from normalign.cli import app
from normalign.configuration.errors import NormalignError
from normalign.hub_upload import push as push_module_function
from normalign.hub_upload.eval_results import eval_result_files

from .stub_hub import Blob, Drop, StubHub


WRITER, READER = "hf_" + "w" * 34, "hf_" + "r" * 34
REPO = "someone/tiny-aligned"
push_home = sys.modules[push_module_function.__module__]


def forget_connections():
    """Both generations of huggingface_hub keep clients, the older ones also whether they were made offline."""
    http = huggingface_hub.utils._http
    getattr(http, "close_session" if hasattr(http, "close_session") else "reset_sessions")()


@pytest.fixture
def hub(monkeypatch):
    with StubHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # xet's client speaks to a storage service of its own, which the stub is not; LFS is the other way in
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", WRITER)
        forget_connections()
        hub.slept = []
        no_sleep = SimpleNamespace(sleep=hub.slept.append, time=time.time, monotonic=time.monotonic)
        for module in (huggingface_hub.utils._http, push_home):
            monkeypatch.setattr(module, "time", no_sleep)
        yield hub
        forget_connections()


@pytest.fixture(scope="module")
def sharded(exported, tmp_path_factory):
    """The export with its weights in four files, as a large model has them."""
    folder = tmp_path_factory.mktemp("sharded") / "export"
    shutil.copytree(exported, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map = {}
    for i in range(4):
        file = f"model-{i + 1:05}-of-00004.safetensors"
        part = {name: weights[name].clone() for name in names[i::4]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def folder(sharded, tmp_path):
    """A copy of the sharded export that a test may change."""
    return shutil.copytree(sharded, tmp_path / "out" / "export")


def send(folder, **options):
    return push(folder, REPO, load_check=False, **options)


def refusal(folder, **options):
    with pytest.raises(NormalignError) as caught:
        send(folder, **options)
    message = str(caught.value)
    assert "\n" not in message and WRITER not in message
    return message


def contents(folder):
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def arrived(hub, repo_id=REPO):
    files = {name: blob.content for name, blob in hub.repos[repo_id].files.items()}
    files.pop(".gitattributes")
    return files


def key_of(name, content):
    return hashlib.sha256(content).hexdigest() if name.endswith(".safetensors") else name


def added_by_commit(hub):
    trees = list(hub.repos[REPO].commits.values())
    return [sorted(after.keys() - before.keys()) for before, after in zip(trees, trees[1:])]


# --- a push that nothing disturbs


@pytest.mark.both_generations
def test_a_push_sends_every_file_once_weights_first_and_config_and_card_last(hub, folder):
    steps = []
    result = send(folder, revision="v1.0", progress=lambda *step: steps.append(step))
    expected = contents(folder)
    assert arrived(hub) == expected
    assert {key: hub.bytes_received[key_of(key, content)] for key, content in expected.items()} == {
        key: len(content) for key, content in expected.items()
    }
    shards = [f"model-{i:05}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    commits = added_by_commit(hub)
    assert commits[:4] == [[shard] for shard in shards]
    assert commits[-1] == ["README.md", "config.json"] and len(commits) == 6
    repo = hub.repos[REPO]
    assert result.commit == repo.head == repo.tags["v1.0"] and len(result.commit) == 40
    assert result.created and not repo.private
    assert sorted(result.sent) == sorted(expected) and result.skipped == result.deleted == []
    total = sum(map(len, expected.values()))
    assert result.bytes_sent == total and steps[0][1:] == (0, total) and steps[-1] == ("checking", total, total)
    assert f'revision = "{result.commit}"' in result.snippet


@pytest.mark.both_generations
def test_results_in_their_folder_and_the_figure_arrive_with_the_model(hub, folder):
    (folder / ".eval_results").mkdir()
    (folder / ".eval_results" / "pope.yaml").write_text(
        eval_result_files({"tasks": {"pope": {"score": 1.0}}})["pope.yaml"]
    )
    (folder / "norms.png").write_bytes(b"\x89PNG")
    send(folder)
    assert arrived(hub) == contents(folder) and ".eval_results/pope.yaml" in arrived(hub)
    assert send(folder).sent == []


def test_a_second_push_sends_nothing_and_says_the_same_commit(hub, folder):
    first = send(folder, revision="v1.0")
    hub.revive()
    second = send(folder, revision="v1.0")
    assert hub.writes() == ["POST /api/validate-yaml"]
    assert second.commit == first.commit and not second.created
    assert second.sent == [] and sorted(second.skipped) == sorted(contents(folder))


@pytest.mark.both_generations
def test_large_files_may_go_in_parts(hub, folder):
    hub.part_size = 40_000
    send(folder)
    assert arrived(hub) == contents(folder)
    assert len(hub.parts) > 4 and set(hub.times_whole.values()) == {1}


def test_a_name_without_owner_goes_under_the_account_of_the_token(hub, folder):
    assert push(folder, "tiny", private=True, load_check=False).repo_id == "someone/tiny"
    assert hub.repos["someone/tiny"].private


@pytest.mark.both_generations
def test_an_update_becomes_visible_in_one_commit_and_takes_old_weights_away(hub, folder, exported):
    send(folder)
    before = len(hub.repos[REPO].commits)
    result = send(exported)
    assert len(hub.repos[REPO].commits) == before + 1
    assert arrived(hub) == contents(exported)
    assert len(result.deleted) == 5 and result.sent == ["model.safetensors"]


def test_what_else_is_in_the_repository_stays(hub, folder):
    send(folder)
    repo = hub.repos[REPO]
    repo.commit({**repo.files, "notes/mine.txt": Blob(b"kept", False)}, "by hand")
    (folder / "README.md").write_text((folder / "README.md").read_text() + "\nMore.\n")
    assert send(folder).sent == ["README.md"]
    assert arrived(hub).pop("notes/mine.txt") == b"kept"


# --- interruptions


POINTS = [(share, how) for share in (0.1, 0.25, 0.4, 0.6, 0.8) for how in ("during", "after")]


@pytest.fixture(scope="module")
def writes_of_a_push(sharded):
    """The numbers of the requests, among all of a push, that send something."""
    with StubHub() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        forget_connections()
        send(sharded, token=WRITER, revision="v1.0")
        numbers = [i for i, line in enumerate(hub.requests, 1) if line.startswith(("PUT", "POST"))]
    return numbers


@pytest.mark.both_generations
@pytest.mark.parametrize(("share", "how"), POINTS)
def test_a_push_cut_anywhere_is_completed_by_the_next_and_sends_only_the_cut_piece_again(
    hub, folder, writes_of_a_push, share, how
):
    hub.cut(at=writes_of_a_push[int(share * len(writes_of_a_push))], how=how)
    message = refusal(folder, revision="v1.0")
    assert "Nothing is lost" in message and "connection" in message
    repo = hub.repos.get(REPO)
    assert repo is None or "config.json" not in repo.files
    hub.revive()
    result = send(folder, revision="v1.0")

    expected = contents(folder)
    assert arrived(hub) == expected
    assert hub.repos[REPO].tags["v1.0"] == result.commit
    cut = set()
    for name, content in expected.items():
        key = key_of(name, content)
        assert hub.times_whole[key] == 1, name
        if hub.bytes_received[key] != len(content):
            cut.add(name)
            assert hub.bytes_received[key] <= 1.5 * len(content)
    assert len(cut) <= 1


def test_a_push_cut_at_its_last_requests_ends_whole_and_with_its_tag(hub, folder, writes_of_a_push):
    for back in (1, 2, 3):
        hub.repos.clear(), hub.stored.clear()
        hub.cut(at=writes_of_a_push[-back], how="after")
        refusal(folder, revision="v1.0")
        hub.revive()
        result = send(folder, revision="v1.0")
        assert arrived(hub) == contents(folder) and hub.repos[REPO].tags == {"v1.0": result.commit}


def test_a_cut_update_leaves_the_old_version_in_place(hub, exported, folder):
    old = send(exported).commit
    hub.fail("PUT", 500, times=1_000)
    refusal(folder)
    assert hub.repos[REPO].head == old
    hub.faults.clear()
    send(folder)
    assert arrived(hub) == contents(folder)


def test_a_connection_that_breaks_once_is_mended_within_the_same_push(hub, folder):
    def once(line):
        if "/commit/" in line and not hub.slept:
            hub.slept.append("cut")
            raise Drop

    hub.before = once
    send(folder)
    assert arrived(hub) == contents(folder) and set(hub.times_whole.values()) == {1}


# --- what the Hub refuses


def test_a_rate_limit_is_waited_for(hub, folder):
    hub.fail("/commit/", 429, times=1, Retry_After=7)
    send(folder)
    assert hub.slept == [8] and arrived(hub) == contents(folder)


def test_a_server_error_that_passes_is_waited_for(hub, folder, caplog):
    hub.fail("/commit/", 503, times=2)
    with caplog.at_level(logging.WARNING):
        send(folder)
    assert arrived(hub) == contents(folder) and hub.slept == [2, 10]
    assert "answered 503; trying again in 2 seconds" in caplog.text


@pytest.mark.both_generations
@pytest.mark.parametrize(
    ("pattern", "status", "body", "expected"),
    [
        ("/commit/", 412, None, "was changed by someone else"),
        ("/commit/", 409, None, "was changed by someone else"),
        ("/preupload/", 403, None, "no right to write to someone/tiny-aligned"),
        ("/preupload/", 401, None, "does not accept the access token"),
        ("whoami", 401, {"error": f"bad {WRITER}"}, "does not accept the access token"),
        ("objects/batch", 403, {"error": "Private repository storage limit reached"}, "has no room"),
        ("objects/batch", 507, None, "has no room"),
        ("/commit/", 429, None, "limits the rate"),
        ("/commit/", 500, None, "trouble of its own"),
        ("PUT /lfs", 502, None, "trouble of its own"),
        ("/commit/", 404, None, "has no repository"),
        ("/commit/", 422, {"error": "odd"}, "refuses the push"),
    ],
)
def test_each_refusal_is_one_paragraph_and_a_later_push_completes(hub, folder, pattern, status, body, expected):
    hub.fail(pattern, status, body)
    message = refusal(folder)
    assert expected in message and str(status) in message
    assert "Nothing is lost" in message
    hub.faults.clear()
    send(folder)
    assert arrived(hub) == contents(folder)


def test_a_commit_by_someone_else_in_the_middle_is_not_overwritten(hub, folder):
    def meanwhile(line):
        repo = hub.repos.get(REPO)
        if "/commit/" in line and len(repo.commits) == 3:
            repo.commit({**repo.files, "theirs.txt": Blob(b"x", False)}, "theirs")

    hub.before = meanwhile
    assert "was changed by someone else" in refusal(folder)
    hub.before = None
    send(folder)
    assert arrived(hub).pop("theirs.txt") == b"x"


def test_a_card_that_the_hub_rejects_stops_before_anything_is_sent(hub, folder):
    hub.rejected_card = '"datasets[0]" must be a string'
    message = refusal(folder)
    assert "datasets[0]" in message and "README.md" in message
    assert hub.repos == {} and not hub.bytes_received


def test_a_token_that_may_only_read_is_refused_first(hub, folder):
    message = refusal(folder, token=READER)
    assert "may only read" in message and READER not in message and hub.repos == {}


def test_an_organization_of_others_is_refused(hub, folder):
    with pytest.raises(NormalignError, match="no right to write to others/tiny"):
        push(folder, "others/tiny", load_check=False)


def test_without_a_token_nothing_is_asked(hub, folder, monkeypatch):
    monkeypatch.setattr(push_home, "get_token", lambda: None)
    assert "hf auth login" in refusal(folder)
    assert hub.requests == []


def test_private_is_refused_for_a_repository_that_is_public(hub, folder):
    send(folder)
    assert "exists and is public" in refusal(folder, private=True)


def test_a_tag_is_never_moved(hub, folder):
    first = send(folder, revision="v1.0").commit
    (folder / "README.md").write_text((folder / "README.md").read_text() + "\nMore.\n")
    hub.revive()
    assert "never moved" in refusal(folder, revision="v1.0")
    assert hub.repos[REPO].tags["v1.0"] == hub.repos[REPO].head == first


def test_files_that_a_gitignore_leaves_out_are_named(hub, folder):
    send(folder)
    repo = hub.repos[REPO]
    repo.commit({**repo.files, ".gitignore": Blob(b"LICENSE", False)}, "by hand")
    (folder / "LICENSE").write_text("free")
    assert "content for LICENSE" in refusal(folder)


@pytest.mark.both_generations
def test_offline_is_said(hub, folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    forget_connections()
    assert "HF_HUB_OFFLINE is set" in refusal(folder)


@pytest.mark.parametrize("name", ["", "a/b/c", "a b", "../x", "/x", "a/.."])
def test_a_name_that_is_none_is_refused(folder, name):
    with pytest.raises(NormalignError, match="no name of a Hub repository"):
        push(folder, name)


@pytest.mark.parametrize("tag", ["main", "a b", "", "0" * 40, "v..1"])
def test_a_tag_that_is_none_is_refused(folder, tag):
    with pytest.raises(NormalignError, match="cannot be a tag"):
        push(folder, REPO, revision=tag)


@pytest.mark.both_generations
def test_logs_show_neither_token_nor_signed_addresses(hub, folder):
    lines = []

    class Keep(logging.StreamHandler):
        def emit(self, record):
            lines.append(self.format(record))

    library = logging.getLogger("huggingface_hub")
    handler = Keep()
    library.addHandler(handler)
    try:
        hub.fail("PUT /lfs", 503, times=2)
        library.warning("outside of a push")
        send(folder)
    finally:
        library.removeHandler(handler)
    text = "\n".join(lines)
    assert "503" in text and "signed" not in text and WRITER not in text
    assert handler.filters == []


# --- dry run


def test_a_dry_run_sends_nothing_and_lists_what_would_go(hub, folder):
    result = send(folder, dry_run=True, revision="v1.0")
    assert hub.writes() == [] and hub.repos == {}
    assert result.created and result.commit is None and sorted(result.sent) == sorted(contents(folder))
    assert result.sent[-2:] == ["config.json", "README.md"]
    send(folder)
    hub.revive()
    (folder / "generation_config.json").write_text("{}")
    again = send(folder, dry_run=True)
    assert again.sent == ["generation_config.json"] and not again.created and hub.writes() == []


def test_a_dry_run_without_network_or_token_lists_everything(hub, folder, monkeypatch):
    monkeypatch.setattr(push_home, "get_token", lambda: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    forget_connections()
    result = send(folder, dry_run=True)
    assert not result.compared and sorted(result.sent) == sorted(contents(folder)) and hub.requests == []


# --- the command


def test_the_command_prints_the_pinned_commit_and_the_snippet(hub, folder):
    done = CliRunner().invoke(app, ["push", str(folder), REPO, "--revision", "v1", "--no-load-check"])
    assert done.exit_code == 0, done.output
    commit = hub.repos[REPO].head
    assert f'revision = "{commit}"' in done.stdout and "AutoModelForImageTextToText" in done.stdout
    assert "model-00001-of-00004.safetensors" in done.stderr
    again = CliRunner().invoke(app, ["push", str(folder), REPO, "--no-load-check", "--json"])
    assert json.loads(again.stdout)["commit"] == commit and json.loads(again.stdout)["sent"] == []


def test_the_command_lists_a_dry_run(hub, folder):
    done = CliRunner().invoke(app, ["push", str(folder), REPO, "--dry-run", "--no-load-check"])
    assert done.exit_code == 0 and hub.repos == {}
    assert "Nothing was sent" in done.stdout
    assert all(name in done.stdout for name in contents(folder))


# --- from the Hub again


LOAD = """
import json, sys
from transformers import AutoModelForImageTextToText, AutoProcessor

repo_id, revision = sys.argv[1:]
processor = AutoProcessor.from_pretrained(repo_id, revision=revision, trust_remote_code=True)
model, info = AutoModelForImageTextToText.from_pretrained(
    repo_id, revision=revision, trust_remote_code=True, output_loading_info=True
)
problems = {key: sorted(map(str, names)) for key, names in info.items() if names}
print(json.dumps([type(model).__module__, type(processor).__name__, problems, "normalign" in sys.modules]))
"""


@pytest.mark.both_generations
def test_what_was_pushed_loads_by_its_id_at_the_pinned_revision(hub, folder, tmp_path):
    commit = push(folder, REPO, private=True).commit  # with the load in a clean process before it
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": WRITER}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOAD, REPO, commit], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    module, processor, problems, has_normalign = json.loads(done.stdout.splitlines()[-1])
    assert module.startswith("transformers_modules.") and commit in module
    assert processor == "LlavaProcessor" and problems == {} and not has_normalign
