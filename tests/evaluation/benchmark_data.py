"""The nine benchmarks in small: a few rows each, in the layout and schema of their data sets on the Hub, with images drawn here.

A task of lmms-eval or lm-eval whose `dataset_path` is one of these folders runs as it stands: `dataset_name`, splits and columns
are those of the original. `right_answer` and `wrong_answer` are what a model says to score 1.0 and 0.0 in the task's own parsing;
`gold_index` is the choice that the two text tasks expect to be the likeliest.
"""

from __future__ import annotations

from pathlib import Path
from string import ascii_uppercase

from datasets import ClassLabel, Dataset, Features, Image, List, Value
from PIL import Image as PILImage
from PIL import ImageDraw


LETTERS = "ABCD"
GENERATION_TASKS = (
    "mmbench_en_dev_static",
    "mmstar",
    "pope",
    "seedbench_2_plus",
    "ocrbench",
    "scienceqa_img",
    "ai2d",
)
TEXT_TASKS = ("hellaswag", "mmlu")
TASKS = GENERATION_TASKS + TEXT_TASKS

MMSTAR_CATEGORIES = {
    "coarse perception": ["image scene and topic", "image style & quality"],
    "fine-grained perception": ["object counting", "recognition"],
    "instance reasoning": ["single-instance reasoning"],
    "logical reasoning": ["diagram reasoning"],
    "science & technology": ["biology & chemistry & physics"],
    "math": ["geometry", "statistical reasoning"],
}
# question type, source data set, answers that count as right
OCRBENCH_ROWS = [
    ("Regular Text Recognition", "IIIT5K", ["CENTRE"]),
    ("Irregular Text Recognition", "SVTP", ["ronaldo"]),
    ("Artistic Text Recognition", "WordArt", ["Vintage"]),
    ("Handwriting Recognition", "IAM", ["quickly"]),
    ("Digit String Recognition", "ORAND-CAR-2014", ["4096"]),
    ("Non-Semantic Text Recognition", "NonSemanticText", ["lkrzt"]),
    ("Scene Text-centric VQA", "TextVQA", ["stop", "stop sign"]),
    ("Doc-oriented VQA", "docVQA", ["12 May 1987"]),
    ("Key Information Extraction", "SROIE", ["$31.90"]),
    ("Handwritten Mathematical Expression Recognition", "HME100k", ["x ^ { 2 } + 1"]),
]
# fmt: off
MMLU_SUBJECTS = [
    "abstract_algebra", "anatomy", "astronomy", "business_ethics", "clinical_knowledge", "college_biology",
    "college_chemistry", "college_computer_science", "college_mathematics", "college_medicine", "college_physics",
    "computer_security", "conceptual_physics", "econometrics", "electrical_engineering", "elementary_mathematics",
    "formal_logic", "global_facts", "high_school_biology", "high_school_chemistry", "high_school_computer_science",
    "high_school_european_history", "high_school_geography", "high_school_government_and_politics",
    "high_school_macroeconomics", "high_school_mathematics", "high_school_microeconomics", "high_school_physics",
    "high_school_psychology", "high_school_statistics", "high_school_us_history", "high_school_world_history",
    "human_aging", "human_sexuality", "international_law", "jurisprudence", "logical_fallacies",
    "machine_learning", "management", "marketing", "medical_genetics", "miscellaneous", "moral_disputes",
    "moral_scenarios", "nutrition", "philosophy", "prehistory", "professional_accounting", "professional_law",
    "professional_medicine", "professional_psychology", "public_relations", "security_studies", "sociology",
    "us_foreign_policy", "virology", "world_religions",
]
# fmt: on


def make_benchmark_data(folder: Path) -> dict[str, Path]:
    """Writes the nine data sets below `folder`; returns, by task name, what takes the place of the task's `dataset_path`."""
    makers = {
        "mmbench_en_dev_static": _mmbench,
        "mmstar": _mmstar,
        "pope": _pope,
        "seedbench_2_plus": _seedbench_2_plus,
        "ocrbench": _ocrbench,
        "scienceqa_img": _scienceqa,
        "ai2d": _ai2d,
        "hellaswag": _hellaswag,
        "mmlu": _mmlu,
    }
    return {task: _write(Path(folder) / task, make()) for task, make in makers.items()}


def right_answer(task: str, doc: dict) -> str:
    """What a model says to row `doc` of a generation task that the task's own parsing counts as right."""
    if task == "pope":
        return doc["answer"]
    if task == "ocrbench":
        return doc["answer"][0]
    return ascii_uppercase[_right_choice(task, doc)]


def wrong_answer(task: str, doc: dict) -> str:
    """What a model says to row `doc` of a generation task that is understood, and wrong."""
    if task == "pope":
        return {"yes": "no", "no": "yes"}[doc["answer"]]
    if task == "ocrbench":
        return "unreadable"
    return ascii_uppercase[(_right_choice(task, doc) + 1) % _choice_count(task, doc)]


