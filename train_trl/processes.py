"""Several processes in one run: they compose once, fail together, all run the vision path, and sum what each has a share of."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import distributed, nn
from torch.distributed import fsdp

from ..configuration.errors import NormalignError
from ..modeling.aligned_norm import AlignedNorm


logger = logging.getLogger(__name__)


def count() -> int:
    """How many processes train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return int(os.environ.get("RANK", 0)) == 0


@contextlib.contextmanager
def agreement() -> Iterator[None]:
    """What goes wrong within in one process ends all of them, once all are through; nothing within may wait for others.

    Raises:
        NormalignError: in every process, with the message of the first one that failed. An error that is none of ours
            is raised as it is where it happened.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if count() == 1:
        if error is not None:
            raise error
        return
    errors: list[Exception | None] = [None] * count()
    shown = (
        error
        if error is None or isinstance(error, NormalignError)
        else NormalignError(f"{type(error).__name__}: {error}")
    )
    distributed.all_gather_object(errors, shown)
    if error is not None and not isinstance(error, NormalignError):
        raise error
    failed = [rank for rank, other in enumerate(errors) if other is not None]
    if failed:
        first = errors[failed[0]]
        if len(failed) < count():
            first = type(first)(f"Process {failed[0]} of {count()}: {first}")
        # one process says it for all
        first.shared = True
        raise first


@contextlib.contextmanager
def folder_of_this_machine(beside: str | Path) -> Iterator[Path]:
    """A folder that all processes of one machine share, made by the first of them and removed at the end.

    Args:
        beside: the folder lies beside this one, where there is room for a model.
    """
    beside = Path(beside).expanduser().resolve()
    names: list[str | None] = [None] * count()
    mine = None
    try:
        with agreement():
            if is_first_of_machine():
                beside.parent.mkdir(parents=True, exist_ok=True)
                mine = tempfile.mkdtemp(prefix=f".{beside.name}.", suffix=".start", dir=beside.parent)
        distributed.all_gather_object(names, mine)
        here = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
        yield Path(names[here])
        # nobody still reads
        distributed.barrier()
    finally:
        if mine is not None:
            shutil.rmtree(mine, ignore_errors=True)


def is_first_of_machine() -> bool:
    """Whether this process is the first of those on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def summed(values: list[float], device: torch.device) -> list[float]:
    """Each value summed over all processes; every one has to call this."""
    if count() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    return total.tolist()


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether each process holds a share of it alone (FSDP2, ZeRO-3)."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "full_tensor")


def size_of(parameter: torch.Tensor) -> int:
    """The number of weights of the whole parameter; those in 4 bits are packed in fewer values."""
    packed = getattr(parameter, "quant_state", None)
    if packed is not None:
        return packed.shape.numel()
    return parameter.ds_numel if hasattr(parameter, "ds_id") else parameter.numel()


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """This process's share of a tensor, flat; all of it where it is not sharded."""
    if hasattr(tensor, "ds_id"):
        share = tensor.ds_tensor.detach().flatten()
        # the last share is filled up to the size of the others
        start = distributed.get_rank(group=tensor.ds_process_group) * share.numel()
        return share[: max(0, min(share.numel(), tensor.ds_numel - start))]
    if hasattr(tensor, "to_local"):
        return tensor.detach().to_local().flatten()
    return tensor.detach().flatten()


def whole_values(parameter: torch.Tensor) -> torch.Tensor:
    """A detached parameter in full; every process has to call this."""
    if hasattr(parameter, "ds_id"):
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter]):
            return parameter.detach().clone()
    if hasattr(parameter, "full_tensor"):
        return parameter.detach().full_tensor()
    return parameter.detach()


def refuse_empty_tensors(folder: str | Path) -> None:
    """Looks at what was gathered from several processes and saved.

    Raises:
        NormalignError: a tensor in it has no values, as a share that was not gathered has none.
    """
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            names = list(tensors.keys())
            empty = [name for name in names if 0 in tensors.get_slice(name).get_shape()]
        if empty:
            raise NormalignError(
                f"{file} was saved with {len(empty)} tensors that have no values, among them {empty[0]}: they were not "
                f"gathered from all processes, and the folder is of no use. Under ZeRO-3 set zero3_save_16bit_model: true."
            )


