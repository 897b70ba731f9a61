"""Yes or no: the ways a model says it, and what is neither."""

import pytest

from normalign.evaluation.answers import extract_yes_no


@pytest.mark.parametrize(
    "said",
    [
        "Yes",
        "yes",
        "YES",
        "yes.",
        "Yes!",
        "**Yes**",
        " Yes\n",
        "Ｙｅｓ",
        "Yes, there is a dog.",
        "Yes, there is a dog but no cat.",
        "Yes, but I am not sure.",
        "Yeah",
        "Yep, two of them",
        "The answer is yes.",
        "Answer: Yes",
        "I think yes",
        "There is a dog in the image.",
        "There are two dogs.",
        "There seems to be a dog.",
        "I can see a dog.",
        "The image shows a dog.",
        "The image clearly shows a dog.",
        "There is no doubt that there is a dog.",
        r"\boxed{Yes}",
        "<answer>yes</answer>",
        "<think>no, or not?</think>Yes",
    ],
)
def test_yes(said):
    assert extract_yes_no(said) == "yes"


@pytest.mark.parametrize(
    "said",
    [
        "No",
        "no.",
        "NO",
        "*no*",
        "No, there isn't",
        "No, there isn’t a dog; there is a cat.",
        "No, there is no dog in the image.",
        "Nope",
        "The answer is no.",
        "Answer: no",
        "There is no dog",
        "There's no dog.",
        "there isnt one",
        "There appears to be no dog.",
        "There isn't a dog in this image.",
        "There is clearly no dog.",
        "There are not any dogs.",
        "I do not see a dog.",
        "The image does not contain a dog.",
        "None of them is a dog.",
        r"\boxed{\text{No}}",
    ],
)
def test_no(said):
    assert extract_yes_no(said) == "no"


@pytest.mark.parametrize(
    "said",
    [
        "",
        "  ",
        ".",
        "not sure",
        "I'm not sure.",
        "yes and no",
        "Yes or no",
        "yes/no",
        "Yes. No.",
        "No. Yes.",
        "No idea",
        "There is no way to tell.",
        "Maybe",
        "I cannot tell.",
        "It is unclear.",
        "There might be a dog.",
        "There is a cat but no dog.",
        "A dog",
        "yesterday",
        "nobody",
        "The answer is yes. The answer is no.",
        r"\boxed{yes} or \boxed{no}",
    ],
)
def test_neither(said):
    assert extract_yes_no(said) is None
