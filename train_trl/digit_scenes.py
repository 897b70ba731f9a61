"""Built-in data: scenes of real handwritten digits with captions and questions, drawn from a seed, without a network.

A scene is a picture of 64 x 64 pixels in four quarters; one to four of them hold a tinted handwritten digit (UCI optical
digits, see data/README.md). Stage 1 rows ask for a caption of the whole scene; stage 2 rows ask one question each:

    kind       question                                 answer
    digit      Which digit is at the top left?          7
    colour     What colour is the digit at the top left?   red
    count      How many digits are there?               3
    exists     Is there a 7?                            yes
    largest    Which digit is the largest?              9
    row        Read the bottom row.                     7 3

Training and test scenes show digits of disjoint samples.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image


if TYPE_CHECKING:
    from datasets import Dataset

Split = Literal["train", "test"]

IMAGE_SIZE = 64
CELL_SIZE = IMAGE_SIZE // 2
PLACES = ("top left", "top right", "bottom left", "bottom right")
COLOURS = {
    "red": (255, 60, 60),
    "green": (60, 220, 80),
    "blue": (80, 120, 255),
    "yellow": (250, 220, 60),
    "purple": (205, 80, 235),
    "white": (240, 240, 240),
}
QUESTION_KINDS = ("digit", "colour", "count", "exists", "largest", "row")
CAPTION_PROMPTS = ("Describe the scene.", "What is in the picture?", "Write a caption.")

# "Is there a 7?" is answered "no" for a scene that holds a 1: the digits are paired with one that looks like them. As
# pairs are symmetric, every digit is asked for as often with the answer "yes" as with "no".
LOOKALIKE = {1: 7, 7: 1, 3: 8, 8: 3, 4: 9, 9: 4, 5: 6, 6: 5, 0: 2, 2: 0}

_DATA_FILE = Path(__file__).parent / "data" / "optical_digits.npz"


@dataclass(frozen=True)
class Digit:
    """A digit in a scene: its value, its colour's name and the number of the handwritten sample that is drawn."""

    value: int
    colour: str
    sample: int


Scene = tuple["Digit | None", "Digit | None", "Digit | None", "Digit | None"]
"""The four quarters in the order of PLACES; None where there is nothing."""


@dataclass(frozen=True)
class SceneQuestion:
    """A scene, what is asked about it, and the right answer."""

    scene: Scene
    kind: str
    question: str
    answer: str
    text_only: bool = False


@lru_cache(maxsize=1)
def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """The handwritten digits: images of shape (1797, 8, 8) with values 0-16, and labels of shape (1797,)."""
    if not _DATA_FILE.is_file():
        raise FileNotFoundError(f"The built-in digits are missing: {_DATA_FILE}. Install normalign again.")
    with np.load(_DATA_FILE, allow_pickle=False) as data:
        return data["images"], data["labels"]


