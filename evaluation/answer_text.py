"""Takes the wrapping off a model's answer, and compares answers as texts: VQA's normalisation and OCRBench's containment."""

from __future__ import annotations

import re
from collections.abc import Sequence


# what chat models wrap an answer in: thoughts, LaTeX text commands and math marks, Markdown emphasis and headings
_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL | re.IGNORECASE)
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|bf|rm)\s*\{([^{}]*)\}")
_MARKS = re.compile(r"\\[()\[\]]|[*`$]|^#+\s+|(?<!\w)_+(?=\w)|(?<=\w)_+(?!\w)", re.MULTILINE)
_FINAL = re.compile(
    r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}|<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE
)

_ARTICLES = {"a", "an", "the"}
_NUMBERS = {"none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6"}
_NUMBERS |= {"seven": "7", "eight": "8", "nine": "9", "ten": "10"}
_SUBJECTS = "it|that|there|they|you|who|what|where|when|how"
# contractions whose apostrophe people leave out, without those that are other words then (we're, he'll, she'd, it's)
_CONTRACTION = re.compile(
    rf"\b(?:\w+n't|(?:\w+)'ve|i'm|(?:they|you|who|what|where)'re|(?:{_SUBJECTS})'ll|(?:{_SUBJECTS})'d"
    r"|(?:that|there|what|who|where|when|how|here)'s|o'clock|ma'am|y'all)\b"
)


def fold_full_width(text: str) -> str:
    """The text with full-width ASCII (U+FF01 to U+FF5E) and the ideographic space as plain ASCII."""
    return "".join(
        chr(ord(char) - 0xFEE0) if 0xFF01 <= ord(char) <= 0xFF5E else " " if char == "\u3000" else char
        for char in text
    )


def unwrapped(answer: str) -> str:
    """The answer without full-width forms, <think> parts, LaTeX text commands, and Markdown's emphasis and headings."""
    text = _THOUGHTS.sub(" ", fold_full_width(answer)).replace("’", "'")
    while (shorter := _LATEX_TEXT.sub(r"\1", text)) != text:
        text = shorter
    return _MARKS.sub("", text).strip()


def final_parts(text: str) -> list[str]:
    r"""What stands in \boxed{...} and <answer>...</answer>, in order."""
    return [boxed or tagged for boxed, tagged in _FINAL.findall(text)]


def without_final_marks(text: str) -> str:
    r"""The text with \boxed{...} and <answer>...</answer> replaced by what stands in them."""
    return _FINAL.sub(lambda match: match.group(1) or match.group(2) or "", text)


def normalize_vqa(text: str) -> str:
    """A short answer as VQA compares it: "The two T-shirts!" becomes "2 t shirts".

    In this order: full-width forms become ASCII; lower case; a contraction loses its apostrophe ("don't" is "dont"), a
    possessive keeps it; the comma in 1,000 and the points in a.m. go; other punctuation becomes a space, but not inside a number (1.5, 10:30,
    -3), nor % and the signs of currencies; none and zero to ten become digits; the articles a, an and the go, unless nothing
    else is left; one space between words.

    Source: Antol et al., VQA, ICCV 2015, section 3 (pre-processing of answers for the evaluation). Its program adds
    missing apostrophes from a list of contractions; here the apostrophe goes on both sides, which compares alike.
    """
    text = fold_full_width(text).replace("’", "'").lower()
    text = _CONTRACTION.sub(lambda match: match.group().replace("'", ""), text)
    text = re.sub(r"(?<=\d),(?=\d)|\.(?!\d)", "", text)
    text = re.sub(
        r"(?<=\d)[.:](?=\d)|(?<![\w.])[.-](?=\d)|(?<=\w)'(?=\w)|[\w%$€£¥°]|(.)", _space_for_group, text, flags=re.S
    )
    words = [_NUMBERS.get(word, word) for word in text.split()]
    return " ".join([word for word in words if word not in _ARTICLES] or words)


def _space_for_group(match: re.Match) -> str:
    return match.group() if match.group(1) is None else " "


def vqa_match(answer: str, references: Sequence[str]) -> bool:
    """Whether the answer equals one of the references after `normalize_vqa`; an empty answer equals none."""
    said = normalize_vqa(answer)
    return bool(said) and said in {normalize_vqa(reference) for reference in references}


def vqa_soft_score(answer: str, references: Sequence[str]) -> float:
    """min(n / 3, 1), where n of the annotators' answers equal the model's after `normalize_vqa`.

    Source: Antol et al., VQA, ICCV 2015, section 3. Its program takes the mean of this over all sets of nine of ten
    annotators, which gives 0.3, 0.6 and 0.9 where one, two and three agree.
    """
    said = normalize_vqa(answer)
    return min(sum(bool(said) and normalize_vqa(reference) == said for reference in references) / 3, 1.0)


def ocrbench_match(answer: str, references: Sequence[str], formula: bool = False) -> bool:
    """Whether one of the references is contained in the answer.

    Case, line breaks and full-width forms make no difference. With `formula` (handwritten expressions, the rows of
    HME100k) case counts, since x and X are two variables, and spaces do not.

    Source: Liu et al., OCRBench, arXiv 2305.07895, and its evaluation program.

    Raises:
        ValueError: a reference is empty, which every answer would contain.
    """
    said = _ocr_form(answer, formula)
    wanted = [_ocr_form(reference, formula) for reference in references]
    if not wanted or not all(wanted):
        raise ValueError("an empty reference is contained in every answer")
    return any(reference in said for reference in wanted)


def _ocr_form(text: str, formula: bool) -> str:
    if formula:
        return text.strip().replace("\n", " ").replace(" ", "")
    return fold_full_width(text).lower().strip().replace("\n", " ")
