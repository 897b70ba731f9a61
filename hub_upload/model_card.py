"""The model card of an export: what the model is, what its aligned norm did, how to load it, and what is not known."""

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData

from .. import __version__
from ..configuration.errors import NormalignError
from ..modeling.aligned_norm import text_embedding_norm
from .both_generations import limits_of_the_other_generation
from .eval_results import BENCHMARKS, is_number, run_notes
from .norms import NORMS_FIGURE, NormTable
from .origin import Training, is_hub_id


CARD_MARK = "<!-- written by normalign export -->"
TEMPLATE = Path(__file__).parent / "model_card.md.jinja"
TAGS = ["normalign", "aligned-norm", "vision-language-model", "multimodal", "custom_code"]

_DEMO_ROWS = {
    "accuracy": "accuracy on held-out scenes",
    "accuracy_black_image": "the same with black images",
    "chance": "chance",
}


@dataclass
class ModelFacts:
    """What the card says about a model, read from its config and weights."""

    model_class: str
    vision_type: str
    text_type: str
    hidden_size: int
    layers: int
    text_norm: float
    parameters: int
    dtype: str
    aligned_norm: dict
    gain_start: float | None
    gain_abs_mean: float | None
    gain_l2: float | None
    gain_min: float | None
    gain_max: float | None
    mu: float | None
    composed_from: dict[str, str]
    generation_limits: list[str]


def model_facts(model) -> ModelFacts:
    """Reads the facts for a card from a loaded model; no file is opened and nothing is guessed."""
    config = model.config
    settings = dict(config.aligned_norm)
    norm = model.get_aligned_norm()
    gain = None if norm is None else norm.weight.detach().double()
    return ModelFacts(
        model_class=type(model).__name__,
        vision_type=config.vision_config.model_type,
        text_type=config.text_config.model_type,
        hidden_size=config.text_config.hidden_size,
        layers=config.text_config.num_hidden_layers,
        text_norm=text_embedding_norm(model.get_input_embeddings()),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        aligned_norm=settings,
        gain_start=None if norm is None else _gain_at_start(settings, config.text_config.hidden_size),
        gain_abs_mean=None if gain is None else gain.abs().mean().item(),
        gain_l2=None if gain is None else torch.linalg.vector_norm(gain).item(),
        gain_min=None if gain is None else gain.min().item(),
        gain_max=None if gain is None else gain.max().item(),
        mu=None if norm is None or not settings["gwc"] else norm.mu.item(),
        composed_from=dict(getattr(config, "composed_from", None) or {}),
        generation_limits=limits_of_the_other_generation(config.to_dict()),
    )


def _gain_at_start(settings: dict, hidden_size: int) -> float | None:
    """The gain before training; None where the config does not tell it."""
    if settings["gain_init"] != "text":
        return float(settings["gain_init"])
    # the start of one learned factor also depends on the projector's output then, which no file keeps
    if settings["target_norm"] is None or settings["kind"] == "scale":
        return None
    return settings["target_norm"] / math.sqrt(hidden_size)


@dataclass(frozen=True)
class License:
    """The license as named at the export, and the license files in the folder."""

    id: str | None = None
    name: str | None = None
    link: str | None = None
    files: list[str] = field(default_factory=list)

    def metadata(self, base: str | None) -> dict[str, str | None]:
        """The card's fields: as named, else the files, else the page of the base model, else that it is not known."""
        file = next((name for name in self.files if name.lower().startswith("lic")), None)
        if self.id is not None:
            link = self.link or (file if self.id == "other" else None)
            return {"license": self.id, "license_name": self.name, "license_link": link}
        if file is not None:
            return {"license": "other", "license_name": "see-license-file", "license_link": file}
        if base is not None:
            link = f"https://huggingface.co/{base}"
            return {"license": "other", "license_name": "see-base-models", "license_link": link}
        return {"license": "unknown"}


