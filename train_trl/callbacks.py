"""What one sees of a training run: a JSON line for each logged step, and a progress bar with the stage's name."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import ProgressCallback, TrainerCallback
from transformers.training_args import OptimizerNames

from ..configuration.errors import NormalignError
from . import processes
from .eval_generation import line_of
from .parts import PARTS, parameters_by_part, total_norm, without_adapters


logger = logging.getLogger(__name__)

_SAMPLED_WEIGHTS = 2**20


class _Mean:
    """A mean over token norms that stays on their device until it is read."""

    def __init__(self):
        self.total: torch.Tensor | float = 0.0
        self.count = 0

    def add(self, norms: torch.Tensor) -> None:
        self.total = self.total + norms.sum()
        self.count += norms.numel()

    def value(self) -> float | None:
        return float(self.total) / self.count if self.count else None

    def sums(self) -> list[float]:
        return [float(self.total), float(self.count)]


class InterfaceProbe:
    """Measures, between `attach` and `detach`, what enters the language model and whether GWC acts.

    `visual_in` and `visual_out` are the mean L2 norms of visual tokens before and after the aligned norm, `text` that of
    text tokens (no placeholder, no padding) where both enter the language model. `gwc_runs` counts the backward passes
    through GWC itself, so that a GWC that is set but bypassed does not go unseen. All are of this process until
    `sum_over_processes`. A vision path that runs without an image in the batch (`processes.VisionPath`) does not count.
    """

    def __init__(self, model: nn.Module):
        model = without_adapters(model)
        self._image_token = model.config.image_token_id
        self._base, self._decoder = model.base_model, model.get_decoder()
        self._norm = model.base_model.multi_modal_projector.aligned_norm
        self._handles: list[Any] = []
        self._text_mask: torch.Tensor | None = None
        self._has_images = True
        self._reset()

    def _reset(self) -> None:
        self.visual_in, self.visual_out, self.text = _Mean(), _Mean(), _Mean()
        self.gwc_runs = 0

    def attach(self) -> None:
        """Starts to measure, with all values at zero."""
        self.detach()
        self._reset()
        self._handles = [
            self._norm.register_forward_hook(self._after_norm),
            self._base.register_forward_pre_hook(self._before_model, with_kwargs=True),
            self._decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True),
        ]

    def detach(self) -> None:
        """Takes every hook off the model; the values stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._text_mask = None

    def sum_over_processes(self, device: torch.device) -> None:
        """Makes means and count those over all processes; every one has to call this."""
        means = (self.visual_in, self.visual_out, self.text)
        sums = [value for mean in means for value in mean.sums()]
        *sums, runs = processes.summed([*sums, float(self.gwc_runs)], device)
        for mean, total, count in zip(means, sums[::2], sums[1::2]):
            mean.total, mean.count = total, int(count)
        self.gwc_runs = int(runs)

    def __enter__(self) -> InterfaceProbe:
        self.attach()
        return self

    def __exit__(self, *exception) -> None:
        self.detach()

    def _after_norm(self, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        if not self._has_images:
            return
        self.visual_in.add(_token_norms(args[0]))
        self.visual_out.add(_token_norms(output))
        node = _gwc_node(output)
        if node is not None:
            node.register_hook(self._count_gwc)

    def _count_gwc(self, grad_inputs: tuple, grad_outputs: tuple) -> None:
        self.gwc_runs += 1

    def _before_model(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        self._text_mask, self._has_images = None, True
        if ids is not None:
            mask = kwargs.get("attention_mask")
            self._text_mask = ids != self._image_token
            self._has_images = not self._text_mask.all().item()
            if mask is not None:
                self._text_mask &= mask.bool()

    def _before_decoder(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        embeddings = kwargs.get("inputs_embeds")
        if embeddings is not None and self._text_mask is not None:
            self.text.add(_token_norms(embeddings[self._text_mask]))


def _gwc_node(output: torch.Tensor) -> Any:
    """GWC's node in the graph behind the norm's output, also behind the one that ZeRO-3 puts in between; None if none."""
    node = output.grad_fn
    for _ in range(3):
        if node is None or node.name().endswith("GWCBackward"):
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _token_norms(tokens: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tokens.detach(), dim=-1, dtype=torch.float32)


class TrainLog(TrainerCallback):
    """Writes one JSON object for each logged step to `path`.

    Loss and learning rate are the trainer's. Gradient norms are those before clipping: they are read after it and
    divided by the factor, which follows from the trainer's total norm. `update/PART` is |dW|/|W| of that one optimizer
    step, over all weights of a small tensor and at most about a million of a large one. Frozen parts have 0. Without a
    picture in the step, the norms of visual tokens are null; without a norm, `aligned_norm/*` is. Between logged steps
    nothing is measured and no hook is on the model. `clip_factor_without_gwc` is what the clipping factor of the same
    gradients would have been: what stands before the norm would have mu times its gradient.

    Of several processes the first writes; token norms are means over the tokens of all, and sharded gradients and weights
    are summed over all. Under DeepSpeed, which takes its step within the backward pass and keeps no gradient,
    `grad_norm/*` and `clip_factor_without_gwc` are null.

    It has to be the first callback: the others (TensorBoard, Weights & Biases, trackio) see what it adds to the logs.

    Args:
        path: of the JSON lines.
        model: one of ours.
        stage: its name.
        rates: gives further figures when a step is logged, such as tokens a second.
    """

    def __init__(
        self,
        path: str | Path,
        model: nn.Module,
        stage: str,
        rates: Callable[[], dict[str, float]] = dict,
    ):
        self.path, self.stage, self._rates = Path(path), stage, rates
        self._model, self._aligned_norm = model, without_adapters(model).get_aligned_norm()
        self._probe = InterfaceProbe(model)
        self._collect_trained()
        self._record: dict[str, Any] | None = None
        self._clipped: dict[str, float] = {}
        self._deepspeed = False
        self._before: dict[str, list[torch.Tensor]] = {}
        self._warned_of_gwc = False
        self._beside: dict[str, Any] = {}
        self._mu: float | None = None
        self._gwc_steps: list[tuple[float, float, float]] = []

    def _collect_trained(self) -> None:
        self._trained = {
            part: [parameter for _, parameter in parameters if parameter.requires_grad]
            for part, parameters in parameters_by_part(self._model).items()
        }
        self._sharded = any(map(processes.is_sharded, self._model.parameters()))

    def close(self) -> None:
        """Takes the hooks off, also where training was broken off."""
        self._probe.detach()

    def add(self, figures: Mapping[str, Any]) -> None:
        """Takes figures of others into the object of the next step that is logged."""
        self._beside.update(figures)

    def on_train_begin(self, args, state, control, **kwargs):
        """Starts the file anew, or goes on with it where training resumes."""
        # FSDP2 has put other parameters in the place of those that were there
        self._collect_trained()
        self._device, self._deepspeed = args.device, args.deepspeed_plugin is not None
        if self._deepspeed and state.is_world_process_zero:
            logger.warning(
                "Under DeepSpeed the gradient norm of each part is not to be had: grad_norm/* is null in the log; the "
                "total grad_norm, the clipping factor and the updates are there."
            )
        if state.is_world_process_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if state.global_step == 0:
                self.path.write_text("", encoding="utf-8")

    def on_step_begin(self, args, state, control, **kwargs):
        """Switches the measuring on for a step that will be logged."""
        self._record = None
        if self._is_logged(state.global_step + 1, args, state):
            self._record = {}
            self._probe.attach()
            if self._deepspeed:
                self._keep_weights()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Reads the gradients and keeps the weights."""
        if self._record is None:
            return
        if not self._deepspeed:
            grads = {part: [p.grad for p in ps if p.grad is not None] for part, ps in self._trained.items()}
            self._clipped = self._norms({part: map(processes.local_values, found) for part, found in grads.items()})
            self._keep_weights()
            norm = self._aligned_norm
            if norm is not None and norm.gwc:
                self._mu = max(processes.whole_values(norm.weight).float().abs().mean().item(), norm.gwc_floor)

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Measures how far the step has moved the weights."""
        if self._record is None:
            return
        now = {part: map(_sample, parameters) for part, parameters in self._trained.items()}
        moved = self._norms({part: (a - b for a, b in zip(now[part], self._before[part])) for part in PARTS})
        size = self._norms(self._before)
        self._record.update({f"update/{part}": moved[part] / (size[part] or 1.0) for part in PARTS})
        self._before = {}

    def _keep_weights(self) -> None:
        self._before = {part: [_sample(parameter) for parameter in ps] for part, ps in self._trained.items()}

    def _norms(self, tensors: Mapping[str, Iterable[torch.Tensor]]) -> dict[str, float]:
        """L2 norm of each part over all its tensors, of which each process has a share if they are sharded."""
        norms = {part: total_norm(list(found)) for part, found in tensors.items()}
        if not self._sharded:
            return norms
        squares = processes.summed([norm**2 for norm in norms.values()], self._device)
        return dict(zip(norms, map(math.sqrt, squares)))

    def on_step_end(self, args, state, control, **kwargs):
        """Switches the measuring off; the last step is always logged."""
        if self._record is not None:
            self._probe.detach()
            self._record.update(self._interface())
            control.should_log = True
        return control

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Completes the record with the trainer's figures and writes it."""
        if self._record is None or logs is None or "loss" not in logs:
            return
        clip_factor = 1.0
        if args.max_grad_norm > 0:
            clip_factor = min(1.0, args.max_grad_norm / (logs["grad_norm"] + 1e-6))
        gradients = {part: None if self._deepspeed else self._clipped[part] / clip_factor for part in PARTS}
        without = None if self._mu is None else self._clip_factor_without_gwc(gradients, args.max_grad_norm)
        if without is not None and self._record["aligned_norm/gwc_fired"]:
            self._gwc_steps.append((self._mu, clip_factor, without))
        record = {
            "stage": self.stage,
            "step": state.global_step,
            "epoch": logs.get("epoch", state.epoch),
            "loss": logs["loss"],
            "learning_rate": logs.get("learning_rate"),
            "mean_token_accuracy": logs.get("mean_token_accuracy"),
            **self._record,
            "grad_norm": logs["grad_norm"],
            **{f"grad_norm/{part}": norm for part, norm in gradients.items()},
            "clip_factor": clip_factor,
            "clip_factor_without_gwc": without,
            **self._rates(),
            **self._beside,
        }
        self._record, self._beside = None, {}
        logs.update({key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"})
        if state.is_world_process_zero:
            line = json.dumps({key: _or_null(value) for key, value in record.items()}, allow_nan=False)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        if not math.isfinite(record["loss"]):
            raise NormalignError(
                f"The loss became {record['loss']} at or before step {record['step']} of {self.stage}. Lower the "
                f"learning rate, or look at the last lines of {self.path}."
            )

    def on_train_end(self, args, state, control, **kwargs):
        """Says through what GWC has acted, where it was on and something before the norm was trained."""
        if state.is_world_process_zero and self._gwc_steps:
            logger.warning(gwc_effect(self._gwc_steps, OptimizerNames(args.optim).value))

    def _clip_factor_without_gwc(self, gradients: dict[str, float], max_grad_norm: float) -> float:
        if max_grad_norm <= 0:
            return 1.0
        shrunk = [norm * (self._mu if part in ("vision", "projector") else 1) for part, norm in gradients.items()]
        return min(1.0, max_grad_norm / (math.hypot(*shrunk) + 1e-6))

    @staticmethod
    def _is_logged(step: int, args, state) -> bool:
        return step % state.logging_steps == 0 or step == state.max_steps or (step == 1 and args.logging_first_step)

    def _interface(self) -> dict[str, Any]:
        self._probe.sum_over_processes(self._device)
        visual_in, visual_out, text = (
            mean.value() for mean in (self._probe.visual_in, self._probe.visual_out, self._probe.text)
        )
        norm = self._aligned_norm
        gain = None if norm is None else processes.whole_values(norm.weight).float()
        gain_abs_mean = None if norm is None else gain.abs().mean().item()
        fired = None if norm is None or not norm.gwc else self._probe.gwc_runs > 0
        if fired is False and visual_in is not None and processes.is_first():
            self._warn_of_gwc()
        return {
            "aligned_norm/gain_abs_mean": gain_abs_mean,
            "aligned_norm/gain_l2": None if gain is None else gain.norm().item(),
            "aligned_norm/mu": None if norm is None else max(gain_abs_mean, norm.gwc_floor) if norm.gwc else 1.0,
            "aligned_norm/gwc_fired": fired,
            "norm/visual_in": visual_in,
            "norm/visual_out": visual_out,
            "norm/text": text,
            "norm/ratio": visual_out / text if visual_out is not None and text else None,
        }

    def _warn_of_gwc(self) -> None:
        if not self._warned_of_gwc and (self._trained["vision"] or self._trained["projector"]):
            self._warned_of_gwc = True
            logger.warning(
                "GWC is on and parts before the norm are trained, but it did not act in the backward pass of a step with "
                "images: the projector gets the plain gradient. Is the norm compiled, or called without its module?"
            )


def gwc_effect(steps: list[tuple[float, float, float]], optimizer: str) -> str:
    """One sentence or two on what GWC did in a run, by its logged steps.

    Args:
        steps: of each logged step mu, the clipping factor, and the one that the same gradients without GWC would have had.
        optimizer: transformers' name of it.
    """
    mu, with_gwc, without = (sum(values) / len(steps) for values in zip(*steps))
    clipping = f"the mean clipping factor was {with_gwc:.3g} with it and would have been {without:.3g} without"
    said = f"GWC multiplied the gradient of what stands before the norm by {1 / mu:.3g}. "
    if "sgd" in optimizer:
        return (
            said
            + f"{optimizer} takes that in full: the steps of projector and encoder grew as much, less clipping ({clipping})."
        )
    said += f"{optimizer} hardly notices a constant factor; "
    if without - with_gwc < 0.01:
        return said + f"nor did clipping ({clipping}), so GWC hardly acted in this run."
    return said + f"it acted through clipping: {clipping}, for all parts alike."


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """A copy of this process's share of the weights, thinned evenly to about a million values."""
    flat = processes.local_values(weight)
    return flat[:: max(1, flat.numel() // _SAMPLED_WEIGHTS)].clone()


def _or_null(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class StageProgress(ProgressCallback):
    """The trainer's progress bar with the stage's name, one short line a logged step, and one an evaluation."""

    def __init__(self, stage: str):
        super().__init__()
        self.stage = stage

    def on_train_begin(self, args, state, control, **kwargs):
        """Opens the bar."""
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description(self.stage)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Writes step, loss, accuracy over tokens and learning rate above the bar."""
        if self.training_bar is None or not logs or "loss" not in logs:
            return
        figures = [f"step {state.global_step}", f"loss {logs['loss']:.4f}"]
        for key, label in (("mean_token_accuracy", "token accuracy"), ("grad_norm", "gradient norm")):
            if key in logs:
                figures.append(f"{label} {logs[key]:.3g}")
        self.training_bar.write(f"{self.stage}  " + "  ".join(figures))
        if answered := line_of(logs):
            self.training_bar.write(f"{self.stage}  step {state.global_step}  {answered}")
