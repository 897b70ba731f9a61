"""Multiple choice: the ways a model says which option it takes, and what is refused."""

import subprocess
import sys
import time

import pytest

from normalign.configuration.errors import NormalignError
from normalign.evaluation.answers import extract_choice


ANIMALS = ["a dog", "a hot dog", "a cat", "The red bird"]

# said, and the letter that is meant among the options A-D above
FORMS = {
    "C": "C",
    "c": "C",
    " C \n": "C",
    "c.": "C",
    "(C)": "C",
    "C)": "C",
    "[C]": "C",
    "C:": "C",
    '"C"': "C",
    "**C**": "C",
    "`C`": "C",
    "Ｃ": "C",
    "（Ｃ）": "C",
    "C: cat": "C",
    "C. a cat": "C",
    "C) a cat": "C",
    "(C) a cat": "C",
    "**C. a cat**": "C",
    "C - a cat": "C",
    "C a cat": "C",
    "C, because it has whiskers.": "C",
    "C because it has whiskers.": "C",
    "C\nIt has whiskers.": "C",
    "A": "A",
    "a": "A",
    "A.": "A",
    "A. a dog": "A",
    "A because it barks": "A",
    "A is correct.": "A",
    "The answer is C": "C",
    "The answer is A.": "A",
    "the answer is c.": "C",
    "The answer is (C) a cat.": "C",
    "The answer is: C": "C",
    'The answer is "C".': "C",
    "The answer is a cat.": "C",
    "The correct answer is **C**.": "C",
    "The answer to the question is B, not A.": "B",
    "Answer: (b)": "B",
    "Answer: B": "B",
    "ANSWER:D": "D",
    "Final answer: D.": "D",
    "Ans: B": "B",
    "option c": "C",
    "Option C: a cat": "C",
    "I choose option C.": "C",
    "The correct option is B.": "B",
    "The correct answer is option D, the red bird.": "D",
    "Option A is wrong, so the answer is B.": "B",
    "The animal has whiskers and fur, so the answer is B.": "B",
    "It barks, therefore A": "A",
    "The ears are pointed.\nIt purrs.\nC": "C",
    "I think it is C.": "C",
    "It's definitely (D).": "D",
    "<think>A? No, B or D.</think>C": "C",
    "<answer>C</answer>": "C",
    r"\boxed{C}": "C",
    r"$\boxed{\text{C}}$": "C",
    r"If A were right it would bark. Thus \boxed{(C)}.": "C",
    r"\(C\)": "C",
    "A. a dog\nB. a hot dog\nC. a cat\nD. the red bird\nAnswer: C": "C",
    "So the answer is: A) a dog": "A",
    "I'd go with A": "A",
    "The answer is not A but C": "C",
    "a cat": "C",
    "A cat.": "C",
    "cat": "C",
    "THE CAT": "C",
    "Hot dog": "B",
    "It is a hot dog.": "B",
    "red bird": "D",
    "A red bird sits here": "D",
    "It is not a dog, it is a cat.": "C",
}

REFUSED = [
    "",
    "   ",
    "...",
    "E",
    "(E)",
    "The answer is E.",
    "AB",
    "BD",
    "ABCD",
    "A or B",
    "A and B",
    "A, B",
    "A/B",
    "A B",
    "A, B and C",
    "(A) or (B)",
    "Either A or B",
    "A, or maybe B",
    "C or, perhaps, a dog",
    "Both B and C.",
    "The answer is A or B.",
    "The answer is A. No, the answer is B.",
    "C. a dog",
    "A. a dog\nB. a hot dog\nC. a cat\nD. the red bird",
    "A. a dog B. a hot dog C. a cat",
    "A fish sits here",
    "a fish",
    "I see a fish.",
    "The answer is a fish.",
    "a cat and a red bird",
    "It is not a cat.",
    "I do not know.",
    "None of the above",
    "catalog",
    "C's",
    r"\boxed{A} \boxed{B}",
]


