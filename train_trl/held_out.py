"""Loss and accuracy on rows that were not trained on, in one forward pass a batch: the answers are given, not generated.

An answer counts as right when each of its tokens, the end of the turn included, is the most probable one after the right
tokens before it. That is the case exactly when greedy decoding would give the answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import ProcessorMixin, TrainerCallback

from ..configuration.errors import NormalignError


class HeldOut:
    """Rows in batches of tensors, made once and measured often.

    Args:
        processor: of the model.
        rows: `messages` (the last is the assistant's), `images`, and `kind`, by which the figures are grouped.
        batch_size: rows in one forward pass.

    Raises:
        NormalignError: a row has no token of the assistant.
    """

    def __init__(self, processor: ProcessorMixin, rows: Sequence[dict[str, Any]], batch_size: int = 32):
        # rows of like length together, so that little is padded
        ordered = sorted(rows, key=lambda row: (bool(row["images"]), row["kind"]))
        self._batches = [
            batch_of_rows(processor, ordered[start : start + batch_size])
            for start in range(0, len(ordered), batch_size)
        ]

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Of each kind `n`, `accuracy` (share of answers that are right) and `loss` (nats a token of the answers).

        The model is left in the mode in which it was.
        """
        sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0])
        modes = [(module, module.training) for module in model.modules()]
        device = next(model.parameters()).device
        model.eval()
        for kinds, labels, inputs in self._batches:
            logits = model(**{name: value.to(device) for name, value in inputs.items()}).logits[:, :-1].float()
            labels = labels[:, 1:].to(device)
            losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
            right = ((logits.argmax(-1) == labels) | (labels == -100)).all(1)
            for kind, loss, count, is_right in zip(
                kinds, losses.sum(1).tolist(), (labels != -100).sum(1).tolist(), right.tolist()
            ):
                for place, value in enumerate((1, is_right, loss, count)):
                    sums[kind][place] += value
        for module, mode in modes:
            module.training = mode
        return {
            kind: {"n": n, "accuracy": right / n, "loss": loss / tokens}
            for kind, (n, right, loss, tokens) in sorted(sums.items())
        }


def batch_of_rows(processor: ProcessorMixin, rows: Sequence[dict[str, Any]]) -> tuple[list[str], torch.Tensor, dict]:
    """The kinds of the rows, their labels (-100 where nothing is learned), and what else goes into the model."""
    messages = [_with_images(row) for row in rows]
    inputs = processor.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
        processor_kwargs={"padding": True},
    )
    mask = torch.as_tensor(inputs.pop("assistant_masks")).bool()
    if not mask.any(1).all():
        raise NormalignError(f"A held-out row has no answer: {str(rows[mask.any(1).tolist().index(False)])[:300]}")
    inputs = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
    return [row["kind"] for row in rows], inputs["input_ids"].masked_fill(~mask, -100), inputs


def _with_images(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row's messages with its pictures in the places where they stand."""
    images = iter(row["images"])
    return [
        {
            "role": message["role"],
            "content": [
                {"type": "image", "image": next(images)} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in row["messages"]
    ]


class HeldOutCurve(TrainerCallback):
    """Measures the held-out rows at the start, every `every` steps and at the end, and hands each measurement on.

    Args:
        held_out: what to measure.
        every: optimizer steps between two measurements.
        note: gets the step and the figures of `HeldOut.measure`.
    """

    def __init__(self, held_out: HeldOut, every: int, note: Callable[[int, dict[str, dict[str, float]]], None]):
        self._held_out, self._every, self._note = held_out, every, note

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Measures the start."""
        self._measure(state, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Measures every so many steps, and the last one."""
        if state.global_step % self._every == 0 or state.global_step == state.max_steps:
            self._measure(state, model)

    def _measure(self, state, model: nn.Module) -> None:
        self._note(state.global_step, self._held_out.measure(model))


def digit_scene_held_out(questions: int, captions: int, text_only: int, seed: int = 1) -> list[dict[str, Any]]:
    """Held-out rows of the built-in data: questions by kind, captions, and questions without a picture (`text_only`)."""
    from .digit_scenes import digit_scene_rows

    rows = digit_scene_rows(questions, seed=seed, split="test", text_only_share=0)
    rows += digit_scene_rows(captions, seed=seed, split="test", stage=1)
    rows += [
        {**row, "kind": "text_only"}
        for row in digit_scene_rows(text_only, seed=seed + 1, split="test", text_only_share=1)
    ]
    return rows