@lru_cache(maxsize=2)
def digit_samples(split: Split) -> dict[int, tuple[int, ...]]:
    """The numbers of the samples that a split may show, by the digit's value. The two splits share none."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}.")
    samples: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(load_digits()[1]):
        if (index // 10 % 5 == 4) == (split == "test"):
            samples[int(label)].append(index)
    return {value: tuple(samples[value]) for value in range(10)}


def caption_of(scene: Scene) -> str:
    """The caption that describes the whole scene, one part for each quarter."""
    parts = (f"{digit.colour} {digit.value}" if digit else "empty" for digit in scene)
    return "; ".join(f"{place}: {part}" for place, part in zip(PLACES, parts))


def draw_questions(
    count: int,
    seed: int = 0,
    split: Split = "train",
    stage: Literal[1, 2] = 2,
    text_only_share: float = 0.1,
    kinds: Sequence[str] = QUESTION_KINDS,
) -> list[SceneQuestion]:
    """Draw `count` scenes with one question each, not yet rendered; the same arguments always draw the same.

    Stage 1 asks for captions only. Stage 2 asks every kind equally often, "yes" as often as "no", and makes
    `text_only_share` of the rows text-only (at every stretch of the list alike).

    Raises:
        ValueError: for a count below 0, a share outside 0-1, or an unknown split, stage or kind.
    """
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}.")
    if stage not in (1, 2):
        raise ValueError(f"stage must be 1 or 2, got {stage!r}.")
    if not 0 <= text_only_share <= 1:
        raise ValueError(f"text_only_share must lie between 0 and 1, got {text_only_share}.")
    unknown = sorted(set(kinds) - set(QUESTION_KINDS))
    if unknown or not kinds:
        raise ValueError(f"Unknown question kinds {unknown}; choose from {', '.join(QUESTION_KINDS)}.")
    rng = Random(f"digit scenes {split} {stage} {seed}")
    samples = digit_samples(split)
    if stage == 1:
        return [_draw_caption(rng, samples) for _ in range(count)]
    positives: Counter[str] = Counter()
    rows = []
    block: list[str] = []
    for index in range(count):
        if not block:
            block = list(kinds)
            rng.shuffle(block)
        kind = block.pop()
        positive = positives[kind] % 2 == 0
        positives[kind] += 1
        text_only = int((index + 1) * text_only_share) > int(index * text_only_share)
        scene, question, answer = _draw_question(rng, samples, kind, positive)
        rows.append(SceneQuestion(scene, kind, question, answer, text_only))
    rng.shuffle(rows)
    return rows


def render_scene(scene: Scene, seed: int | str = 0) -> Image.Image:
    """Paint a scene as an RGB picture of 64 x 64 pixels; `seed` sets sizes, places within the quarters and noise."""
    rng = np.random.default_rng(list(str(seed).encode()))
    background = rng.uniform(0, 40, size=3)
    canvas = np.tile(background, (IMAGE_SIZE, IMAGE_SIZE, 1))
    images = load_digits()[0]
    for index, digit in enumerate(scene):
        # Drawn for empty quarters too, so that one digit more does not change how the others look.
        size = int(rng.integers(22, 29))
        top, left = rng.integers(0, CELL_SIZE - size + 1, size=2)
        tint_jitter = rng.uniform(-20, 20, size=3)
        if digit is None:
            continue
        top, left = top + index // 2 * CELL_SIZE, left + index % 2 * CELL_SIZE
        small = Image.fromarray((images[digit.sample] * 15.9).astype(np.uint8))
        ink = np.asarray(small.resize((size, size), Image.Resampling.BICUBIC), dtype=np.float64)[..., None] / 255
        tint = np.array(COLOURS[digit.colour]) + tint_jitter
        patch = canvas[top : top + size, left : left + size]
        canvas[top : top + size, left : left + size] = patch * (1 - ink) + tint * ink
    canvas += rng.normal(0, 4, size=canvas.shape)
    return Image.fromarray(canvas.clip(0, 255).astype(np.uint8))


def digit_scene_rows(
    count: int,
    seed: int = 0,
    split: Split = "train",
    stage: Literal[1, 2] = 2,
    text_only_share: float = 0.1,
    kinds: Sequence[str] = QUESTION_KINDS,
) -> list[dict[str, Any]]:
    """Rows for TRL's SFTTrainer, in its conversational form: `messages` and `images`, and what was asked beside them.

    Args:
        count: number of rows.
        seed: the same arguments always give the same rows; another seed gives other scenes.
        split: "train" or "test"; they show disjoint samples of handwriting.
        stage: 1 for captions of the whole scene, 2 for questions.
        text_only_share: share of the stage 2 rows in which a caption stands in place of the picture, `images` is empty.
        kinds: the kinds of questions that stage 2 asks.

    Returns:
        One dictionary a row: `messages`, `images` (a list with one PIL picture, or none), `kind` ("caption" or one of
        QUESTION_KINDS), `question`, `answer`, `caption` (the scene in words) and `text_only`.

    Raises:
        ValueError: for a count below 0, a share outside 0-1, or an unknown split, stage or kind.
    """
    questions = draw_questions(count, seed, split, stage, text_only_share, kinds)
    return [_row(question, f"{split} {stage} {seed} {index}") for index, question in enumerate(questions)]


def digit_scenes_dataset(
    count: int,
    seed: int = 0,
    split: Split = "train",
    stage: Literal[1, 2] = 2,
    text_only_share: float = 0.1,
    kinds: Sequence[str] = QUESTION_KINDS,
) -> Dataset:
    """The rows of `digit_scene_rows` as a `datasets.Dataset`, ready for TRL's SFTTrainer."""
    import datasets

    rows = digit_scene_rows(count, seed, split, stage, text_only_share, kinds)
    text = datasets.Value("string")
    features = datasets.Features(
        {
            "messages": [{"role": text, "content": [{"type": text, "text": text}]}],
            "images": datasets.Sequence(datasets.Image()),
            "kind": text,
            "question": text,
            "answer": text,
            "caption": text,
            "text_only": datasets.Value("bool"),
        }
    )
    columns = {name: [row[name] for row in rows] for name in features}
    columns["messages"] = [[_with_all_keys(message) for message in messages] for messages in columns["messages"]]
    return datasets.Dataset.from_dict(columns, features=features)


