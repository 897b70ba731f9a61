"""Running statistics against their plain definitions."""

import math

import pytest
import torch

from normalign.inspection.statistics import MEASURES, LayerStatistics, NormStatistics, token_measures

from .reference import layer_means, norm_figures


pytestmark = pytest.mark.both_generations


def states(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_norm_statistics_match_a_sort_in_one_pass():
    norms = states(1000).exp() * 3
    statistics = NormStatistics()
    for part in norms.split(77):
        statistics.add(part)
    measured, expected = statistics.to_dict(), norm_figures(norms)
    for name in ("mean", "std", "count"):
        assert measured[name] == pytest.approx(expected[name], rel=1e-12)
    assert measured["quantiles"] == pytest.approx(expected["quantiles"], rel=1.4e-3)


@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e6])
def test_quantiles_keep_their_accuracy_over_thirteen_decades(scale):
    norms = (states(501).abs() + 1) * scale
    statistics = NormStatistics()
    statistics.add(norms)
    assert statistics.to_dict()["quantiles"] == pytest.approx(norm_figures(norms)["quantiles"], rel=1.4e-3)


def test_norms_behind_the_mask_are_left_out_even_when_they_are_not_numbers():
    statistics = NormStatistics()
    statistics.add(torch.tensor([1.0, math.nan, 3.0, math.inf]), torch.tensor([True, False, True, False]))
    figures = statistics.to_dict()
    assert (figures["count"], figures["mean"], figures["std"]) == (2, 2.0, 1.0)


def test_norm_of_zero_is_counted():
    statistics = NormStatistics()
    statistics.add(torch.tensor([0.0, 2.0]))
    figures = statistics.to_dict()
    assert (figures["count"], figures["mean"]) == (2, 1.0)
    assert figures["quantiles"]["0.05"] < 1e-7


def test_token_measures_match_their_definitions():
    before, after, first = states(50, 16), states(50, 16, seed=1), states(50, 16, seed=2)
    measured = dict(zip(MEASURES, token_measures(before, after, first).mean(dim=1).tolist()))
    assert measured == pytest.approx(layer_means(before, after, first), rel=1e-12)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1, 1e3])
def test_effective_angle_equals_the_formula(size):
    """tan(theta) = C sin(phi) / (|h| + C cos(phi)), for updates small and large against the token."""
    before = states(200, 32)
    after = before + size * states(200, 32, seed=1)
    measures = dict(zip(MEASURES, token_measures(before, after, before)))
    angle, formula = measures["angle_mean_rad"], measures["angle_formula_mean_rad"]
    assert torch.allclose(angle, formula, rtol=1e-9, atol=1e-15)
    plain = torch.nn.functional.cosine_similarity(before, after, dim=-1).clamp(-1, 1).arccos()
    assert torch.allclose(angle, plain, rtol=1e-3 if size < 1e-3 else 1e-6, atol=1e-9)


def test_small_angles_are_exact():
    """acos would lose a turn of 1e-9 rad, which tokens of a large norm make."""
    before = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    after = before + torch.tensor([[0.0, 1e-9]], dtype=torch.float64)
    measures = dict(zip(MEASURES, token_measures(before, after, before)))
    assert measures["angle_mean_rad"].item() == pytest.approx(1e-9, rel=1e-6)
    assert measures["angle_formula_mean_rad"].item() == pytest.approx(1e-9, rel=1e-6)


def test_isotropic_angle_is_the_turn_of_an_orthogonal_update():
    before = torch.tensor([[3.0, 0.0]])
    after = torch.tensor([[3.0, 4.0]])
    measures = dict(zip(MEASURES, token_measures(before, after, before)))
    for name in ("angle_mean_rad", "angle_formula_mean_rad", "isotropic_angle_rad"):
        assert measures[name].item() == pytest.approx(math.atan(4 / 3))


def test_inputs_are_not_changed_and_states_of_norm_zero_are_finite():
    before, after = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
    after[0] = 1
    copies = before.clone(), after.clone()
    assert token_measures(before, after, before).isfinite().all()
    assert torch.equal(before, copies[0]) and torch.equal(after, copies[1])


def test_layer_statistics_are_means_over_each_group_without_padding():
    masks = torch.tensor([[[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]], [[0, 0, 1, 0, 0], [0, 1, 1, 1, 0]]]).bool()
    layer, parts = LayerStatistics(), []
    for seed in (0, 10):
        before, after, first = (states(2, 5, 8, seed=seed + i) for i in range(3))
        after[0, 4] = math.nan  # what stands at padding may be anything
        layer.add(before, after, first, masks)
        parts.append((before, after, first))
    for group, measured in zip(masks, layer.to_dicts()):
        tokens = [torch.cat([part[i][group] for part in parts]) for i in range(3)]
        assert measured == pytest.approx(layer_means(*tokens), rel=1e-12)


def test_bfloat16_states_are_measured_in_float32():
    before, after, first = (states(20, 64, seed=i, dtype=torch.bfloat16) for i in range(3))
    measured = dict(zip(MEASURES, token_measures(before, after, first).mean(dim=1).tolist()))
    assert measured == pytest.approx(layer_means(before.double(), after.double(), first.double()), rel=1e-6)
