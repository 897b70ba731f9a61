"""What lmms-eval reads of this package when it looks for models (entry point `lmms_eval.models`), before any is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from lmms_eval.models.registry_v2 import ModelManifest


def manifest() -> ModelManifest:
    """`lmms-eval --model normalign` is the class in lmms_model.py."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(
        model_id="normalign", simple_class_path=f"{__name__.rpartition('.')[0]}.lmms_model.NormalignModel"
    )
