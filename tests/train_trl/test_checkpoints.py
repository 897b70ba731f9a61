"""A run that was killed, stopped, or ran out of disk goes on to the very weights of one that was not."""

import errno
import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from normalign.configuration.errors import NormalignError, RunStopped
from normalign.train_trl import load_recipe, train
from normalign.train_trl.__main__ import main
from normalign.train_trl.checkpoints import SEAL_NAME, StopOnSigterm, cut_log, find_resume, goes_on, what_is_torn
from normalign.train_trl.training import AlignedSFTTrainer


# 10 rows in batches of 4 (two accumulated parts of 2): an epoch has 3 steps, the last one shorter
RUN = {
    "data": {"rows": 10, "stage": 2},
    "batch_size": 4,
    "gradient_accumulation": 2,
    "max_steps": 6,
    "save_steps": 2,
    "schedule": "cosine",
}
FULL = {**RUN, "tune": {"vision": "full", "language": "full"}}
LORA = {**RUN, "tune": {"vision": "lora", "language": "lora"}, "lora": {"rank": 2, "dropout": 0.2}}
# what no part of the trainer may break together
LORA |= {"batching": "padding_free", "group_by_length": True, "gradient_checkpointing": True}


def weights_of(folder):
    """All weights of a finished folder or checkpoint, adapter or whole model."""
    return {key: value for file in Path(folder).glob("*model*.safetensors") for key, value in load_file(file).items()}


def steps_of(folder):
    return [json.loads(line)["step"] for line in (Path(folder) / "train_log.jsonl").read_text().splitlines()]


def assert_same_run(folder, reference):
    """Bit-equal weights, a log of every step, and the same figures of gain and gradient in it."""
    ours, theirs = weights_of(folder), weights_of(reference)
    assert ours.keys() == theirs.keys() and ours
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    assert steps_of(folder) == steps_of(reference) == list(range(1, RUN["max_steps"] + 1))
    logs = [
        [json.loads(line) for line in (Path(run) / "train_log.jsonl").read_text().splitlines()]
        for run in (folder, reference)
    ]
    for one, other in zip(*logs):
        assert {key: value for key, value in one.items() if "second" not in key} == {
            key: value for key, value in other.items() if "second" not in key
        }


@pytest.fixture(scope="module")
def whole_runs(recipe_file, tmp_path_factory):
    """The folders of a run of all weights and of one with adapters, neither interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    return {
        kind: train(recipe_file(1, folder / kind, **changes)) for kind, changes in (("full", FULL), ("lora", LORA))
    }


@pytest.fixture
def at_step(monkeypatch):
    """A function that has `action` done once within a step, between its first and its second accumulated part."""

    def arrange(step, action):
        done = []

        def training_step(self, *args, **kwargs):
            loss = before(self, *args, **kwargs)
            if self.state.global_step == step - 1 and not done:
                done.append(step)
                action()
            return loss

        monkeypatch.setattr(AlignedSFTTrainer, "training_step", training_step)

    before = AlignedSFTTrainer.training_step
    return arrange


def in_a_child(function):
    """Runs `function` in a forked process; its wait status, and the message of the error that it raised."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            function()
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode()[:60_000])
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        message = pipe.read().decode()
    return os.waitpid(child, 0)[1], message


def kill_this_process():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_was_killed_in_a_step_goes_on_to_the_same_weights(
    whole_runs, recipe_file, tmp_path, at_step, caplog
):
    """SIGKILL, with two processes that prepare batches; the newest checkpoint is torn as well."""
    path = recipe_file(1, tmp_path, **FULL, dataloader_workers=2)
    with pytest.MonkeyPatch.context() as patch:
        at_step(5, kill_this_process)
        status, _ = in_a_child(lambda: train(path))
        patch.undo()
    assert os.WTERMSIG(status) == signal.SIGKILL
    out = tmp_path / "stage1"
    assert steps_of(out) == [1, 2, 3, 4] and not (out / "config.json").exists()
    whole = (out / "checkpoint-4" / "optimizer.pt").read_bytes()
    (out / "checkpoint-4" / "optimizer.pt").write_bytes(whole[:-1])
    with (out / "train_log.jsonl").open("a") as log:
        log.write('{"step": 5, "lo')
    at_step(99, kill_this_process)
    train(path)
    assert f"checkpoint-4 is torn and is passed over: optimizer.pt has {len(whole) - 1:,} bytes" in caplog.text
    assert f"goes on from {out / 'checkpoint-2'}" in caplog.text
    assert_same_run(out, whole_runs["full"])
    assert what_is_torn(out / "checkpoint-4") is None


