"""Exact match of short answers after VQA's normalisation, for the `evaluate` library."""

import datasets
import evaluate

from normalign.configuration.errors import NormalignError
from normalign.evaluation.answers import normalize_vqa, vqa_match, vqa_soft_score
from normalign.evaluation.metrics.figures import Checked, share


_DESCRIPTION = """
Share of answers that equal an accepted one, once case, punctuation, articles, number words and apostrophes make no difference. With the
answers of several annotators also VQA's soft score: an answer that n of them gave counts min(n / 3, 1).
"""

_CITATION = """
@inproceedings{antol2015vqa,
  title = {{VQA}: Visual Question Answering},
  author = {Antol, Stanislaw and Agrawal, Aishwarya and Lu, Jiasen and Mitchell, Margaret and Batra, Dhruv and Zitnick, C. Lawrence and
    Parikh, Devi},
  booktitle = {International Conference on Computer Vision (ICCV)},
  year = {2015}
}
"""

_INPUTS = """
Args:
    predictions (list of str): what the model said.
    references (list of str, or of lists of str): the right answer of each question, or those of its annotators.
Returns:
    accuracy: a share from 0 to 1, with low and high, its 95% interval (Wilson).
    n: how many answers.
    empty: how many of them hold no word or number; they are wrong.
    soft_score (with three or more answers to each question): the mean of min(n / 3, 1), where n annotators gave the model's answer.
Examples:
    >>> import evaluate
    >>> from normalign.evaluation.metrics import metric_path
    >>> metric = evaluate.load(metric_path("vqa_exact_match"))
    >>> metric.compute(predictions=["Two dogs.", "the red one"], references=["2 dogs", "blue"])["accuracy"]
    0.5
    >>> metric.compute(predictions=["Two."], references=[["2", "two", "3"]])["soft_score"]
    0.6666666666666666
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class VQAExactMatch(Checked, evaluate.Metric):
    """Share of short answers that equal an accepted one after normalisation."""

    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=[
                datasets.Features({"predictions": text, "references": datasets.List(text)}),
                datasets.Features({"predictions": text, "references": text}),
            ],
            reference_urls=["https://arxiv.org/abs/1505.00468"],
        )

    def _compute(self, predictions, references):
        several = not all(isinstance(reference, str) for reference in references)
        accepted = [list(answers) if several else [answers] for answers in references]
        for number, answers in enumerate(accepted, start=1):
            if not answers or not any(text.strip() for text in answers):
                raise NormalignError(f"Question {number} has no accepted answer: its references are {answers!r}.")
        result = share([vqa_match(said, answers) for said, answers in zip(predictions, accepted)])
        result["empty"] = sum(not normalize_vqa(said) for said in predictions)
        if min(map(len, accepted)) >= 3:
            scores = [vqa_soft_score(said, answers) for said, answers in zip(predictions, accepted)]
            result["soft_score"] = sum(scores) / len(scores)
        return result