def chance_accuracy(rows: Iterable[dict[str, Any]], training_rows: Iterable[dict[str, Any]] | None = None) -> float:
    """The accuracy on `rows` of the best answers that can be given without the picture.

    That is the most frequent answer to the same question, or else to the same kind of question, in the training
    distribution: `training_rows`, by default 12,000 training questions. Text-only rows are left out on both sides.

    Raises:
        ValueError: if no row with a picture is left.
    """
    rows = [row for row in rows if not row["text_only"]]
    if not rows:
        raise ValueError("chance_accuracy needs at least one row with a picture.")
    by_question: dict[str, Counter[str]] = defaultdict(Counter)
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, question, answer in _default_training_answers() if training_rows is None else _answers(training_rows):
        by_question[question][answer] += 1
        by_kind[kind][answer] += 1
    right = 0
    for row in rows:
        answers = by_question.get(row["question"]) or by_kind.get(row["kind"]) or Counter()
        right += any(answer == row["answer"] for answer, _ in answers.most_common(1))
    return right / len(rows)


def _draw_scene(
    rng: Random, samples: dict[int, tuple[int, ...]], values: Sequence[int], places: Iterable[int]
) -> Scene:
    """Put digits of these values at these places, each in a random colour and handwriting."""
    at_place = dict(zip(places, values))
    return tuple(
        Digit(at_place[place], rng.choice(tuple(COLOURS)), rng.choice(samples[at_place[place]]))
        if place in at_place
        else None
        for place in range(4)
    )


def _draw_caption(rng: Random, samples: dict[int, tuple[int, ...]]) -> SceneQuestion:
    count = rng.randint(1, 4)
    scene = _draw_scene(rng, samples, [rng.randrange(10) for _ in range(count)], rng.sample(range(4), count))
    return SceneQuestion(scene, "caption", rng.choice(CAPTION_PROMPTS), caption_of(scene))


def _draw_question(
    rng: Random, samples: dict[int, tuple[int, ...]], kind: str, positive: bool
) -> tuple[Scene, str, str]:
    """Draw what is asked first and a scene for it, so that the answers stay balanced; `positive` is for "exists"."""
    count = rng.randint(1 if kind in ("digit", "colour", "count", "row") else 2, 4)
    places = rng.sample(range(4), count)
    values = [rng.randrange(10) for _ in range(count)]
    if kind == "largest":
        largest = rng.randint(1, 9)
        values = [largest] + [rng.randint(0, largest) for _ in range(count - 1)]
    elif kind == "exists" and not positive:
        asked = LOOKALIKE[values[0]]
        values = [rng.choice([other for other in range(10) if other != asked]) if v == asked else v for v in values]
    scene = _draw_scene(rng, samples, values, places)
    place = PLACES[places[0]]
    if kind == "digit":
        return scene, f"Which digit is at the {place}?", str(values[0])
    if kind == "colour":
        return scene, f"What colour is the digit at the {place}?", scene[places[0]].colour
    if kind == "count":
        return scene, "How many digits are there?", str(count)
    if kind == "exists":
        return scene, f"Is there a {values[0] if positive else LOOKALIKE[values[0]]}?", "yes" if positive else "no"
    if kind == "largest":
        return scene, "Which digit is the largest?", str(max(values))
    row = places[0] // 2
    shown = [str(digit.value) for digit in scene[2 * row : 2 * row + 2] if digit]
    return scene, f"Read the {('top', 'bottom')[row]} row.", " ".join(shown)


def _row(item: SceneQuestion, seed: str) -> dict[str, Any]:
    caption = caption_of(item.scene)
    if item.text_only:
        images = []
        content = [{"type": "text", "text": f"{caption}\n{item.question}"}]
    else:
        images = [render_scene(item.scene, seed)]
        content = [{"type": "image"}, {"type": "text", "text": item.question}]
    return {
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "text", "text": item.answer}]},
        ],
        "images": images,
        "kind": item.kind,
        "question": item.question,
        "answer": item.answer,
        "caption": caption,
        "text_only": item.text_only,
    }


def _with_all_keys(message: dict[str, Any]) -> dict[str, Any]:
    """Arrow structs have all keys in every entry: an image's text is None."""
    return {**message, "content": [{"type": part["type"], "text": part.get("text")} for part in message["content"]]}


def _answers(rows: Iterable[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(row["kind"], row["question"], row["answer"]) for row in rows if not row["text_only"]]


@lru_cache(maxsize=1)
def _default_training_answers() -> list[tuple[str, str, str]]:
    questions = draw_questions(12_000, text_only_share=0)
    captions = draw_questions(2_000, stage=1)
    return [(item.kind, item.question, item.answer) for item in questions + captions]
