"""`compose`: a vision encoder and a language model become one LLaVA model whose visual tokens are aligned from the start."""

import copy
import logging

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import GenerationConfig, LlavaProcessor, PreTrainedModel, PreTrainedTokenizerBase

from ..configuration.errors import NormalignError
from ..modeling.aligned_norm import text_embedding_norm
from ..modeling.configuration_normalign_llava import NormAlignLlavaConfig, complete_aligned_norm
from ..modeling.modeling_normalign_llava import (
    NormAlignLlavaForConditionalGeneration,
    NormAlignLlavaMultiModalProjector,
)
from .chat_templates import ChatTemplate, chat_template_for
from .loading import (
    LanguageModel,
    VisionEncoder,
    load_generation_config,
    load_language_model,
    load_vision_encoder,
    public_name,
)
from .pairing import check_pair, visual_tokens
from .projectors import load_projector_


logger = logging.getLogger(__name__)

IMAGE_TOKEN = "<image>"
# Matrix kernels are fast when the vocabulary is a multiple of this; a table that was stays so.
_ROW_MULTIPLE = 8
# Names under which tokenizers keep a token for padding that does not also end a turn.
_PAD_TOKENS = ("<|finetune_right_pad_id|>", "<pad>", "<|endoftext|>", "<unk>")


def compose(
    vision: str,
    text: str,
    aligned_norm: dict | None = None,
    *,
    projector: str | None = None,
    vision_feature_layer: int | None = None,
    dtype: torch.dtype | str | None = None,
    seed: int | None = None,
    calibration_images: list[Image.Image] | None = None,
    trust_remote_code: bool = False,
) -> tuple[NormAlignLlavaForConditionalGeneration, LlavaProcessor]:
    """Puts a vision encoder and a causal language model together; between them a new projector and the aligned norm.

    Args:
        vision: folder, Hub id or preset of a vision encoder (SigLIP, SigLIP 2 of fixed resolution, CLIP, DINOv2); of a dual
            checkpoint the vision part is taken.
        text: folder, Hub id or preset of a causal language model (Llama, Qwen2, Qwen3, SmolLM2, Gemma, Gemma 3).
        aligned_norm: settings that differ from the defaults, see `complete_aligned_norm`.
        projector: folder or Hub id of a LLaVA checkpoint whose projector weights are used instead of new ones.
        vision_feature_layer: index into the encoder's hidden states; None means -2 (LLaVA-1.5), and -1 for DINOv2.
        dtype: of all weights but the norm's, which stay in float32; None is float32.
        seed: makes the new projector reproducible; the global random state is not touched then.
        calibration_images: for the norm `scale` alone, images whose projected tokens are measured. None generates some,
            whose tokens may be longer or shorter than those of real pictures.
        trust_remote_code: allow code from the two repositories to run.

    Returns:
        the model, in eval mode, and its processor. T, measured on the text embeddings before a token is added, is in
        `model.config.aligned_norm["target_norm"]`.

    Raises:
        NormalignError: says in one paragraph what cannot be used, where it is, and what to do.

    Source: arXiv 2512.08374, section 4.1 (T and the gain); the projector starts as in LLaVA's code (PyTorch's nn.Linear).
    """
    settings = checked_settings(aligned_norm)
    dtype = checked_dtype(dtype)
    if seed is not None and not 0 <= seed < 2**63:
        raise NormalignError(f"seed must be from 0 to {2**63 - 1} (2**63 - 1), got {seed}.")
    encoder = load_vision_encoder(vision, vision_feature_layer, dtype, trust_remote_code)
    language = load_language_model(text, dtype, trust_remote_code)
    if settings["target_norm"] is None:
        settings["target_norm"] = measured_text_norm(language.model, language.tokenizer, text)

    image_token = add_image_token_(language.model, language.tokenizer)
    _set_pad_token_(language.tokenizer)
    template = _chat_template(language.tokenizer, image_token, text)
    config = _config(encoder, language, settings, image_token, projector, {"vision": vision, "text": text})
    bare_logits = _logits(language.model, language.tokenizer)
    model = assemble(
        config,
        vision_tower=encoder.model,
        language_model=language.model.get_decoder(),
        lm_head=language.model.get_output_embeddings(),
        projector=new_projector(config, dtype, seed),
    )
    model.generation_config = _generation_config(language, template, image_token)
    _refuse_other_logits(bare_logits, _logits(model, language.tokenizer), language.model, text)
    norm_loaded = projector is not None and load_projector_(model, projector)
    processor = build_processor(encoder, language.tokenizer, template.text, image_token)
    count = check_pair(model, processor)
    if not norm_loaded:
        start_gain_(model, processor, calibration_images)
    logger.info(_summary(model, count))
    return model, processor


def checked_settings(aligned_norm: dict | None) -> dict:
    """The complete settings of the norm.

    Raises:
        NormalignError: names the key or value that does not fit.
    """
    try:
        return complete_aligned_norm(aligned_norm)
    except ValueError as error:
        raise NormalignError(str(error)) from error


def checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype:
    """A torch dtype for its name or itself; None is float32.

    Raises:
        NormalignError: there is no such floating-point type.
    """
    found = torch.float32 if dtype is None else dtype
    if isinstance(found, str):
        found = getattr(torch, found.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise NormalignError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}.")
    return found


def measured_text_norm(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str) -> float:
    """T over the rows that the tokenizer can name: a table's spare rows are noise.

    Raises:
        NormalignError: the table has no values to measure.
    """
    try:
        return text_embedding_norm(model.get_input_embeddings(), vocab_size=len(tokenizer))
    except ValueError as error:
        raise NormalignError(f"The text norm of '{source}' cannot be measured. {error}") from error


def add_image_token_(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Makes sure that the tokenizer has a special token for an image and the model a row for it; returns the token.

    New rows, in the embeddings and in the head, are zero: they leave T as it is, and no text is ever encoded with them.
    """
    image_token = getattr(tokenizer, "image_token", None) or IMAGE_TOKEN
    known, rows = len(tokenizer), model.get_input_embeddings().weight.shape[0]
    special = getattr(tokenizer, "extra_special_tokens", None) or getattr(tokenizer, "additional_special_tokens", [])
    if image_token not in special:
        tokenizer.add_special_tokens({"additional_special_tokens": [*map(str, special), image_token]})
    needed = len(tokenizer)
    if needed > rows:
        if rows % _ROW_MULTIPLE == 0:
            needed += -needed % _ROW_MULTIPLE
        # transformers draws the new rows at random; they become zero below
        with torch.random.fork_rng(devices=[]):
            model.resize_token_embeddings(needed, mean_resizing=False)
    with torch.no_grad():
        for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            table[known : len(tokenizer)] = 0
            table[rows:] = 0
    return image_token


def _set_pad_token_(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.pad_token is None:
        vocabulary = tokenizer.get_vocab()
        known = (name for name in _PAD_TOKENS if name in vocabulary and name != tokenizer.eos_token)
        tokenizer.pad_token = next(known, tokenizer.eos_token)
    # the prompts of a batch have to end together for generation; trainers pass their own side
    tokenizer.padding_side = "left"


def _chat_template(tokenizer: PreTrainedTokenizerBase, image_token: str, source: str) -> ChatTemplate:
    try:
        return chat_template_for(tokenizer, image_token)
    except ValueError as error:
        raise NormalignError(
            f"No chat template fits the language model '{source}'. {error} Set eos_token in its tokenizer_config.json."
        ) from error


def _config(
    encoder: VisionEncoder,
    language: LanguageModel,
    settings: dict,
    image_token: str,
    projector: str | None,
    sources: dict[str, str],
) -> NormAlignLlavaConfig:
    vision_config, text_config = encoder.model.config, language.model.config
    # a folder of this machine is of no use to anyone who loads the model
    vision_config._name_or_path = text_config._name_or_path = ""
    size = encoder.patches + encoder.additional_tokens
    return NormAlignLlavaConfig(
        # copies: a config that is put into another one loses its choice of attention implementation
        vision_config=copy.deepcopy(vision_config),
        text_config=copy.deepcopy(text_config),
        aligned_norm=settings,
        image_token_index=language.tokenizer.convert_tokens_to_ids(image_token),
        image_seq_length=size - 1 if encoder.select_strategy == "default" else size,
        vision_feature_layer=encoder.feature_layer,
        vision_feature_select_strategy=encoder.select_strategy,
        tie_word_embeddings=bool(text_config.tie_word_embeddings),
        dtype=encoder.model.dtype,
        projector_init="torch_linear" if projector is None else "checkpoint",
        composed_from={part: public_name(name) for part, name in sources.items()},
    )


def new_projector(
    config: NormAlignLlavaConfig, dtype: torch.dtype, seed: int | None = None
) -> NormAlignLlavaMultiModalProjector:
    """A projector with PyTorch's own initialisation of nn.Linear; with a seed, without touching the global random state."""
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        return NormAlignLlavaMultiModalProjector(config).to(dtype)


def assemble(
    config: NormAlignLlavaConfig,
    vision_tower: PreTrainedModel,
    language_model: PreTrainedModel,
    lm_head: nn.Linear,
    projector: NormAlignLlavaMultiModalProjector,
) -> NormAlignLlavaForConditionalGeneration:
    """The model made of these parts, which are used as they are, not copied.

    Raises:
        NormalignError: a part is of another class than the one that loading the saved model would build.
    """
    with torch.device("meta"):
        model = NormAlignLlavaForConditionalGeneration(config)
    for name, part in (("vision_tower", vision_tower), ("language_model", language_model)):
        built = getattr(model.model, name)
        if type(built) is not type(part):
            raise NormalignError(
                f"The {name.replace('_', ' ')} is a {type(part).__name__}, but from its config (model type "
                f"'{part.config.model_type}') transformers builds a {type(built).__name__}, so the saved model would not "
                f"load again. Give a checkpoint of an architecture that AutoModel knows."
            )
        setattr(model.model, name, part)
    config.vision_config, config.text_config = vision_tower.config, language_model.config
    model.model.multi_modal_projector = projector
    model.lm_head = lm_head
    model.tie_weights()
    config.architectures = [type(model).__name__]
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if left:
        raise NormalignError(f"These tensors of the composed model have no values: {', '.join(left)}.")
    return model.eval()


@torch.no_grad()
def _logits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    ids = tokenizer("The picture shows a red house.", add_special_tokens=False, return_tensors="pt")["input_ids"]
    return model(input_ids=ids).logits


def _refuse_other_logits(bare: torch.Tensor, composed: torch.Tensor, model: PreTrainedModel, source: str) -> None:
    difference = (bare - composed).abs().max().item()
    # the same kernels on the same weights: anything beyond rounding is a step that LLaVA leaves out
    if not difference <= 1e-6 * bare.abs().max().item():
        raise NormalignError(
            f"The language model '{source}' (model type '{model.config.model_type}') does more than LLaVA's head does: on "
            f"a text prompt its own logits and the composed model's differ by up to {difference:.3g}. Such steps are "
            f"soft-capping (Gemma 2), a scale on the logits (Cohere, Granite) or inputs for each layer (Gemma 3n). Give a "
            f"model such as Llama, Qwen2, Qwen3, SmolLM2, Gemma or Gemma 3."
        )


def _generation_config(language: LanguageModel, template: ChatTemplate, image_token: str) -> GenerationConfig:
    """The language model's own, which also stops at the template's end of turn and never writes an image token."""
    config, tokenizer = load_generation_config(language.model), language.tokenizer
    stops = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    stops = [stop for stop in stops if stop is not None] or [tokenizer.eos_token_id]
    stops = list(
        dict.fromkeys(i for i in (*stops, tokenizer.convert_tokens_to_ids(template.end_of_turn)) if i is not None)
    )
    config._from_model_config = False
    config.eos_token_id = stops if len(stops) > 1 else stops[0]
    config.pad_token_id = tokenizer.pad_token_id
    image_id = tokenizer.convert_tokens_to_ids(image_token)
    silent = {image_id, *(config.suppress_tokens or ())}
    if image_id == len(tokenizer) - 1:
        rows = language.model.get_output_embeddings().weight
        silent |= {row for row in range(len(tokenizer), rows.shape[0]) if not rows[row].any()}
    config.suppress_tokens = sorted(silent)
    return config


def build_processor(
    encoder: VisionEncoder, tokenizer: PreTrainedTokenizerBase, chat_template: str, image_token: str
) -> LlavaProcessor:
    """The processor, with one chat template in both places where tools look for it."""
    tokenizer.chat_template = chat_template
    # transformers 4 would hand token_type_ids to a model that does not take them
    tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = ["input_ids", "attention_mask"]
    return LlavaProcessor(
        image_processor=encoder.image_processor,
        tokenizer=tokenizer,
        patch_size=encoder.patch_size,
        vision_feature_select_strategy=encoder.select_strategy,
        num_additional_image_tokens=encoder.additional_tokens,
        image_token=image_token,
        chat_template=chat_template,
    )


def start_gain_(
    model: NormAlignLlavaForConditionalGeneration,
    processor: LlavaProcessor,
    calibration_images: list[Image.Image] | None = None,
) -> None:
    """Sets the gain as the config says; for `scale` from the mean norm of projected tokens, measured on images.

    Generated images, which stand in where none are given, may give another norm than real pictures do.
    """
    norm = model.get_aligned_norm()
    if norm is None:
        return
    input_norm = None
    if norm.kind == "scale" and model.config.aligned_norm["gain_init"] == "text":
        if calibration_images is None:
            calibration_images = generated_images()
            logger.warning(
                "The norm 'scale' has no calibration images: the norm of projected tokens was measured on %d generated "
                "images and may be off on real ones. Give some of your own with --images (in Python calibration_images).",
                len(calibration_images),
            )
        pixels = processor.image_processor(images=calibration_images, return_tensors="pt")["pixel_values"]
        norm.set_gain_(1.0)
        input_norm = visual_tokens(model, pixels).float().norm(dim=-1).mean().item()
    model.initialize_aligned_norm_(model.config.aligned_norm["target_norm"], input_norm)


def generated_images(count: int = 4, size: int = 224) -> list[Image.Image]:
    """Smooth coloured clouds, the same ones every time."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return [Image.fromarray(cloud).resize((size, size), Image.Resampling.BICUBIC) for cloud in coarse]


def _summary(model: NormAlignLlavaForConditionalGeneration, count: int) -> str:
    settings, config = model.config.aligned_norm, model.config
    norm = model.get_aligned_norm()
    gain = "no norm" if norm is None else f"{norm.kind}, gain {norm.weight.detach().mean().item():.6g}"
    return (
        f"Composed {config.vision_config.model_type} (hidden state {config.vision_feature_layer}, {count} visual tokens an "
        f"image) and {config.text_config.model_type}: text norm T = {settings['target_norm']:.6g}, {gain}."
    )
