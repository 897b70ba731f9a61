"""LLaVA with an aligned norm at the end of its projector."""

import copy
import math

import torch
from torch import nn
from transformers import AutoModel, BitsAndBytesConfig, GenerationMixin, PreTrainedModel, __version__
from transformers.models.llava.modeling_llava import (
    LlavaForConditionalGeneration,
    LlavaModel,
    LlavaMultiModalProjector,
    LlavaPreTrainedModel,
)
from transformers.utils import logging

from .aligned_norm import AlignedNorm, text_embedding_norm
from .configuration_normalign_llava import NormAlignLlavaConfig, complete_aligned_norm


logger = logging.get_logger(__name__)

# with and without the prefix: transformers 5 compares from a name's start on, and the base model has none
_LEFT_WHOLE = [
    "lm_head",
    "vision_tower",
    "model.vision_tower",
    "multi_modal_projector",
    "model.multi_modal_projector",
]


def _with_parts_left_whole(quantization):
    """The quantization settings, in which bitsandbytes' say what to leave whole where the user's do not."""
    if isinstance(quantization, dict) and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        quantization = BitsAndBytesConfig(**quantization)
    if getattr(quantization, "llm_int8_skip_modules", ()) is None:
        quantization = copy.copy(quantization)
        quantization.llm_int8_skip_modules = list(_LEFT_WHOLE)
    return quantization


class NormAlignLlavaMultiModalProjector(LlavaMultiModalProjector):
    """LLaVA's projector, then the aligned norm: (..., vision width) -> (..., hidden size of the language model)."""

    def __init__(self, config: NormAlignLlavaConfig):
        super().__init__(config)
        settings = complete_aligned_norm(config.aligned_norm)
        if settings["kind"] == "none":
            self.aligned_norm = nn.Identity()
            return
        self.aligned_norm = AlignedNorm(
            config.text_config.hidden_size,
            kind=settings["kind"],
            eps=settings["eps"],
            gwc=settings["gwc"],
            gwc_floor=settings["gwc_floor"],
        )
        self.aligned_norm.requires_grad_(settings["trainable"])

    def forward(self, image_features: torch.Tensor) -> torch.Tensor:
        return self.aligned_norm(super().forward(image_features))


