"""Puts models together: compose (vision encoder + language model) and graft (existing model + aligned norm)."""

from .compose import compose
from .graft import graft
from .pairing import check_pair, visual_token_count


__all__ = ["check_pair", "compose", "graft", "visual_token_count"]
