"""Puts rows of like length into one batch, so that little of it is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch.utils.data import Sampler
from transformers import ProcessorMixin
from transformers.trainer_pt_utils import get_length_grouped_indices
from trl.data_utils import prepare_multimodal_messages

from ..configuration.errors import NormalignError
from .vision_cache import without_decoding


if TYPE_CHECKING:
    from datasets import Dataset

_ROWS_AT_ONCE = 256


class LengthGroups(Sampler[int]):
    """Row numbers in an order in which each `batch_size` of them are of like length.

    The order follows from seed and epoch alone, so that all processes have the same and a resumed run goes on in it.
    The first batch has the longest row: if memory does not do, that shows at once. The batches after it are shuffled,
    which transformers' own sampler leaves out: it would go from long to short rows over and over.

    Args:
        lengths: tokens of each row.
        batch_size: rows of one step over all processes.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int = 0):
        self.lengths, self.batch_size, self.seed, self.epoch = list(lengths), batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """The trainer calls it before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        # two numbers into one that differs for each pair of them
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        rows = get_length_grouped_indices(self.lengths, self.batch_size, generator=generator)
        batches = [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        # the first has the longest row, the last may be short
        inner = batches[1:-1]
        order = torch.randperm(len(inner), generator=generator).tolist()
        for batch in [*batches[:1], *(inner[i] for i in order), *batches[1:][-1:]]:
            yield from batch


def row_lengths(dataset: Dataset, processor: ProcessorMixin) -> list[int]:
    """Tokens of each row, images included, without decoding one.

    Exact for image processors that make each image the same size, as those of CLIP and SigLIP do.

    Raises:
        NormalignError: the rows are streamed.
    """
    if not hasattr(dataset, "__len__"):
        raise NormalignError(
            "group_by_length orders all rows by length before the first step, which streamed rows do not allow. Write "
            "data.streaming: false, or group_by_length: false."
        )
    if "length" in dataset.column_names:
        return dataset["length"]
    blank = processor(images=[Image.new("RGB", (32, 32))], text=processor.image_token, return_tensors="pt")
    per_image = int((blank["input_ids"] == processor.image_token_id).sum())
    dataset, lengths = without_decoding(dataset), []
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        rows = dataset[start : start + _ROWS_AT_ONCE]
        tokens = processor.tokenizer.apply_chat_template(
            [prepare_multimodal_messages(m, images or []) for m, images in zip(rows["messages"], rows["images"])],
            chat_template=processor.chat_template,
            tokenize=True,
            return_dict=True,
        )
        for ids in tokens["input_ids"]:
            images = ids.count(processor.image_token_id)
            lengths.append(len(ids) + images * (per_image - 1))
    return lengths
