"""The verdict: each thing it can say, on figures made by hand and on composed models without and with the norm."""

import math

import pytest
import torch

from normalign.inspection.inputs import build_inputs
from normalign.inspection.parts import find_parts
from normalign.inspection.record import record_norms
from normalign.inspection.verdict import arises_in, norm_factors, turns, verdict
from normalign.train_trl.digit_scenes import digit_scene_rows


pytestmark = pytest.mark.both_generations

HIDDEN_SIZE = 400


def report(encoder=40.0, projector=40.0, inserted=None, T=1.0, visual=(0.1, 0.2), text=(1.0, 0.4), **more):
    """A report's dictionary: mean norms of the parts, and each layer's turns (rad) of the two modalities."""
    inserted = projector if inserted is None else inserted
    means = {"vision_encoder": encoder, "projector": projector, "inserted": inserted}
    return {
        "text_embedding_norm": T,
        "ratio": inserted / T,
        "interface": {part: mean and {"mean": mean, "std": 0.0} for part, mean in means.items()},
        "layers": [
            {
                "visual": {"angle_mean_rad": a, "update_norm_mean": 3.0},
                "text": {"angle_mean_rad": b, "update_norm_mean": 2.0},
            }
            for a, b in zip(visual, text)
        ],
        **more,
    }


def test_a_gap_is_more_than_a_factor_of_two_either_way():
    for inserted, gap in ((0.49, True), (0.5, False), (1.0, False), (2.0, False), (2.01, True)):
        text, figures = verdict(report(encoder=1.0, projector=inserted), HIDDEN_SIZE)
        assert figures["gap"] is figures["needs_realignment"] is gap
        assert text.startswith("Norm gap: " if gap else "No norm gap: ")
        assert f"at {inserted:.3g} times" in text or f"at {inserted:.2f} times" in text


def test_aligning_would_set_T_over_root_D_and_need_training():
    text, figures = verdict(report(projector=40.0, T=1.09), 3072)
    assert figures["T"] == 1.09 and figures["gain"] == pytest.approx(1.09 / math.sqrt(3072))
    assert "put a LayerNorm behind the projector and start its gain at T/sqrt(D) = 0.01967 (T = 1.09)" in text
    assert "a finished model then needs re-alignment training" in text
    text, _ = verdict(report(encoder=1.0, projector=1.0), HIDDEN_SIZE)
    assert "nothing to align" in text and "re-alignment" not in text


@pytest.mark.parametrize(
    ("encoder", "projector", "inserted", "steps", "words"),
    [
        (
            40,
            36,
            36,
            ["vision_encoder"],
            "in the vision encoder (40 times T), not in the projector (0.9 times the encoder)",
        ),
        (
            1.5,
            60,
            60,
            ["projector"],
            "in the projector (40 times the encoder), not in the vision encoder (1.5 times T)",
        ),
        (8, 40, 40, ["vision_encoder", "projector"], "the vision encoder (8 times T) and in the projector (5 times"),
        (1.6, 2.72, 2.72, ["projector"], "in the projector (1.7 times the encoder)"),
        (1, 1, 30, ["behind_projector"], "in what stands behind the projector (times 30)"),
        (None, 40, 40, ["projector"], "in the projector (40 times T)."),
        (None, None, 40, ["behind_projector"], "what stands behind the projector (times 40)."),
        (0.1, 0.2, 0.2, ["vision_encoder"], "the vision encoder (0.1 times T), not in the projector (2 times"),
    ],
)
def test_a_gap_arises_in_the_steps_that_make_it(encoder, projector, inserted, steps, words):
    text, figures = verdict(report(encoder, projector, inserted), HIDDEN_SIZE)
    assert figures["arises_in"] == steps
    assert words in text
    factors = [factor for factor in figures["factors"].values() if factor is not None]
    assert math.prod(factors) == pytest.approx(figures["ratio"])


def test_factors_of_unmeasured_steps_are_none():
    assert norm_factors(report(None, 40.0, T=2.0)) == {"vision_encoder": None, "projector": 20, "behind_projector": 1}
    assert arises_in({"vision_encoder": None, "projector": 20.0, "behind_projector": 1.0}, 20.0, False) == [
        "projector"
    ]


def test_behind_an_aligned_norm_only_its_gain_counts():
    data = report(40.0, 40.0, 20.0, aligned_norm=True)
    text, figures = verdict(data, HIDDEN_SIZE)
    assert figures["arises_in"] == ["aligned_norm"] and "in the aligned norm, whose gain does not fit T" in text
    assert "start the gain of its norm anew at T/sqrt(D) = 0.05" in text
    text, figures = verdict(report(40.0, 40.0, 1.0, aligned_norm=True), HIDDEN_SIZE)
    assert figures["arises_in"] == [] and "The aligned norm brings them there from 40." in text


