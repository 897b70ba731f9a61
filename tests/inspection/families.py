"""A tiny random model, with its processor, of each family of vision-language models that an inspection must handle.

The processors are the families' own, with a byte-level tokenizer that has their special tokens, and the image processors
that work on PIL images. Some of them also expect a processor of videos, which needs torchvision; `_images_only` lets
them do without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
SIDE = {"height": 16, "width": 16}
TEMPLATE = (
    "{{% for message in messages %}}user:{{% for part in message.content %}}"
    "{{% if part.type == 'image' %}}{image}{{% else %}}{{{{ part.text }}}}{{% endif %}}{{% endfor %}}\n{{% endfor %}}assistant:"
)


@dataclass(frozen=True)
class Family:
    """How to build a family's tiny model, and where its parts are by the names in its own modeling file."""

    name: str
    build: Callable[[], tuple]
    vision_encoder: str
    projector: str
    layers: str
    since: int = 4  # the generation of transformers from which on it can be built in this way

    @lru_cache  # noqa: B019  a family lives as long as the tests
    def __call__(self) -> tuple:
        """The model, in eval mode with its weights spread out, and the processor; not to be changed."""
        return self.fresh()

    def fresh(self) -> tuple:
        """The same, built anew."""
        torch.manual_seed(0)
        model, processor = self.build()
        _spread(model)
        return model.eval(), processor


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image of random blocks."""
    pixels = torch.randint(1, 256, (4, 4, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy()).resize((width, height))


def _spread(model: torch.nn.Module) -> None:
    """Weights large enough that layers turn their tokens; also those that start at zero (Gemma 3's projection)."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5 if "embed" in name else 0.15)


def _tokenizer(*special: str, **named: str) -> tf.PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges, and the special tokens of the family; `named` become its attributes."""
    tokens = ["<pad>", "<s>", "</s>", *special, *named.values()]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate([*tokens, *symbols])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", extra_special_tokens=named
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, *named.values()]})
    return tokenizer


def _image_processor(name: str) -> type:
    """The one that works on PIL images, which has a name of its own since transformers 5."""
    return getattr(tf, f"{name}ImageProcessorPil", None) or getattr(tf, f"{name}ImageProcessor")


def _images_only(processor_class: type, image_processor, tokenizer, **options):
    """The processor without its processor of videos."""

    class ImagesOnly(processor_class):
        def check_argument_for_proper_class(self, name, argument):
            if name != "video_processor":
                return super().check_argument_for_proper_class(name, argument)

    return ImagesOnly(image_processor=image_processor, tokenizer=tokenizer, video_processor=None, **options)


def _text(kind: str, tokenizer, **more) -> dict:
    return tf.AutoConfig.for_model(kind, vocab_size=len(tokenizer) + 3, **TEXT, **more).to_dict()


def _ids(tokenizer, **tokens: str) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def _clip() -> dict:
    return tf.CLIPVisionConfig(**VISION).to_dict()


def _siglip() -> dict:
    return tf.SiglipVisionConfig(**VISION, vision_use_head=False).to_dict()


def _llava():
    tokenizer = _tokenizer("<image>")
    config = tf.LlavaConfig(
        vision_config=_clip(), text_config=_text("llama", tokenizer), image_token_index=3, image_seq_length=16
    )
    processor = tf.LlavaProcessor(
        image_processor=_image_processor("Llava")(size=SIDE, crop_size=SIDE),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.format(image="<image>"),
    )
    return tf.LlavaForConditionalGeneration(config), processor


def _llava_next():
    tokenizer = _tokenizer("<image>")
    grid = [[16, 32], [32, 16], [32, 32]]
    config = tf.LlavaNextConfig(
        vision_config=_clip(),
        text_config=_text("mistral", tokenizer),
        image_token_index=3,
        image_grid_pinpoints=grid,
        image_seq_length=16,
    )
    processor = tf.LlavaNextProcessor(
        image_processor=_image_processor("LlavaNext")(
            size={"shortest_edge": 16}, crop_size=SIDE, image_grid_pinpoints=grid
        ),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.format(image="<image>"),
    )
    return tf.LlavaNextForConditionalGeneration(config), processor


def _llava_onevision():
    tokenizer = _tokenizer("<image>", "<video>")
    grid = [[16, 32], [32, 16], [32, 32]]
    config = tf.LlavaOnevisionConfig(
        vision_config=_siglip(),
        text_config=_text("qwen2", tokenizer),
        image_token_index=3,
        video_token_index=4,
        image_grid_pinpoints=grid,
    )
    processor = _images_only(
        tf.LlavaOnevisionProcessor,
        _image_processor("LlavaOnevision")(size=SIDE, image_grid_pinpoints=grid),
        tokenizer,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=TEMPLATE.format(image="<image>"),
    )
    return tf.LlavaOnevisionForConditionalGeneration(config), processor


QWEN_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}


def _qwen(processor_class: type, config_class: type, model_class: type, vision: dict):
    tokenizer = _tokenizer(*QWEN_TOKENS.values())
    text = {**TEXT, "vocab_size": len(tokenizer) + 3}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    vision = {
        "depth": 2,
        "num_heads": 2,
        "hidden_size": 24,
        "intermediate_size": 40,
        "out_hidden_size": 32,
        "patch_size": 4,
        **vision,
    }
    config = config_class(vision_config=vision, text_config=text, **_ids(tokenizer, **QWEN_TOKENS))
    images = _image_processor("Qwen2VL")(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
    template = TEMPLATE.format(image="<|vision_start|><|image_pad|><|vision_end|>")
    processor = _images_only(processor_class, images, tokenizer, chat_template=template)
    return model_class(config), processor


def _qwen2_5_vl():
    vision = {"window_size": 16, "fullatt_block_indexes": [1]}
    return _qwen(tf.Qwen2_5_VLProcessor, tf.Qwen2_5_VLConfig, tf.Qwen2_5_VLForConditionalGeneration, vision)


def _qwen3_vl():
    vision = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return _qwen(tf.Qwen3VLProcessor, tf.Qwen3VLConfig, tf.Qwen3VLForConditionalGeneration, vision)


def _internvl():
    tokenizer = _tokenizer(
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    vision = {**VISION, "image_size": [16, 16], "patch_size": [4, 4]}
    config = tf.InternVLConfig(
        vision_config=vision,
        text_config=_text("qwen2", tokenizer),
        image_seq_length=4,
        **_ids(tokenizer, image_token_id="<IMG_CONTEXT>"),
    )
    processor = _images_only(
        tf.InternVLProcessor,
        _image_processor("GotOcr2")(size=SIDE, crop_to_patches=True, max_patches=4),
        tokenizer,
        image_seq_length=4,
        chat_template=TEMPLATE.format(image="<IMG_CONTEXT>"),
    )
    return tf.InternVLForConditionalGeneration(config), processor


def _idefics3():
    tokenizer = _tokenizer(
        "<image>",
        "<fake_token_around_image>",
        "<end_of_utterance>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    )
    config = tf.Idefics3Config(
        vision_config=VISION,
        text_config=_text("llama", tokenizer),
        scale_factor=2,
        **_ids(tokenizer, image_token_id="<image>"),
    )
    processor = tf.Idefics3Processor(
        image_processor=_image_processor("Idefics3")(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=TEMPLATE.format(image="<image>"),
    )
    return tf.Idefics3ForConditionalGeneration(config), processor


def _smolvlm():
    """SmolVLM's model with Idefics3's processor: its own differs in video alone, and needs the package num2words."""
    _, processor = _idefics3()
    tokenizer = processor.tokenizer
    config = tf.SmolVLMConfig(
        vision_config=VISION,
        text_config=_text("llama", tokenizer),
        scale_factor=2,
        **_ids(tokenizer, image_token_id="<image>"),
    )
    return tf.SmolVLMForConditionalGeneration(config), processor


def _paligemma():
    tokenizer = _tokenizer("<image>")
    images = _image_processor("Siglip")(size=SIDE)
    images.image_seq_length = 16
    processor = tf.PaliGemmaProcessor(image_processor=images, tokenizer=tokenizer)
    config = tf.PaliGemmaConfig(
        vision_config=_siglip(),
        text_config=_text("gemma", tokenizer),
        image_token_index=3,
        projection_dim=32,
        hidden_size=32,
    )
    return tf.PaliGemmaForConditionalGeneration(config), processor


def _gemma3():
    tokenizer = _tokenizer(boi_token="<start_of_image>", image_token="<image_soft_token>", eoi_token="<end_of_image>")
    config = tf.Gemma3Config(
        vision_config=_siglip(),
        text_config=_text("gemma3_text", tokenizer, sliding_window=8),
        mm_tokens_per_image=4,
        **_ids(
            tokenizer,
            boi_token_index="<start_of_image>",
            image_token_index="<image_soft_token>",
            eoi_token_index="<end_of_image>",
        ),
    )
    processor = tf.Gemma3Processor(
        image_processor=_image_processor("Gemma3")(size=SIDE),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=TEMPLATE.format(image="<start_of_image>"),
    )
    return tf.Gemma3ForConditionalGeneration(config), processor


GLM_TOKENS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}


def _glm4v():
    tokenizer = _tokenizer(*GLM_TOKENS.values())
    text = {**TEXT, "vocab_size": len(tokenizer) + 3}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
    }
    vision = {
        "depth": 2,
        "num_heads": 2,
        "hidden_size": 24,
        "intermediate_size": 40,
        "out_hidden_size": 32,
        "patch_size": 4,
        "image_size": 16,
    }
    config = tf.Glm4vConfig(vision_config=vision, text_config=text, **_ids(tokenizer, **GLM_TOKENS))
    processor = _images_only(
        tf.Glm4vProcessor,
        _image_processor("Glm4v")(patch_size=4, size={"shortest_edge": 64, "longest_edge": 2048}),
        tokenizer,
        chat_template=TEMPLATE.format(image="<|begin_of_image|><|image|><|end_of_image|>"),
    )
    return tf.Glm4vForConditionalGeneration(config), processor


class PixtralLikeProcessor(tf.LlavaProcessor):
    """Writes the tokens that PixtralProcessor writes (rows of an image, with breaks); that one imports torchvision."""

    def _process_images(self, images, **options):
        return super()._process_images(images, **{**options, "patch_size": 2 * self.patch_size})

    def replace_image_token(self, image_inputs: dict, image_idx: int, **options) -> str:
        height, width = (int(side) // (2 * self.patch_size) for side in image_inputs["image_sizes"][image_idx])
        rows = "[IMG_BREAK]".join("[IMG]" * width for _ in range(height))
        return f"{rows}[IMG_END]"


def _mistral3():
    tokenizer = _tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    vision = tf.PixtralVisionConfig(**{**VISION, "image_size": 64}).to_dict()
    config = tf.Mistral3Config(
        vision_config=vision, text_config=_text("mistral", tokenizer), image_token_index=3, spatial_merge_size=2
    )
    processor = PixtralLikeProcessor(
        image_processor=_image_processor("Pixtral")(patch_size=4, size={"longest_edge": 32}),
        tokenizer=tokenizer,
        patch_size=4,
        image_token="[IMG]",
        chat_template=TEMPLATE.format(image="[IMG]"),
    )
    return tf.Mistral3ForConditionalGeneration(config), processor


OVIS_INDICATORS = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]


def _ovis2():
    tokenizer = _tokenizer("<image>", "<IMG_ATOM>", *OVIS_INDICATORS)
    text = _text("qwen2", tokenizer)
    config = tf.Ovis2Config(
        vision_config={**VISION, "vocab_size": 64, "hidden_stride": 2},
        text_config=text,
        vocab_size=text["vocab_size"],
        hidden_size=32,
        visual_indicator_token_ids=tokenizer.convert_tokens_to_ids(OVIS_INDICATORS),
        **_ids(tokenizer, image_token_id="<IMG_ATOM>"),
    )
    processor = tf.Ovis2Processor(
        image_processor=_image_processor("Ovis2")(size=SIDE, crop_to_patches=True, max_patches=4),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=TEMPLATE.format(image="<image>"),
    )
    return tf.Ovis2ForConditionalGeneration(config), processor


def _ours():
    from normalign.modeling.configuration_normalign_llava import NormAlignLlavaConfig
    from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration

    plain, processor = _llava()
    settings = plain.config.to_dict()
    settings.pop("model_type")
    return NormAlignLlavaForConditionalGeneration(NormAlignLlavaConfig(**settings)), processor


LLAVA_PARTS = ("model.vision_tower", "model.multi_modal_projector", "model.language_model.layers")
IDEFICS_PARTS = ("model.vision_model", "model.connector", "model.text_model.layers")
QWEN_PARTS = ("model.visual", "model.visual.merger", "model.language_model.layers")

FAMILIES = [
    Family("LLaVA", _llava, *LLAVA_PARTS),
    Family("LLaVA-NeXT", _llava_next, *LLAVA_PARTS),
    Family("LLaVA-OneVision", _llava_onevision, *LLAVA_PARTS),
    Family("Qwen2.5-VL", _qwen2_5_vl, *QWEN_PARTS, since=5),
    Family("Qwen3-VL", _qwen3_vl, *QWEN_PARTS, since=5),
    Family("InternVL", _internvl, *LLAVA_PARTS),
    Family("Idefics3", _idefics3, *IDEFICS_PARTS),
    Family("SmolVLM", _smolvlm, *IDEFICS_PARTS),
    Family("PaliGemma", _paligemma, *LLAVA_PARTS, since=5),
    Family("Gemma 3", _gemma3, *LLAVA_PARTS),
    Family("GLM-4.1V", _glm4v, *QWEN_PARTS, since=5),
    Family("Mistral 3", _mistral3, *LLAVA_PARTS, since=5),
    Family("Ovis2", _ovis2, "model.vision_tower", "model.visual_embeddings_table", "model.language_model.layers"),
    Family("ours", _ours, *LLAVA_PARTS),
]