def gold_index(task: str, doc: dict) -> int:
    """The choice of row `doc` of a text task that has to be the likeliest."""
    return int({"hellaswag": doc.get("label"), "mmlu": doc.get("answer")}[task])


def _right_choice(task: str, doc: dict) -> int:
    if task in ("scienceqa_img", "ai2d"):
        return int(doc["answer"])
    return LETTERS.index(doc["answer"])


def _choice_count(task: str, doc: dict) -> int:
    if task == "scienceqa_img":
        return len(doc["choices"])
    if task == "ai2d":
        return len(doc["options"])
    if task == "mmbench_en_dev_static":
        return sum(doc[letter] != "nan" for letter in LETTERS)
    return len(LETTERS)


def _write(folder: Path, configs: dict[str, dict[str, Dataset]]) -> Path:
    """A data set repository as on the Hub: parquet files, and a card whose head says which file is which config's split."""
    card = ["---", "configs:"]
    for config, splits in configs.items():
        below = "data" if config == "default" else config
        card += [f"- config_name: {config}", "  data_files:"]
        (folder / below).mkdir(parents=True)
        for split, rows in splits.items():
            rows.to_parquet(folder / below / f"{split}-00000-of-00001.parquet")
            card += [f"  - split: {split}", f"    path: {below}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]), encoding="utf-8")
    return folder


def _table(rows: list[dict], **types) -> Dataset:
    """Columns in the order of the first row; text where `types` does not say otherwise."""
    return Dataset.from_list(rows, features=Features({name: types.get(name, Value("string")) for name in rows[0]}))


def _drawing(number: int, text: str = "") -> PILImage.Image:
    """An image that differs from the others in size, shape, colour and, now and then, mode."""
    width, height = 40 + 24 * (number % 4), 72 - 16 * (number % 3)
    image = PILImage.new("RGB", (width, height), (250, 248, 240))
    draw = ImageDraw.Draw(image)
    colour = [(200, 30, 30), (20, 140, 40), (30, 60, 200), (220, 160, 0)][number % 4]
    box = (6, 6, 26 + number % 5, 26 + number % 7)
    (draw.ellipse if number % 2 else draw.rectangle)(box, fill=colour)
    if text:
        draw.text((4, height - 14), text, fill=(0, 0, 0))
    return image.convert({5: "L", 7: "RGBA"}.get(number, "RGB"))


def _mmbench() -> dict:
    # Each question stands there once per rotation of its options, at index + k * 1,000,000; it counts as right when all are.
    questions = [
        (241, "What colour is the shape?", "nan", ["red", "green", "blue", "yellow"], 0, "attribute_recognition"),
        (252, "What is the shape?", "There is one.", ["a circle", "a star", "a square"], 2, "object_localization"),
        (260, "Is the shape on the left?", "nan", ["yes", "no"], 0, "spatial_relationship"),
        (273, "How many shapes are there?", "Count all.", ["4", "3", "2", "1"], 3, "attribute_recognition"),
    ]
    l2 = {
        "attribute_recognition": "finegrained_perception (instance-level)",
        "object_localization": "finegrained_perception (instance-level)",
        "spatial_relationship": "finegrained_perception (cross-instance)",
    }
    rows = []
    for number, (index, question, hint, options, right, category) in enumerate(questions):
        for shift in range(len(options)):
            shown = [options[(place - shift) % len(options)] for place in range(len(options))]
            cells = [*shown, "nan", "nan"][: len(LETTERS)]
            rows.append(
                {
                    "index": index + shift * 1_000_000,
                    "question": question,
                    "hint": hint,
                    "answer": LETTERS[(right + shift) % len(options)],
                    **dict(zip(LETTERS, cells)),
                    "category": category,
                    "image": _drawing(number),
                    "source": "drawn",
                    "L2-category": l2[category],
                    "comment": "nan",
                    "split": "dev",
                }
            )
    return {"en": {"dev": _table(rows, index=Value("int64"), image=Image())}}


def _mmstar() -> dict:
    kinds = [(category, l2) for category, l2s in MMSTAR_CATEGORIES.items() for l2 in l2s]
    rows = [
        {
            "index": index,
            "question": f"Which label is under shape {index}?\nOptions: A: alpha, B: beta, C: gamma, D: delta",
            "image": _drawing(index, ["alpha", "beta", "gamma", "delta"][index % 4]),
            "answer": LETTERS[index % 4],
            "category": category,
            "l2_category": l2,
            "meta_info": {"source": "drawn", "split": "val", "image_path": f"images/{index}.jpg"},
        }
        for index, (category, l2) in enumerate(kinds)
    ]
    meta = {"source": Value("string"), "split": Value("string"), "image_path": Value("string")}
    return {"default": {"val": _table(rows, index=Value("int64"), image=Image(), meta_info=meta)}}


def _pope() -> dict:
    rows = []
    for number, category in enumerate(["adversarial", "adversarial", "popular", "popular", "random", "random"]):
        thing = ["circle", "square"][number // 2 % 2]
        drawn = "circle" if number % 2 else "square"
        rows.append(
            {
                "id": str(number),
                "question_id": str(number + 1),
                "question": f"Is there a {thing} in the image?",
                "answer": "yes" if thing == drawn else "no",
                "image_source": f"COCO_val2014_{number:012d}",
                "image": _drawing(number),
                "category": category,
            }
        )
    return {"default": {"test": _table(rows, image=Image())}}


def _seedbench_2_plus() -> dict:
    rows = []
    for number, kind in enumerate(["chart", "chart", "map", "map", "web", "web"]):
        words = ["north", "south", "east", "west"]
        rows.append(
            {
                "question_id": str(number),
                "question": f"What does the {kind} say?",
                **{f"choice_{letter}": word for letter, word in zip(LETTERS, words)},
                "answer": LETTERS[number % 4],
                "question_image_type": kind,
                "question_image_subtype": f"{kind}_{number % 2}",
                "image_id": f"{kind}/{number}.png",
                "image": _drawing(number, words[number % 4]),
            }
        )
    return {"default": {"test": _table(rows, image=Image())}}


def _ocrbench() -> dict:
    rows = [
        {
            "dataset": source,
            "question": "what is written in the image?",
            "question_type": kind,
            "answer": answers,
            "image": _drawing(number, answers[0]),
        }
        for number, (kind, source, answers) in enumerate(OCRBENCH_ROWS)
    ]
    return {"default": {"test": _table(rows, answer=List(Value("string")), image=Image())}}


def _scienceqa() -> dict:
    rows = []
    for number in range(5):
        choices = ["oil", "water", "air", "stone", "sand"][: 2 + number % 4]
        rows.append(
            {
                "image": _drawing(number),
                "question": "What is in the vessel?",
                "choices": choices,
                "answer": number % min(len(choices), 4),
                "hint": "The vessel is open." if number % 2 else "",
                "task": "closed choice",
                "grade": f"grade{number + 3}",
                "subject": "natural science",
                "topic": "physics",
                "category": "Materials",
                "skill": "Identify a substance",
                "lecture": "A substance has properties.",
                "solution": "Look at the vessel.",
            }
        )
    types = {"image": Image(), "choices": List(Value("string")), "answer": Value("int8")}
    return {"ScienceQA-IMG": {"test": _table(rows, **types)}}


def _ai2d() -> dict:
    rows = [
        {
            "question": f"Which part does arrow {number} mark?",
            "options": ["root", "stem", "leaf", "flower"],
            "answer": str(number % 4),
            "image": _drawing(number, "leaf"),
        }
        for number in range(6)
    ]
    return {"default": {"test": _table(rows, options=List(Value("string")), image=Image())}}


def _hellaswag() -> dict:
    def rows(split: str, count: int, labelled: bool = True) -> Dataset:
        made = []
        for number in range(count):
            ctx_a, ctx_b = "[header] How to fill a jar [title] Take a jar.", "then the cook" if number % 2 else ""
            made.append(
                {
                    "ind": 10 + number,
                    "activity_label": "Filling a jar",
                    "ctx_a": ctx_a,
                    "ctx_b": ctx_b,
                    "ctx": f"{ctx_a} {ctx_b}".strip(),
                    "endings": ["pours jam in.", "paints the wall. [substeps] Twice.", "sings.", "reads the news."],
                    "source_id": f"wikihow~{number}",
                    "split": split,
                    "split_type": "indomain",
                    "label": str(number % 4) if labelled else "",
                }
            )
        return _table(made, ind=Value("int32"), endings=List(Value("string")))

    splits = {"train": rows("train", 2), "test": rows("test", 1, labelled=False), "validation": rows("val", 4)}
    return {"default": splits}


def _mmlu() -> dict:
    types = {"choices": List(Value("string")), "answer": ClassLabel(names=list(LETTERS))}

    def rows(subject: str, split: str, count: int, start: int) -> Dataset:
        made = [
            {
                "question": f"{split} question {number} of {subject.replace('_', ' ')}?",
                "subject": subject,
                "choices": ["the first", "the second", "the third", "the fourth"],
                "answer": (start + number) % 4,
            }
            for number in range(count)
        ]
        return _table(made, **types)

    return {
        subject: {
            "test": rows(subject, "test", 1 + place % 2, start=place),
            "validation": rows(subject, "validation", 1, start=place),
            "dev": rows(subject, "dev", 5, start=place + 1),
        }
        for place, subject in enumerate(MMLU_SUBJECTS)
    }