def model_card(
    facts: ModelFacts,
    code: list[Path],
    *,
    results: dict | None = None,
    base_model: str | list[str] | None = None,
    license: License | str | None = None,
    norms: NormTable | None = None,
    training: Training | None = None,
    merged: bool = False,
) -> ModelCard:
    """The card of one model.

    Args:
        facts: what `model_facts` read.
        code: the Python files in the folder; the card lists their SHA-256.
        results: the content of a results.json of `normalign demo` or `normalign evaluate`; None leaves the table out.
        base_model: Hub ids of the base models; None takes those that `facts` names.
        license: the license, or its id; None refers to the base models.
        norms: what was inspected; the card shows `norms.png` beside it.
        training: the recipes; None leaves them out.
        merged: whether an adapter was merged into the weights.
    """
    named = [name for name in dict.fromkeys(facts.composed_from.values()) if is_hub_id(name)]
    bases = [base_model] if isinstance(base_model, str) else list(base_model or named)
    license = license if isinstance(license, License) else License(license)
    if license.id is None and (license.name or license.link):
        raise NormalignError(
            "A license's name and link need the license itself: give 'other' or the Hub's id as license."
        )
    training = training or Training()
    # of the two, the language model's license is the one that more often has terms; the text links both
    language_model = facts.composed_from.get("text")
    rows = result_rows(results)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="image-text-to-text",
        base_model=bases or None,
        datasets=training.datasets or None,
        tags=[*TAGS],
        **license.metadata(language_model if language_model in bases else bases[0] if bases else None),
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        mark=CARD_MARK,
        facts=facts,
        norm=facts.aligned_norm,
        bases=bases,
        license=license,
        code_hashes={file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in code},
        result_rows=rows,
        norms=norms,
        norms_figure=NORMS_FIGURE,
        training=training,
        merged=merged,
        transformers_version=transformers.__version__,
        normalign_version=__version__,
    )


def result_rows(results: dict | None) -> list[dict]:
    """The rows of the table of results: name, metric, score, n, note. Only figures that `results` holds.

    Raises:
        NormalignError: see `check_results`.
    """
    check_results(results)
    if results is None:
        return []
    if "tasks" in results:
        rows = [_task_row(name, task, results) for name, task in results["tasks"].items()]
        if results.get("average") is not None:
            rows.append({"name": "average", "metric": "", "score": _figure(results["average"]), "n": "", "note": ""})
        return rows
    n = results.get("questions", "")
    rows = {label: results[key] for key, label in _DEMO_ROWS.items() if results.get(key) is not None}
    return [
        {"name": f"built-in digit scenes: {label}", "metric": "exact match", "score": _figure(v), "n": n, "note": ""}
        for label, v in rows.items()
    ]


def check_results(results: dict | None) -> None:
    """Refuses what is no results.json of `normalign evaluate` or `normalign demo`, or holds a score that is no number.

    Raises:
        NormalignError: names the key and what stands there.
    """
    if results is None:
        return
    if "tasks" not in results and "accuracy" not in results:
        raise NormalignError(
            f"The results for the card need the key 'tasks' (normalign evaluate) or 'accuracy' (normalign demo), and have "
            f"{', '.join(map(repr, results)) or 'none'}."
        )
    tasks = results.get("tasks", {})
    blocks = {"tasks": tasks, **({f"tasks.{name}": task for name, task in tasks.items()} if _is_block(tasks) else {})}
    problems = [f"{key} is {value!r}, not a block" for key, value in blocks.items() if not _is_block(value)]
    figures = {key: results.get(key) for key in ("average", *_DEMO_ROWS)}
    for key, task in blocks.items():
        if key != "tasks" and _is_block(task):
            figures |= {f"{key}.{name}": task.get(name) for name in ("score", "stderr")}
    problems += [
        f"{key} is {value!r}, not a number"
        for key, value in figures.items()
        if value is not None and not is_number(value)
    ]
    if problems:
        raise NormalignError(
            f"The results for the card cannot be read: {'; '.join(problems)}. Name the results.json that `normalign "
            f"evaluate` or `normalign demo` wrote."
        )


def _is_block(value: object) -> bool:
    return isinstance(value, dict)


def _task_row(name: str, task: dict, results: dict) -> dict:
    stderr = f" ± {_figure(task['stderr'])}" if task.get("stderr") is not None else ""
    score = _figure(task.get("score")) + stderr
    shown = f"[{name}](https://huggingface.co/datasets/{BENCHMARKS[name][0]})" if name in BENCHMARKS else _cell(name)
    return {
        "name": shown,
        "metric": _cell(task.get("metric", "")),
        "score": score,
        "n": _cell(task.get("n", "")),
        "note": _cell(", ".join(run_notes(results, task))),
    }


def _figure(value) -> str:
    return "no score" if value is None else f"{value:.4g}"


def _cell(value) -> str:
    return str(value).replace("|", r"\|").replace("\n", " ")
