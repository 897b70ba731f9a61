"""OCRBench's score, for the `evaluate` library: an answer is right if it contains what stands in the image."""

import datasets
import evaluate

from normalign.configuration.errors import NormalignError
from normalign.evaluation.answers import ocrbench_match
from normalign.evaluation.metrics.figures import Checked, refuse_other_length, share


_DESCRIPTION = """
How many answers contain one of the accepted texts, whatever the case; in handwritten formulas case counts and spaces do not. OCRBench
has 1000 questions, so that its score, a count, is a thousand times the share.
"""

_CITATION = """
@article{liu2024ocrbench,
  title = {{OCRBench}: on the hidden mystery of {OCR} in large multimodal models},
  author = {Liu, Yuliang and Li, Zhang and Huang, Mingxin and Yang, Biao and Yu, Wenwen and Li, Chunyuan and Yin, Xu-Cheng and
    Liu, Cheng-Lin and Jin, Lianwen and Bai, Xiang},
  journal = {Science China Information Sciences},
  volume = {67},
  year = {2024}
}
"""

_INPUTS = """
Args:
    predictions (list of str): what the model said.
    references (list of lists of str): the accepted texts of each question.
    question_types (list of str, optional, given to compute): the type of each question, as in OCRBench's data set. Those of
        "Handwritten Mathematical Expression Recognition" are compared as formulas, and the score is given for each type.
Returns:
    score: how many answers are right.
    accuracy: their share from 0 to 1, with low and high, its 95% interval (Wilson).
    n: how many answers.
    by_type (with question_types): of each type score and n.
Examples:
    >>> import evaluate
    >>> from normalign.evaluation.metrics import metric_path
    >>> metric = evaluate.load(metric_path("ocrbench"))
    >>> result = metric.compute(predictions=["The sign says STOP.", "12 June"], references=[["stop"], ["12 May", "May 12"]])
    >>> result["score"], result["accuracy"]
    (1, 0.5)
"""

_FORMULAS = "Handwritten Mathematical Expression Recognition"


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class OCRBench(Checked, evaluate.Metric):
    """Count and share of answers that contain an accepted text."""

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.List(datasets.Value("string"))}
            ),
            codebase_urls=["https://github.com/Yuliang-Liu/MultimodalOCR"],
            reference_urls=["https://arxiv.org/abs/2305.07895"],
        )

    def _compute(self, predictions, references, question_types=None):
        types = [None] * len(predictions) if question_types is None else list(question_types)
        refuse_other_length("question_types", types, predictions)
        right = []
        for number, (said, accepted, kind) in enumerate(zip(predictions, references, types), start=1):
            try:
                right.append(ocrbench_match(said, accepted, formula=kind == _FORMULAS))
            except ValueError as error:
                raise NormalignError(
                    f"The references of answer {number} are no texts to look for: {error}."
                ) from error
        result = {"score": sum(right), **share(right)}
        if question_types is not None:
            of_type = {
                kind: [hit for hit, other in zip(right, types) if other == kind] for kind in dict.fromkeys(types)
            }
            result["by_type"] = {kind: {"score": sum(hits), "n": len(hits)} for kind, hits in of_type.items()}
        return result
