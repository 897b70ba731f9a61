"""What the runs of an ablation say together: means, intervals over seeds, paired differences, and sentences for them.

A run is the content of a result.json that `ablate` writes. From each, `run_measures` takes one number a measure; an arm
has the mean of each over its seeds, and two arms the differences seed by seed. The names of measures:

    accuracy, question_loss, accuracy/KIND, loss/KIND       held-out questions at the end, all together and by kind
    caption_loss, caption_accuracy, text_only_loss, text_only_accuracy       other held-out rows at the end
    after/STAGE/MEASURE    the same on the rows of the curve, at the end of a stage
    area/MEASURE           its mean height over all steps (the area under the curve, by trapezoids, over the steps)
    ratio/before           norm of inserted tokens over text embeddings; so too ratio/after, and projected_ratio/,
                           projected_norm/, inserted_norm/, text_norm/, turn_ratio/ (turns of visual tokens over text
                           tokens, added up over the layers) with before and after
    gain/start, gain/end   mean |gain|; gain/end_l2; gain/movement is |g_end - g_start| / |g_start|
    STAGE/KEY              means over the logged steps: grad_norm/PART, update/PART, clip_factor, clip_factor_without_gwc
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import PurePath
from statistics import fmean, median, stdev
from typing import Any

from ..configuration.errors import NormalignError
from ..inspection.schema import number


SCHEMA = 1
ACCURACY_LEVELS = (0.25, 0.5, 0.75, 0.9)
CAPTION_LOSS_LEVELS = (0.5, 0.3, 0.2, 0.1)  # nats a token
LEAST_RATIO = 5  # of projected to text norm in the arm without a norm; below it there is nothing to align
CONFIDENCE = 0.95
CURVES = ("accuracy", "question_loss", "caption_loss", "text_only_loss", "text_only_accuracy")
_OF_LOG = {
    "gain_abs_mean": "aligned_norm/gain_abs_mean",
    "gain_l2": "aligned_norm/gain_l2",
    "projected_norm": "norm/visual_in",
    "ratio": "norm/ratio",
}
_NOT_QUESTIONS = ("caption", "text_only")
# compared beside each arm with the first one: what alignment does, what its start does, what GWC does
_PAIRS = (
    ("default", "none"),
    ("aligned", "none"),
    ("aligned_gwc", "none"),
    ("rms", "none"),
    ("scale", "none"),
    ("aligned", "default"),
    ("aligned_gwc", "aligned"),
)
_START_AT_TEXT_NORM = ("aligned", "aligned_gwc", "rms", "scale")


def summarise(results: list[dict[str, Any]], arms: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """The content of summary.json.

    Args:
        results: the content of each result.json, in any order.
        arms: the arms, the one that the others are compared with first.
        settings: of the ablation; `seeds` is how many there are of each arm.

    Returns:
        `settings`, `stages` (name and steps), `levels`, `arms` and `paired`. Of an arm: `seeds`, `accuracy`, `gain`,
        `ratio_before`, `ratio_after` (means over seeds), `measures` (of each `mean`, `low`, `high` and the `values` by
        seed), `steps_to`, `curves` (mean, low and high by step, counted over all stages) and `turns` (by layer).
        `paired[ARM][OTHER][MEASURE]` has the differences ARM - OTHER seed by seed, how many are `higher`, `lower` and
        `same`, and, where all values are positive, the geometric mean `factor` ARM / OTHER. `low` and `high` are the
        95% t-interval over seeds, null with one seed.

    Raises:
        NormalignError: a run is missing, there twice or not asked for, or runs were not measured alike.
    """
    runs = _by_arm(results, arms, settings["seeds"])
    first = runs[arms[0]][0]
    stages = [{"stage": stage["stage"], "steps": _last_step(first, stage["stage"])} for stage in first["stages"]]
    measures = {arm: _arm_measures(arm, runs[arm]) for arm in arms}
    pairs = dict.fromkeys([(arm, arms[0]) for arm in arms[1:]] + [pair for pair in _PAIRS if set(pair) <= set(arms)])
    paired: dict[str, Any] = {}
    for arm, other in pairs:
        paired.setdefault(arm, {})[other] = {
            measure: _difference(values, measures[other][measure])
            for measure, values in measures[arm].items()
            if measure in measures[other]
        }
    return {
        "schema": SCHEMA,
        "settings": {**settings, "recipes": [_short(file) for file in settings.get("recipes", [])]},
        "confidence": CONFIDENCE,
        "held_out": {kind: figures["n"] for kind, figures in first["held_out"].items()},
        "stages": stages,
        "arms": {arm: _arm(runs[arm], measures[arm]) for arm in arms},
        "paired": paired,
    }


def t_quantile(degrees: int) -> float:
    """The t that a Student variable with so many degrees of freedom stays below in size with probability 0.95.

    The distribution of a whole number of degrees is a finite sum in the angle atan(t / sqrt(degrees)) (Abramowitz and
    Stegun, 26.7.3 and 26.7.4); it grows with the angle, which is halved in on.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < CONFIDENCE else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _within(angle: float, degrees: int) -> float:
    """The probability that |t| stays below sqrt(degrees) tan(angle)."""
    cosine = math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean and 95% t-interval of independent values; one value has no interval (None)."""
    mean = fmean(values)
    if len(values) < 2:
        return {"mean": mean, "low": None, "high": None}
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


# --- from runs to measures


def _by_arm(results: list[dict[str, Any]], arms: list[str], seeds: int) -> dict[str, list[dict[str, Any]]]:
    """The runs of each arm in the order of seeds; all of them or an error."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for run in results:
        key = (run["arm"], run["seed"])
        if key in found:
            raise NormalignError(f"Arm {key[0]} has two results for seed {key[1]}.")
        found[key] = run
    wanted = [(arm, seed) for arm in arms for seed in range(seeds)]
    for words, keys in (("has no result of", set(wanted) - set(found)), ("did not ask for", set(found) - set(wanted))):
        if keys:
            names = ", ".join(f"{arm} with seed {seed}" for arm, seed in sorted(keys))
            raise NormalignError(f"The ablation {words} {names}. Each arm is summarised over all its {seeds} seeds.")
    first = found[wanted[0]]
    for key, run in found.items():
        if _shape(run) != _shape(first):
            raise NormalignError(
                f"Arm {key[0]}, seed {key[1]}, was not measured like arm {wanted[0][0]}, seed {wanted[0][1]}: other stages, "
                f"steps or held-out rows. Run them again with the same settings."
            )
    return {arm: [found[arm, seed] for seed in range(seeds)] for arm in arms}


