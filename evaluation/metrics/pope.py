"""POPE's figures, for the `evaluate` library: yes or no is read out of what a model says about an object in an image."""

import datasets
import evaluate

from normalign.configuration.errors import NormalignError
from normalign.evaluation.answers import extract_yes_no
from normalign.evaluation.metrics.figures import Checked, share


_DESCRIPTION = """
Accuracy, precision, recall, F1 and the share of yes of answers to questions such as "Is there a dog in the image?". An answer of
which neither yes nor no can be read, or both, is wrong and is counted as unparsed; to a question whose answer is yes it is a miss.
"""

_CITATION = """
@inproceedings{li2023pope,
  title = {Evaluating Object Hallucination in Large Vision-Language Models},
  author = {Li, Yifan and Du, Yifan and Zhou, Kun and Wang, Jinpeng and Zhao, Wayne Xin and Wen, Ji-Rong},
  booktitle = {Proceedings of the 2023 Conference on Empirical Methods in Natural Language Processing (EMNLP)},
  year = {2023}
}
"""

_INPUTS = """
Args:
    predictions (list of str): what the model said.
    references (list of str): yes or no, whatever the case.
Returns:
    accuracy: a share from 0 to 1, with low and high, its 95% interval (Wilson).
    precision, recall, f1: of yes; 0 where nothing stands below the line.
    yes_ratio: the share of answers that say yes. (lmms-eval 0.7.3 gives the share of references
        under that name; it reads "yes" and "no" alone, and leaves other answers out of recall.)
    n, unparsed: how many answers, and how many of them say neither, or both.
Examples:
    >>> import evaluate
    >>> from normalign.evaluation.metrics import metric_path
    >>> metric = evaluate.load(metric_path("pope"))
    >>> said = ["Yes, there is a dog.", "no", "There is no cat.", "I am not sure"]
    >>> result = metric.compute(predictions=said, references=["yes", "yes", "no", "yes"])
    >>> result["accuracy"], result["precision"], result["yes_ratio"], result["unparsed"]
    (0.5, 1.0, 0.25, 1)
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class Pope(Checked, evaluate.Metric):
    """Accuracy, precision, recall, F1 and yes-ratio of yes-or-no answers."""

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
            codebase_urls=["https://github.com/AoiDragon/POPE"],
            reference_urls=["https://arxiv.org/abs/2305.10355"],
        )

    def _compute(self, predictions, references):
        wanted = [reference.strip().lower() for reference in references]
        if wrong := sorted({reference for reference in wanted if reference not in ("yes", "no")}):
            raise NormalignError(f"The reference {wrong[0]!r} is neither yes nor no.")
        said = [extract_yes_no(answer) for answer in predictions]
        pairs = list(zip(said, wanted))
        hits, yes, there = pairs.count(("yes", "yes")), said.count("yes"), wanted.count("yes")
        return {
            **share([answer == reference for answer, reference in pairs]),
            "precision": hits / yes if yes else 0.0,
            "recall": hits / there if there else 0.0,
            "f1": 2 * hits / (yes + there) if yes + there else 0.0,
            "yes_ratio": yes / len(said),
            "unparsed": said.count(None),
        }
