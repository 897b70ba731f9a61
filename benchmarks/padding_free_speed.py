"""Speed of training on rows laid end to end against TRL's padded batches, in supervised tokens per second.

    OMP_NUM_THREADS=1 python benchmarks/padding_free_speed.py [--device cpu] [--batches 12] [--out PATH]

Rows have one image (64 visual tokens) and 10 to 400 tokens of text, 8 to a batch; the model is a Llama of 6 layers of
width 512 with a small SigLIP encoder, random, trained whole by our trainer: collating, forward, backward and AdamW. The
ways take turns batch by batch in one process, so that the ratios hold on a noisy machine. On a GPU with flash-attn (or
`--attention NAME`) FlashAttention is measured too.
"""

import argparse
import copy
import random
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from datasets import Dataset, Features, Image, Sequence, Value
from PIL import Image as PillowImage
from record import write_result
from transformers import LlamaConfig, SiglipVisionConfig

from normalign import compose
from normalign.modeling.configuration_normalign_llava import NormAlignLlavaConfig
from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign.train_trl.recipe import Recipe
from normalign.train_trl.training import build_trainer


ROWS_IN_A_BATCH, IMAGE_SIDE, PATCH = 8, 128, 16
FEWEST, MOST = 10, 400


def make_model(processor, attention: str) -> NormAlignLlavaForConditionalGeneration:
    """A random LLaVA whose language model has 6 layers of width 512."""
    torch.manual_seed(0)
    config = NormAlignLlavaConfig(
        vision_config=SiglipVisionConfig(
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=IMAGE_SIDE,
            patch_size=PATCH,
            vision_use_head=False,
        ).to_dict(),
        text_config=LlamaConfig(
            vocab_size=len(processor.tokenizer),
            hidden_size=512,
            intermediate_size=1376,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=8,
            pad_token_id=processor.tokenizer.pad_token_id,
        ).to_dict(),
        image_token_index=processor.image_token_id,
        image_seq_length=(IMAGE_SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    model = NormAlignLlavaForConditionalGeneration(config)
    model.set_attn_implementation({"": attention, "text_config": attention, "vision_config": "sdpa"})
    model.model.vision_tower.requires_grad_(False)
    return model


def make_rows(processor, count: int) -> Dataset:
    """Rows of one image and a number of text tokens that is drawn evenly from 10 to 400, half of them the answer's."""
    drawn, words = random.Random(0), ["red", "blue", "green", "top", "left", "digit", "right", "bottom"]
    word = len(processor.tokenizer(" red blue", add_special_tokens=False)["input_ids"]) / 2
    messages, images = [], []
    for _ in range(count):
        half = int(max(1, drawn.randint(FEWEST, MOST) / word // 2))
        question, answer = (" ".join(drawn.choices(words, k=half)) for _ in range(2))
        messages.append(
            [
                {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": question}]},
                {"role": "assistant", "content": [{"type": "text", "text": answer}]},
            ]
        )
        colour = tuple(drawn.randrange(256) for _ in range(3))
        images.append([PillowImage.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), colour)])
    part = {"type": Value("string"), "text": Value("string")}
    features = {"messages": [{"role": Value("string"), "content": [part]}], "images": Sequence(Image())}
    return Dataset.from_dict({"messages": messages, "images": images}, Features(features))


def make_trainer(model, processor, rows: Dataset, batching: str, folder: str):
    """Our trainer with its optimizer, as a recipe would build it."""
    recipe = Recipe(output_dir=folder, model="in memory", batch_size=ROWS_IN_A_BATCH, batching=batching)
    trainer = build_trainer(model, processor, rows, recipe)
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()
    return trainer


def step(trainer, rows: list[dict]) -> tuple[float, int, float, float]:
    """One optimizer step: seconds, supervised tokens, tokens computed, and the loss."""
    start = time.perf_counter()
    batch = trainer.data_collator(rows)
    supervised = int((batch["labels"][:, 1:] != -100).sum())
    tokens = batch["input_ids"].numel()
    loss = trainer.training_step(trainer.model, dict(batch), torch.tensor(supervised, device=trainer.args.device))
    trainer.optimizer.step()
    trainer.model.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, supervised, tokens, loss.item()


def main() -> None:
    """Measures the ways in turn and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--attention", nargs="*", default=None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "padding_free_speed.json")
    args = parser.parse_args()
    attentions = args.attention or ["sdpa"]
    if args.attention is None and torch.cuda.is_available() and find_spec("flash_attn"):
        attentions.append("flash_attention_2")
    _, processor = compose("mini-vision", "mini-language", seed=0)
    processor.image_processor.size = {"height": IMAGE_SIDE, "width": IMAGE_SIDE}
    rows = make_rows(processor, ROWS_IN_A_BATCH * (args.batches + 1))
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for attention in attentions:
            model = make_model(processor, attention)
            trainers = {
                batching: make_trainer(copy.deepcopy(model), processor, rows, batching, f"{folder}/{batching}")
                for batching in ("padded", "padding_free")
            }
            measured = {batching: [] for batching in trainers}
            for number in range(args.batches + 1):
                batch = [rows[number * ROWS_IN_A_BATCH + i] for i in range(ROWS_IN_A_BATCH)]
                for batching, trainer in trainers.items():
                    # the first warms up
                    figures = step(trainer, [dict(row) for row in batch])
                    measured[batching] += [figures] if number else []
            results += rows_of_result(attention, measured)
    write_result(args.out, results, batches=args.batches, rows_in_a_batch=ROWS_IN_A_BATCH, visual_tokens=64)


def rows_of_result(attention: str, measured: dict[str, list[tuple]]) -> list[dict]:
    """A row for each way; `ratio` is its supervised tokens per second over those of the padded way."""
    rows, padded_rate = [], None
    for batching, figures in measured.items():
        seconds, supervised, tokens, losses = zip(*figures)
        rate = sum(supervised) / sum(seconds)
        padded_rate = padded_rate or rate
        rows.append(
            {
                "case": f"{batching}, {attention}",
                "seconds_median": statistics.median(seconds),
                "ratio": rate / padded_rate,
                "supervised_tokens_per_second": rate,
                "tokens_computed": sum(tokens),
                "loss_last": losses[-1],
            }
        )
        print(
            f"{rows[-1]['case']:<32} {rate:8.1f} supervised tokens/s  {rows[-1]['ratio']:.2f}x  {sum(tokens)} tokens"
        )
    return rows


if __name__ == "__main__":
    main()
