"""What an ablation's runs say together, on results made by hand whose means, intervals and sentences are known."""

import json
import math

import pytest

from normalign.configuration.errors import NormalignError
from normalign.train_trl.ablation_summary import interval, sentences, summarise, t_quantile, verdict

from .ablation_results import result, settings


GAINS = {"none": None, "default": (1.0, 0.999), "aligned": (0.03, 0.036), "aligned_gwc": (0.03, 0.033)}


def summary_of(arms, seeds=3, **changes):
    """A summary of runs, where `changes` gives for an arm what `result` takes, as a function of the seed."""
    runs = [
        result(arm, seed, **{"gain": GAINS[arm], **changes.get(arm, lambda seed: {})(seed)})
        for arm in arms
        for seed in range(seeds)
    ]
    return summarise(runs, list(arms), settings(seeds))


def said(summary, start):
    """The one sentence that starts so."""
    [sentence] = [sentence for sentence in sentences(summary) if sentence.startswith(start)]
    return sentence


@pytest.mark.parametrize(
    ("degrees", "t"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423), (120, 1.9799)]
)
def test_t_quantiles_are_those_of_the_tables(degrees, t):
    assert t_quantile(degrees) == pytest.approx(t, abs=5e-5)


def test_an_interval_is_mean_and_t_times_standard_error():
    found = interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2
    assert found["high"] - 2 == pytest.approx(4.302653 / math.sqrt(3), abs=1e-6)
    assert 2 - found["low"] == pytest.approx(found["high"] - 2)


def test_one_value_has_no_interval():
    assert interval([0.5]) == {"mean": 0.5, "low": None, "high": None}


def test_summary_has_the_fixed_keys_with_means_over_seeds():
    summary = summary_of(["none", "aligned"], 2, none=lambda seed: {"accuracy": (0.4, 0.8)[seed], "ratio": 30.0})
    none, aligned = summary["arms"]["none"], summary["arms"]["aligned"]
    assert none["seeds"] == 2
    # half the rows have the accuracy, half of them half of it
    assert none["accuracy"]["values"] == pytest.approx([0.3, 0.6])
    assert none["accuracy"]["mean"] == pytest.approx(0.45)
    assert none["accuracy"]["high"] == pytest.approx(0.45 + 12.7062 * 0.15, abs=1e-4)
    assert none["accuracy"]["low"] == pytest.approx(0.45 - 12.7062 * 0.15, abs=1e-4)
    assert (none["ratio_before"], none["ratio_after"]) == (30, 30)
    assert none["gain"]["start_abs_mean"] is None
    assert (aligned["gain"]["start_abs_mean"], aligned["gain"]["end_abs_mean"]) == (0.03, 0.036)
    assert aligned["gain"]["end_l2"] == pytest.approx(0.36)
    assert aligned["gain"]["movement"] == pytest.approx(0.2)


def test_measures_by_kind_and_stage_stand_beside_them():
    measures = summary_of(["none"], 2)["arms"]["none"]["measures"]
    expected = {
        "accuracy/count": 0.4,
        "accuracy/digit": 0.2,
        "loss/digit": 2.0,
        "question_loss": 1.5,
        "caption_loss": 1.0,
        "text_only_accuracy": 0.9,
        "after/stage1/accuracy": 0.3,
        "after/stage2/caption_loss": 1 / 3,
        "turn_ratio/before": 1 / 30,
        "projected_ratio/after": 30,
        "stage1/grad_norm/projector": 1.0,
        "stage2/update/language": 1e-3,
        "stage1/clip_factor": 1 / math.sqrt(5),
        # two rises from 0 over 0.15 to 0.3, each the half of its 20 steps high
        "area/accuracy": 0.15,
    }
    assert {name: measures[name]["mean"] for name in expected} == pytest.approx(expected)


