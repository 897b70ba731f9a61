"""Attention is chosen part by part; what cannot be had is refused with what to write instead."""

import pytest

from normalign.configuration.errors import NormalignError
from normalign.train_trl.attention import set_attention


def test_auto_takes_sdpa_where_there_is_no_flash_attention(tiny_model):
    assert set_attention(tiny_model, "auto", half_precision=False) == {"vision": "sdpa", "language": "sdpa"}


def test_a_part_without_sdpa_gets_eager(tiny_model, monkeypatch):
    monkeypatch.setattr(type(tiny_model.model.vision_tower), "_supports_sdpa", False)
    assert set_attention(tiny_model, "auto", half_precision=False) == {"vision": "eager", "language": "sdpa"}


def test_auto_takes_flash_attention_where_gpu_package_and_part_allow_it(tiny_model, monkeypatch):
    """No GPU is needed to see which name is chosen: transformers' own check of the package is left out."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("normalign.train_trl.attention.is_flash_attn_2_available", lambda: True)
    for part in (tiny_model.model.vision_tower, tiny_model.model.language_model):
        monkeypatch.setattr(part, "set_attn_implementation", lambda name, part=part: set_name(part, name))
    monkeypatch.setattr(type(tiny_model.model.vision_tower), "_supports_flash_attn", False)
    assert set_attention(tiny_model, "auto", half_precision=True) == {
        "vision": "sdpa",
        "language": "flash_attention_2",
    }
    assert set_attention(tiny_model, "auto", half_precision=False) == {"vision": "sdpa", "language": "sdpa"}


def set_name(part, name):
    part.config._attn_implementation_internal = name


def test_flash_attention_by_name_without_a_gpu_is_refused(tiny_model, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(NormalignError, match="needs a GPU that PyTorch can use"):
        set_attention(tiny_model, "flash_attention_2", half_precision=True)


def test_flash_attention_by_name_without_the_package_names_the_extra(tiny_model, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(NormalignError, match=r"pip install 'normalign\[flash\]'"):
        set_attention(tiny_model, "flash_attention_2", half_precision=True)
    with pytest.raises(NormalignError, match="Write precision: bfloat16"):
        set_attention(tiny_model, "flash_attention_2", half_precision=False)


def test_an_unknown_name_is_refused_with_the_part(tiny_model):
    with pytest.raises(NormalignError, match="'flashy' does not work for the vision part"):
        set_attention(tiny_model, "flashy", half_precision=False)