@pytest.mark.parametrize(("said", "meant"), FORMS.items())
def test_an_answer_that_chooses_one_option_is_read(said, meant):
    assert extract_choice(said, ANIMALS) == meant


@pytest.mark.parametrize("said", REFUSED)
def test_an_answer_that_chooses_none_or_several_is_refused(said):
    assert extract_choice(said, ANIMALS) is None


@pytest.mark.parametrize(
    ("said", "meant"),
    [("C", "C"), ("(b)", "B"), ("C. a cat", "C"), ("The answer is D.", "D"), ("option b", "B"), ("It must be A.", "A"),
     ("A cat sits here", None), ("I see a cat", None), ("A. one\nB. two", None), ("A or B", None), ("E", "E"), ("", None)],
)  # fmt: skip
def test_letters_are_read_without_the_options_texts(said, meant):
    assert extract_choice(said) == meant


def test_letters_that_are_not_offered_are_no_answer():
    assert extract_choice("D") == "D"
    assert extract_choice("D", letters="ABC") is None
    assert extract_choice("D", ["yes", "no"]) is None
    assert extract_choice("Answer: D", {"A": "left", "B": "right"}) is None


def test_letters_come_back_as_they_were_given():
    assert extract_choice("B", {"a": "left", "b": "right"}) == "b"
    assert extract_choice("right", {"P": "left", "Q": "right"}) == "Q"


@pytest.mark.parametrize(
    ("said", "options", "meant"),
    [
        # diagrams label their parts by letters: the letter of an option is meant where it is one
        ("B", ["B", "A"], "B"),
        ("F", ["E", "F"], "B"),
        ("The answer is F.", ["E", "F"], "B"),
        ("Vitamin C", ["vitamin A", "vitamin C"], "B"),
        ("The answer is vitamin A.", ["vitamin C", "vitamin A"], "B"),
        ("It contains vitamin C", ["vitamin C", "vitamin A", "iron"], "A"),
        ("3", ["1", "2", "3"], "C"),
        ("There are 3 dogs.", ["1", "2", "3"], "C"),
        ("-5", ["5", "-5"], "B"),
        ("1.5", ["1", "1.5", "5"], "B"),
        ("1000", ["100", "1,000"], "B"),
        ("<", [">", "<"], "B"),
        ("yes", ["Yes", "No"], "A"),
        ("There is no cat.", ["Yes", "No"], "B"),
        ("No, it is not.", ["Yes", "No"], "B"),
        ("left", ["left", "Left"], None),
        ("left of the right lamp", ["left", "right"], None),
        ("C major", ["C minor", "G major", "D minor", "C major"], "D"),
        ("The answer is C major.", ["C minor", "G major", "D minor", "C major"], "D"),
        ("C. B cells", ["T cells", "A cells", "B cells"], "C"),
    ],
)
def test_options_that_look_like_letters_numbers_or_one_another_are_told_apart(said, options, meant):
    assert extract_choice(said, options) == meant


@pytest.mark.parametrize(
    ("choices", "letters"), [({"AB": "x"}, "AB"), ({"1": "x", "2": "y"}, "AB"), (["x", "y"], "AA"), (["x", "y"], "A")]
)
def test_options_without_a_letter_of_their_own_are_refused(choices, letters):
    with pytest.raises(NormalignError, match="letter"):
        extract_choice("A", choices, letters)


def test_answers_are_read_without_the_evaluate_library():
    code = (
        "import sys; import normalign.evaluation.answers; print({'evaluate', 'datasets', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_an_answer_that_repeats_itself_without_end_is_read_in_no_time():
    start = time.perf_counter()
    assert extract_choice("so the answer to the cat " * 2000, ANIMALS) == "C"
    assert extract_choice("A " * 20000, ANIMALS) == "A"
    assert time.perf_counter() - start < 10
