"""Loads a vision encoder or a language model with what belongs to it, and explains in one paragraph what is missing."""

import difflib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from PIL import Image
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_MAPPING,
)
from transformers.utils import cached_file, logging

from ..configuration.backbones import BACKBONES, resolve_backbone
from ..configuration.errors import NormalignError
from ..modeling.configuration_normalign_llava import NormAlignLlavaConfig


# Encoders trained on their patch tokens; those trained through a pooled token are read one layer earlier, as in LLaVA-1.5.
_LAST_LAYER_ENCODERS = ("dinov2", "dinov2_with_registers")
# Switches for parts that LLaVA never runs and that would be parameters without a gradient, by start of model type.
_UNUSED_PARTS = {"siglip": "vision_use_head", "dinov2": "use_mask_token"}


@dataclass
class VisionEncoder:
    """A vision encoder, its image processor, and how many tokens it makes.

    `tokens` is what the encoder gives for one image, `patches` how many of them stand for a piece of the picture; the
    others (class token, registers) come first.
    """

    model: PreTrainedModel
    image_processor: object
    feature_layer: int
    patch_size: int
    tokens: int
    patches: int

    @property
    def additional_tokens(self) -> int:
        """Class token and registers."""
        return self.tokens - self.patches

    @property
    def select_strategy(self) -> str:
        """LLaVA's name for leaving out the first token ("default") or not ("full")."""
        return "default" if self.additional_tokens else "full"


