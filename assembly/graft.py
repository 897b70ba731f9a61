"""`graft`: an existing LLaVA model gets the aligned norm; its weights are moved in memory, not copied or renamed."""

import copy
import logging

import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration, LlavaProcessor, PretrainedConfig, PreTrainedModel

from ..configuration.errors import NormalignError
from ..modeling.configuration_normalign_llava import NormAlignLlavaConfig
from ..modeling.modeling_normalign_llava import (
    NormAlignLlavaForConditionalGeneration,
    NormAlignLlavaMultiModalProjector,
)
from .chat_templates import chat_template_for
from .compose import assemble, checked_dtype, checked_settings, measured_text_norm, start_gain_
from .loading import explained, locate, public_name, quiet_transformers, refuse_missing_weights
from .pairing import check_pair, visual_tokens


logger = logging.getLogger(__name__)

_MODELS = {"llava": LlavaForConditionalGeneration, "normalign_llava": NormAlignLlavaForConditionalGeneration}
_KEPT_SETTINGS = (
    "image_token_index",
    "projector_hidden_act",
    "vision_feature_select_strategy",
    "vision_feature_layer",
    "multimodal_projector_bias",
    "tie_word_embeddings",
)


def graft(
    model: str | PreTrainedModel,
    aligned_norm: dict | None = None,
    *,
    processor: LlavaProcessor | None = None,
    dtype: torch.dtype | str | None = None,
    calibration_images: list[Image.Image] | None = None,
) -> tuple[NormAlignLlavaForConditionalGeneration, LlavaProcessor]:
    """Puts the aligned norm at the end of the projector of a finished LLaVA model.

    The finished model was trained without the norm, so it has to be re-aligned by training before it answers well; a
    warning says so, with T and the gain. With the norm `none` nothing is inserted, and it answers as before.

    Args:
        model: folder or Hub id of a LLaVA model (or of ours with the norm `none`), or the loaded model, whose parts are
            used, not copied: do not use it afterwards.
        aligned_norm: settings that differ from the defaults, see `complete_aligned_norm`.
        processor: the model's processor; None reads it from where the model comes from.
        dtype: of all weights but the norm's; None keeps the dtype of a loaded model and is float32 for a folder or id.
        calibration_images: for the norm `scale` alone, images whose projected tokens are measured. None generates some,
            whose tokens may be longer or shorter than those of real pictures.

    Returns:
        the model, in eval mode, and its processor. T is in `model.config.aligned_norm["target_norm"]`.

    Raises:
        NormalignError: the model is of another family, has a norm already, or does not fit its processor.

    Source: arXiv 2512.08374, section 4.1.
    """
    settings = checked_settings(aligned_norm)
    source = model if isinstance(model, str) else model.config._name_or_path
    if isinstance(model, str):
        source = locate("The model", model)
        model = _load(source, checked_dtype(dtype))
    elif dtype is not None:
        model = model.to(checked_dtype(dtype))
    _refuse_other_families(model.config.to_dict(), source)
    if processor is None:
        with explained("The processor of the model", source):
            processor = LlavaProcessor.from_pretrained(source, trust_remote_code=False)
    _unify_chat_template_(processor)
    if settings["target_norm"] is None:
        settings["target_norm"] = measured_text_norm(model, processor.tokenizer, source)
    new = _with_norm(model, settings, source)
    check_pair(new, processor)
    start_gain_(new, processor, calibration_images)
    _say_what_changed(new, source or type(model).__name__)
    return new, processor


def _say_what_changed(model: NormAlignLlavaForConditionalGeneration, name: str) -> None:
    norm, T = model.get_aligned_norm(), model.config.aligned_norm["target_norm"]
    if norm is None:
        logger.warning(
            f"Nothing was inserted into '{name}' (the norm is 'none'): it gives the logits that it gave before, and needs "
            f"no training for it. Its text norm is T = {T:.6g}."
        )
    else:
        logger.warning(
            f"Grafted '{name}': text norm T = {T:.6g}, its gain starts at {norm.weight.detach().mean().item():.6g}. The "
            f"model was trained without it and needs re-alignment training before use."
        )


def _load(source: str, dtype: torch.dtype) -> PreTrainedModel:
    with explained("The model", source):
        config, _ = PretrainedConfig.get_config_dict(source)
    _refuse_other_families(config, source)
    # transformers would print a table of the weights that are checked below
    with explained("The model", source), quiet_transformers():
        model, info = _MODELS[config["model_type"]].from_pretrained(source, dtype=dtype, output_loading_info=True)
    refuse_missing_weights("The model", source, model, info)
    return model


def _refuse_other_families(config: dict, source: str) -> None:
    kind = (config.get("aligned_norm") or {}).get("kind", "none")
    if config.get("model_type") not in _MODELS:
        raise NormalignError(
            f"'{source}' is a model of type '{config.get('model_type')}', which cannot be grafted yet: supported are 'llava' "
            f"(LLaVA-1.5 and its kin, in transformers' format) and 'normalign_llava' with the norm 'none'."
        )
    if kind != "none":
        raise NormalignError(
            f"'{source}' has an aligned norm already ('{kind}'). Train it as it is, or compose a new model with other "
            f"settings."
        )


def _with_norm(model: PreTrainedModel, settings: dict, source: str) -> NormAlignLlavaForConditionalGeneration:
    old, parts = model.config, model.model
    size = old.vision_config.image_size
    count = visual_tokens(model, torch.zeros(1, old.vision_config.num_channels, size, size)).shape[1]
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    vision_tower, language_model = parts.vision_tower, parts.language_model
    vision_tower.config._name_or_path = language_model.config._name_or_path = ""
    config = NormAlignLlavaConfig(
        vision_config=copy.deepcopy(old.vision_config),
        text_config=copy.deepcopy(old.text_config),
        aligned_norm=settings,
        image_seq_length=count,
        dtype=model.dtype,
        projector_init="checkpoint",
        grafted_from=public_name(source),
        **{name: getattr(old, name) for name in _KEPT_SETTINGS},
    )
    projector = NormAlignLlavaMultiModalProjector(config)
    for name, module in parts.multi_modal_projector.named_children():
        if name != "aligned_norm":
            setattr(projector, name, module)
    new = assemble(config, vision_tower, language_model, model.lm_head, projector.to(model.device))
    new.generation_config = copy.deepcopy(model.generation_config)
    silent = {*(new.generation_config.suppress_tokens or ()), config.image_token_id}
    new.generation_config.suppress_tokens = sorted(silent)
    after = {name: tensor.data_ptr() for name, tensor in new.state_dict().items() if ".aligned_norm." not in name}
    if before != after:
        lost = sorted(set(before.items()) ^ set(after.items()))
        raise NormalignError(
            f"Not every weight of '{source}' found its place: {', '.join(name for name, _ in lost[:3])}, ... Its projector "
            f"is not LLaVA's two linear layers. Supported are models in transformers' LLaVA format."
        )
    return new


def _unify_chat_template_(processor: LlavaProcessor) -> None:
    tokenizer = processor.tokenizer
    if processor.chat_template is None:
        processor.chat_template = chat_template_for(tokenizer, processor.image_token).text
    if tokenizer.chat_template not in (None, processor.chat_template):
        logger.warning("The tokenizer's chat template is replaced by the processor's, which differs from it.")
    tokenizer.chat_template = processor.chat_template