def test_curves_go_on_over_the_stages():
    curves = summary_of(["aligned"], 2)["arms"]["aligned"]["curves"]
    assert [point["step"] for point in curves["accuracy"]] == [0, 10, 20, 20, 30, 40]
    assert [point["stage"] for point in curves["accuracy"]] == ["stage1"] * 3 + ["stage2"] * 3
    assert [point["mean"] for point in curves["accuracy"]] == pytest.approx([0, 0.15, 0.3] * 2)
    assert [(point["step"], point["mean"]) for point in curves["gain_abs_mean"]] == [
        *[(0, 0.03), (10, 0.033), (20, 0.036)],
        *[(30, 0.033), (40, 0.036)],
    ]


def test_a_run_that_never_reaches_a_level_counts_as_later_than_all():
    curves = [(0.0, 0.4, 0.4), (0.0, 0.0, 0.0), (0.0, 0.2, 0.4)]
    levels = summary_of(["none"], 3, none=lambda seed: {"curve": curves[seed]})["arms"]["none"]["steps_to"]["accuracy"]
    assert levels["0.25"] == {"reached": 2, "of": 3, "median": 20, "values": [10, None, 20]}
    assert levels["0.5"] == {"reached": 0, "of": 3, "median": None, "values": [None] * 3}


def test_a_level_reached_by_half_the_runs_has_no_median():
    curves = [(0.0, 0.4, 0.4), (0.0, 0.0, 0.0)]
    levels = summary_of(["none"], 2, none=lambda seed: {"curve": curves[seed]})["arms"]["none"]["steps_to"]["accuracy"]
    assert (levels["0.25"]["reached"], levels["0.25"]["median"]) == (1, None)


def test_caption_losses_are_reached_from_above():
    # losses of 1, 1/2 and 1/3
    levels = summary_of(["none"], 2)["arms"]["none"]["steps_to"]["caption_loss"]
    assert (levels["0.5"]["median"], levels["0.3"]["median"]) == (10, None)


def test_arms_are_compared_seed_by_seed():
    summary = summary_of(
        ["none", "aligned"],
        3,
        none=lambda seed: {"accuracy": 0.2 * seed, "gradient": 1.0},
        aligned=lambda seed: {"accuracy": 0.2 * seed + (0.04, 0.04, 0)[seed], "gradient": (2.0, 4.0, 8.0)[seed]},
    )
    pair = summary["paired"]["aligned"]["none"]
    assert pair["accuracy"]["values"] == pytest.approx([0.03, 0.03, 0])
    assert [pair["accuracy"][sign] for sign in ("higher", "lower", "same")] == [2, 0, 1]
    assert pair["accuracy"]["factor"] is None  # seed 0 has no right answer in arm none
    factor = pair["stage1/grad_norm/projector"]["factor"]
    assert factor["mean"] == pytest.approx(4)
    assert factor["high"] / 4 == pytest.approx(math.exp(4.302653 * math.log(2) / math.sqrt(3)), rel=1e-5)


def test_gwc_is_compared_with_the_same_norm_without_it():
    summary = summary_of(list(GAINS), 2)
    assert {arm: list(others) for arm, others in summary["paired"].items()} == {
        "default": ["none"],
        "aligned": ["none", "default"],
        "aligned_gwc": ["none", "aligned"],
    }


def test_the_order_of_the_results_does_not_matter():
    runs = [result(arm, seed, 0.1 * seed) for arm in ("none", "rms") for seed in range(3)]
    assert summarise(runs, ["none", "rms"], settings(3)) == summarise(runs[::-1], ["none", "rms"], settings(3))