@dataclass
class LanguageModel:
    """A causal language model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@contextmanager
def explained(what: str, source: str) -> Iterator[None]:
    """Turns an error while `what` is read from `source` into one paragraph."""
    try:
        yield
    except NormalignError:
        raise
    # what a broken file, a missing repository or foreign code raises has no common class
    except Exception as error:
        if broken := _broken_weights(source):
            raise NormalignError(
                f"{what} '{source}' could not be loaded: its file {broken} is truncated or corrupt. Copy or download it again."
            ) from error
        reason = " ".join(str(error).split()).rstrip(".")
        reason = reason if len(reason) <= 700 else reason[:700].rsplit(" ", 1)[0] + " ..."
        raise NormalignError(
            f"{what} '{source}' could not be loaded: {reason or type(error).__name__}. {_remedy(source)}"
        ) from error


def _broken_weights(source: str) -> Path | None:
    """The first safetensors file of a folder that cannot be opened."""
    for file in sorted(Path(source).glob("*.safetensors")) if Path(source).is_dir() else ():
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError):
            return file
    return None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' warnings back; its errors stay."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _remedy(source: str) -> str:
    if Path(source).is_dir():
        return "Check that the folder is complete, as save_pretrained or a download of the whole repository leaves it."
    if "/" not in source:
        near = difflib.get_close_matches(source, BACKBONES, n=1)
        hint = f"; the nearest preset is '{near[0]}'" if near else f"; presets are {', '.join(BACKBONES)}"
        return f"There is no folder '{source}' here{hint}. Give a folder, a Hub id (owner/name) or a preset."
    return (
        "Check the id; a gated repository needs its terms accepted on the Hub and `hf auth login`; without a network "
        "(or with HF_HUB_OFFLINE=1) the repository must have been downloaded before."
    )


def locate(what: str, name: str) -> str:
    """The folder or Hub id for `name` (a preset, a folder, an id).

    Raises:
        NormalignError: `name` is empty, or is written as a path and there is no such folder, or no config.json in it that
            can be read.
    """
    if not str(name).strip():
        raise NormalignError(
            f"{what} has no name: '{name}' was given. Give a folder, a Hub id (owner/name) or a preset."
        )
    source = resolve_backbone(str(name))
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise NormalignError(
                f"{what} '{source}' is a folder without a config.json. Give the folder that save_pretrained wrote, or "
                f"the Hub id of the model."
            )
        read_config(folder)
        return str(folder)
    if folder.is_file():
        raise NormalignError(f"{what} '{source}' is a file. Give the folder that it lies in.")
    if folder.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
        raise NormalignError(
            f"{what} '{source}' is not there: no such folder. Give an existing folder, a Hub id (owner/name) or the "
            f"name of a preset."
        )
    return source


def read_config(folder: Path) -> dict:
    """The content of a folder's config.json.

    Raises:
        NormalignError: the file is empty, no JSON, or no block of settings; names it.
    """
    file, remedy = folder / "config.json", "Copy or download it again from where the model came from."
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON and of UTF-8 alike
        size = file.stat().st_size
        reason = f"is broken ({' '.join(str(error).split())})" if size else "is empty"
        raise NormalignError(f"The file {file} {reason}, so the model cannot be loaded. {remedy}") from error
    if not isinstance(content, dict):
        raise NormalignError(
            f"The file {file} holds a {type(content).__name__}, not a block of settings, so it is no model's. {remedy}"
        )
    return content


def public_name(name: str) -> str:
    """The Hub id behind `name`, the preset that ships with us, or a folder's name without the path, which is of no use on
    another machine."""
    source = resolve_backbone(str(name))
    folder = Path(source).expanduser()
    if not source or not folder.is_dir():
        return source
    return str(name) if source != str(name) else folder.resolve().name


def load_vision_encoder(
    name: str, feature_layer: int | None, dtype: torch.dtype, trust_remote_code: bool
) -> VisionEncoder:
    """The vision encoder of a checkpoint (of a dual SigLIP or CLIP checkpoint its vision part alone).

    Args:
        feature_layer: index into the encoder's hidden states (0 is the embeddings, -1 the last layer). None means -2, as in
            LLaVA-1.5, and -1 for DINOv2, whose training reads the patch tokens of the last layer.

    Raises:
        NormalignError: says what is wrong with the checkpoint, or that the layer does not exist.
    """
    what = "The vision encoder"
    source = locate(what, name)
    _refuse_whole_models(what, source)
    with explained(what, source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    config = getattr(config, "vision_config", None) or config
    _refuse_unless_vision(config, source)
    for family, switch in _UNUSED_PARTS.items():
        if config.model_type.startswith(family):
            setattr(config, switch, False)
    # the weights of the text side of a dual checkpoint are not wanted; what is missing is checked below
    options = {"config": config, "dtype": dtype, "trust_remote_code": trust_remote_code, "output_loading_info": True}
    with explained(what, source), quiet_transformers():
        model, info = AutoModel.from_pretrained(source, **options)
        if info["missing_keys"] and all(key.startswith("vision_model.") for key in info["missing_keys"]):
            # transformers 5 saves SigLIP and CLIP without this level, which transformers 4 looks for
            mapping = {"^(?!vision_model[.]|text_model[.])": "vision_model."}
            model, info = AutoModel.from_pretrained(source, key_mapping=mapping, **options)
    refuse_missing_weights(what, source, model, info)
    _refuse_further_layers(what, source, model, info)
    with explained("The image processor of the vision encoder", source), quiet_transformers():
        image_processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
    if feature_layer is None:
        last = config.model_type in _LAST_LAYER_ENCODERS or getattr(config, "num_hidden_layers", 2) < 2
        feature_layer = -1 if last else -2
    return _measured(model.eval(), image_processor, feature_layer, source)


def _refuse_whole_models(what: str, source: str) -> None:
    with explained(what, source):
        settings, _ = PretrainedConfig.get_config_dict(source)
    kind = settings.get("model_type")
    if kind == NormAlignLlavaConfig.model_type or kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise NormalignError(
            f"'{source}' is already a vision-language model (model type '{kind}'), not a part of one. Measure it with "
            f"`normalign inspect`, or give a LLaVA model without the norm to `normalign graft`; compose takes a vision "
            f"encoder and a language model."
        )


def _refuse_unless_vision(config: PretrainedConfig, source: str) -> None:
    known = type(config) in MODEL_MAPPING
    model_class = MODEL_MAPPING[type(config)] if known else None
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if known and model_class.main_input_name != "pixel_values":
        raise NormalignError(
            f"'{source}' is not a vision encoder: its model type is '{config.model_type}', which takes "
            f"{model_class.main_input_name}, not pixel_values. Give a vision encoder such as SigLIP, CLIP or DINOv2."
        )
    if not isinstance(getattr(config, "patch_size", None), int):
        raise NormalignError(
            f"'{source}' (model type '{config.model_type}') cannot be used as vision encoder: its config has no "
            f"patch_size that is one whole number (found {getattr(config, 'patch_size', None)!r}). Give a vision "
            f"transformer with square patches such as SigLIP, CLIP or DINOv2."
        )


def _measured(model: PreTrainedModel, image_processor, feature_layer: int, source: str) -> VisionEncoder:
    """Runs the encoder once on a blank image and counts its tokens and layers."""
    sizes = []
    for size in ((300, 200), (200, 300)):
        with explained("The image processor of the vision encoder", source):
            pixels = image_processor(images=Image.new("RGB", size), return_tensors="pt")["pixel_values"]
        sizes.append(tuple(pixels.shape[-2:]))
    if pixels.dim() != 4 or sizes[0] != sizes[1]:
        raise NormalignError(
            f"The image processor of '{source}' gives pictures of a size that depends on the image ({sizes[0]} and "
            f"{sizes[1]} for a wide and a tall one), but LLaVA needs one fixed number of visual tokens. Use an encoder "
            f"of fixed resolution (of SigLIP 2 the variants without NaFlex), or set size and crop_size in its "
            f"preprocessor_config.json."
        )
    with explained("The vision encoder", source), torch.no_grad():
        states = model(pixels.to(model.dtype), output_hidden_states=True).hidden_states
    if not -len(states) <= feature_layer < len(states):
        raise NormalignError(
            f"vision_feature_layer is {feature_layer}, but the vision encoder '{source}' has {len(states) - 1} layers: its "
            f"hidden states go from {-len(states)} to {len(states) - 1}, where 0 is the embeddings and -1 the last layer."
        )
    # the same state counted from the end: transformers 5 takes a 0 for "no hidden states are wanted"
    feature_layer = feature_layer or -len(states)
    features = states[feature_layer]
    patches = (pixels.shape[-2] // model.config.patch_size) * (pixels.shape[-1] // model.config.patch_size)
    if features.dim() != 3 or features.shape[1] < patches or features.shape[-1] != model.config.hidden_size:
        raise NormalignError(
            f"The vision encoder '{source}' (model type '{model.config.model_type}') gives hidden states of shape "
            f"{tuple(features.shape)} for an image of {patches} patches, but LLaVA needs (images, at least one token a "
            f"patch, {model.config.hidden_size}). Give a vision transformer such as SigLIP, CLIP or DINOv2."
        )
    return VisionEncoder(
        model, image_processor, feature_layer, model.config.patch_size, tokens=features.shape[1], patches=patches
    )


def load_language_model(name: str, dtype: torch.dtype, trust_remote_code: bool) -> LanguageModel:
    """The causal language model of a checkpoint, with its tokenizer.

    Raises:
        NormalignError: says what is wrong with the checkpoint.
    """
    what = "The language model"
    source = locate(what, name)
    _refuse_whole_models(what, source)
    with explained(what, source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    if getattr(config, "vision_config", None) is not None:
        raise NormalignError(
            f"'{source}' is not a language model: its model type '{config.model_type}' has a vision part already. "
            f"Give a plain causal language model, or use `normalign graft` for a whole LLaVA model."
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "auto_map", None):
        raise NormalignError(
            f"'{source}' is not a causal language model: transformers has none of the model type '{config.model_type}'. "
            f"Give a model such as Llama, Qwen, SmolLM2 or Gemma."
        )
    _read_rope_parameters_(config, source)
    tokenizer = load_tokenizer(source, trust_remote_code)
    # transformers would print a table of the weights that are checked below
    with explained(what, source), quiet_transformers():
        model, info = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    refuse_missing_weights(what, source, model, info)
    _refuse_further_layers(what, source, model, info)
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise NormalignError(
            f"The language model '{source}' (model type '{config.model_type}') has a head that LLaVA has no place for "
            f"({head}); needed is one linear layer without bias. Give a model such as Llama, Qwen, SmolLM2 or Gemma."
        )
    return LanguageModel(model.eval(), tokenizer)


def _read_rope_parameters_(config: PretrainedConfig, source: str) -> None:
    """Transformers 4 overlooks the rotary embedding's settings where transformers 5 writes them, and takes its defaults."""
    rope = getattr(config, "rope_parameters", None)
    if int(transformers.__version__.split(".")[0]) >= 5 or not rope:
        return
    if "rope_theta" not in rope:
        raise NormalignError(
            f"The language model '{source}' was saved by transformers 5 with rotary embeddings for each kind of layer, which "
            f"transformers {transformers.__version__} cannot read. Use transformers 5."
        )
    config.rope_theta = rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config.rope_scaling = None if scaling.get("rope_type", "default") == "default" else scaling


