"""Finds the parts of any Hugging Face vision-language model: vision encoder, projector, decoder layers, embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from ..configuration.errors import NormalignError


# How projectors are called where more than one module stands between vision encoder and language model; those that
# sit inside the vision encoder (Qwen-VL, GLM-V) are called mergers.
PROJECTOR_NAMES = (
    "projector",
    "connector",
    "merger",
    "aligner",
    "embed_vision",
    "visual_embeddings",
    "resampler",
    "mlp1",
)


@dataclass
class Parts:
    """The parts of a vision-language model; a part that could not be found is None and explained in `not_found`.

    `visual_token_ids` are the ids whose embeddings the model takes from the visual side: the image token, and for a
    visual vocabulary (Ovis) its indicator tokens.
    """

    model: nn.Module
    vision_encoder: nn.Module | None
    projector: nn.Module | None
    aligned_norm: nn.Module | None
    decoder: nn.Module
    layers: list[nn.Module]
    embeddings: nn.Module
    image_token_id: int
    visual_token_ids: tuple[int, ...]
    not_found: list[str] = field(default_factory=list)

    @property
    def hidden_size(self) -> int:
        """Width of the language model."""
        return self.model.config.get_text_config().hidden_size

    @property
    def vision_hidden_size(self) -> int | None:
        """Width of the vision encoder's tokens, where its config says."""
        return getattr(getattr(self.model.config, "vision_config", None), "hidden_size", None)


def find_parts(model: nn.Module) -> Parts:
    """Finds the parts through the general interface (config, `get_decoder`, `get_input_embeddings`).

    The vision encoder is the sub-model built from `config.vision_config`; the projector is what else has parameters
    beside it and the language model, or the merger inside it.

    Raises:
        NormalignError: no image token, no embeddings or no decoder layers can be found, so that there is nothing to
            measure; the message says which.
    """
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()  # a PEFT wrapper
    config = getattr(model, "config", None)
    image_token_id = _first(config, "image_token_id", "image_token_index")
    embeddings = _embeddings(model)
    vision_encoder = _vision_encoder(model, config)
    decoder = _decoder(model, config, vision_encoder)
    layers = [] if decoder is None else _layers(decoder)
    missing = {
        "an image token (config.image_token_id)": image_token_id is None,
        "an embedding table (get_input_embeddings())": embeddings is None,
        "a language model (get_decoder())": decoder is None,
        "its decoder layers (get_decoder().layers)": not layers,
    }
    if any(missing.values()):
        text_only = image_token_id is None and vision_encoder is None
        raise NormalignError(
            f"{type(model).__name__} cannot be inspected: it lacks {', '.join(n for n, gone in missing.items() if gone)}. "
            + (
                "It looks like a language model without vision; an inspection needs a vision-language model, such as "
                "one that AutoModelForImageTextToText loads."
                if text_only
                else "A vision-language model that follows transformers' interface has them; for a model with its own "
                "code, give its class these methods, or set config.image_token_id to the id that stands for visual tokens."
            )
        )
    projector = _projector(model, vision_encoder, decoder, embeddings)
    return Parts(
        model=model,
        vision_encoder=vision_encoder,
        projector=projector,
        aligned_norm=_aligned_norm(projector),
        decoder=decoder,
        layers=layers,
        embeddings=embeddings,
        image_token_id=image_token_id,
        visual_token_ids=(image_token_id, *(_first(config, "visual_indicator_token_ids") or ())),
        not_found=_not_found(model, vision_encoder, projector),
    )


def _first(config: object, *names: str) -> object:
    """The first of these settings that is set."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _embeddings(model: nn.Module) -> nn.Module | None:
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _vision_encoder(model: nn.Module, config: object) -> nn.Module | None:
    """The outermost sub-model built from `config.vision_config`."""
    return _built_from(model, getattr(config, "vision_config", None))


def _built_from(model: nn.Module, config: object) -> nn.Module | None:
    """The outermost sub-model whose config is of the class of this one."""
    from transformers import PretrainedConfig, PreTrainedModel

    if not isinstance(config, PretrainedConfig):
        return None
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and type(module.config) is type(config):
            return module
    return None


def _decoder(model: nn.Module, config: object, vision_encoder: nn.Module | None) -> nn.Module | None:
    """What `get_decoder` names; if that is the whole model, the sub-model built from `config.text_config`.

    Up to transformers 4 `get_decoder` of some families (Idefics3, SmolVLM) does not tell text from vision.
    """
    decoder = getattr(model, "get_decoder", lambda: None)()
    if decoder is not None and all(module is not vision_encoder for module in decoder.modules()):
        return decoder
    return _built_from(model, getattr(config, "text_config", None))


def _layers(decoder: nn.Module) -> list[nn.Module]:
    """The list of layers nearest to the top of the decoder."""
    if isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        return list(decoder.layers)
    lists = [
        (name.count("."), list(m)) for name, m in decoder.named_modules() if isinstance(m, nn.ModuleList) and len(m)
    ]
    return min(lists, key=lambda found: found[0])[1] if lists else []


def _projector(
    model: nn.Module, vision_encoder: nn.Module | None, decoder: nn.Module, embeddings: nn.Module
) -> nn.Module | None:
    """The module with parameters beside vision encoder and language model, or the merger inside the encoder."""
    if vision_encoder is None:
        return None
    output = getattr(model, "get_output_embeddings", lambda: None)()
    known = {id(part) for part in (vision_encoder, decoder, embeddings, output) if part is not None}
    beside = list(_beside(model, known))
    if len(beside) != 1:
        named = [(name, m) for name, m in beside if any(part in name for part in PROJECTOR_NAMES)]
        beside = named or [(name, m) for name, m in vision_encoder.named_children() if name == "merger"]
    return beside[0][1] if beside else None


def _beside(module: nn.Module, known: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters that are not among the known parts and hold none of them."""
    for name, child in module.named_children():
        if id(child) in known:
            continue
        if any(id(inner) in known for inner in child.modules()):
            yield from _beside(child, known)
        elif any(True for _ in child.parameters()):
            yield name, child


def _aligned_norm(projector: nn.Module | None) -> nn.Module | None:
    """The projector's aligned norm; kind `none` has an identity in its place, which is not one."""
    norm = getattr(projector, "aligned_norm", None)
    return norm if hasattr(norm, "gwc") else None


def _not_found(model: nn.Module, vision_encoder: nn.Module | None, projector: nn.Module | None) -> list[str]:
    """A sentence for each part whose output cannot be told apart."""
    name = type(model).__name__
    sentences = []
    if vision_encoder is None:
        sentences.append(
            f"The vision encoder of {name} was not found: no sub-model is built from config.vision_config. Norms out of "
            f"the encoder and out of the projector are not measured; those of the inserted tokens are."
        )
    elif projector is None:
        sentences.append(
            f"The projector of {name} was not found: no module stands alone between the vision encoder and the language "
            f"model. Norms out of the encoder and out of the projector are not measured; those of the inserted tokens are."
        )
    return sentences
