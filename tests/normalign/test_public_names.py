"""`import normalign`: quick, and every public name is there on both generations of transformers."""

import subprocess
import sys

import pytest
import transformers

import normalign


def test_import_is_lazy():
    code = "import sys, normalign; print({'torch', 'transformers'} & set(sys.modules), sorted(normalign.__all__)[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set() AlignedNorm\n"


@pytest.mark.both_generations
@pytest.mark.parametrize("name", normalign.__all__)
def test_every_public_name_can_be_imported(name):
    assert callable(getattr(normalign, name))
    assert name in dir(normalign)


@pytest.mark.both_generations
def test_auto_model_for_vision2seq_is_the_class_of_this_generation():
    successor = (
        "AutoModelForVision2Seq" if transformers.__version__.startswith("4.") else "AutoModelForImageTextToText"
    )
    assert normalign.AutoModelForVision2Seq is getattr(transformers, successor)


def test_an_unknown_name_is_refused_by_name():
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        normalign.no_such_thing