def test_visual_tokens_lag_when_they_turn_less_at_first_or_on_the_whole():
    cases = {
        "at first": ((0.4, 1.0), (1.0, 1.0), True, 1),
        "at first alone": ((0.4, 1.3), (1.0, 1.0), True, 1),
        "on the whole": ((0.7, 0.7), (1.0, 1.0), True, 0),
        "alike": ((1.0, 0.6), (1.0, 1.0), False, 0),
        "faster": ((2.0, 1.0), (1.0, 1.0), False, 0),
    }
    for name, (visual, text, lags, behind) in cases.items():
        turned = turns(report(visual=visual, text=text))
        assert (turned["lags"], turned["layers_behind"], turned["layers"]) == (lags, behind, 2)
        assert turned["first_layer_ratio"] == pytest.approx(visual[0] / text[0])
        assert turned["ratio"] == pytest.approx(sum(visual) / sum(text))
        assert turned["update_size_ratio"] == pytest.approx(1.5)
        words, _ = verdict(report(visual=visual, text=text), HIDDEN_SIZE)
        assert ("do not lag behind" not in words) is lags
        assert ("at the start, not on the whole" in words) is (name == "at first alone")
        assert f"they turn by {visual[0]:.3f} rad where text tokens turn by 1.000 (with updates 1.50 times" in words


def test_a_report_without_layers_says_nothing_of_turns():
    text, figures = verdict(report(visual=(), text=()), HIDDEN_SIZE)
    assert figures["turns"] is None and "lag" not in text


def test_controls_are_told_and_a_model_that_hardly_looks_is_named():
    effect = {"kl_mean": 0.5, "top1_changed": 0.25}
    controls = {
        "black": effect,
        "none": effect,
        "other": None,
        "position_sensitivity_index": {**effect, "shuffles": 2},
    }
    text, _ = verdict(report(controls=controls), HIDDEN_SIZE)
    assert "changes in 25% of cases with a black image (KL 0.5 nats), 25% of cases with no image (KL" in text
    assert "hardly looks" not in text and "another image" not in text
    still = {"kl_mean": 0.001, "top1_changed": 0.0}
    text, _ = verdict(report(controls={"black": still, "none": effect, "other": still}), HIDDEN_SIZE)
    assert "The model hardly looks at its image." in text


def test_gradients_are_told_with_what_mu_predicts():
    def arm(before, after):
        return {"share": {"vision": before / 2, "projector": before / 2, "norm": 0.0, "language": after}}

    gradients = {
        "gwc_on": arm(0.9, 0.1),
        "gwc_off": arm(0.02, 0.98),
        "predicted_factor": 20.0,
        "measured_factor": {"vision": 20.02, "projector": 20.01},
    }
    text, _ = verdict(report(gradients=gradients), HIDDEN_SIZE)
    assert "GWC multiplies the gradients before the norm by 20 (1/mu is 20): vision encoder and projector take" in text
    assert "90.0% of the clipping budget with it, 2.0% without" in text
    plain = {"gwc_on": None, "gwc_off": {"share": {"vision": 0.1, "projector": 0.2, "norm": None, "language": 0.7}}}
    text, _ = verdict(report(gradients=plain), HIDDEN_SIZE)
    assert "Vision encoder and projector take 30.0% of the clipping budget." in text


def composed_report(norm, seed=0):
    from normalign import compose

    model, processor = compose("mini-vision", "mini-language", norm, seed=seed, dtype=torch.float32)
    parts = find_parts(model)
    with record_norms(model) as recorder, torch.no_grad():
        for row in digit_scene_rows(2, split="test", text_only_share=0):
            model(**build_inputs(model, processor, [("Is there a 7?", row["images"])]))
    return {**recorder.to_dict(), "aligned_norm": parts.aligned_norm is not None}, parts.hidden_size, model


def test_a_composed_model_without_the_norm_has_a_gap_from_its_encoder_and_lags():
    data, hidden_size, model = composed_report({"kind": "none"})
    text, figures = verdict(data, hidden_size)
    assert figures["gap"] and figures["ratio"] > 20 and figures["arises_in"] == ["vision_encoder"]
    assert figures["turns"]["lags"] and figures["turns"]["layers_behind"] == figures["turns"]["layers"] == 4
    assert figures["gain"] == pytest.approx(data["text_embedding_norm"] / model.config.text_config.hidden_size**0.5)
    for words in ("Norm gap", "arises in the vision encoder", "lag behind", f"{figures['gain']:.4g}", "re-alignment"):
        assert words in text


def test_a_composed_model_with_the_norm_has_neither():
    data, hidden_size, model = composed_report({"kind": "layernorm"})
    text, figures = verdict(data, hidden_size)
    assert not figures["gap"] and figures["ratio"] == pytest.approx(1, abs=0.02) and not figures["turns"]["lags"]
    assert figures["gain"] == pytest.approx(model.get_aligned_norm().weight[0].item(), rel=1e-5)
    before = f"The aligned norm brings them there from {data['interface']['projector']['mean']:.3g}."
    for words in ("No norm gap", before, "do not lag behind", "nothing to align"):
        assert words in text


def test_a_composed_model_with_a_gain_of_one_has_its_gap_from_the_norm():
    text, figures = verdict(*composed_report({"kind": "layernorm", "gain_init": 1.0})[:2])
    assert figures["arises_in"] == ["aligned_norm"] and figures["turns"]["lags"]
    assert "whose gain does not fit T" in text
