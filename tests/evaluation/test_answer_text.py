"""Short answers: VQA's normalisation and scores, and OCRBench's containment."""

import pytest

from normalign.evaluation.answers import normalize_vqa, ocrbench_match, vqa_match, vqa_soft_score


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("Yes", "yes"),
        (" a  Dog.\n", "dog"),
        ("The two T-shirts!", "2 t shirts"),
        ("none", "0"),
        ("Ten", "10"),
        ("1,000", "1000"),
        ("red, white", "red white"),
        ("1.5", "1.5"),
        ("$1.50", "$1.50"),
        ("50%", "50%"),
        ("-3", "-3"),
        ("10:30 a.m.", "10:30 am"),
        ("don't", "dont"),
        ("Don’t", "dont"),
        ("can't", "cant"),
        ("it's", "it's"),
        ("that's", "thats"),
        ("we're", "we're"),
        ("5 o'clock", "5 oclock"),
        ("dog's", "dog's"),
        ("'stop'", "stop"),
        ("ＡＢＣ　１", "abc 1"),
        ("A", "a"),
        ("the", "the"),
        ("(left)/right", "left right"),
        ("?!", ""),
        ("", ""),
        ("Straße", "straße"),
    ],
)
def test_vqa_normalisation(text, normal):
    assert normalize_vqa(text) == normal
    assert normalize_vqa(normal) == normal


def test_an_answer_matches_any_of_the_references_and_an_empty_one_none():
    assert vqa_match("Two dogs.", ["cat", "2 dogs"])
    assert not vqa_match("two", ["two dogs"])
    assert not vqa_match("", [""]) and not vqa_match(".", ["!"])
    assert not vqa_match("dogs", ["dog's"])


@pytest.mark.parametrize(("agree", "score"), [(0, 0), (1, 1 / 3), (2, 2 / 3), (3, 1), (10, 1)])
def test_the_soft_score_is_full_where_three_annotators_agree(agree, score):
    assert vqa_soft_score("The cat", ["cat"] * agree + ["dog"] * (10 - agree)) == pytest.approx(score)
    assert vqa_soft_score("", [""] * 10) == 0


def test_ocrbench_wants_the_text_contained_whatever_its_case_and_line_breaks():
    assert ocrbench_match("The sign says STOP\nHERE.", ["stop here"])
    assert ocrbench_match("ＳＴＯＰ", ["go", "stop"])
    assert not ocrbench_match("st op", ["stop"])
    assert not ocrbench_match("", ["stop"])


def test_ocrbench_compares_formulas_with_case_and_without_spaces():
    assert ocrbench_match("$ x ^ { 2 }\n+ 1 $", ["x^{2} + 1"], formula=True)
    assert not ocrbench_match("X^{2}+1", ["x^{2}+1"], formula=True)
    assert not ocrbench_match("x ^ 2", ["x^2"])


@pytest.mark.parametrize("references", [[], [""], ["stop", " "]])
def test_an_empty_reference_is_refused(references):
    with pytest.raises(ValueError, match="empty reference"):
        ocrbench_match("anything", references)