class VisionPath:
    """Runs encoder and projector without an image in a step that has none, where something waits for them.

    Other processes wait where parameters are sharded or gradients averaged: all have to run the same modules in the same
    order. In one process a loss needs it that reaches no trained parameter otherwise. The features enter nothing: they
    are multiplied by zero, and the gradients of the vision path are zero. An encoder that every process holds and none
    trains is left out, and the projector gets one token of zeros; else both get one black image. A step with images pays
    nothing.

    Args:
        model: of ours, or PEFT's around it; the hooks stay on it until `remove`.
    """

    def __init__(self, model: nn.Module):
        bare = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._base, self._ran, self._said = bare.base_model, False, False
        path = {*self._base.vision_tower.parameters(), *self._base.multi_modal_projector.parameters()}
        self._alone = not any(p.requires_grad for p in model.parameters() if p not in path)
        self._handles = [
            self._base.multi_modal_projector.register_forward_hook(self._note_run),
            bare.get_decoder().register_forward_pre_hook(self._run_if_waited_for, with_kwargs=True),
        ]

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _note_run(self, *args) -> None:
        self._ran = True

    def _run_if_waited_for(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        ran, self._ran = self._ran, False
        embeddings = kwargs.get("inputs_embeds")
        in_vain = self._alone and self._base.training and torch.is_grad_enabled()
        # without gradients, as when answers are generated, nothing waits but shares of parameters
        waits = count() > 1 and (torch.is_grad_enabled() or any(map(is_sharded, self._base.parameters())))
        if ran or embeddings is None or not (waits or in_vain):
            return None
        if not self._said:
            self._said = True
            logger.info("A batch has no image: the vision path runs without one, and its features enter nothing.")
        nothing = self._features(embeddings).sum() * 0
        self._ran = False
        return args, {**kwargs, "inputs_embeds": embeddings + nothing.to(embeddings.dtype)}

    def _features(self, like: torch.Tensor) -> torch.Tensor:
        config = self._base.config.vision_config
        tower = self._base.vision_tower
        # an encoder that passes on features from the vision cache is run by no process
        cached = "forward" in vars(tower)
        if not cached and any(p.requires_grad or is_sharded(p) for p in tower.parameters()):
            # the whole image: positions stretched to a smaller one are read past their module, which ZeRO-3 notices
            black = like.new_zeros(1, getattr(config, "num_channels", 3), config.image_size, config.image_size)
            return torch.cat(list(self._base.get_image_features(pixel_values=black).pooler_output))
        layers = self._base.config.vision_feature_layer
        width = config.hidden_size * (1 if isinstance(layers, int) else len(layers))
        return self._base.multi_modal_projector(like.new_zeros(1, 1, width))


@contextlib.contextmanager
def own_class(model: nn.Module) -> Iterator[None]:
    """Within, a model that FSDP2 has given a class of its making has its own again, whose code is saved with it."""
    made = type(model)
    if not isinstance(model, fsdp.FSDPModule):
        yield
        return
    model.__class__ = next(kind for kind in made.__mro__ if not issubclass(kind, fsdp.FSDPModule))
    try:
        yield
    finally:
        model.__class__ = made


@contextlib.contextmanager
def norm_in_float32() -> Iterator[None]:
    """Within, FSDP2 makes each aligned norm a unit of its own that stays in float32, whatever the others compute in."""
    plain = fsdp.fully_shard

    def fully_shard(module: nn.Module | list[nn.Module], **options: Any):
        for part in module if isinstance(module, list) else [module]:
            for inner in part.modules():
                if isinstance(inner, AlignedNorm) and not isinstance(inner, fsdp.FSDPModule):
                    own = fsdp.MixedPrecisionPolicy(cast_forward_inputs=False)
                    plain(inner, **{**options, "mp_policy": own})
        return plain(module, **options)

    # accelerate, which shards the model, has one policy for all units
    fsdp.fully_shard = fully_shard
    try:
        yield
    finally:
        fsdp.fully_shard = plain