def test_sigterm_ends_the_step_writes_a_checkpoint_and_exits_with_143(
    whole_runs, recipe_file, tmp_path, at_step, capsys
):
    """R89: a run with adapters goes on to the same weights, and trains the same ones."""
    path = recipe_file(1, tmp_path, **LORA)
    before = signal.getsignal(signal.SIGTERM)
    at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert main([str(path)]) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    out = tmp_path / "stage1"
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        f"Stopped by SIGTERM after step 3 of 6; {out}/checkpoint-3 is written. Run the same command again to go on."
    )
    assert find_resume(out) == out / "checkpoint-3" and steps_of(out) == [1, 2, 3]
    trained = []
    with pytest.MonkeyPatch.context() as patch:
        create = AlignedSFTTrainer.create_optimizer

        def note(self, *args, **kwargs):
            trained.append({name for name, parameter in self.model.named_parameters() if parameter.requires_grad})
            return create(self, *args, **kwargs)

        patch.setattr(AlignedSFTTrainer, "create_optimizer", note)
        train(path)
        shutil.rmtree(tmp_path / "stage1")
        at_step(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(RunStopped):
            train(path)
        train(path)
    assert trained[0] == trained[1] == trained[2]
    assert_same_run(out, whole_runs["lora"])


def test_a_run_that_was_interrupted_goes_on_to_the_same_weights(whole_runs, recipe_file, tmp_path, at_step):
    def interrupt():
        raise KeyboardInterrupt

    path = recipe_file(1, tmp_path, **LORA)
    at_step(4, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(path)
    at_step(99, interrupt)
    # what does not change what is learned may differ
    train(path, {"save_total_limit": 1, "save_steps": 3})
    assert_same_run(tmp_path / "stage1", whole_runs["lora"])
    assert [path.name for path in (tmp_path / "stage1").glob("checkpoint-*")] == ["checkpoint-6"]


@pytest.mark.parametrize("limit", [20_000, 150_000], ids=["weights", "optimizer"])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_says_so(whole_runs, recipe_file, tmp_path, at_step, limit):
    """A bound on the size of files stands for the full disk: the system refuses the write in the middle of a file."""
    path = recipe_file(1, tmp_path, **FULL)
    with pytest.MonkeyPatch.context():
        at_step(4, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        status, message = in_a_child(lambda: train(path))
    assert os.waitstatus_to_exitcode(status) == 1
    assert message.startswith("NormalignError: The run stopped because a file could not be written")
    assert "it goes on from step 2 (checkpoint-2 is whole)" in message and "\n" not in message
    out = tmp_path / "stage1"
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]
    if limit == 20_000:
        at_step(99, kill_this_process)
        train(path)
        assert_same_run(out, whole_runs["full"])


def test_a_full_disk_at_the_end_leaves_no_half_a_model(recipe_file, tmp_path, monkeypatch):
    path = recipe_file(1, tmp_path, max_steps=1)
    before = AlignedSFTTrainer._save

    def full(self, *args, **kwargs):
        before(self, *args, **kwargs)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(AlignedSFTTrainer, "_save", full)
    with pytest.raises(NormalignError, match=r"No space left on device.*it goes on from the beginning"):
        train(path)
    assert {file.name for file in (tmp_path / "stage1").iterdir()} == {"train_log.jsonl", "recipe.yaml"}
    monkeypatch.setattr(AlignedSFTTrainer, "_save", before)
    assert (train(path) / "model.safetensors").is_file() and steps_of(tmp_path / "stage1") == [1]


def test_an_unfinished_run_of_another_recipe_is_refused_with_the_keys(recipe_file, tmp_path, at_step):
    def interrupt():
        raise KeyboardInterrupt

    path = recipe_file(1, tmp_path, **FULL)
    at_step(1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(path)
    with pytest.raises(NormalignError) as caught:
        train(path, {"learning_rate": 5e-4, "data.rows": 12, "logging_steps": 3})
    message = str(caught.value)
    assert "these keys differ: data.rows (10 there, 12 here); learning_rate (0.001 there, 0.0005 here)." in message
    assert "logging_steps" not in message and "--overwrite true" in message
    with pytest.raises(NormalignError, match="is not empty"):
        train(path, {"resume": "never"})
    assert goes_on(load_recipe(path)) and not goes_on(load_recipe(path, {"overwrite": True}))
    (tmp_path / "stage1" / "recipe.yaml").write_text("a: [")
    with pytest.raises(NormalignError, match="recipe.yaml, the recipe of the run in this folder, cannot be read"):
        train(path)


def test_a_finished_run_is_not_gone_on_with_and_each_folder_has_its_recipe(whole_runs, recipe_file):
    folder = whole_runs["full"]
    assert not goes_on(load_recipe(recipe_file(1, folder.parent, **FULL)))
    with pytest.raises(NormalignError, match="stage1 is not empty"):
        train(recipe_file(1, folder.parent, **FULL))
    for place in (folder, folder / "checkpoint-4"):
        assert load_recipe(place / "recipe.yaml") == load_recipe(recipe_file(1, folder.parent, **FULL))
        assert yaml.safe_load((place / "recipe.yaml").read_text())["batch_size"] == 4
        assert not (place / "training_args.bin").exists() and not (place / "README.md").exists()
    sizes = json.loads((folder / "checkpoint-4" / SEAL_NAME).read_text())
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= sizes.keys()
    assert not (folder / SEAL_NAME).exists()


@pytest.mark.parametrize("damage", ["seal", "missing", "cut", "garbled"])
def test_every_kind_of_torn_checkpoint_is_seen(whole_runs, tmp_path, damage):
    out = tmp_path / "run"
    for step in (2, 4):
        shutil.copytree(whole_runs["lora"] / f"checkpoint-{step}", out / f"checkpoint-{step}")
    assert find_resume(out) == out / "checkpoint-4"
    newest = out / "checkpoint-4"
    if damage == "seal":
        (newest / SEAL_NAME).unlink()
    elif damage == "missing":
        (newest / "adapter_model.safetensors").unlink()
    elif damage == "cut":
        os.truncate(newest / "rng_state.pth", 10)
    else:
        (newest / SEAL_NAME).write_text("{")
    assert find_resume(out) == out / "checkpoint-2"
    shutil.rmtree(out / "checkpoint-2")
    assert find_resume(out) is None


def test_a_log_is_cut_where_the_run_goes_on(tmp_path):
    log = tmp_path / "train_log.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    cut_log(log, 2)
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_run_that_ended_without_its_folder_trains_no_step_more(recipe_file, tmp_path):
    """Broken off between its last checkpoint, in the middle of an epoch, and the finished folder."""
    path = recipe_file(1, tmp_path, data={"rows": 12}, max_steps=2, save_steps=2)
    out = train(path)
    whole = weights_of(out)
    (out / "config.json").unlink()
    train(path)
    assert steps_of(out) == [1, 2]
    again = load_file(out / "model.safetensors")
    assert [key for key in again if not torch.equal(again[key], whole[key])] == []


def test_a_streamed_run_goes_on_in_the_pass_over_the_data_where_it_was(recipe_file, tmp_path, at_step):
    """Five rows in steps of two: the fifth step is in the second pass, in which the rows come in another order."""
    turns = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": "a" * n}] for n in range(1, 6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    changes = {"tune": {"language": "full"}, "batch_size": 2, "max_steps": 5, "save_steps": 4}
    changes["data"] = {"name": "trl", "path": str(tmp_path / "rows.jsonl"), "streaming": True}
    whole = weights_of(train(recipe_file(1, tmp_path / "whole", **changes)))
    path = recipe_file(1, tmp_path, **changes)

    def interrupt():
        raise KeyboardInterrupt

    at_step(5, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(path)
    again = weights_of(train(path))
    assert steps_of(tmp_path / "stage1") == [1, 2, 3, 4, 5]
    assert [key for key in again if not torch.equal(again[key], whole[key])] == []


def test_a_sigterm_that_also_ends_the_processes_that_prepare_batches_is_no_fault():
    with pytest.raises(RunStopped, match="go on from the newest checkpoint") as caught, StopOnSigterm():
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")
    assert caught.value.exit_status == 143
    with pytest.raises(RuntimeError, match="is killed"), StopOnSigterm():
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
