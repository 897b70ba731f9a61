"""Turns a trained model into a self-contained Hub folder, checks it and sends it."""

from .card_check import Problem, check_card
from .clean_process import check_export, load_in_clean_process
from .export import export
from .model_card import model_card
from .push import PushResult, push
from .space import export_space
from .verify import Verification, print_verification, verify


__all__ = [
    "Problem",
    "PushResult",
    "Verification",
    "check_card",
    "check_export",
    "export",
    "export_space",
    "load_in_clean_process",
    "model_card",
    "print_verification",
    "push",
    "verify",
]
