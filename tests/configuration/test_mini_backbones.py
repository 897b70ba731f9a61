"""The mini backbones: small, loadable offline, truly pretrained, and as far apart in norm as large ones."""

from pathlib import Path

import pytest
import torch
from transformers import AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoTokenizer

import normalign.configuration
from normalign.train_trl.digit_scenes import QUESTION_KINDS, caption_of, digit_scene_rows, draw_questions, render_scene


FOLDER = Path(normalign.configuration.__file__).parent / "mini_backbones"
FEATURE_LAYER = -2


@pytest.fixture(scope="module")
def encoder():
    return AutoModel.from_pretrained(FOLDER / "vision").float().eval()


@pytest.fixture(scope="module")
def language_model():
    return AutoModelForCausalLM.from_pretrained(FOLDER / "language").float().eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER / "language")


@torch.no_grad()
def visual_tokens(encoder, scenes, seed):
    """Encoder outputs (N, 16, width) of the feature layer."""
    processor = AutoImageProcessor.from_pretrained(FOLDER / "vision")
    images = [render_scene(scene, f"{seed} {index}") for index, scene in enumerate(scenes)]
    pixels = processor(images, return_tensors="pt")["pixel_values"].float()
    return encoder(pixels, output_hidden_states=True).hidden_states[FEATURE_LAYER]


def answers_to(language_model, tokenizer, prompts):
    """Greedy answers, one by one, so that no padding is involved."""
    answers = []
    for prompt in prompts:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        output = language_model.generate(**inputs, max_new_tokens=32, do_sample=False)
        answers.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def test_both_together_take_at_most_8_megabytes():
    sizes = {path.name: path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= 8_000_000
    assert not any(name.endswith((".bin", ".pt")) for name in sizes)


def test_architectures_and_precision():
    encoder = AutoModel.from_pretrained(FOLDER / "vision", dtype="auto")
    language_model = AutoModelForCausalLM.from_pretrained(FOLDER / "language", dtype="auto")
    assert type(encoder).__name__ == "SiglipVisionModel"
    assert type(language_model).__name__ == "LlamaForCausalLM"
    assert encoder.dtype == language_model.dtype == torch.float16


def test_encoder_tells_held_out_digits_and_colours_apart(encoder):
    """A linear probe on single patch tokens, fitted on training scenes, names what lies in each patch's quarter."""
    colours = ("red", "green", "blue", "yellow", "purple", "white")
    features, digits, tints = {}, {}, {}
    for split, count in (("train", 500), ("test", 250)):
        scenes = [item.scene for item in draw_questions(count, seed=11, split=split, stage=1)]
        tokens = visual_tokens(encoder, scenes, split)
        quarters = tokens.unflatten(1, (2, 2, 2, 2)).permute(0, 1, 3, 2, 4, 5).reshape(len(scenes), 4, -1)
        there = torch.tensor([[cell is not None for cell in scene] for scene in scenes])
        features[split] = torch.cat([quarters[there], torch.ones(int(there.sum()), 1)], 1)
        digits[split] = torch.tensor([cell.value for scene in scenes for cell in scene if cell])
        tints[split] = torch.tensor([colours.index(cell.colour) for scene in scenes for cell in scene if cell])
    for labels, classes, least in ((digits, 10, 0.93), (tints, 6, 0.99)):
        x, y = features["train"], torch.nn.functional.one_hot(labels["train"], classes).float()
        ridge = 0.1 * x.pow(2).mean() * len(x) ** 0.5 * torch.eye(x.shape[1])
        weights = torch.linalg.solve(x.T @ x + ridge, x.T @ y)
        accuracy = ((features["test"] @ weights).argmax(-1) == labels["test"]).float().mean().item()
        assert accuracy >= least


def test_language_model_answers_questions_about_a_caption(language_model, tokenizer):
    rows = digit_scene_rows(90, seed=12, split="test", text_only_share=1.0)
    prompts = [row["messages"][0]["content"][0]["text"] for row in rows]
    right = [answer == row["answer"] for answer, row in zip(answers_to(language_model, tokenizer, prompts), rows)]
    assert {row["kind"] for row in rows} == set(QUESTION_KINDS)
    assert sum(right) / len(right) >= 0.95


def test_language_model_cannot_answer_without_the_caption(language_model, tokenizer):
    rows = digit_scene_rows(60, seed=13, split="test", text_only_share=0.0, kinds=("digit", "colour", "row"))
    answers = answers_to(language_model, tokenizer, [row["question"] for row in rows])
    assert sum(answer == row["answer"] for answer, row in zip(answers, rows)) / len(rows) <= 0.4


def test_language_model_turns_a_raster_reading_into_a_caption(language_model, tokenizer):
    items = draw_questions(10, seed=14, split="test", stage=1)
    prompts = []
    for item in items:
        words = [f"{cell.colour} {cell.value}" if cell else "empty empty" for cell in item.scene]
        rows = [" ".join(words[:2])] * 2 + [" ".join(words[2:])] * 2
        prompts.append(f"{' '.join(rows)}\n{item.question}")
    right = [a == caption_of(i.scene) for a, i in zip(answers_to(language_model, tokenizer, prompts), items)]
    assert sum(right) >= 9


def test_every_digit_is_one_token(tokenizer):
    for digit in range(10):
        assert len(tokenizer(str(digit), add_special_tokens=False)["input_ids"]) == 1
        assert len(tokenizer(f" {digit}", add_special_tokens=False)["input_ids"]) == 1
    text = "top left: red 7; top right: empty\nRead the top row."
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_tokenizer_speaks_chatml_and_leaves_the_image_token_to_compose(tokenizer, language_model):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert "<image>" not in tokenizer.get_vocab()
    assert len(tokenizer) == language_model.get_input_embeddings().num_embeddings
    assert language_model.generation_config.eos_token_id == tokenizer.eos_token_id
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Is there a 7?"}]},
        {"role": "assistant", "content": "yes"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>user\nIs there a 7?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    )
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    trained = [i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"]) if m]
    assert tokenizer.decode(trained) == "yes<|im_end|>"


def test_norms_show_the_gap_that_normalign_closes(encoder, language_model):
    text_norm = language_model.get_input_embeddings().weight.norm(dim=-1).mean().item()
    tokens = visual_tokens(encoder, [item.scene for item in draw_questions(40, split="test", stage=1)], "norm")
    assert 0.25 <= text_norm <= 0.6
    assert tokens.norm(dim=-1).mean().item() >= 20
    torch.manual_seed(0)
    width = language_model.config.hidden_size
    projector = torch.nn.Sequential(
        torch.nn.Linear(tokens.shape[-1], width), torch.nn.GELU(), torch.nn.Linear(width, width)
    )
    assert projector(tokens).norm(dim=-1).mean().item() >= 5 * text_norm
