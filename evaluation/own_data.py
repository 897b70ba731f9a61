"""Questions of one's own, one JSON object a line: what `normalign evaluate --data FILE.jsonl` asks and how it scores it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..configuration.errors import NormalignError
from .answers import extract_choice, extract_yes_no, vqa_match
from .images import open_image
from .requests import Request, Scores, Unit


_KEYS = {"id", "image", "images", "question", "answer", "answers", "choices", "kind"}
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PICK = "Answer with the option's letter from the given choices directly."


class OwnTask:
    """A file of questions; see `Task` in requests.py.

    Each row has `question`, and `answer` or a list `answers`; and, if wanted, `image` or `images` (paths, beside the file
    unless absolute), `choices` (a list of texts), `kind` (figures are given for each kind) and `id`. With choices, the
    answer is a letter or one of the texts, and what the model says is read by the rules of `extract_choice`; with `yes` or
    `no` as answer, by those of `extract_yes_no`; else it must equal an answer after VQA's normalisation.

    Raises:
        NormalignError: the file is missing or empty, or a row is not of this form; names file and line.
    """

    generates = True
    metric = "accuracy"
    max_new_tokens = 64
    stop = ()

    def __init__(self, file: Path, limit: int | None = None) -> None:
        self.file, self.name = file, file.stem
        self.rows: dict[str, dict[str, Any]] = {}
        for number, line in enumerate(_lines(file), start=1):
            if not line.strip():
                continue
            row = _read_row(line, f"Line {number} of {file}", file.parent)
            row_id = str(row.get("id", number))
            if row_id in self.rows:
                raise NormalignError(f"Line {number} of {file}: the id {row_id!r} stands in an earlier line too.")
            self.rows[row_id] = row
            if limit is not None and len(self.rows) == limit:
                break
        if not self.rows:
            raise NormalignError(f"There is no question in {file}. It needs one JSON object a line.")
        self.has_images = any(row["images"] for row in self.rows.values())
        self.about = {"harness": "normalign", "task_version": None, "dataset": file.name, "split": None}

    def requests(self) -> list[Request]:
        return [
            Request(row_id, _prompt(row), partial(_opened, row["images"], row["where"]))
            for row_id, row in self.rows.items()
        ]

    def score(self, answers: dict[str, str]) -> Scores:
        scores = Scores(None)
        kinds: dict[str, list[float]] = defaultdict(list)
        for row_id, answer in answers.items():
            row = self.rows[row_id]
            right = self._is_right(row_id, answer, scores)
            scores.targets[row_id] = row["answers"] if len(row["answers"]) > 1 else row["answers"][0]
            scores.units.append(Unit((row_id,), float(right)))
            if row.get("kind") is not None:
                kinds[str(row["kind"])].append(float(right))
        if scores.units:
            scores.value = sum(unit.score for unit in scores.units) / len(scores.units)
        scores.kinds = dict(sorted(kinds.items()))
        return scores

    def _is_right(self, row_id: str, answer: str, scores: Scores) -> bool:
        row = self.rows[row_id]
        way = way_of(row["answers"], row["choices"])
        if way != "text":
            scores.parsed[row_id] = read_answer(answer, way, row["choices"])
        return is_right(answer, row["answers"], row["choices"])


def way_of(answers: Sequence[str], choices: Sequence[str]) -> Literal["choice", "yes_no", "text"]:
    """How an answer is read, by what is right: as one of `choices`, as yes or no, or as a text."""
    if choices:
        return "choice"
    return "yes_no" if len(answers) == 1 and answers[0].lower() in ("yes", "no") else "text"


def read_answer(answer: str, way: str, choices: Sequence[str]) -> str | None:
    """The letter of a choice, or yes or no, out of what a model says; None where it gives none."""
    return extract_choice(answer, dict(zip(_LETTERS, choices))) if way == "choice" else extract_yes_no(answer)


def is_right(answer: str, answers: Sequence[str], choices: Sequence[str]) -> bool:
    """Whether a model's answer is one of the right ones, letters where there are `choices`; see `OwnTask` for how it is read."""
    way = way_of(answers, choices)
    if way == "text":
        return vqa_match(answer, answers)
    return read_answer(answer, way, choices) in [one if choices else one.lower() for one in answers]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: U+2028 may stand in a text
    except FileNotFoundError as error:
        raise NormalignError(f"There is no file {file}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise NormalignError(f"{file} cannot be read as UTF-8 text: {error}.") from error


def _read_row(line: str, where: str, folder: Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise NormalignError(f"{where} is no JSON: {error}.") from error
    if not isinstance(row, dict):
        raise NormalignError(f"{where} is no JSON object, as {{...}}.")
    if unknown := sorted(set(row) - _KEYS):
        raise NormalignError(
            f"{where} has the key {', '.join(map(repr, unknown))}; known are {', '.join(sorted(_KEYS))}."
        )
    if not isinstance(row.get("question"), str) or not row["question"].strip():
        raise NormalignError(f"{where} has no question: the key 'question' needs a text.")
    for one, several in (("answer", "answers"), ("image", "images")):
        if one in row and several in row:
            raise NormalignError(f"{where} has both '{one}' and '{several}'. Give one of them.")
    given = row.get("answers", [row["answer"]] if "answer" in row else [])
    answers = [given] if isinstance(given, str) else given
    if not isinstance(answers, list) or not answers or not all(_is_answer(one) for one in answers):
        raise NormalignError(f"{where} has no answer: give 'answer' (a text) or 'answers' (a list of accepted texts).")
    images = row.get("images", [row["image"]] if row.get("image") is not None else [])
    if not isinstance(images, list) or not all(isinstance(path, str) and path.strip() for path in images):
        raise NormalignError(f"{where}: 'image' needs a path, 'images' a list of paths.")
    choices = row.get("choices") or []
    if not isinstance(choices, list) or not all(_is_answer(text) for text in choices) or len(choices) == 1:
        raise NormalignError(f"{where}: 'choices' needs a list of two or more texts.")
    if len(choices) > len(_LETTERS):
        raise NormalignError(f"{where} has {len(choices)} choices; at most {len(_LETTERS)} have letters.")
    answers, choices = [str(one).strip() for one in answers], [str(text).strip() for text in choices]
    if choices:
        answers = [letter_of(one, choices, where) for one in answers]
    paths = [path if path.is_absolute() else folder / path for path in (Path(one).expanduser() for one in images)]
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise NormalignError(f"{where}: there is no image {', '.join(missing)}.")
    return {**row, "answers": answers, "choices": choices, "images": paths, "where": where}


def _is_answer(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool) and bool(str(value).strip())


def letter_of(answer: str, choices: Sequence[str], where: str) -> str:
    """The letter of a right answer, given as one or as the text of a choice.

    Raises:
        NormalignError: it is neither; names `where` the row stands.
    """
    texts = [i for i, text in enumerate(choices) if text.casefold() == answer.casefold()]
    if (
        len(texts) == 1
        and len(answer) == 1
        and answer.upper() in _LETTERS[: len(choices)].replace(_LETTERS[texts[0]], "")
    ):
        raise NormalignError(
            f"{where}: the answer {answer!r} is the text of choice {_LETTERS[texts[0]]} and the letter of another one. Order the "
            f"choices {list(choices)} by their own letters, or give them texts that are no letters."
        )
    if len(texts) == 1:
        return _LETTERS[texts[0]]
    if len(answer) == 1 and answer.upper() in _LETTERS[: len(choices)]:
        return answer.upper()
    raise NormalignError(
        f"{where}: the answer {answer!r} is {'several of' if texts else 'none of'} the choices {choices}, nor one of the "
        f"letters A to {_LETTERS[len(choices) - 1]}."
    )


def _prompt(row: dict[str, Any]) -> str:
    """The question as it stands; choices follow as lines with letters and the request to pick one, as in LLaVA's prompts."""
    if not row["choices"]:
        return row["question"]
    lines = [f"{letter}. {text}" for letter, text in zip(_LETTERS, row["choices"])]
    return "\n".join([row["question"], *lines, _PICK])


def _opened(paths: list[Path], where: str) -> list:
    return [open_image(path, where) for path in paths]
