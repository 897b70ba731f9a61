"""Makes batches of rows: padded, or laid end to end as one row in which none sees another."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.data_utils import prepare_multimodal_messages
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..configuration.errors import NormalignError
from .images import name_of_row, open_images


if TYPE_CHECKING:
    from .vision_cache import VisionCache

IGNORED = -100
SDPA_BY_ROW = "sdpa_by_row"
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass
class PaddedCollator(DataCollatorForVisionLanguageModeling):
    """TRL's collator for rows of `messages` and `images` whose images may be undecoded.

    Gives input_ids, attention_mask and labels (rows, longest row), padded on the right, labels on the assistant's tokens
    alone; pixel_values (images, 3, height, width) unless the batch is text alone. With a `vision_cache`, pixel_values
    are the kept outputs of the encoder, (images, values), and no image is decoded. With `name_rows`, `rows` has the
    name of each ("Row 3 of data.json"), to be taken out before the batch goes into a model.

    Raises:
        NormalignError: an image is not in the cache.
    """

    vision_cache: VisionCache | None = None
    name_rows: bool = False

    def torch_call(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if self.vision_cache is not None:
            batch = self._from_cache(examples)
        else:
            rows = [{"messages": e["messages"], "images": open_images(e)} for e in examples]
            batch = dict(super().torch_call(rows))
        return {**batch, "rows": list(map(name_of_row, examples))} if self.name_rows else batch

    def _from_cache(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        processor, cache = self.processor, self.vision_cache
        messages = [prepare_multimodal_messages(e["messages"], images=e.get("images") or []) for e in examples]
        tokens = processor.tokenizer.apply_chat_template(
            messages,
            chat_template=self.chat_template or processor.chat_template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        rows = []
        for ids, assistant in zip(tokens["input_ids"], tokens["assistant_masks"]):
            counts = torch.tensor([cache.visual_tokens if token == processor.image_token_id else 1 for token in ids])
            ids = torch.tensor(ids).repeat_interleave(counts)
            labels = ids.masked_fill(torch.tensor(assistant).repeat_interleave(counts) == 0, IGNORED)
            rows.append((ids, labels))
        lengths = torch.tensor([len(ids) for ids, _ in rows])
        batch = {
            "input_ids": _pad([ids for ids, _ in rows], processor.tokenizer.pad_token_id),
            "attention_mask": (torch.arange(lengths.max()) < lengths[:, None]).long(),
            "labels": _pad([labels for _, labels in rows], IGNORED),
        }
        images = [image for example in examples for image in example.get("images") or []]
        if images:
            batch["pixel_values"] = cache.read(images)
        return batch


@dataclass
class PaddingFreeCollator(PaddedCollator):
    """The rows of a batch laid end to end; see `lay_end_to_end`. `boundaries` is for FlashAttention."""

    boundaries: bool = False

    def torch_call(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return lay_end_to_end(super().torch_call(examples), self.boundaries)


def lay_end_to_end(batch: Mapping[str, Any], boundaries: bool = False) -> dict[str, Any]:
    """A padded batch as one row, (1, all tokens), without padding and without attention_mask.

    position_ids start at 0 in each row, by which transformers tells the rows apart. The first label of each row is
    -100: the token before it belongs to another row. Images stay in order.

    Args:
        batch: tensors of the shape of attention_mask are laid end to end, others are left as they are.
        boundaries: adds where rows begin and end, as FlashAttention takes it: cu_seq_lens_q and _k (rows + 1, int32),
            max_length_q and _k.
    """
    kept = batch["attention_mask"].bool()
    lengths = kept.sum(dim=1).tolist()
    laid = {
        name: value[kept].unsqueeze(0) if isinstance(value, torch.Tensor) and value.shape == kept.shape else value
        for name, value in batch.items()
        if name != "attention_mask"
    }
    edges = [0, *itertools.accumulate(lengths)]
    laid["labels"][0, edges[:-1]] = IGNORED
    laid["position_ids"] = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    if boundaries:
        laid["cu_seq_lens_q"] = laid["cu_seq_lens_k"] = torch.tensor(edges, dtype=torch.int32)
        laid["max_length_q"] = laid["max_length_k"] = max(lengths)
    return laid


def prepare_padding_free(model: nn.Module) -> bool:
    """Readies a model for rows laid end to end, and makes sure that none sees another in it.

    With sdpa the language model's attention is from now on computed row by row: over the whole batch at once its cost
    would grow with the square of all tokens. FlashAttention does so by itself if it is told the boundaries, which are
    kept from the vision encoder, to whose tokens they do not apply.

    Returns:
        whether the collator is to give the boundaries.

    Raises:
        NormalignError: the language model mixes rows, or does not start positions anew.
    """
    decoder = model.get_decoder()
    if decoder.config._attn_implementation == "sdpa":
        decoder.set_attn_implementation(SDPA_BY_ROW)
    refuse_language_models_that_mix_rows(decoder)
    if "flash" not in decoder.config._attn_implementation:
        return False
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "vision_tower":
            module.register_forward_pre_hook(_without_boundaries, with_kwargs=True)
    return True


def refuse_language_models_that_mix_rows(decoder: nn.Module) -> None:
    """Runs two short rows laid end to end, and looks whether the second is what it is beside another first one.

    A model whose weights are not in this process (on the meta device, or sharded) is passed over.

    Raises:
        NormalignError: it is not, or it differs from the first although both have the same tokens.
    """
    if any(parameter.device.type == "meta" or not parameter.numel() for parameter in decoder.parameters()):
        return
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        problem = "it takes no positions, by which rows are told apart"
    else:
        after_itself, after_another = _second_row(decoder)
        first, second = after_itself.chunk(2)
        # the same shapes and the same kernels: without a leak they are the same to the bit
        if _difference(after_another.chunk(2)[1], second) > 1e-6:
            problem = "a row would see the rows before it"
        elif _difference(first, second) > 0.05:  # bfloat16 rounds
            problem = "its positions do not start anew with each row"
        else:
            return
    raise NormalignError(
        f"batching: padding_free does not work with a language model of type {decoder.config.model_type!r}: {problem}. "
        f"Write batching: padded."
    )


@torch.no_grad()
def _second_row(decoder: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """The last hidden states, (8, width), of four random tokens after the same four, and after four others."""
    table, config = decoder.get_input_embeddings().weight, decoder.config
    generator = torch.Generator().manual_seed(0)
    other, row = (torch.randn(2, 4, table.shape[1], generator=generator) * table.float().std().cpu()).to(table)
    positions = torch.arange(4, device=table.device).repeat(2).unsqueeze(0)
    attention, modes = config._attn_implementation, {module: module.training for module in decoder.modules()}
    if "flash" in attention:
        # it wants bfloat16 on a GPU, which the model may not be on yet; whether rows mix is not a matter of the kernel
        config._attn_implementation = "eager"
    decoder.eval()
    try:
        return tuple(
            decoder(
                inputs_embeds=torch.cat(rows).unsqueeze(0), position_ids=positions, use_cache=False
            ).last_hidden_state[0]
            for rows in ((row, row), (other, row))
        )
    finally:
        config._attn_implementation = attention
        for module, mode in modes.items():
            module.training = mode


def sdpa_by_row(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa, one row at a time where rows lie end to end: (1, heads, tokens, size) -> (1, tokens, heads, size).

    Each row keeps its own block of the mask, so that sliding windows and the like hold as they are; outside the blocks
    the mask lets nothing through.
    """
    sdpa, tokens = ALL_ATTENTION_FUNCTIONS["sdpa"], query.shape[2]
    of_one_row = getattr(attention_mask, "shape", None) == (1, 1, tokens, tokens)
    starts = []
    if of_one_row and position_ids is not None and position_ids.shape == (1, tokens):
        starts = (position_ids[0] == 0).nonzero().flatten().tolist()
    if len(starts) < 2:
        return sdpa(module, query, key, value, attention_mask, **kwargs)
    outputs = []
    for a, b in itertools.pairwise([*starts, tokens]):
        states = (state[:, :, a:b] for state in (query, key, value))
        outputs.append(sdpa(module, *states, attention_mask[:, :, a:b, a:b], **kwargs)[0])
    return torch.cat(outputs, dim=1), None


def _without_boundaries(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name not in _BOUNDARIES}


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (torch.linalg.vector_norm(a.float() - b.float()) / torch.linalg.vector_norm(b.float())).item()


def _pad(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


AttentionInterface.register(SDPA_BY_ROW, sdpa_by_row)
AttentionMaskInterface.register(SDPA_BY_ROW, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
