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
import torch
from huggingface_hub import constants
from safetensors.torch import load, save
from typer.testing import CliRunner

from normalign import push
from normalign.cli import app
from normalign.configuration.errors import NormalignError
from normalign.hub_upload import push as push_module_function
from normalign.hub_upload.eval_results import eval_result_files

from .stub_hub import READER, REPO, WRITER, Blob, Drop, StubHub, arrived, contents


push_home = sys.modules[push_module_function.__module__]


def forget_connections():
    """Both generations of huggingface_hub keep clients, the older ones also whether they were made offline."""
    http = huggingface_hub.utils._http
    getattr(http, "close_session" if hasattr(http, "close_session") else "reset_sessions")()


@pytest.fixture
def hub(monkeypatch):
    with StubHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
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


def test_a_folder_that_was_written_anew_between_two_runs_arrives_as_it_is_now(hub, folder, exported, writes_of_a_push):
    hub.cut(at=writes_of_a_push[len(writes_of_a_push) // 2], how="after")
    refusal(folder)
    hub.revive()
    assert any(name.startswith("model-00001") for name in hub.repos[REPO].files)
    shutil.rmtree(folder)
    shutil.copytree(exported, folder)
    assert "model-00001-of-00004.safetensors" in send(folder).deleted
    assert arrived(hub) == contents(exported)


# --- the other way in, xet


@pytest.fixture
def xet_hub(hub, monkeypatch, tmp_path):
    """The Hub as the real one is today: the client uploads large files with hf_xet, which has its own HTTP client."""
    pytest.importorskip("hf_xet", reason="uploads by xet need hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setenv("HF_XET_XORB_COMPRESSION_POLICY", "none")
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "0")
    return hub


@pytest.mark.both_generations
def test_a_push_by_xet_goes_on_where_one_by_lfs_was_cut(xet_hub, folder, monkeypatch):
    """R64: what is there is told by SHA-256 and the SHA-1 of git, whichever way it came."""
    hub = xet_hub
    with monkeypatch.context() as lfs:
        lfs.setattr(constants, "HF_HUB_DISABLE_XET", True)
        hub.fail("/commit/", 403, after=2)
        refusal(folder)
    hub.faults.clear()
    result = send(folder)
    assert arrived(hub) == contents(folder)
    assert result.skipped == ["model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"]
    # the third had come by LFS, without its commit; the client that does not ask sends it again
    assert 1 <= len(hub.xorbs) <= 2 and hub.times_whole.keys() >= hub.xorbs.keys()
    assert send(folder).sent == []


@pytest.mark.both_generations
@pytest.mark.parametrize(
    ("pattern", "status", "expected"),
    [
        ("xet-write-token", 401, "does not accept the access token"),
        ("xet-write-token", 403, "no right to write to someone/tiny-aligned"),
        ("/v1/xorbs", 413, "has no room"),
        ("/v1/shards", 400, "refuses the push"),
    ],
)
def test_each_refusal_of_xet_is_one_paragraph_too(xet_hub, folder, pattern, status, expected):
    xet_hub.fail(pattern, status)
    message = refusal(folder)
    assert expected in message and str(status) in message and "Nothing is lost" in message
    xet_hub.faults.clear()
    send(folder)
    assert arrived(xet_hub) == contents(folder)


def test_an_answer_that_xet_cannot_read_is_one_paragraph(xet_hub, folder):
    xet_hub.fail("/v2/shards", 200, {"odd": 1})
    message = refusal(folder)
    assert "broke" in message and "Nothing is lost" in message


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
        ("PUT /lfs", 413, None, "has no room"),
        ("whoami", 401, {"error": "User Access Token is expired"}, "expired"),
        ("repos/create", 404, {"error": "This organization does not exist"}, "no repository or owner"),
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
    """R62"""
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


def refused_command(*words):
    """The words of a command that ends with status 1 or 2, on standard error alone."""
    done = CliRunner().invoke(app, ["push", *map(str, words), "--no-load-check"])
    assert done.exit_code in (1, 2) and done.stdout == "" and "Traceback" not in done.stderr
    assert WRITER not in done.stderr
    return " ".join(done.stderr.replace("│", " ").split())


def test_the_command_says_each_refusal_once_and_ends_with_status_1_or_2(hub, folder, monkeypatch):
    """R62, R64: as a user meets them, one after the other; the last push then sends what is missing."""
    assert "is no name of a Hub repository" in refused_command(folder, "someone/a b")
    assert "is no name of a Hub repository" in refused_command(folder, "https://huggingface.co/someone/tiny")
    assert "There is no folder" in refused_command(folder / "no", REPO)
    monkeypatch.setenv("HF_TOKEN", READER)
    assert "may only read" in refused_command(folder, REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "e" * 34)
    assert "does not accept the access token" in refused_command(folder, REPO)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    assert "right to write to others/tiny" in refused_command(folder, "others/tiny")
    hub.rejected_card = '"license" must be one of [apache-2.0, ...]'
    assert '"license" must be one of' in refused_command(folder, REPO)
    assert hub.repos == {} and not hub.bytes_received
    hub.rejected_card = None
    hub.fail("/commit/", 429, after=2, Retry_After=3600)
    assert "Run it again in 3600 seconds" in refused_command(folder, REPO)
    hub.faults.clear()
    hub.fail("PUT /lfs", 500)
    assert "trouble of its own (status 500" in refused_command(folder, REPO)
    hub.faults.clear()
    assert "exists and is public" in refused_command(folder, REPO, "--private")
    done = CliRunner().invoke(app, ["push", str(folder), REPO, "--revision", "v1", "--no-load-check"])
    assert done.exit_code == 0 and arrived(hub) == contents(folder)
    (folder / "README.md").write_text((folder / "README.md").read_text() + "\nMore.\n")
    assert "has a tag or branch v1" in refused_command(folder, REPO, "--revision", "v1")
    assert hub.repos[REPO].tags == {"v1": hub.repos[REPO].head}


def test_a_hub_that_cannot_be_reached_is_tried_three_times_and_named(hub, folder, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    message = refused_command(folder, REPO)
    assert "http://127.0.0.1:9 broke or could not be made" in message and "Nothing is lost" in message
    assert hub.slept == [2, 10]


def test_a_long_rate_limit_is_said_instead_of_waited_for(hub, folder, caplog):
    """Waits of up to five minutes are made, and each is announced; a longer one is the user's to make."""
    hub.fail("/commit/", 429, times=1, Retry_After=290)
    send(folder)
    assert hub.slept == [291] and "answered 429; trying again in 291 seconds" in caplog.text
    hub.revive(), hub.repos.clear(), hub.slept.clear()
    hub.fail("/commit/", 429, Retry_After=301)
    assert "Run it again in 301 seconds" in refusal(folder) and hub.slept == []


# --- from the Hub again


def verified(*words):
    done = CliRunner().invoke(app, ["verify", *words])
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.both_generations
def test_verify_says_why_a_repository_cannot_be_had(hub, folder, monkeypatch):
    send(folder, private=True)
    status, said = verified("someone/none")
    assert status == 1 and "the Hub has no model of that name or does not show it to you" in said
    status, said = verified(REPO, "--revision", "v9")
    assert status == 1 and f"{REPO} has no branch, tag or commit 'v9'" in said
    hub.fail("GET", 403, {"error": "Ask"}, X_Error_Code="GatedRepo", X_Error_Message="Access is restricted")
    status, said = verified("someone/gated")
    assert status == 1 and f"Ask for access at {hub.url}/someone/gated" in said
    monkeypatch.setenv("HF_TOKEN", READER)
    hub.faults.clear()
    status, said = verified("someone/tiny-aligned", "--revision", "main")
    assert status == 1 and "does not show it to you" in said


def test_verify_shows_what_someone_has_changed_in_a_repository(hub, folder):
    pinned = send(folder, revision="v1.0").commit
    repo = hub.repos[REPO]
    code = repo.files["modeling_normalign_llava.py"].content.decode()
    changed = code.replace("import torch\n", "import torch\nimport this\n", 1)
    shard = "model-00001-of-00004.safetensors"
    tensors = load(repo.files[shard].content)
    name = sorted(tensors)[0]
    tensors[name] = torch.ones(7)
    content = {
        "modeling_normalign_llava.py": Blob(changed.encode(), False),
        shard: Blob(save(tensors, metadata={"format": "pt"}), True),
        "pytorch_model.bin": Blob(b"\x80\x02x", True),
    }
    repo.commit({**repo.files, **content}, "not by us")
    status, said = verified(REPO)
    assert status == 1 and "verdict fails" in said and f"load with revision='{repo.head}'" in said
    assert "+import this" in said and "modeling_normalign_llava.py differs yes" in said
    assert "pickles, which run code when they are loaded: pytorch_model.bin" in said
    assert f"{name} is (7,), not (" in said
    assert "GET /someone/tiny-aligned/resolve/" + repo.head + "/pytorch_model.bin" not in hub.requests
    status, said = verified(REPO, "--revision", pinned)
    assert status == 0 and "verdict passes" in said and "can move" not in said


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
