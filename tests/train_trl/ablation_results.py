"""Results of runs as `ablate` writes them, made by hand: two stages of 20 steps, two kinds of questions."""

import math


STAGES = ("stage1", "stage2")
KINDS = ("digit", "count")


def held_out(accuracy, loss=1.0, rows=100):
    """`accuracy` on count, and half of it on digit."""
    return {
        "caption": {"n": rows, "accuracy": 0.0, "loss": loss},
        "count": {"n": rows, "accuracy": accuracy, "loss": loss},
        "digit": {"n": rows, "accuracy": accuracy / 2, "loss": 2 * loss},
        "text_only": {"n": rows, "accuracy": 0.9, "loss": 0.1},
    }


def result(arm, seed, accuracy=0.4, loss=1.0, curve=(0.0, 0.2, 0.4), gain=None, ratio=30.0, gradient=1.0, vision=0.0):
    """One run.

    `curve` has the accuracies of count at step 0, 10 and 20 of both stages, with losses of `loss` over 1, 2 and 3;
    `gain` is the mean |gain| at start and end, `ratio` the norm of inserted over text tokens; `gradient` is that of the
    projector, `vision` that of the encoder.
    """
    projected = 12.0
    log = [
        {
            "step": step,
            "loss": 1.0,
            "aligned_norm/gain_abs_mean": gain and gain[0] + (gain[1] - gain[0]) * step / 20,
            "aligned_norm/gain_l2": gain and 10 * gain[1],
            "norm/visual_in": projected,
            "norm/ratio": ratio,
        }
        for step in (10, 20)
    ]
    gradients = {"vision": vision, "projector": gradient, "norm": 0.0 if gain is None else 0.5, "language": 2.0}
    total = math.hypot(*gradients.values())
    means = {
        **{f"grad_norm/{part}": norm for part, norm in gradients.items()},
        **{f"update/{part}": 1e-3 * (norm > 0) for part, norm in gradients.items()},
        "clip_factor": min(1, 1 / total),
        **({"clip_factor_without_gwc": 0.9} if arm == "aligned_gwc" else {}),
    }
    inspected = {
        "text_norm": 0.4,
        "projected_norm": projected,
        "inserted_norm": 0.4 * ratio,
        "ratio": ratio,
        "turns": [{"visual": 1.2 / ratio, "text": 1.2}, {"visual": 0.5 / ratio, "text": 0.5}],
        "turn_ratio": 1 / ratio,
    }
    return {
        "arm": arm,
        "seed": seed,
        "held_out": held_out(accuracy, loss),
        "curve": [
            {"stage": stage, "step": 10 * place, **held_out(height, loss / (place + 1))}
            for stage in STAGES
            for place, height in enumerate(curve)
        ],
        "stages": [{"stage": stage, "means": means, "log": log} for stage in STAGES],
        "before": dict(inspected),
        "after": dict(inspected),
        "gain": gain and {"abs_mean": gain[1], "l2": 10 * gain[1], "relative_movement": abs(gain[1] / gain[0] - 1)},
        "gain_start": gain and gain[0],
    }


def settings(seeds):
    """As `ablate` hands them on."""
    return {
        "recipes": ["/some/where/demo/stage1.yaml", "/some/where/demo/stage2.yaml"],
        "seeds": seeds,
        "overrides": {},
    }
