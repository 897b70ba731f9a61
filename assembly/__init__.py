"""Puts models together: compose (vision encoder + language model) and graft (existing model + aligned norm)."""

from .compose import compose


__all__ = ["compose"]