def test_the_summary_is_json_and_names_no_folder_of_the_machine():
    text = json.dumps(summary_of(list(GAINS), 1), allow_nan=False)
    assert "demo/stage1.yaml" in text
    assert "/some/where" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda runs: runs.pop(), "has no result of aligned with seed 1"),
        (lambda runs: runs.append(runs[0]), "Arm none has two results for seed 0"),
        (lambda runs: runs.append(result("none", 2)), "did not ask for none with seed 2"),
        (lambda runs: runs[3]["held_out"]["digit"].update(n=50), "Arm aligned, seed 1, was not measured like"),
        (lambda runs: runs[3]["curve"].pop(), "Arm aligned, seed 1, was not measured like"),
        (lambda runs: runs[3]["stages"][0]["means"].pop("clip_factor"), "only one has stage1/clip_factor"),
    ],
)
def test_runs_that_are_missing_or_measured_otherwise_are_refused(change, message):
    runs = [result(arm, seed) for arm in ("none", "aligned") for seed in range(2)]
    change(runs)
    with pytest.raises(NormalignError, match=message):
        summarise(runs, ["none", "aligned"], settings(2))


def test_runs_without_questions_are_refused():
    run = result("none", 0)
    run["held_out"] = {"caption": run["held_out"]["caption"]}
    with pytest.raises(NormalignError, match="without questions on pictures"):
        summarise([run], ["none"], settings(1))


def test_identical_arms_show_no_difference():
    text = said(summary_of(["none", "aligned"], 4, aligned=lambda seed: {"gain": None}), "(c) aligned against none")
    assert "No difference shown: accuracy on questions 0 (0 to 0)" in text
    assert "Better" not in text and "Worse" not in text


def test_noise_shows_no_difference():
    changes = (0.06, -0.04, 0.02, -0.02)
    summary = summary_of(["none", "aligned"], 4, aligned=lambda seed: {"accuracy": 0.4 + changes[seed]})
    text = said(summary, "(c) aligned against none")
    assert "No difference shown: accuracy on questions +0.00375 (" in text
    assert "Better" not in text and "Worse" not in text


@pytest.mark.parametrize(("sign", "verdict", "seeds"), [(1, "Better", "4 of 4"), (-1, "Worse", "0 of 4")])
def test_a_clear_difference_is_said_whichever_way_it_goes(sign, verdict, seeds):
    changes = (0.20, 0.24, 0.16, 0.20)
    summary = summary_of(["none", "aligned"], 4, aligned=lambda seed: {"accuracy": 0.4 + sign * changes[seed]})
    text = said(summary, "(c) aligned against none")
    assert text.startswith(
        f"(c) aligned against none. {verdict}: accuracy on questions {'+' if sign > 0 else '-'}0.150 ("
    )
    assert f"{seeds} seeds higher. No difference shown: loss on questions" in text


def test_less_loss_is_better():
    changes = (0.20, 0.24, 0.18, 0.22)
    summary = summary_of(["none", "aligned"], 4, aligned=lambda seed: {"loss": 1 - changes[seed]})
    text = said(summary, "(c) aligned against none")
    assert text.startswith("(c) aligned against none. Better: loss on questions -0.315 (")
    assert "loss on captions -0.210 (" in text.partition("No difference shown")[0]


def test_the_same_difference_with_every_seed_is_no_finding():
    """Shares of few rows may differ by the same amount by chance: there is no spread to make an interval from."""
    summary = summary_of(["none", "aligned"], 2, aligned=lambda seed: {"accuracy": 0.5})
    text = said(summary, "(c) aligned against none")
    assert (
        "The same difference with every seed, so no interval and nothing shown: accuracy on questions +0.075" in text
    )
    assert "Better" not in text


def test_one_seed_shows_no_difference_and_says_why():
    summary = summary_of(list(GAINS), 1, aligned=lambda seed: {"accuracy": 0.9})
    assert summary["arms"]["none"]["accuracy"] == {"mean": 0.3, "low": None, "high": None, "values": [0.3]}
    found = sentences(summary)
    assert "With one seed there are no intervals, and no difference between arms can be shown." in found
    assert not [
        text for text in found if any(word in text for word in ("Better", "Worse", "Higher", "Lower", " to +"))
    ]


def test_comparisons_are_counted_once_for_all():
    found = sentences(summary_of(["none", "aligned"], 2))
    # seven measures of (c), two times of (b), and for (e) in two stages gradient and update of two parts, and clipping
    assert [text for text in found if "not corrected" in text] == [
        "There are 19 comparisons below, not corrected for being many: of comparisons without any difference, about one in "
        "twenty shows one by chance."
    ]