def load_tokenizer(source: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint; one that transformers 5 saved is read by transformers 4 too.

    Raises:
        NormalignError: there is no tokenizer, or it is empty.
    """
    with explained("The tokenizer of the language model", source):
        if Path(source).is_dir() and not any(
            (Path(source) / file).is_file()
            for file in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
        ):
            raise NormalignError(
                f"The language model '{source}' has no tokenizer: there is no tokenizer.json, tokenizer.model or "
                f"tokenizer_config.json in the folder. Put the tokenizer's files beside the weights."
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        except (ValueError, AttributeError):
            # transformers 4 knows neither the class name nor the list of tokens that transformers 5 writes
            settings = json.loads(Path(cached_file(source, "tokenizer_config.json")).read_text())
            extra = settings.get("extra_special_tokens") or []
            if int(transformers.__version__.split(".")[0]) >= 5 or not isinstance(extra, list):
                raise
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                source, extra_special_tokens={}, additional_special_tokens=extra
            )
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise NormalignError(
            f"The tokenizer of '{source}' is empty: it makes no token of the letter a. Put tokenizer.json (or "
            f"tokenizer.model) beside the weights."
        )
    return tokenizer


def load_processor(source: str | Path) -> ProcessorMixin:
    """The processor of a whole model (folder or Hub id); no code of the repository is run.

    Raises:
        NormalignError: it is missing or incomplete.
    """
    # transformers 5 warns of our model type, because a processor's loader reads the config without its code
    with quiet_transformers(), explained("The processor of the model", str(source)):
        return AutoProcessor.from_pretrained(source, trust_remote_code=False)


def load_generation_config(model: PreTrainedModel) -> GenerationConfig:
    """A copy of the model's generation config."""
    return GenerationConfig.from_dict(model.generation_config.to_dict())


def refuse_missing_weights(what: str, source: str, model: PreTrainedModel, info: dict) -> None:
    """Raises NormalignError if loading left weights of the model without values from the checkpoint.

    The norm's are no matter: our models set a gain that is missing from T.
    """
    missing = sorted(key for key in info["missing_keys"] if ".aligned_norm." not in key)
    mismatched = sorted(str(key) for key in info.get("mismatched_keys", ()))
    gone = [*missing, *mismatched]
    if gone:
        names = ", ".join(gone[:3]) + (", ..." if len(gone) > 3 else "")
        raise NormalignError(
            f"{what} '{source}' lacks {len(gone)} weight{'s' if len(gone) > 1 else ''} of {type(model).__name__}, which would "
            f"be random: {names}. Give a checkpoint that has them all."
        )


def _refuse_further_layers(what: str, source: str, model: PreTrainedModel, info: dict) -> None:
    """Raises NormalignError if the checkpoint has more layers than its config says, so that the upper ones are lost."""

    def kind(key: str) -> str:
        return re.sub(r"\.\d+\.", ".N.", key.removeprefix("model.").removeprefix("vision_model."))

    known = {kind(key) for key in model.state_dict()}
    further = sorted(key for key in info["unexpected_keys"] if ".N." in kind(key) and kind(key) in known)
    if further:
        raise NormalignError(
            f"{what} '{source}' has more layers than its config.json says: {len(further)} weights would be left out, "
            f"{', '.join(further[:2])}, ... Put the number of layers in config.json right, or take the config.json that "
            f"belongs to these weights."
        )
