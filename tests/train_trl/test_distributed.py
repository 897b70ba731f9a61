"""Two processes (gloo, on the CPU) against one on the same rows: DDP, FSDP2, DeepSpeed ZeRO-2 and ZeRO-3."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from normalign.configuration.errors import NormalignError
from normalign.modeling.aligned_norm import text_embedding_norm
from normalign.train_trl import processes, train
from normalign.train_trl.parts import PARTS, freeze, parameters_by_part
from normalign.train_trl.training import build_trainer, load_or_compose


sys.path.insert(0, str(Path(__file__).parent))
import distributed_worker as worker


ROOT = Path(__file__).parents[2]
WAYS = [
    "cpu",
    "fsdp2",
    *(
        pytest.param(
            way, marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
        )
        for way in ("zero2", "zero3")
    ),
]


def launch(*command):
    """Runs a command that starts two processes and ends within three minutes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def weights_of(folder):
    return load_file(Path(folder) / "model.safetensors")


def log_of(folder):
    return [json.loads(line) for line in (Path(folder) / "train_log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def single(backbones, tmp_path_factory):
    """Both stages in one process."""
    folder = tmp_path_factory.mktemp("single")
    worker.run(worker.recipe(1, folder / "stage1", backbones, None))
    worker.run(worker.recipe(2, folder / "stage2", backbones, folder / "stage1"))
    return folder


@pytest.fixture(scope="session")
def both(single, backbones, tmp_path_factory):
    """A function that gives the folder of a way, in which two processes have trained both stages."""
    folder, started = tmp_path_factory.mktemp("both"), set()

    def folder_of(way):
        ways = ("zero2", "zero3") if way.startswith("zero") else ("cpu", "fsdp2")
        if ways not in started:
            started.add(ways)
            program = Path(worker.__file__)
            torchrun = ["torch.distributed.run", "--nproc_per_node", 2, "--rdzv_backend", "c10d"]
            torchrun += ["--rdzv_endpoint", "localhost:0"]
            launch(*torchrun, program, folder, backbones, single / "stage1", *ways)
        return folder / way

    return folder_of


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_as_one(both, single, way):
    """R06, R30, R31, R69, R79, R88, R90: also where one has no image, or nothing to learn from, in a step."""
    for stage, checkpoint in (
        ("stage1", "checkpoint-1"),
        ("stage1", "."),
        ("stage2", "checkpoint-3"),
        ("stage2", "."),
    ):
        one, two = (weights_of(folder / stage / checkpoint) for folder in (single, both(way)))
        assert one.keys() == two.keys()
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-6, msg=f"{stage}/{checkpoint} {name}")
    # the steps are not all nothing
    start, end = weights_of(single / "stage1" / "checkpoint-1"), weights_of(single / "stage2")
    assert all(not torch.equal(start[name], end[name]) for name in start if "vision_tower" not in name)


@pytest.mark.parametrize("way", WAYS)
def test_gradient_and_gwc_are_those_of_one_process(both, single, backbones, way):
    """R79: the first process has no image in the first step, and the projector's gradient is not thinned by that."""
    recipe = worker.recipe(1, single / "unused", backbones, None)
    before = {name: value.detach() for name, value in load_or_compose(recipe, worker.rows())[0].named_parameters()}
    one, two = (weights_of(folder / "stage1" / "checkpoint-1") for folder in (single, both(way)))
    names = [name for name in one if "multi_modal_projector" in name]
    gradient = {name: (before[name] - one[name]) / worker.RATE for name in names}
    for name in names:
        torch.testing.assert_close((before[name] - two[name]) / worker.RATE, gradient[name], rtol=1e-5, atol=1e-6)
    projector = [value.norm() for name, value in gradient.items() if "aligned_norm" not in name]
    record = log_of(single / "stage1")[0]
    assert torch.stack(projector).norm().item() == pytest.approx(record["grad_norm/projector"], rel=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_the_log_of_two_processes_is_that_of_one(both, single, way):
    """R90: sharded weights and gradients are summed over the processes; what cannot be had is null, never wrong."""
    gone = {f"grad_norm/{part}" for part in PARTS} if way.startswith("zero") else set()
    gone |= {"clip_factor_without_gwc"} if gone else set()
    for stage in ("stage1", "stage2"):
        one, two = log_of(single / stage), log_of(both(way) / stage)
        assert [record["step"] for record in two] == [record["step"] for record in one]
        for expected, record in zip(one, two):
            assert all(record[key] is None for key in gone)
            # how fast it went, and how much was padded in batches that were put together differently, is another matter
            for key in expected.keys() - gone - {"padding_share"}:
                if key.endswith("_per_second"):
                    continue
                value = expected[key]
                near = pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value
                assert record[key] == near, f"{stage}, step {record['step']}: {key}"
    assert one[0]["aligned_norm/gwc_fired"] is True and one[0]["norm/visual_out"] > 0
    # the last step has no image: what runs in its place is not measured
    assert two[3]["aligned_norm/gwc_fired"] is False and two[3]["norm/visual_out"] is None


@pytest.mark.parametrize("way", WAYS)
def test_what_two_processes_save_is_a_whole_folder(both, way):
    """R82"""
    from transformers import AutoProcessor

    from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration

    for folder in (both(way) / "stage2" / "checkpoint-3", both(way) / "stage2"):
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
        assert all(parameter.numel() for parameter in model.parameters())
        assert AutoProcessor.from_pretrained(folder).chat_template
        assert (folder / "modeling_normalign_llava.py").is_file() and not (folder / "_fully_shard.py").exists()
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["NormAlignLlavaForConditionalGeneration"]
        assert config["auto_map"]["AutoConfig"] == "configuration_normalign_llava.NormAlignLlavaConfig"
        assert config["auto_map"]["AutoModelForImageTextToText"].startswith("modeling_normalign_llava.")
    # where it was composed is gone
    assert not list(both(way).glob(".*"))


@pytest.mark.parametrize("way", WAYS[1:])
def test_the_norm_stays_in_float32_where_the_rest_computes_in_bfloat16(both, way):
    used, saved = json.loads((both(way) / "seen-0.json").read_text())["dtypes"]
    assert used == [["torch.bfloat16", "torch.float32"]] and saved == ["torch.float32"]


@pytest.mark.parametrize("way", WAYS[3:])
def test_adapters_of_a_sharded_model_are_saved_with_all_values(both, way):
    """R82"""
    tensors = load_file(both(way) / "adapters" / "adapter_model.safetensors")
    assert all(tensor.numel() for tensor in tensors.values())
    assert any("lora_B" in name and tensor.any() for name, tensor in tensors.items())
    assert [tuple(t.shape) for name, t in tensors.items() if name.endswith("aligned_norm.weight")] == [(32,)]


def test_a_saved_tensor_without_values_is_refused(tmp_path):
    """R82"""
    from safetensors.torch import save_file

    save_file({"whole": torch.ones(2), "share": torch.ones(0)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(NormalignError, match="1 tensors that have no values, among them share"):
        processes.refuse_empty_tensors(tmp_path)


def test_an_error_in_one_process_ends_all_with_its_message(both):
    for rank in (0, 1):
        seen = json.loads((both("cpu") / f"seen-{rank}.json").read_text())
        assert seen["error"] == "Process 1 of 2: no picture."


def test_a_checkpoint_of_two_processes_is_resumed_by_one(both, backbones, tmp_path):
    folder = shutil.copytree(both("cpu") / "stage2", tmp_path / "stage2")
    recipe = worker.recipe(2, folder, backbones, folder / "checkpoint-3")
    model, processor = load_or_compose(recipe, worker.rows())
    freeze(model, recipe.tune)
    trainer = build_trainer(model, processor, worker.rows(), recipe)
    trainer._get_train_sampler = lambda data=None: torch.utils.data.SequentialSampler(worker.rows())
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert trainer.state.global_step == 4
    end = weights_of(folder)
    for _, parameters in parameters_by_part(model).items():
        for name, parameter in parameters:
            torch.testing.assert_close(parameter.detach(), end[name], rtol=0, atol=1e-6)


def test_accumulation_changes_nothing(single, backbones, tmp_path):
    """R46: four rows at once, or one row four times."""
    for stage, start in ((1, None), (2, single / "stage1")):
        out = worker.run(worker.recipe(stage, tmp_path / str(stage), backbones, start, gradient_accumulation=4))
        one = weights_of(single / f"stage{stage}")
        for name, value in weights_of(out).items():
            torch.testing.assert_close(value, one[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["cpu", "ddp"])
def test_the_files_for_accelerate_start_the_processes_that_they_name(name, tmp_path):
    script = tmp_path / "who.py"
    script.write_text("import os\nprint('process', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n")
    done = launch(
        "accelerate.commands.launch", "--config_file", ROOT / f"configuration/accelerate/{name}.yaml", script
    )
    assert sorted(re.findall(r"process \d of \d", done.stdout)) == ["process 0 of 2", "process 1 of 2"]


def test_the_command_of_the_documentation_trains_as_one_process(recipe_file, tmp_path):
    """Rows are drawn in the same order, too, and may lie end to end; one process prints."""
    laid = {"batching": "padding_free", "group_by_length": True}
    path = recipe_file(1, tmp_path, optimizer="sgd", learning_rate=0.5, **laid)
    one = train(path)
    settings = ROOT / "configuration" / "accelerate" / "cpu.yaml"
    command = ["accelerate.commands.launch", "--config_file", settings, "-m", "normalign.train_trl", path]
    done = launch(*command, "--output_dir", tmp_path / "two")
    assert done.stdout.count("GWC on") == 1
    two = weights_of(tmp_path / "two")
    for name, value in weights_of(one).items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-6)


def test_fsdp_on_the_cpu_is_refused_where_accelerate_would_train_without_it(recipe_file, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(NormalignError, match="accelerate shards a model on GPUs alone"):
        train(recipe_file(1, tmp_path))


def test_a_gain_that_is_shared_out_is_not_set(tiny_model):
    """R30: a share without values is told from a gain, and from a table to measure T on."""
    norm = tiny_model.get_aligned_norm()
    norm.weight.data = torch.empty(0)
    with pytest.raises(ValueError, match="shared out over processes"):
        tiny_model.initialize_aligned_norm_()
    tiny_model.get_input_embeddings().weight.data = torch.empty(0)
    with pytest.raises(ValueError, match="gather a sharded table"):
        text_embedding_norm(tiny_model.get_input_embeddings())
