"""Asks a vision-language model about pictures and keeps its logits. Runs in this process and in a clean one alike.

The clean process gets this file by its path and has no normalign: only torch, transformers, NumPy and Pillow here.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image


def chat_messages(prompt: str, image_path: str | Path | None) -> list[dict]:
    """One user turn: the picture, when there is one, then the prompt."""
    content = [{"type": "text", "text": prompt}]
    if image_path is not None:
        with Image.open(image_path) as image:
            content.insert(0, {"type": "image", "image": image.convert("RGB")})
    return [{"role": "user", "content": content}]


@torch.no_grad()
def ask(
    model, processor, image_paths: list, prompts: list[str], max_new_tokens: int = 32
) -> tuple[list[str], np.ndarray]:
    """Greedy answers, and the logits of the token that follows each prompt.

    Args:
        image_paths: one path, or None for no picture, for each prompt.

    Returns:
        the answers without surrounding white space, and float32 logits of shape (prompts, vocabulary).
    """
    answers, logits = [], []
    for image_path, prompt in zip(image_paths, prompts):
        inputs = processor.apply_chat_template(
            chat_messages(prompt, image_path),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        ).to(model.device, model.dtype)
        logits.append(model(**inputs).logits[0, -1].float().cpu().numpy())
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        answers.append(processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return answers, np.stack(logits)


def ask_pipeline(pipe, image_paths: list, prompts: list[str], max_new_tokens: int = 32) -> list[str]:
    """Greedy answers of an image-text-to-text pipeline to the same prompts, without surrounding white space."""
    answers = []
    for image_path, prompt in zip(image_paths, prompts):
        output = pipe(
            text=chat_messages(prompt, image_path),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_full_text=False,
        )
        answers.append(output[0]["generated_text"].strip())
    return answers
