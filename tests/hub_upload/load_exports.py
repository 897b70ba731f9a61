"""Loads models and keeps what they see and say. Runs in the tests' process and, given by its path, in the other generation.

That process has no normalign and no tests: only torch, transformers, NumPy and Pillow here.
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image


AUTO_CLASSES = {
    4: ["AutoModelForVision2Seq", "AutoModelForImageTextToText", "AutoModel"],
    5: ["AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModel"],
}
GENERATION = int(transformers.__version__.split(".")[0])
QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w10 w11 w12?"}]}]


def picture() -> Image.Image:
    """The same noise every time."""
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 60, 3), dtype=np.uint8))


def question(processor):
    """The model's inputs for the picture and the question about it."""
    text = processor.apply_chat_template(QUESTION, add_generation_prompt=True)
    return processor(images=picture(), text=text, return_tensors="pt")


@torch.no_grad()
def hidden_states(model, processor) -> dict[str, np.ndarray]:
    """What a model without head makes of the question."""
    inputs = question(processor).to(model.dtype)
    return {"hidden_states": model(**inputs).last_hidden_state.float().numpy()}


@torch.no_grad()
def seen_and_said(model, processor) -> dict[str, np.ndarray]:
    """What a model gets of a picture and a question, its logits, hidden states, and greedy answer."""
    inputs = question(processor)
    found = {"input_ids": inputs["input_ids"].numpy(), "pixel_values": inputs["pixel_values"].numpy()}
    output = model(**inputs.to(model.dtype), output_hidden_states=True)
    found["hidden_states"] = output.hidden_states[-1].float().numpy()
    found["logits"] = output.logits.float().numpy()
    found["answer"] = model.generate(**inputs, max_new_tokens=6, do_sample=False).numpy()
    return found


def load_all(root: str, every_way: list[str]) -> tuple[dict[str, dict], dict[str, np.ndarray]]:
    """Loads each folder in `root` by this generation's first auto class, those of `every_way` by all, and by a pipeline.

    Returns:
        for each folder and class what loading reported, under "folder/class", and what the models saw and said.
    """
    reports, arrays = {}, {}
    for folder in sorted(Path(root).iterdir()):
        processor = transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=True)
        for name in AUTO_CLASSES[GENERATION] if folder.name in every_way else AUTO_CLASSES[GENERATION][:1]:
            model, info = getattr(transformers, name).from_pretrained(
                folder, trust_remote_code=True, dtype="auto", output_loading_info=True
            )
            case = f"{folder.name}/{name}"
            reports[case] = {
                "problems": {key: list(map(str, value)) for key, value in info.items() if value},
                "class": type(model).__name__,
                "dtype": str(model.dtype),
            }
            look = hidden_states if name == "AutoModel" else seen_and_said
            arrays |= {f"{case}/{key}": value for key, value in look(model.eval(), processor).items()}
        if folder.name in every_way:
            pipe = transformers.pipeline("image-text-to-text", model=str(folder), trust_remote_code=True, dtype="auto")
            content = [{"type": "image", "image": picture()}, *QUESTION[0]["content"][1:]]
            answer = pipe(
                text=[{"role": "user", "content": content}],
                max_new_tokens=6,
                do_sample=False,
                return_full_text=False,
            )
            reports[f"{folder.name}/pipeline"] = {"answer": answer[0]["generated_text"]}
    return reports, arrays
