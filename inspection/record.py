"""Records, while a vision-language model runs, the norms and turns of its visual and text tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..configuration.errors import NormalignError
from ..modeling.aligned_norm import text_embedding_norm
from .inputs import MODALITIES, modality_masks
from .parts import Parts, find_parts
from .statistics import LayerStatistics, NormStatistics


class NormRecorder:
    """Running statistics of everything that passed through the model since it was made; see `record_norms`.

    `called` is the module that is called from outside: the model, or PEFT's wrapper around it.
    """

    def __init__(self, parts: Parts, called: nn.Module) -> None:
        self.parts = parts
        self.called = called
        self.vision_encoder = NormStatistics()
        self.projector = NormStatistics()
        self.inserted = NormStatistics()
        self.text_tokens = NormStatistics()
        self.layers = [LayerStatistics() for _ in parts.layers]
        self._embedded = NormStatistics()  # text tokens as they come out of the embedding table
        self._masks: torch.Tensor | None = None  # (2, batch, tokens) while the model runs, else None
        self._first: torch.Tensor | None = None
        self._signature = inspect.signature(parts.model.forward)
        self._handles: list[Any] = []

    def to_dict(self) -> dict[str, Any]:
        """The keys text_embedding_norm, interface, ratio, layers and not_found of report.json.

        Raises:
            NormalignError: no visual token, or no text token, was seen.
        """
        for name, statistics in (("visual", self.inserted), ("text", self.text_tokens)):
            if statistics.count == 0:
                raise NormalignError(
                    f"No {name} token passed through {type(self.parts.model).__name__} while it was recorded. Visual "
                    f"tokens are those with id {self.parts.image_token_id} (config.image_token_id): check that the "
                    f"processor writes that id where an image stands."
                )
        T = text_embedding_norm(self.parts.embeddings) * self._embedding_scale()
        interface = {
            name: statistics.to_dict() if statistics.count else None
            for name, statistics in (
                ("vision_encoder", self.vision_encoder),
                ("projector", self.projector),
                ("inserted", self.inserted),
                ("text_tokens", self.text_tokens),
            )
        }
        return {
            "text_embedding_norm": T,
            "interface": interface,
            "ratio": interface["inserted"]["mean"] / T,
            "layers": [dict(zip(MODALITIES, layer.to_dicts())) for layer in self.layers],
            "not_found": list(self.parts.not_found),
        }

    def attach(self) -> None:
        """Puts the hooks on the model's parts."""
        parts = self.parts
        self._on(self.called, before=self._begin)
        self._handles.append(self.called.register_forward_hook(self._end, always_call=True))
        self._on(parts.embeddings, after=self._see_embeddings)
        self._attach_vision()
        for index, layer in enumerate(parts.layers):
            if index == 0:
                self._on(layer, before=self._see_first)
            self._on(
                layer, after=lambda args, kwargs, output, index=index: self._see_layer(index, args, kwargs, output)
            )

    def detach(self) -> None:
        """Takes them all off again."""
        while self._handles:
            self._handles.pop().remove()
        self._masks = self._first = None

    def _attach_vision(self) -> None:
        """Hooks where the vision encoder hands over to the projector, and behind the projector."""
        parts = self.parts
        if parts.projector is None:
            return
        inside = any(module is parts.projector for module in parts.vision_encoder.modules())
        last_norm = getattr(parts.vision_encoder, "post_layernorm", None) if inside else None
        if isinstance(parts.projector, nn.Embedding):
            # a visual vocabulary (Ovis): what enters the table are probabilities, so look before the head that makes them
            transformer = getattr(parts.vision_encoder, "transformer", parts.vision_encoder)
            self._on(transformer, after=lambda args, kwargs, output: self._see_encoder(output[0]))
        elif last_norm is not None:
            # GLM-V: a convolution stands between the encoder's last norm and the merger
            self._on(last_norm, after=lambda args, kwargs, output: self._see_encoder(output))
        else:
            self._on(parts.projector, before=lambda args, kwargs: self._see_encoder(_first_tensor(args, kwargs)))
        if parts.aligned_norm is not None:
            self._on(parts.aligned_norm, before=lambda args, kwargs: self._see_projected(_first_tensor(args, kwargs)))
        else:
            self._on(parts.projector, after=self._see_projector_output)

    def _on(self, module: nn.Module, before=None, after=None) -> None:
        """A hook that works while the model's own forward pass runs, and not when checkpointing runs a layer again."""
        if before is not None:

            def pre_hook(module, args, kwargs):
                if self._masks is not None or module is self.called:
                    before(args, kwargs)

            self._handles.append(module.register_forward_pre_hook(pre_hook, with_kwargs=True))
        if after is not None:

            def hook(module, args, kwargs, output):
                if self._masks is not None:
                    after(args, kwargs, output)

            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def _begin(self, args: tuple, kwargs: dict) -> None:
        given = self._signature.bind_partial(*args).arguments | kwargs
        masks = modality_masks(self.parts, given)
        self._masks = torch.stack([masks[modality] for modality in MODALITIES])

    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._masks = self._first = None

    def _mask(self, modality: str) -> torch.Tensor:
        return self._masks[MODALITIES.index(modality)]

    def _see_encoder(self, features: torch.Tensor) -> None:
        width = self.parts.vision_hidden_size
        if width and features.shape[-1] % width == 0:
            features = features.unflatten(-1, (-1, width))  # neighbours or layers that were laid side by side
        self.vision_encoder.add(_norms(features))

    def _see_projected(self, features: torch.Tensor) -> None:
        self.projector.add(_norms(features))

    def _see_projector_output(self, args: tuple, kwargs: dict, output: Any) -> None:
        if not _first_tensor(args, kwargs).is_floating_point():
            return  # a visual vocabulary asked for its indicator tokens by their ids
        for features in [output] if torch.is_tensor(output) else output:
            self._see_projected(features)

    def _see_embeddings(self, args: tuple, kwargs: dict, output: torch.Tensor) -> None:
        if output.shape[:-1] == self._masks.shape[1:]:
            self._embedded.add(_norms(output), self._mask("text"))

    def _see_first(self, args: tuple, kwargs: dict) -> None:
        self._first = _first_tensor(args, kwargs).detach()
        norms = _norms(self._first)
        self.inserted.add(norms, self._mask("visual"))
        self.text_tokens.add(norms, self._mask("text"))

    def _see_layer(self, index: int, args: tuple, kwargs: dict, output: Any) -> None:
        after = output if torch.is_tensor(output) else output[0]
        self._masks = self._masks.to(after.device)
        self.layers[index].add(_first_tensor(args, kwargs), after, self._first, self._masks)

    def _embedding_scale(self) -> float:
        """What the decoder multiplies embeddings by on their way to its first layer (Gemma: sqrt(hidden size))."""
        if self._embedded.count != self.text_tokens.count:
            return 1.0
        scale = self.text_tokens.total / self._embedded.total
        return 1.0 if abs(scale - 1) < 0.05 else scale


@contextmanager
def record_norms(model: nn.Module, parts: Parts | None = None) -> Iterator[NormRecorder]:
    """Records every forward pass of the model inside the `with` block; its hooks are removed at the end, come what may.

        with record_norms(model) as recorder:
            model(**inputs)
        recorder.to_dict()

    Works in training too: gradients are left alone, and layers that checkpointing runs again are not counted twice.

    Args:
        parts: the model's parts, where they are known already.

    Raises:
        NormalignError: a part that is needed cannot be found (see `find_parts`).
    """
    recorder = NormRecorder(parts or find_parts(model), model)
    try:
        recorder.attach()
        yield recorder
    finally:
        recorder.detach()


def _first_tensor(args: tuple, kwargs: dict) -> torch.Tensor:
    """What a module was called with, by position or by name."""
    return next(value for value in (*args, kwargs.get("hidden_states"), *kwargs.values()) if torch.is_tensor(value))


@torch.no_grad()
def _norms(states: torch.Tensor) -> torch.Tensor:
    """L2 norms over the last dimension, in float32 at least."""
    dtype = torch.promote_types(states.dtype, torch.float32)
    return torch.linalg.vector_norm(states.detach(), dim=-1, dtype=dtype)
