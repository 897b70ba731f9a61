"""Log-likelihoods of given continuations of prompts with images, in batches, for any image-text-to-text model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..configuration.errors import NormalignError
from .generation import batches_by_images, model_inputs


if TYPE_CHECKING:
    import torch
    from PIL import Image
    from transformers import PreTrainedModel, ProcessorMixin


def log_likelihoods(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    prompts: Sequence[str],
    images: Sequence[list[Image.Image]],
    continuations: Sequence[str],
    *,
    batch_size: int = 32,
    raw: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[tuple[float, bool]]:
    """For each row the sum of the log-probabilities of the continuation's tokens, and whether greedy decoding gives it.

    Args:
        prompts: texts up to where the continuation begins, with a token for each image, as `chat_prompts` gives them. Where
            one ends in space, the space that its continuation begins with is left out.
        images: the images of each prompt, in order; an empty list for text alone.
        continuations: what is scored. Its tokens are those that come on top of the prompt's when both are tokenised as one
            text.
        raw: the prompts are bare text, as lm-eval puts it: the tokenizer's special tokens are added, and the space that a
            prompt ends with counts to the continuation.
        progress: called with the number of rows just done.

    Returns:
        (natural logarithm of the probability, is greedy), in the order of the rows.

    Raises:
        NormalignError: a continuation has no tokens of its own.
    """
    import torch

    pairs = [_joined(*pair, raw=raw) for pair in zip(prompts, continuations, strict=True)]
    texts = [prompt + continuation for prompt, continuation in pairs]
    whole = _lengths(processor, texts, raw)
    before = _lengths(processor, [prompt for prompt, _ in pairs], raw)
    scored = [both - one for both, one in zip(whole, before, strict=True)]
    for number, count in enumerate(scored):
        if count < 1:
            raise NormalignError(
                f"The continuation {continuations[number]!r} (row {number}) adds no token to its prompt, so it has no "
                f"probability of its own. Give one that holds some text."
            )
    # rows of one length together, the longest first: what does not fit into memory shows at once
    order = sorted(range(len(texts)), key=lambda i: (-len(images[i]), -whole[i]))
    results: list[tuple[float, bool] | None] = [None] * len(texts)
    for batch in batches_by_images(order, images, batch_size):
        # padding on the right: it leaves the positions of the tokens as they are, whatever a model makes of the mask
        inputs = model_inputs(
            model,
            processor,
            [texts[i] for i in batch],
            [images[i] for i in batch],
            padding_side="right",
            add_special_tokens=raw,
        )
        ends = inputs["attention_mask"].sum(dim=1).tolist()
        starts = [end - scored[i] for end, i in zip(ends, batch, strict=True)]
        with torch.inference_mode():
            logits, first = _logits(model, inputs, min(starts) - 1, max(ends) - 1)
            for row, (i, start, end) in enumerate(zip(batch, starts, ends, strict=True)):
                targets = inputs["input_ids"][row, start:end]
                results[i] = _score(logits[row, start - 1 - first : end - 1 - first], targets.to(logits.device))
        if progress:
            progress(len(batch))
    return results


def _joined(prompt: str, continuation: str, *, raw: bool) -> tuple[str, str]:
    bare = prompt.rstrip()
    if raw:
        return bare, prompt[len(bare) :] + continuation
    return prompt, continuation if bare == prompt else continuation.lstrip(" ")


def _lengths(processor: ProcessorMixin, texts: list[str], raw: bool) -> list[int]:
    """Tokens of each text, an image counted as the one token that stands for it."""
    if not texts:
        return []
    return [len(ids) for ids in processor.tokenizer(texts, add_special_tokens=raw)["input_ids"]]


def _logits(model: PreTrainedModel, inputs, first: int, last: int) -> tuple[torch.Tensor, int]:
    """Logits at the positions from `first` to before `last`, or at all where the model cannot leave some out.

    Over a large vocabulary the logits take more memory than anything else does, and most are not asked for.

    Returns:
        the logits, of shape (batch, positions, vocabulary), and the first position in them.
    """
    import torch

    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return model(**inputs, use_cache=False).logits, 0
    kept = torch.arange(first, last, device=model.device)
    return model(**inputs, use_cache=False, logits_to_keep=kept).logits, first


def _score(logits: torch.Tensor, targets: torch.Tensor) -> tuple[float, bool]:
    """Of logits (tokens, vocabulary) and the tokens that follow (tokens,)."""
    log_probabilities = logits.float().log_softmax(dim=-1)
    total = log_probabilities.gather(1, targets[:, None]).double().sum()
    return total.item(), bool((logits.argmax(dim=-1) == targets).all())
