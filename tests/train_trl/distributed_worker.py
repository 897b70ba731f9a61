"""Trains in each way of sharing a run out over processes; started by torchrun: OUT BACKBONES START WAY...

Also the rows and the order that all ways and the single process train on.
"""

import functools
import json
import os
import sys
from pathlib import Path
from unittest import mock


BATCH = 4
RATE = 0.5


@functools.cache
def rows():
    """16 rows for 4 steps of 4: the first process, which takes the first two of each step, has in step 1 text alone, in
    step 2 images alone, in step 3 nothing to learn from; step 4 is text alone for all."""
    from datasets import concatenate_datasets

    from normalign.train_trl.digit_scenes import digit_scenes_dataset

    images, text = (digit_scenes_dataset(16, seed=3, stage=2, text_only_share=share) for share in (0.0, 1.0))
    silent = images.select([0, 1]).map(lambda row: {"messages": row["messages"][:1]})
    parts = [text.select([0, 1]), images.select([2, 3, 4, 5]), text.select([2, 3]), silent, images.select([6, 7])]
    return concatenate_datasets([*parts, text.select([4, 5, 6, 7])])


def recipe(stage, out, backbones, start, **changes):
    """SGD at a constant rate without clipping, so that the first checkpoint shows the first gradient."""
    from normalign.train_trl import Recipe
    from normalign.train_trl.recipe import ComposeSettings, DataSettings, PartFigures, TuneSettings

    begin = {"model": str(start)}
    if stage == 1:
        begin = {"compose": ComposeSettings(f"{backbones}/vision", f"{backbones}/text", seed=0)}
    figures = {
        "output_dir": str(out),
        "tune": TuneSettings(language="frozen" if stage == 1 else "full"),
        "data": DataSettings(rows=16),
        "optimizer": "sgd",
        "learning_rate": PartFigures(RATE),
        "max_grad_norm": 0.0,
        "schedule": "constant",
        "warmup": 0,
        "batch_size": BATCH,
        "max_steps": 2 if stage == 1 else 4,
        "save_steps": 1 if stage == 1 else 3,
        "logging_steps": 1,
    }
    return Recipe(**{**begin, **figures, **changes})


def run(recipe):
    """Trains on `rows` in their order, also on those that the check before the first step would refuse."""
    from torch.utils.data import SequentialSampler

    from normalign.train_trl import training

    with (
        mock.patch.object(training, "load_data", lambda recipe: rows()),
        mock.patch.object(training, "check_rows", lambda *args, **kwargs: None),
        mock.patch.object(training, "without_bad_rows", lambda dataset, *args: dataset),
        mock.patch.object(
            training.AlignedSFTTrainer, "_get_train_sampler", lambda self, data=None: SequentialSampler(data)
        ),
    ):
        return training.run(recipe)


def prepare(way):
    """The environment that `accelerate launch` makes of configuration/accelerate/WAY.yaml."""
    import yaml

    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    folder = Path(__file__).parents[2] / "configuration/accelerate"
    settings = yaml.safe_load((folder / f"{way}.yaml").read_text())
    if way == "fsdp2":
        os.environ.update(ACCELERATE_USE_FSDP="true", ACCELERATE_TORCH_DEVICE="cpu")
        os.environ.update({name.upper(): str(value) for name, value in settings["fsdp_config"].items()})
    elif way.startswith("zero"):
        deepspeed = settings["deepspeed_config"]
        os.environ.update(
            ACCELERATE_USE_DEEPSPEED="true",
            ACCELERATE_DEEPSPEED_ZERO_STAGE=str(deepspeed["zero_stage"]),
            ACCELERATE_GRADIENT_ACCUMULATION_STEPS=deepspeed["gradient_accumulation_steps"],
            ACCELERATE_GRADIENT_CLIPPING=deepspeed["gradient_clipping"],
            ACCELERATE_DEEPSPEED_ZERO3_INIT=str(deepspeed.get("zero3_init_flag", False)),
            ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL=str(deepspeed.get("zero3_save_16bit_model", False)),
        )


def shared_error():
    """What each process hears of an error in the second alone."""
    from normalign.configuration.errors import NormalignError
    from normalign.train_trl import processes

    try:
        with processes.agreement():
            if os.environ["RANK"] == "1":
                raise NormalignError("no picture.")
    except NormalignError as error:
        return str(error)


def dtypes_in_bfloat16(out, backbones, start):
    """The dtypes in which weights are used within a forward of a run in bfloat16, and in which they are saved."""
    from safetensors.torch import load_file

    from normalign.modeling import aligned_norm

    used, plain = set(), aligned_norm.AlignedNorm.forward

    def forward(self, x):
        used.add((str(x.dtype), str(self.weight.dtype)))
        return plain(self, x)

    with mock.patch.object(aligned_norm.AlignedNorm, "forward", forward):
        run(recipe(2, out, backbones, start, precision="bfloat16", max_steps=1))
    saved = load_file(Path(out) / "model.safetensors")
    return [sorted(used), sorted({str(value.dtype) for name, value in saved.items() if "aligned_norm" in name})]


def train_adapters(out, backbones, start):
    """One step of LoRA on the language model, projector and norm saved whole."""
    from normalign.train_trl.recipe import TuneSettings

    run(recipe(2, out, backbones, start, max_steps=1, save_steps=None, tune=TuneSettings(language="lora")))


def main(out, backbones, start, *ways):
    import torch

    if ways[0].startswith("zero"):
        import deepspeed

        # a kernel for processes on one machine, which would be compiled first
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group("gloo")

    from accelerate.state import DistributedType, PartialState

    for way in ways:
        prepare(way)
        # accelerate has FSDP on GPUs alone, though torch has it on the CPU too
        on_gpus = mock.patch.object(
            PartialState, "_prepare_backend", lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
        )
        with on_gpus if way == "fsdp2" else mock.MagicMock():
            folder = Path(out) / way
            for stage in (1, 2):
                run(recipe(stage, folder / f"stage{stage}", backbones, start))
            seen = {"error": shared_error()}
            if way != "cpu":
                seen["dtypes"] = dtypes_in_bfloat16(folder / "bfloat16", backbones, start)
            if way == "zero3":
                train_adapters(folder / "adapters", backbones, start)
        (folder / f"seen-{os.environ['RANK']}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
