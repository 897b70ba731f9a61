"""Measures norms, angles and gradients in any Hugging Face vision-language model and reports them."""

from .compare import Comparison, compare_reports
from .console import print_report
from .measure import inspect_model
from .report import NormReport


__all__ = ["Comparison", "NormReport", "compare_reports", "inspect_model", "print_report"]