class NormAlignLlavaPreTrainedModel(LlavaPreTrainedModel):
    """Initialisation and loading rules that the two models share."""

    config_class = NormAlignLlavaConfig
    base_model_prefix = "model"
    _no_split_modules = ["NormAlignLlavaMultiModalProjector"]
    # transformers 4.57 would rename our parameters on saving by LLaVA's old-name table
    _checkpoint_conversion_mapping = {}

    def post_init(self) -> None:
        super().post_init()
        # also the sub-models' blocks, and only what is there: FSDP refuses a name that it does not find
        parts = [part for part in self.modules() if isinstance(part, PreTrainedModel)]
        names = {name for part in parts for name in part._no_split_modules or ()}
        self._no_split_modules = sorted(names & {type(module).__name__ for module in self.modules()})

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, AlignedNorm):
            return super()._init_weights(module)
        settings = self.config.aligned_norm
        if settings["gain_init"] != "text":
            module.set_gain_(float(settings["gain_init"]))
        elif settings["target_norm"] is not None:
            module.set_target_norm_(settings["target_norm"])
        else:
            # T is not known before the embeddings are there: `initialize_aligned_norm_` puts the value in
            module.set_gain_(1.0)

    def _keep_norm_in_float32(self) -> None:
        if self.config.aligned_norm["kind"] != "none":
            self._keep_in_fp32_modules_strict = ["aligned_norm"]

    def initialize_aligned_norm_(self, target_norm: float | None = None, input_norm: float | None = None) -> float:
        """Starts the gain anew, as `config.aligned_norm.gain_init` says, and writes T to the config.

        Args:
            target_norm: T; when None, T is measured on the embeddings.
            input_norm: mean norm of the projected tokens, for kind `scale` alone.

        Returns:
            the gain (one value for all channels).

        Raises:
            ValueError: there is no norm to initialise, its weights are not in memory (offloaded), or T cannot be
                measured (see `text_embedding_norm`).
        """
        norm = self.get_aligned_norm()
        if norm is None:
            raise ValueError("aligned_norm.kind is 'none': there is no gain to initialise.")
        if norm.weight.device.type == "meta" or norm.weight.numel() == 0:
            raise ValueError(
                "The gain of the aligned norm is not in memory (offloaded, on the meta device, or shared out over "
                "processes by ZeRO-3), so it cannot be set. Load the model once as a whole, save it, and load that."
            )
        T = target_norm or text_embedding_norm(self.get_input_embeddings())
        self._set_gain_(norm, T, input_norm)
        self.config.aligned_norm["target_norm"] = T
        return norm.weight.flatten()[0].item()

    def _set_gain_(self, norm: AlignedNorm, T: float, input_norm: float | None = None) -> None:
        for parameter in norm.parameters():
            parameter._is_hf_initialized = False
        if self.config.aligned_norm["gain_init"] == "text":
            norm.set_target_norm_(T, input_norm)
        else:
            norm.set_gain_(float(self.config.aligned_norm["gain_init"]))

    def get_aligned_norm(self) -> AlignedNorm | None:
        """The norm at the end of the projector, or None for kind `none`."""
        norm = self.base_model.multi_modal_projector.aligned_norm
        return norm if isinstance(norm, AlignedNorm) else None

    def enable_input_require_grads(self) -> None:
        """As in transformers, and alike on 4.57 and 5: checkpointed encoder adapters get a gradient, while an encoder
        that is not trained at all builds no graph."""
        super().enable_input_require_grads()
        tower = self.base_model.vision_tower

        def require_grad_if_trained(module, args, output):
            trained = any(parameter.requires_grad for parameter in tower.parameters())
            return output.requires_grad_(True) if trained else output.detach()

        try:
            patch_embedding = tower.get_input_embeddings()
        except NotImplementedError:  # an encoder that does not say which; transformers has passed over it too
            return
        self._patch_embedding_hook = patch_embedding.register_forward_hook(require_grad_if_trained)

    def disable_input_require_grads(self) -> None:
        """Takes the hooks of `enable_input_require_grads` off."""
        super().disable_input_require_grads()
        if hasattr(self, "_patch_embedding_hook"):
            self._patch_embedding_hook.remove()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info=False, **kwargs):
        """As in transformers; a weight that the folder lacks or that the model has no place for is an error.

        The one exception is a gain that is missing: it is set from T, and said so. bitsandbytes quantizes the language
        model's layers alone, unless `llm_int8_skip_modules` of its config says what to leave whole.
        """
        if kwargs.get("quantization_config") is not None:
            kwargs["quantization_config"] = _with_parts_left_whole(kwargs["quantization_config"])
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        model._check_loaded_keys(info, pretrained_model_name_or_path)
        if norm := model.get_aligned_norm():
            # transformers 5 builds the parameters anew on loading
            norm.requires_grad_(model.config.aligned_norm["trainable"])
        return (model, info) if output_loading_info else model

    def save_pretrained(self, *args, **kwargs):
        """As in transformers; 4-bit weights that were used on a CPU are refused.

        bitsandbytes lays them out anew for some CPUs in the first forward pass and does not bring all of them back.
        """
        states = (getattr(parameter, "quant_state", None) for parameter in self.parameters())
        if any(getattr(state, "packing_format_for_cpu", False) for state in states):
            raise ValueError(
                "bitsandbytes has laid out this model's 4-bit weights for this CPU since they were loaded, and would save "
                "other values than it computes with. Load the model again and save it before it is used, or save the "
                "model that is not quantized."
            )
        return super().save_pretrained(*args, **kwargs)

    def _check_loaded_keys(self, info: dict, source) -> None:
        missing, unexpected = set(info["missing_keys"]), sorted(info["unexpected_keys"])
        norm_keys = {name for name, _ in self.named_parameters() if "multi_modal_projector.aligned_norm." in name}
        whole_norm_missing = bool(norm_keys) and norm_keys <= missing
        random = sorted(missing - norm_keys if whole_norm_missing else missing)
        kind = self.config.aligned_norm["kind"]
        if random or unexpected:
            problems = []
            if random:
                problems.append(
                    f"{len(random)} weights are not in it and would be random ({', '.join(random[:3])}, ...)"
                )
            if norm_parts := [key.rsplit(".", 1)[1] for key in unexpected if ".aligned_norm." in f".{key}"]:
                problems.append(
                    f"it holds an aligned norm's {' and '.join(norm_parts)}, but config.aligned_norm.kind is {kind!r}"
                )
            elif unexpected:
                problems.append(
                    f"{len(unexpected)} of its weights have no place in the model ({', '.join(unexpected[:3])}, ...)"
                )
            saved_by = getattr(self.config, "transformers_version", None)
            raise ValueError(
                f"The checkpoint {source} does not fit {type(self).__name__}: {'; '.join(problems)}. Load it with the "
                f"config and the generation of transformers it was saved with (it says {saved_by}, this is {__version__}); "
                f"a LLaVA model without the norm is converted by `normalign graft`."
            )
        if whole_norm_missing:
            gain = self.initialize_aligned_norm_(self.config.aligned_norm["target_norm"])
            logger.warning(
                f"The checkpoint {source} has no aligned norm: its gain was set to {gain:.6g} from the text norm "
                f"T = {self.config.aligned_norm['target_norm']:.6g}. The model needs re-alignment training."
            )


class NormAlignLlavaModel(NormAlignLlavaPreTrainedModel, LlavaModel):
    """LLaVA without the language-modelling head, with the aligned norm at the end of `multi_modal_projector`."""

    _auto_class = "AutoModel"
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]

    def __init__(self, config: NormAlignLlavaConfig):
        # not LlavaModel.__init__, which would build a second projector
        LlavaPreTrainedModel.__init__(self, config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = NormAlignLlavaMultiModalProjector(config)
        self.language_model = AutoModel.from_config(config.text_config)
        self._keep_norm_in_float32()
        self.post_init()
        if config.aligned_norm["kind"] != "none" and config.aligned_norm["target_norm"] is None:
            self._align_if_embeddings_are_there()

    def _align_if_embeddings_are_there(self) -> None:
        table = self.get_input_embeddings().weight
        # on the meta device (from_pretrained) or sharded away the gain comes from the checkpoint or is set after loading
        if table.device.type != "meta" and table.numel() and math.isfinite(n := table.norm().item()) and n > 0:
            # not written to the config: other weights may follow, with another T
            self._set_gain_(self.get_aligned_norm(), text_embedding_norm(self.get_input_embeddings()))


class NormAlignLlavaForConditionalGeneration(
    NormAlignLlavaPreTrainedModel, LlavaForConditionalGeneration, GenerationMixin
):
    """LLaVA whose visual tokens enter the language model at the norm of text tokens (arXiv 2512.08374)."""

    _auto_class = "AutoModelForImageTextToText"

    def __init__(self, config: NormAlignLlavaConfig):
        # not LlavaForConditionalGeneration.__init__, which would build a second language model
        LlavaPreTrainedModel.__init__(self, config)
        self.model = NormAlignLlavaModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self._keep_norm_in_float32()
        self.post_init()
