"""How what a model says is read: the choice, the yes or no, the short answer; without the `evaluate` library."""

from .answer_choice import extract_choice
from .answer_text import normalize_vqa, ocrbench_match, vqa_match, vqa_soft_score
from .answer_yes_no import extract_yes_no


__all__ = ["extract_choice", "extract_yes_no", "normalize_vqa", "ocrbench_match", "vqa_match", "vqa_soft_score"]
