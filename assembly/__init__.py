"""Puts models together: compose (vision encoder + language model) and graft (existing model + aligned norm)."""

from .adapters import load_adapter
from .compose import compose
from .graft import graft
from .pairing import check_pair, visual_token_count
from .saving import check_target, save_whole


__all__ = ["check_pair", "check_target", "compose", "graft", "load_adapter", "save_whole", "visual_token_count"]
