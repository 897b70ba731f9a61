"""Pretrain the two mini backbones that normalign ships: a SigLIP encoder and a Llama language model, in minutes on a CPU.

    python benchmarks/pretrain_mini_backbones.py [--part vision|language|both] [--out DIR]

The encoder learns from training scenes of handwritten digits (train_trl/digit_scenes.py): every patch token has to name
the digit and the colour in its quarter. The language model learns from text alone, written by this program: a description of
a scene, a question about it and the answer, in ChatML. A description is either a caption or a raster reading, which says
for each patch of the picture, row by row, one word that is true there. Neither has seen the other.

The shipped weights were made in a few phases, on one thread of a CPU that other work shared:

    program=benchmarks/pretrain_mini_backbones.py
    python $program --part vision --no-deform --vision-steps 1200 --out runs/first
    python $program --part language --no-inventories --language-steps 2000 --out runs/first
    more="--vision-batch 64 --vision-pool 30000"
    python $program --part vision --init runs/first --seed 1 --vision-steps 1000 $more --out runs/second
    python $program --part vision --init runs/second --seed 2 --vision-steps 1400 $more
    python $program --part language --init runs/first --seed 5 --language-steps 720
"""

import argparse
import json
import math
import os
import platform
import time
from pathlib import Path
from random import Random

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from normalign.train_trl.digit_scenes import (
    COLOURS,
    IMAGE_SIZE,
    Scene,
    SceneQuestion,
    caption_of,
    draw_questions,
    render_scene,
)


ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "configuration" / "mini_backbones"
RESULT = ROOT / "benchmarks" / "results" / "mini_backbones.json"

