"""Accuracy of multiple-choice answers, for the `evaluate` library: the chosen option is read out of what a model says."""

import datasets
import evaluate

from normalign.configuration.errors import NormalignError
from normalign.evaluation.answers import extract_choice
from normalign.evaluation.metrics.figures import Checked, refuse_other_length, share


_DESCRIPTION = """
Share of answers that choose the right option. The option is read out of free text: "C", "c.", "(C)", "The answer is C", or the
option's own text; where no option can be read, or more than one, the answer is wrong and is counted as unparsed.
"""

_CITATION = """
@inproceedings{liu2024mmbench,
  title = {{MMBench}: Is Your Multi-modal Model an All-around Player?},
  author = {Liu, Yuan and Duan, Haodong and Zhang, Yuanhan and Li, Bo and Zhang, Songyang and Zhao, Wangbo and Yuan, Yike and
    Wang, Jiaqi and He, Conghui and Liu, Ziwei and Chen, Kai and Lin, Dahua},
  booktitle = {European Conference on Computer Vision (ECCV)},
  year = {2024}
}
"""

_INPUTS = """
Args:
    predictions (list of str): what the model said.
    references (list of str): the letters of the right options, whatever their case.
    choices (list, optional, given to compute): the texts of the options, one list for each answer, or one list for all
        of them. Without them letters alone are read.
Returns:
    accuracy: a share from 0 to 1, with low and high, its 95% interval (Wilson).
    n: how many answers.
    unparsed: how many of them name no option, or several.
Examples:
    >>> import evaluate
    >>> from normalign.evaluation.metrics import metric_path
    >>> metric = evaluate.load(metric_path("multiple_choice"))
    >>> said = ["The answer is C", "b.", "a red bus", "I cannot tell"]
    >>> result = metric.compute(predictions=said, references=["C", "A", "A", "D"], choices=["a red bus", "a tram", "a car", "a dog"])
    >>> result["accuracy"], result["n"], result["unparsed"]
    (0.5, 4, 1)
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class MultipleChoice(Checked, evaluate.Metric):
    """Multiple-choice accuracy with answer extraction."""

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
            reference_urls=["https://arxiv.org/abs/2307.06281"],
        )

    def _compute(self, predictions, references, choices=None):
        options = _options(choices, predictions)
        right, unparsed = [], 0
        for said, reference, texts in zip(predictions, references, options):
            wanted = reference.strip().upper()
            letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(texts) if texts else 26]
            if len(wanted) != 1 or wanted not in letters:
                raise NormalignError(
                    f"The reference {reference!r} is no letter from A to {letters[-1]}: references are the letters of the "
                    f"right options."
                )
            found = extract_choice(said, texts)
            right.append(found == wanted)
            unparsed += found is None
        return {**share(right), "unparsed": unparsed}


def _options(choices, predictions):
    """The texts of the options of each answer, or None where they are not known."""
    if choices is None:
        return [None] * len(predictions)
    choices = list(choices)
    if all(isinstance(text, str) for text in choices):
        return [choices] * len(predictions)
    refuse_other_length("choices", choices, predictions)
    return [None if texts is None else list(texts) for texts in choices]
