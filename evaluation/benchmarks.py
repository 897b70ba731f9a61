"""The paper's nine benchmarks: what each measures and costs, by which harness it is scored, and the paper's figures."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from ..configuration.errors import NormalignError


@dataclass(frozen=True)
class Benchmark:
    """One benchmark as a harness defines it.

    `metric` is the harness's name of the score that is reported; `rows` the size of its split on the Hub; `answers` what
    a model gives: a letter, a yes or no, words, or the log-likelihoods of the choices.
    """

    name: str
    title: str
    harness: str
    metric: str
    dataset: str
    split: str
    rows: int
    answers: str
    measures: str
    login: bool = False
    judge: bool = False


_ALL = [
    Benchmark(
        "mmbench_en_dev_static", "MMBench-EN", "lmms-eval", "gpt_eval_score", "lmms-lab-encoder/MMBench", "dev",
        4329, "letter", "perception and reasoning; a question counts if it is right with its options in every order",
    ),
    Benchmark(
        "mmstar", "MM-Star", "lmms-eval", "average", "Lin-Chen/MMStar", "val",
        1500, "letter", "questions that cannot be answered without the image; mean of 18 abilities",
    ),
    Benchmark(
        "pope", "POPE", "lmms-eval", "pope_accuracy", "lmms-lab-encoder/POPE", "test",
        9000, "yes or no", "whether an object is in the image; answers yes to what is not there are hallucinations",
    ),
    Benchmark(
        "seedbench_2_plus", "SEED-Bench-2-Plus", "lmms-eval", "seedbench_2_plus_all", "doolayer/SEED-Bench-2-Plus", "test",
        2277, "letter", "charts, maps and web pages rich in text",
    ),
    Benchmark(
        "ocrbench", "OCRBench", "lmms-eval", "ocrbench_accuracy", "echo840/OCRBench", "test",
        1000, "words", "reading text, documents and formulas",
    ),
    Benchmark(
        "scienceqa_img", "ScienceQA", "lmms-eval", "exact_match", "lmms-lab-encoder/ScienceQA", "test",
        2017, "letter", "school science, the questions that have an image",
    ),
    Benchmark(
        "ai2d", "AI2D", "lmms-eval", "exact_match", "lmms-lab-encoder/ai2d", "test",
        3088, "letter", "diagrams of school science",
    ),
    Benchmark(
        "hellaswag", "HellaSwag", "lm-eval", "acc_norm", "Rowan/hellaswag", "validation",
        10042, "log-likelihood", "text alone: how a situation goes on",
    ),
    Benchmark(
        "mmlu", "MMLU", "lm-eval", "acc", "cais/mmlu", "test",
        14042, "log-likelihood", "text alone: knowledge of 57 subjects",
    ),
]  # fmt: skip
BENCHMARKS = {benchmark.name: benchmark for benchmark in _ALL}

# Li et al., ICLR 2026, arXiv 2512.08374, Table 4 (LLaVA-1.5 recipe, SigLIP-SO400M-patch14-384), in percent
PAPER_ARMS = ("no norm", "norm, no GWC", "norm + GWC")
PAPER = {
    "Llama-3.2-3B-Instruct": {
        "mmstar": (37.72, 41.19, 41.24),
        "seedbench_2_plus": (42.86, 47.26, 45.56),
        "ocrbench": (40.70, 45.60, 44.10),
        "mmlu": (45.19, 53.21, 51.60),
        "average": (59.01, 62.04, 61.27),
    },
    "Qwen2.5-7B-Instruct": {
        "mmstar": (50.34, 48.08, 50.58),
        "seedbench_2_plus": (56.65, 59.51, 58.27),
        "ocrbench": (47.00, 47.60, 49.40),
        "mmlu": (71.02, 71.14, 71.74),
        "average": (68.49, 68.71, 69.41),
    },
}


def chosen_benchmarks(names: str) -> list[Benchmark]:
    """The benchmarks that `names` lists with commas; `paper` stands for all nine.

    Raises:
        NormalignError: a name is none of the nine, or there is none.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    wanted = [other for name in wanted for other in (BENCHMARKS if name == "paper" else [name])]
    unknown = sorted({name for name in wanted if name not in BENCHMARKS})
    if unknown or not wanted:
        what = f"There is no benchmark {', '.join(map(repr, unknown))}" if unknown else "No benchmark is named"
        near = [match for name in unknown for match in difflib.get_close_matches(name.lower(), BENCHMARKS, n=1)]
        meant = f" Did you mean {', '.join(dict.fromkeys(near))}?" if near else ""
        raise NormalignError(
            f"{what}.{meant} Choose from {', '.join(BENCHMARKS)}, or `paper` for all of them. Any other task of lmms-eval runs "
            f"with `lmms-eval --model normalign --model_args pretrained=MODEL --tasks NAME`."
        )
    return [BENCHMARKS[name] for name in dict.fromkeys(wanted)]


def refuse_missing_harnesses(benchmarks: list[Benchmark]) -> None:
    """Raises NormalignError if a harness that the benchmarks need is not installed, before anything heavy is done."""
    harnesses = dict.fromkeys(benchmark.harness for benchmark in benchmarks)
    missing = [harness for harness in harnesses if harness_version(harness) is None]
    if missing:
        raise NormalignError(
            f"The benchmarks are scored by {' and '.join(missing)}, not installed here. Run "
            f"`pip install 'normalign[eval]'`, into an environment of its own if the harness asks for other versions than "
            f"yours; questions of your own (--data FILE.jsonl) need neither."
        )


def harness_version(harness: str) -> str | None:
    """The installed version of `lmms-eval` or `lm-eval`, None if there is none."""
    try:
        return version(harness)
    except PackageNotFoundError:
        return None


def average_of_nine(scores: dict[str, float | None]) -> float | None:
    """The plain mean of the nine scores in percent, as in the paper's Table 4; None unless all nine are there."""
    values = [scores.get(name) for name in BENCHMARKS]
    return None if any(value is None for value in values) else sum(values) / len(values)