PATCH_SIZE = 16
GRID = IMAGE_SIZE // PATCH_SIZE
EMPTY = 10
COLOUR_NAMES = tuple(COLOURS)
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEXT_NORM = 0.4

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' -}}
{%- set ns = namespace(text='') -%}
{%- if message['content'] is string -%}
{%- set ns.text = message['content'] -%}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{%- set ns.text = ns.text + part['text'] -%}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- ns.text + '<|im_end|>' -}}{%- endgeneration -%}
{{- '\n' -}}
{%- else -%}
{{- ns.text + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def cell_of_patch() -> list[int]:
    """The quarter that each patch lies in, patches row by row."""
    return [row // (GRID // 2) * 2 + column // (GRID // 2) for row in range(GRID) for column in range(GRID)]


# ------------------------------------------------------------------------------------------------------ encoder


def scene_batch(scenes: list[Scene], seed: str, processor: SiglipImageProcessor) -> tuple[torch.Tensor, ...]:
    """Pictures (N, 3, H, W) in float16 and, for each patch, the digit (10 where empty) and the colour (-100 where empty)."""
    chunks = []
    for start in range(0, len(scenes), 1000):
        images = [render_scene(scene, f"{seed} {start + i}") for i, scene in enumerate(scenes[start : start + 1000])]
        chunks.append(processor(images, return_tensors="pt")["pixel_values"].half())
    pixels = torch.cat(chunks)
    digits = torch.tensor([[cell.value if cell else EMPTY for cell in scene] for scene in scenes])
    colours = torch.tensor([[COLOUR_NAMES.index(cell.colour) if cell else -100 for cell in scene] for scene in scenes])
    cells = torch.tensor(cell_of_patch())
    return pixels, digits[:, cells], colours[:, cells]


def deform(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Turn, scale, slant and shift each quarter of the pictures (N, 3, H, W) a little: more hands than the data has."""
    count, side = len(pixels) * 4, IMAGE_SIZE // 2
    cells = pixels.unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 1, 4, 5).reshape(count, 3, side, side)
    angle, slant, wide, high, right, down = torch.rand(6, count, generator=generator) * 2 - 1
    angle, slant, wide, high = 0.2 * angle, 0.2 * slant, 1 + 0.12 * wide, 1 + 0.12 * high
    affine = torch.stack(
        [
            torch.stack([wide * angle.cos(), -high * angle.sin() + slant, 0.06 * right], -1),
            torch.stack([wide * angle.sin(), high * angle.cos(), 0.06 * down], -1),
        ],
        1,
    )
    grid = F.affine_grid(affine, list(cells.shape), align_corners=False)
    cells = F.grid_sample(cells, grid, padding_mode="border", align_corners=False)
    return cells.reshape(-1, 2, 2, 3, side, side).permute(0, 3, 1, 4, 2, 5).reshape(pixels.shape)


class PatchHeads(nn.Module):
    """Names digit and colour from a patch token; only there to train and to test the encoder, never shipped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.digit = nn.Linear(width, EMPTY + 1)
        self.colour = nn.Linear(width, len(COLOUR_NAMES))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(hidden)
        return self.digit(hidden), self.colour(hidden)


def train_encoder(
    steps: int, batch_size: int, lr: float, pool: int, seed: int, init: Path | None, deformed: bool
) -> tuple[SiglipVisionModel, dict]:
    """Train the encoder; both of its last two layers have to name what is in each patch's quarter."""
    torch.manual_seed(seed)
    processor = image_processor()
    config = SiglipVisionConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        vision_use_head=False,
    )
    model = SiglipVisionModel.from_pretrained(init).float() if init else SiglipVisionModel(config)
    heads = nn.ModuleList(PatchHeads(config.hidden_size) for _ in range(2))
    scenes = [item.scene for item in draw_questions(pool, seed=seed, split="train", stage=1)]
    pixels, digits, colours = scene_batch(scenes, f"pretrain {seed}", processor)
    parameters = [*model.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(steps))
    order = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    for step in range(steps):
        rows = torch.randint(len(scenes), (batch_size,), generator=order)
        batch = deform(pixels[rows].float(), order) if deformed else pixels[rows].float()
        hidden = model(batch, output_hidden_states=True).hidden_states
        loss = torch.zeros(())
        for layer, head in zip((-1, -2), heads):
            digit_logits, colour_logits = head(hidden[layer])
            loss = loss + F.cross_entropy(digit_logits.flatten(0, 1), digits[rows].flatten(), label_smoothing=0.05)
            loss = loss + F.cross_entropy(colour_logits.flatten(0, 1), colours[rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        scheduler.step()
        report("vision", step, steps, loss.item(), start)
    return model, {"steps": steps, "batch_size": batch_size, "seconds": time.perf_counter() - start} | test_encoder(
        model, heads, processor
    )


@torch.no_grad()
def test_encoder(model: SiglipVisionModel, heads: nn.ModuleList, processor: SiglipImageProcessor) -> dict:
    """Accuracies on test scenes, a quarter counting as right if the mean of its patches' votes is; and token norms."""
    scenes = [item.scene for item in draw_questions(1000, seed=1, split="test", stage=1)]
    pixels, digits, colours = scene_batch(scenes, "test", processor)
    hidden = model(pixels.float(), output_hidden_states=True).hidden_states
    figures = {}
    cells = torch.tensor(cell_of_patch())
    for layer, head in zip((-1, -2), heads):
        digit_logits, colour_logits = head(hidden[layer])
        by_cell = torch.stack([digit_logits[:, cells == cell].mean(1) for cell in range(4)], 1).argmax(-1)
        truth = torch.stack([digits[:, cells == cell][:, 0] for cell in range(4)], 1)
        there = colours != -100
        figures[f"layer {layer}"] = {
            "digit_accuracy": (by_cell == truth)[truth != EMPTY].float().mean().item(),
            "digit_accuracy_patch": (digit_logits.argmax(-1) == digits)[there].float().mean().item(),
            "colour_accuracy_patch": (colour_logits.argmax(-1) == colours)[there].float().mean().item(),
            "token_norm": hidden[layer].norm(dim=-1).mean().item(),
        }
    return figures


def image_processor() -> SiglipImageProcessor:
    """The processor of the encoder: pixels scaled to -1..1."""
    return SiglipImageProcessor(
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )


# ----------------------------------------------------------------------------------------------- language model


def raster_reading(scene: Scene, rng: Random) -> str:
    """One word for each patch, row by row: its quarter's digit or colour (each said at least once), or "empty"."""
    words = [""] * GRID**2
    for cell in range(4):
        patches = [patch for patch, owner in enumerate(cell_of_patch()) if owner == cell]
        rng.shuffle(patches)
        digit = scene[cell]
        for number, patch in enumerate(patches):
            if digit is None:
                words[patch] = "empty"
            else:
                words[patch] = rng.choice((str(digit.value), digit.colour))
                if number < 2:
                    words[patch] = (str(digit.value), digit.colour)[number]
    return " ".join(words)


INVENTORY = "Which digits are there?"


def inventory_of(scene: Scene) -> str:
    """Yes or no for each of the ten digits: dense practice for "Is there a 7?"."""
    values = {digit.value for digit in scene if digit}
    return "; ".join(f"{digit} {'yes' if digit in values else 'no'}" for digit in range(10))


def chat_text(item: SceneQuestion, rng: Random, raster: bool) -> tuple[str, str]:
    """Prompt and answer of one exchange, in ChatML."""
    description = raster_reading(item.scene, rng) if raster else caption_of(item.scene)
    prompt = f"{TURN_START}user\n{description}\n{item.question}{TURN_END}\n{TURN_START}assistant\n"
    return prompt, f"{item.answer}{TURN_END}\n"


def corpus(count: int, seed: int, inventories: bool) -> list[tuple[str, str]]:
    """Exchanges: 60% questions and 40% captions; with inventories 45%, 15% more of "exists", 20% captions, 20% inventories.

    Captions are written from raster readings; the rest is asked about raster readings (80%) and captions (20%).
    """
    rng = Random(f"corpus {seed}")
    exists, captions, listed = [round(count * share) for share in ((0.15, 0.2, 0.2) if inventories else (0, 0.4, 0))]
    items = draw_questions(count - exists - captions - listed, seed=seed + 1000, text_only_share=0)
    items += draw_questions(exists, seed=seed + 1001, text_only_share=0, kinds=("exists",))
    items += draw_questions(captions, seed=seed + 1000, stage=1)
    items += [
        SceneQuestion(item.scene, "inventory", INVENTORY, inventory_of(item.scene))
        for item in draw_questions(listed, seed=seed + 1002, text_only_share=0)
    ]
    rng.shuffle(items)
    return [chat_text(item, rng, raster=item.kind == "caption" or rng.random() < 0.8) for item in items]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in which every digit is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r" ?\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def train_language(
    steps: int, batch_size: int, lr: float, seed: int, init: Path | None, inventories: bool
) -> tuple[LlamaForCausalLM, object, dict]:
    """Train the tokenizer and the language model on descriptions, questions and answers."""
    torch.manual_seed(seed)
    texts = corpus(steps * batch_size, seed, inventories)
    if init:
        tokenizer = AutoTokenizer.from_pretrained(init)
    else:
        tokenizer = train_tokenizer([prompt + answer for prompt, answer in texts[:5000]])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM.from_pretrained(init).float() if init else LlamaForCausalLM(config)
    embedding = model.get_input_embeddings()
    if not init:
        nn.init.normal_(embedding.weight, std=TEXT_NORM / math.sqrt(config.hidden_size))
    others = [p for p in model.parameters() if p is not embedding.weight]
    # Small steps for the embeddings keep their norms near where they start, as in large models.
    groups = [{"params": others, "lr": lr, "weight_decay": 0.01}, {"params": [embedding.weight], "lr": lr / 10}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(steps))
    # Short and long exchanges in batches of their own: less padding.
    texts.sort(key=lambda text: len(text[0]) + len(text[1]))
    batches = [texts[i : i + batch_size] for i in range(0, len(texts), batch_size)]
    Random(seed).shuffle(batches)
    start = time.perf_counter()
    for step, batch in enumerate(batches):
        inputs, weights = encode(tokenizer, batch)
        logits = model(**inputs).logits[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1), inputs["input_ids"][:, 1:].flatten(), reduction="none")
        weights = weights[:, 1:].flatten()
        loss = (losses * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        answers = losses[weights == 1].mean().item()
        report("language", step, steps, answers, start)
        if (step + 1) % max(steps // 8, 1) == 0:
            print("language: accuracy about raster readings", test_language(model, tokenizer, True), flush=True)
    figures = {"steps": steps, "batch_size": batch_size, "seconds": time.perf_counter() - start}
    model.eval()
    for raster in (True, False):
        figures[f"accuracy_{'raster' if raster else 'caption'}"] = test_language(model, tokenizer, raster)
    weight = embedding.weight.detach().float().norm(dim=-1)
    figures["text_embedding_norm"] = weight.mean().item()
    return model, tokenizer, figures


def encode(tokenizer, batch: list[tuple[str, str]], prompt_weight: float = 0.05) -> tuple[dict, torch.Tensor]:
    """Token ids padded on the right, and each token's weight in the loss: 1 in answers, small in prompts, 0 in padding."""
    prompts = tokenizer([prompt for prompt, _ in batch], add_special_tokens=False)["input_ids"]
    answers = tokenizer([answer for _, answer in batch], add_special_tokens=False)["input_ids"]
    length = max(len(a) + len(b) for a, b in zip(prompts, answers))
    ids = torch.full((len(batch), length), tokenizer.pad_token_id)
    weights = torch.zeros(len(batch), length)
    mask = torch.zeros(len(batch), length, dtype=torch.long)
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        mask[row, :end] = 1
        weights[row, : len(prompt)] = prompt_weight
        weights[row, len(prompt) : end] = 1
    return {"input_ids": ids, "attention_mask": mask}, weights


@torch.no_grad()
def test_language(model: LlamaForCausalLM, tokenizer, raster: bool, count: int = 600) -> dict:
    """Share of answers that are right in full, by kind of question: every token is the most likely one."""
    rng = Random("test")
    items = draw_questions(count, seed=1, split="test", text_only_share=0)
    if raster:
        items += draw_questions(count // 6, seed=1, split="test", stage=1)
    inputs, weights = encode(tokenizer, [chat_text(item, rng, raster) for item in items])
    wrong = (model(**inputs).logits[:, :-1].argmax(-1) != inputs["input_ids"][:, 1:]) & (weights[:, 1:] == 1)
    right = (~wrong.any(-1)).float()
    by_kind = {}
    for kind in sorted({item.kind for item in items}):
        by_kind[kind] = right[torch.tensor([item.kind == kind for item in items])].mean().item()
    return by_kind


# ------------------------------------------------------------------------------------------------------- program


def cosine(steps: int, warmup: int = 50):
    """Learning rate factor: linear warm-up, then half a cosine down to 0."""
    return lambda step: min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * min(step / steps, 1))))


def report(name: str, step: int, steps: int, loss: float, start: float) -> None:
    """Print progress and the time left, forty times a run."""
    if (step + 1) % max(steps // 40, 1) == 0:
        seconds = time.perf_counter() - start
        left = seconds / (step + 1) * (steps - step - 1)
        print(f"{name}: step {step + 1}/{steps}  loss {loss:.4f}  {seconds:.0f} s, {left:.0f} s left", flush=True)


def save(model: nn.Module, folder: Path, *others) -> None:
    """Save as float16 safetensors, with what else the folder needs."""
    folder.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(folder)
    if isinstance(model, SiglipVisionModel):
        # The parameter names of published SigLIP checkpoints, which transformers 4 and 5 both load.
        weights = load_file(folder / "model.safetensors")
        weights = {f"vision_model.{name.removeprefix('vision_model.')}": weight for name, weight in weights.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for other in others:
        other.save_pretrained(folder)
    tokenizer_config = folder / "tokenizer_config.json"
    if tokenizer_config.is_file():
        # transformers 4 knows neither the class name nor the list of tokens that transformers 5 writes.
        settings = json.loads(tokenizer_config.read_text())
        settings = {key: settings[key] for key in settings if key not in ("backend", "extra_special_tokens")}
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        tokenizer_config.write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Train what was asked for, save it, and record accuracies, norms and seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("vision", "language", "both"), default="both")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for vision/ and language/")
    parser.add_argument("--init", type=Path, help="folder of backbones to train further, instead of random weights")
    parser.add_argument("--result", type=Path, default=RESULT, help="JSON file for the measured figures")
    parser.add_argument("--seed", type=int, default=0)
    boolean = argparse.BooleanOptionalAction
    parser.add_argument("--deform", action=boolean, default=True, help="deform the training pictures")
    parser.add_argument("--inventories", action=boolean, default=True, help="train on inventories of digits, too")
    parser.add_argument("--vision-steps", type=int, default=2500)
    parser.add_argument("--vision-batch", type=int, default=96)
    parser.add_argument("--vision-pool", type=int, default=20_000, help="number of different training pictures")
    parser.add_argument("--language-steps", type=int, default=3000)
    parser.add_argument("--language-batch", type=int, default=64)
    args = parser.parse_args()

    def init(part: str) -> Path | None:
        return args.init / part if args.init else None

    figures = json.loads(args.result.read_text()) if args.result.is_file() else {}
    figures["machine"] = {"processor": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    figures["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }
    for part in ("vision", "language"):
        if args.part not in (part, "both"):
            continue
        if part == "vision":
            pool, batch = args.vision_pool, args.vision_batch
            model, measured = train_encoder(args.vision_steps, batch, 1e-3, pool, args.seed, init(part), args.deform)
            save(model, args.out / part, image_processor())
        else:
            steps, batch = args.language_steps, args.language_batch
            model, tokenizer, measured = train_language(steps, batch, 1e-3, args.seed, init(part), args.inventories)
            save(model, args.out / part, tokenizer)
        row = {"case": part, "phase": 1, "seed": args.seed}
        rows = figures.setdefault("rows", [])
        if args.init:
            row["phase"] += sum(other["case"] == part for other in rows)
        else:
            rows[:] = [other for other in rows if other["case"] != part]
        rows.append(row | {key: measured.pop(key) for key in ("steps", "batch_size", "seconds")})
        figures[part] = measured
    args.result.parent.mkdir(parents=True, exist_ok=True)
    args.result.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
