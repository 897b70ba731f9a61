"""Turns a trained model into a self-contained Hub folder, checks it and sends it."""

from .clean_process import check_export, load_in_clean_process
from .export import export
from .model_card import model_card
from .push import PushResult, push


__all__ = ["PushResult", "check_export", "export", "load_in_clean_process", "model_card", "push"]
