"""Measures norms, angles and gradients in any Hugging Face vision-language model and reports them."""

from .measure import inspect_model
from .report import NormReport


__all__ = ["NormReport", "inspect_model"]