def _shape(run: dict[str, Any]) -> list[Any]:
    """What has to be alike in all runs."""
    counts = {kind: figures["n"] for kind, figures in run["held_out"].items()}
    points = [
        (p["stage"], p["step"], {kind: figures["n"] for kind, figures in _kinds(p).items()}) for p in run["curve"]
    ]
    lines = [(stage["stage"], line["step"]) for stage in run["stages"] for line in stage["log"]]
    return [counts, points, lines]


def _kinds(point: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {key: value for key, value in point.items() if isinstance(value, dict)}


def _held_out(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    """The measures of one measurement; over all questions, each row counts alike."""
    questions = {kind: figures[kind] for kind in figures if kind not in _NOT_QUESTIONS}
    rows = sum(kind["n"] for kind in questions.values())
    if not rows:
        raise NormalignError(
            "A run was measured without questions on pictures: give `questions` and `curve_rows` above 0."
        )
    # counted in whole answers, so that equal runs are equal to the last bit
    right = sum(round(kind["n"] * kind["accuracy"]) for kind in questions.values())
    loss = sum(kind["n"] * kind["loss"] for kind in questions.values())
    measures = {"accuracy": right / rows, "question_loss": loss / rows}
    for kind in set(figures) & set(_NOT_QUESTIONS):
        measures |= {f"{kind}_{name}": figures[kind][name] for name in ("loss", "accuracy")}
    return measures


def _last_step(run: dict[str, Any], stage: str) -> int:
    return max(point["step"] for point in run["curve"] if point["stage"] == stage)


def _offsets(run: dict[str, Any]) -> dict[str, int]:
    """Steps that were done before each stage."""
    offsets, done = {}, 0
    for stage in run["stages"]:
        offsets[stage["stage"]] = done
        done += _last_step(run, stage["stage"])
    return offsets


def _curve(run: dict[str, Any]) -> list[tuple[str, int, dict[str, float]]]:
    """Stage, step over all stages, and measures of each point of the curve."""
    offsets = _offsets(run)
    return [
        (point["stage"], offsets[point["stage"]] + point["step"], _held_out(_kinds(point))) for point in run["curve"]
    ]


def run_measures(run: dict[str, Any]) -> dict[str, float]:
    """All measures of one run by name (see the top of this file); what the run does not have is left out."""
    held_out, curve = run["held_out"], _curve(run)
    measures: dict[str, float | None] = dict(_held_out(held_out))
    for kind in held_out:
        if kind not in _NOT_QUESTIONS:
            measures[f"accuracy/{kind}"] = held_out[kind]["accuracy"]
            measures[f"loss/{kind}"] = held_out[kind]["loss"]
    for stage in run["stages"]:
        name = stage["stage"]
        *_, (_, _, last) = (point for point in curve if point[0] == name)
        measures |= {f"after/{name}/{measure}": value for measure, value in last.items()}
        measures |= {f"{name}/{key}": value for key, value in stage["means"].items()}
    steps = [step for _, step, _ in curve]
    for measure in curve[0][2]:
        measures[f"area/{measure}"] = _mean_height(steps, [point[measure] for _, _, point in curve])
    for when in ("before", "after"):
        norms = run[when]
        measures[f"projected_ratio/{when}"] = norms["projected_norm"] / norms["text_norm"]
        for key in ("ratio", "projected_norm", "inserted_norm", "text_norm", "turn_ratio"):
            measures[f"{key}/{when}"] = norms[key]
    if run["gain"] is not None:
        start, end = run["gain_start"], run["gain"]["abs_mean"]
        measures |= {"gain/start": start, "gain/end": end, "gain/end_l2": run["gain"]["l2"]}
        measures["gain/movement"] = run["gain"]["relative_movement"]
    return {measure: value for measure, value in measures.items() if value is not None}


def _mean_height(steps: Sequence[int], heights: Sequence[float]) -> float:
    """The area under the line through the points, over its length."""
    pieces = zip(steps, steps[1:], heights, heights[1:])
    return sum((b - a) * (y + z) / 2 for a, b, y, z in pieces) / (steps[-1] - steps[0])


# --- from measures to arms and pairs


def _arm_measures(arm: str, runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Of each measure the values by seed."""
    by_seed = [run_measures(run) for run in runs]
    for seed, measures in enumerate(by_seed):
        if missing := set(by_seed[0]) ^ set(measures):
            raise NormalignError(
                f"Arm {arm}: seeds 0 and {seed} do not have the same measures, only one has {', '.join(sorted(missing))}."
            )
    return {measure: [measures[measure] for measures in by_seed] for measure in by_seed[0]}


def _arm(runs: list[dict[str, Any]], values: dict[str, list[float]]) -> dict[str, Any]:
    measures = {measure: {**interval(by_seed), "values": by_seed} for measure, by_seed in values.items()}

    def mean(measure: str) -> float | None:
        return measures[measure]["mean"] if measure in measures else None

    return {
        "seeds": len(runs),
        "accuracy": measures["accuracy"],
        "gain": {
            "start_abs_mean": mean("gain/start"),
            "end_abs_mean": mean("gain/end"),
            "end_l2": mean("gain/end_l2"),
            "movement": mean("gain/movement"),
        },
        "ratio_before": mean("ratio/before"),
        "ratio_after": mean("ratio/after"),
        "measures": measures,
        "steps_to": {
            "accuracy": _steps_to(runs, "accuracy", ACCURACY_LEVELS, lambda value, level: value >= level),
            "caption_loss": _steps_to(runs, "caption_loss", CAPTION_LOSS_LEVELS, lambda value, level: value <= level),
        },
        "curves": {**_curves(runs), **_log_curves(runs)},
        "turns": {
            when: {
                kind: [interval(angles) for angles in zip(*[[t[kind] for t in run[when]["turns"]] for run in runs])]
                for kind in ("visual", "text")
            }
            for when in ("before", "after")
        },
    }


def _difference(values: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    differences = [value - other for value, other in zip(values, others, strict=True)]
    signs = [(difference > 0) - (difference < 0) for difference in differences]
    factor = None
    if min(*values, *others) > 0:
        logs = interval([math.log(value / other) for value, other in zip(values, others)])
        factor = {key: None if log is None else math.exp(log) for key, log in logs.items()}
    return {
        **interval(differences),
        "values": differences,
        "higher": signs.count(1),
        "lower": signs.count(-1),
        "same": signs.count(0),
        "factor": factor,
    }


def _steps_to(
    runs: list[dict[str, Any]], measure: str, levels: Sequence[float], reached: Callable[[float, float], bool]
) -> dict[str, Any]:
    """When each run was first measured at a level, in steps over all stages; None where it never was.

    The median counts a run that never got there as later than all others, so it is None unless more than half, or
    half on each side of the middle, got there.
    """
    steps_to = {}
    for level in levels:
        steps = [
            next((step for _, step, point in _curve(run) if measure in point and reached(point[measure], level)), None)
            for run in runs
        ]
        middle = median([math.inf if step is None else step for step in steps])
        steps_to[str(level)] = {
            "reached": sum(step is not None for step in steps),
            "of": len(steps),
            "median": None if math.isinf(middle) else middle,
            "values": steps,
        }
    return steps_to


def _curves(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    curves: dict[str, list[dict[str, Any]]] = {}
    for points in zip(*[_curve(run) for run in runs]):
        stage, step, measures = points[0]
        for measure in CURVES:
            if measure in measures:
                values = [point[measure] for _, _, point in points]
                curves.setdefault(measure, []).append({"stage": stage, "step": step, **interval(values)})
    return curves


def _log_curves(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """From the training logs; a step in which a run has no value (no norm, no picture in the batch) has no point."""
    offsets = _offsets(runs[0])
    curves: dict[str, list[dict[str, Any]]] = {}
    if runs[0]["gain_start"] is not None:
        start = {"stage": runs[0]["stages"][0]["stage"], "step": 0}
        curves["gain_abs_mean"] = [{**start, **interval([run["gain_start"] for run in runs])}]
    for name, key in _OF_LOG.items():
        for place, stage in enumerate(runs[0]["stages"]):
            for lines in zip(*[run["stages"][place]["log"] for run in runs]):
                values = [line[key] for line in lines]
                if None not in values:
                    step = offsets[stage["stage"]] + lines[0]["step"]
                    point = {"stage": stage["stage"], "step": step, **interval(values)}
                    curves.setdefault(name, []).append(point)
    return curves


def _short(file: str) -> str:
    """A recipe's folder and name, without the place on the machine where it lay."""
    return "/".join(PurePath(file).parts[-2:])


# --- sentences

Said = list[tuple[str, int]]  # sentences, each with the number of comparisons in it

MEASURE_WORDS = {
    "accuracy": "accuracy on questions",
    "question_loss": "loss on questions",
    "caption_loss": "loss on captions",
    "text_only_accuracy": "accuracy on text alone",
    "text_only_loss": "loss on text alone",
    "area/accuracy": "accuracy on questions over the whole training",
    "area/caption_loss": "loss on captions over the whole training",
}
_ROW_WORDS = {"caption": "captions", "text_only": "questions on text alone"}
_PART_WORDS = {"vision": "vision encoder", "projector": "projector", "language": "language model"}
_WHEN_WORDS = {"before": "at the start", "after": "after training"}
_NO_SPREAD = "the same difference with every seed, so no interval and nothing shown"
_ONE_SEED = "one seed, so no difference can be shown"
_SHOWN = ("better", "worse", "higher", "lower")
_VERDICTS = (*_SHOWN, "no difference shown", _NO_SPREAD, _ONE_SEED)


def sentences(summary: dict[str, Any]) -> list[str]:
    """What the figures say on each of the paper's claims (a) to (e), and nothing that they do not say."""
    claims = _norms(summary) + _turns(summary) + _helps(summary) + _default(summary) + _compensation(summary)
    return [*_frame(summary, sum(count for _, count in claims)), *(text for text, _ in claims)]


def verdict(figures: dict[str, Any], good: int = 0, even: float = 0) -> str:
    """What an interval shows: nothing where it holds `even`, else better or worse (higher or lower where `good` is 0).

    Seeds that differ by one and the same amount, as a share of few rows may, give an interval without width, which says
    nothing on how far other seeds would move it.
    """
    if figures["low"] is None:
        return _ONE_SEED
    if figures["low"] <= even <= figures["high"]:
        return "no difference shown"
    if figures["high"] - figures["low"] <= 1e-9 * abs(figures["mean"]):
        return _NO_SPREAD
    above = figures["mean"] > even
    if good == 0:
        return "higher" if above else "lower"
    return "better" if above == (good > 0) else "worse"


def with_interval(figures: dict[str, Any], show: Callable[[float], str] = lambda value: number(value, 3)) -> str:
    """A mean and, where there is one, its interval."""
    if figures["low"] is None:
        return show(figures["mean"])
    return f"{show(figures['mean'])} ({show(figures['low'])} to {show(figures['high'])})"


def signed(value: float) -> str:
    """A difference with its sign."""
    return f"{'+' if value > 0 else ''}{number(float(value), 3)}"


def higher(pair: dict[str, Any]) -> str:
    """With how many seeds the first of two arms was higher."""
    same = f", {pair['same']} the same" if pair["same"] else ""
    return f"{pair['higher']} of {len(pair['values'])} seeds higher{same}"


def question_kinds(summary: dict[str, Any]) -> list[str]:
    """The kinds of questions on pictures that were measured."""
    return [kind for kind in summary["held_out"] if kind not in _NOT_QUESTIONS]


def good_direction(measure: str) -> int:
    """1 where more of a measure is better, -1 where less is, 0 where neither is."""
    if "loss" in measure.split("/")[-1] or measure.startswith("loss/"):
        return -1
    return 1 if "accuracy" in measure else 0


def _frame(summary: dict[str, Any], comparisons: int) -> list[str]:
    arms = list(summary["arms"])
    seeds = summary["arms"][arms[0]]["seeds"]
    rows = summary["held_out"]
    questions = sum(rows[kind] for kind in question_kinds(summary))
    measured = [f"{questions} questions on pictures"]
    measured += [f"{rows[kind]} {words}" for kind, words in _ROW_WORDS.items() if kind in rows]
    said = [
        f"Trained alike but for the norm: {', '.join(arms)}, {seeds} {'seed' if seeds == 1 else 'seeds'} each. Measured at "
        f"the end on held-out rows, the same for all: {', '.join(measured)}."
    ]
    if seeds == 1:
        said.append("With one seed there are no intervals, and no difference between arms can be shown.")
    else:
        said.append(
            "What stands in brackets is the 95% t-interval over seeds; arms are compared seed by seed. It says how far "
            "other seeds would move a figure, not other data or other models."
        )
    if seeds > 1 and comparisons:
        said.append(
            f"There are {comparisons} comparisons below, not corrected for being many: of comparisons without any "
            f"difference, about one in twenty shows one by chance."
        )
    return said


def _norms(summary: dict[str, Any]) -> Said:
    if "none" not in summary["arms"]:
        return [("(a) Not measured: the arm none, without a norm, was not run.", 0)]
    measures = summary["arms"]["none"]["measures"]
    ratios = {words: measures[f"projected_ratio/{when}"] for when, words in _WHEN_WORDS.items()}
    shown = " and ".join(f"{with_interval(ratio)} {words}" for words, ratio in ratios.items())
    said = [
        (f"(a) Without a norm, the ratio of projected visual tokens' norm to that of text embeddings was {shown}.", 0)
    ]
    if low := [words for words, ratio in ratios.items() if ratio["mean"] < LEAST_RATIO]:
        said.append(
            (
                f"(a) This setting does not show the phenomenon: {' and '.join(low)} the ratio is under {LEAST_RATIO}. What "
                f"follows says little about alignment.",
                0,
            )
        )
    return said


def _turns(summary: dict[str, Any]) -> Said:
    measures = summary["arms"].get("none", {}).get("measures", {})
    turned = {words: measures.get(f"turn_ratio/{when}") for when, words in _WHEN_WORDS.items()}
    if None in turned.values():
        return [("(b) Not measured: the turns through the layers without a norm are not known.", 0)]
    shown = " and ".join(f"{with_interval(ratio)} {words}{_pace(ratio)}" for words, ratio in turned.items())
    said = [
        (f"(b) Without a norm, the turns of visual tokens over those of text tokens, all layers, were {shown}.", 0)
    ]
    names = {f"turn_ratio/{when}": f"turns of visual over text tokens {words}" for when, words in _WHEN_WORDS.items()}
    for arm in summary["arms"]:
        said += _compared(summary, "b", arm, "none", names, {})
    return said


def _pace(ratio: dict[str, Any]) -> str:
    if ratio["low"] is None:
        return ""
    judged = verdict(ratio, even=1)
    return {"lower": " (they turn more slowly)", "higher": " (they turn faster)"}.get(judged, f" ({judged})")


def _helps(summary: dict[str, Any]) -> Said:
    arms = [arm for arm in _START_AT_TEXT_NORM if arm in summary["arms"]]
    if not arms or "none" not in summary["arms"]:
        return [("(c) Not measured: it needs the arm none and one that starts at the norm of text.", 0)]
    return [said for arm in arms for said in _compared(summary, "c", arm, "none", MEASURE_WORDS, {})]


def _default(summary: dict[str, Any]) -> Said:
    if "default" not in summary["arms"]:
        return [("(d) Not measured: the arm default, whose gain starts at 1, was not run.", 0)]
    said: Said = []
    for arm in ("default", "aligned"):
        if arm in summary["arms"]:
            measures = summary["arms"][arm]["measures"]
            start, end, moved = (measures[f"gain/{name}"] for name in ("start", "end", "movement"))
            moved = with_interval(moved, lambda share: f"{number(100 * share, 3)}%")
            ends = f"{number(start['mean'])} to {number(end['mean'])}"
            said.append(
                (f"(d) In arm {arm} the mean |gain| went from {ends}; the gain moved by {moved} of its length.", 0)
            )
    names = {"gain/movement": "movement of the gain over its length"}
    said += _compared(summary, "d", "default", "none", MEASURE_WORDS, {})
    return said + _compared(summary, "d", "aligned", "default", {**names, **MEASURE_WORDS}, {})


def _compensation(summary: dict[str, Any]) -> Said:
    if "aligned" not in summary["arms"] or not {"none", "aligned_gwc"} & set(summary["arms"]):
        return [("(e) Not measured: it needs the arm aligned, and none or aligned_gwc to compare it with.", 0)]
    parts = [part for part in _PART_WORDS if _is_trained(summary, part)]
    said: Said = []
    if "vision" not in parts:
        said.append(("(e) The vision encoder was frozen, so what reaches it was not measured.", 0))
    stages = [stage["stage"] for stage in summary["stages"]]
    factors = {
        f"{stage}/{key}/{part}": f"{words} of the {_PART_WORDS[part]} in {stage}"
        for stage in stages
        for part in parts
        for key, words in (("grad_norm", "gradient norm before clipping"), ("update", "relative update"))
    }
    clipping = {f"{stage}/clip_factor": f"clipping factor in {stage}" for stage in stages}
    said += _compared(summary, "e", "aligned", "none", clipping, factors)
    return said + _compared(summary, "e", "aligned_gwc", "aligned", {**clipping, **MEASURE_WORDS}, factors)


def _is_trained(summary: dict[str, Any], part: str) -> bool:
    return any(
        max(arm["measures"][f"{stage['stage']}/update/{part}"]["values"]) > 0
        for arm in summary["arms"].values()
        for stage in summary["stages"]
    )


def _compared(
    summary: dict[str, Any],
    claim: str,
    arm: str,
    other: str,
    differences: dict[str, str],
    factors: dict[str, str],
) -> Said:
    """One sentence on two arms, by what their intervals show; none where one of the arms was not run."""
    pairs = summary["paired"].get(arm, {}).get(other, {})
    found: dict[str, list[str]] = {}
    for measure, words in factors.items():
        if measure in pairs and (factor := pairs[measure]["factor"]) is not None:
            found.setdefault(verdict(factor, even=1), []).append(f"{words} {with_interval(factor)} times")
    for measure, words in differences.items():
        if measure in pairs:
            judged = verdict(pairs[measure], good_direction(measure))
            counts = f", {higher(pairs[measure])}" if judged in _SHOWN else ""
            found.setdefault(judged, []).append(f"{words} {with_interval(pairs[measure], signed)}{counts}")
    if not found:
        return []
    shown = ". ".join(f"{judged.capitalize()}: {'; '.join(found[judged])}" for judged in _VERDICTS if judged in found)
    return [(f"({claim}) {arm} against {other}. {shown}.", sum(map(len, found.values())))]
