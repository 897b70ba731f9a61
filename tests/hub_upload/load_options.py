"""Loads an export with the options that users give, and keeps what each model says. Given by its path to a clean process.

That process has no normalign and no tests: only torch, transformers, NumPy and Pillow here.
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor


DEVICE_MAPS = {
    "auto": "auto",
    "cpu": {"": "cpu"},
    "disk": {
        "model.vision_tower": "cpu",
        "model.multi_modal_projector": "disk",
        "model.language_model.embed_tokens": "cpu",
        "model.language_model.layers.0": "cpu",
        "model.language_model.layers.1": "disk",
        "model.language_model.norm": "disk",
        "model.language_model.rotary_emb": "cpu",
        "lm_head": "cpu",
    },
}
PROMPTS = {
    "one image": ("<image> w10 w11 w12 w13 w14 w15", 1),
    "no image": ("w20 w21", 0),
    "two images": ("<image> w30 <image> w31 w32", 2),
    "another image": ("<image> w10", 1),
}
TEXT = "w20 w21 w22 w23 w24 w25 w26"
MAX_NEW_TOKENS = 5
GENERATION = int(transformers.__version__.split(".")[0])


def pictures(count: int, seed: int = 0) -> list[np.ndarray]:
    """Noise, the same for a seed every time."""
    return list(np.random.default_rng(seed).integers(0, 256, (count, 20, 30, 3), dtype=np.uint8))


def inputs_of(processor, names) -> dict[str, torch.Tensor]:
    """The prompts of these names as one batch with padding on the left; each has pictures of its own."""
    images = [image for name in names for image in pictures(PROMPTS[name][1], seed=list(PROMPTS).index(name))]
    return processor(
        text=[PROMPTS[name][0] for name in names],
        images=images or None,
        return_tensors="pt",
        padding=True,
        padding_side="left",
    )


@torch.no_grad()
def logits_of(model, processor, names=PROMPTS) -> np.ndarray:
    """Logits of the token that follows each prompt, of shape (prompts, vocabulary), one prompt at a time."""
    rows = [model(**inputs_of(processor, [name]).to(model.dtype)).logits[0, -1] for name in names]
    return torch.stack(rows).float().numpy()


def answers_of(model, processor, names) -> list[list[int]]:
    """Greedy answers to prompts in one batch, as token ids up to the first end."""
    inputs = inputs_of(processor, names).to(model.dtype)
    tokens = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    rows = tokens[:, inputs["input_ids"].shape[1] :].tolist()
    end = processor.tokenizer.eos_token_id
    return [row[: row.index(end)] if end in row else row for row in rows]


def load(folder: str, auto_class=AutoModelForImageTextToText, **options):
    return auto_class.from_pretrained(folder, trust_remote_code=True, **options).eval()


def load_with_options(folder: str, work: str) -> tuple[dict, dict[str, np.ndarray]]:
    """What loading with each option gives: facts that JSON can hold, and logits by the option's name."""
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    facts, logits = {}, {}

    def keep(name: str, model) -> None:
        # torch is slow in bfloat16 on most CPUs
        names = list(PROMPTS)[:1] if name == "bfloat16" else PROMPTS
        logits[name] = logits_of(model, processor, names)
        facts[name] = {
            "dtypes": sorted({str(p.dtype) for n, p in model.named_parameters() if "aligned_norm" not in n}),
            "norm_dtypes": sorted({str(p.dtype) for p in model.get_aligned_norm().parameters()}),
            "attention": [
                model.config._attn_implementation,
                model.config.text_config._attn_implementation,
                model.config.vision_config._attn_implementation,
            ],
            "device_map": {k: str(v) for k, v in (getattr(model, "hf_device_map", None) or {}).items()},
            "offloaded": sum(p.device.type == "meta" for p in model.parameters()),
        }

    for name in ("float32", "bfloat16"):
        keep(name, load(folder, dtype=getattr(torch, name)))
    for name, device_map in DEVICE_MAPS.items():
        model = load(folder, device_map=device_map, offload_folder=str(Path(work) / name))
        keep(f"device_map {name}", model)
        facts[f"device_map {name}"]["answers"] = answers_of(model, processor, PROMPTS)
    for name in ("eager", "sdpa"):
        keep(name, load(folder, attn_implementation=name))
    try:
        load(folder, attn_implementation="quick")
    except ValueError as error:
        facts["unknown attention"] = str(error)

    model = load(folder)
    facts["one by one"] = [answers_of(model, processor, [name])[0] for name in PROMPTS]
    facts["in one batch"] = answers_of(model, processor, PROMPTS)
    facts["text alone in one batch"] = answers_of(model, processor, ["no image", "no image"])

    causal = load(folder, AutoModelForCausalLM)
    facts["causal class"] = type(causal).__name__
    with torch.no_grad():
        logits["text"] = causal(**processor.tokenizer(TEXT, return_tensors="pt")).logits[0].numpy()

    # transformers 4.57 compares the number of placeholders in Python, which no graph can hold
    facts["whole graph"] = GENERATION > 4
    compiled = torch.compile(model, backend="eager", fullgraph=facts["whole graph"])
    # one prompt, as each new shape is compiled anew
    logits["compiled"] = logits_of(compiled, processor, ["one image"])
    return facts, logits