def test_norms_and_turns_without_a_norm_are_told():
    summary = summary_of(
        ["none", "aligned"], 3, none=lambda seed: {"ratio": 30 + seed}, aligned=lambda seed: {"ratio": 1}
    )
    assert said(summary, "(a)").endswith(
        "was 30.0 (30.0 to 30.0) at the start and 30.0 (30.0 to 30.0) after training."
    )
    assert "at the start (they turn more slowly)" in said(summary, "(b) Without a norm")
    assert said(summary, "(b) aligned against none").startswith("(b) aligned against none. Higher: turns of visual")


def test_a_setting_without_the_gap_is_said_to_show_nothing():
    runs = [result("none", seed) for seed in range(2)]
    for run in runs:
        run["before"]["projected_norm"] = 4.9 * run["before"]["text_norm"]
    summary = summarise(runs, ["none"], settings(2))
    assert [text for text in sentences(summary) if "does not show" in text] == [
        "(a) This setting does not show the phenomenon: at the start the ratio is under 5. What follows says little about "
        "alignment."
    ]
    assert not [text for text in sentences(summary_of(["none"], 2)) if "does not show" in text]


def test_movement_of_the_gain_is_a_share_of_its_length():
    summary = summary_of(list(GAINS), 3, aligned=lambda seed: {"gain": (0.03, 0.036 + 0.0003 * seed)})
    assert "from 1.000 to 0.9990; the gain moved by 0.100% (" in said(summary, "(d) In arm default")
    assert "from 0.03000 to 0.03630; the gain moved by 21.0% (" in said(summary, "(d) In arm aligned")
    assert "Higher: movement of the gain over its length" in said(summary, "(d) aligned against default")


def test_gwc_is_told_by_factors_of_gradients():
    gradients = {"none": (0.9, 1.0, 1.1), "aligned": (0.5, 0.4, 0.6), "aligned_gwc": (14.0, 13.5, 18.0)}
    summary = summary_of(
        list(gradients), 3, **{a: lambda seed, g=g: {"gradient": g[seed]} for a, g in gradients.items()}
    )
    assert "Lower: gradient norm before clipping of the projector in stage1 0.4" in said(
        summary, "(e) aligned against"
    )
    text = said(summary, "(e) aligned_gwc against aligned")
    factor = (14 * 13.5 * 18 / (0.5 * 0.4 * 0.6)) ** (1 / 3)
    assert f"Higher: gradient norm before clipping of the projector in stage1 {factor:.1f} (" in text
    unchanged = text.partition("No difference")[2]
    for part in ("projector", "language model"):
        assert f"relative update of the {part} in stage1 1.00 (1.00 to 1.00) times" in unchanged


def test_a_frozen_encoder_is_not_spoken_of():
    arms = ("none", "aligned")
    frozen = sentences(summary_of(arms, 2))
    trained = sentences(summary_of(arms, 2, **{arm: lambda seed: {"vision": 0.1} for arm in arms}))
    assert "(e) The vision encoder was frozen, so what reaches it was not measured." in frozen
    assert not [text for text in frozen if "of the vision encoder" in text]
    assert [text for text in trained if "gradient norm before clipping of the vision encoder in stage1" in text]


def test_claims_whose_arms_were_not_run_are_not_judged():
    found = sentences(summary_of(["aligned_gwc"], 2))
    assert [text[:16] for text in found[2:]] == [f"({claim}) Not measured" for claim in "abcde"]


def test_verdicts_follow_the_interval():
    figures = {"mean": 0.2, "low": 0.1, "high": 0.3}
    assert [verdict(figures, good) for good in (1, -1, 0)] == ["better", "worse", "higher"]
    assert verdict(figures, even=0.15) == "no difference shown"
    assert verdict(figures, even=1) == "lower"
