"""Running statistics of norms and turns: sums and histograms on the model's device, nothing kept per token."""

from __future__ import annotations

import torch


# Bins of a histogram of log2: 256 to the octave from 2^-24 to 2^24, so that the middle of a bin is within 0.14% of
# every norm in it.
BINS_PER_OCTAVE = 256
LOWEST_OCTAVE, HIGHEST_OCTAVE = -24, 24
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
# Divisors are at least this, so that the product of two of them is still a normal float32.
SMALLEST_NORM = 1e-18

# What is measured of a token at a layer, in the order of `token_measures`; the names of the report's keys.
MEASURES = (
    "norm_mean",
    "update_norm_mean",
    "cosine_prev_mean",
    "angle_mean_rad",
    "update_ratio_mean",
    "cosine_first_mean",
    "angle_formula_mean_rad",
    "isotropic_angle_rad",
)


def sum_dtype(device: torch.device) -> torch.dtype:
    """The format that sums are kept in: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


class NormStatistics:
    """Count, mean, standard deviation and quantiles of norms that are seen once.

    Sums are kept in float64, quantiles come from a histogram with fixed bins of log2: each is within 0.14% of the
    norm of that rank, for norms between 6e-8 and 1.6e7. Nothing is read back from the device before `to_dict`.
    """

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None
        self._bins: torch.Tensor | None = None

    def add(self, norms: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Takes in norms of any shape; those where `mask` (of the same shape) is False are left out."""
        norms = norms.detach().flatten().to(sum_dtype(norms.device))
        if mask is None:
            weights = torch.ones_like(norms)
        else:
            weights = mask.flatten().to(norms.device, norms.dtype)
            norms = norms.where(weights > 0, torch.ones_like(norms))
        if self._sums is None:
            self._sums = torch.zeros(3, dtype=norms.dtype, device=norms.device)
            bins = (HIGHEST_OCTAVE - LOWEST_OCTAVE) * BINS_PER_OCTAVE
            self._bins = torch.zeros(bins, dtype=norms.dtype, device=norms.device)
        norms, weights = norms.to(self._sums.device), weights.to(self._sums.device)
        weighted = norms * weights
        self._sums += torch.stack((weights.sum(), weighted.sum(), (weighted * norms).sum()))
        # a norm that is not a number shows in the mean; it has no place among the bins
        places = ((norms.log2() - LOWEST_OCTAVE) * BINS_PER_OCTAVE).nan_to_num(0).clamp(0, len(self._bins) - 1)
        self._bins.scatter_add_(0, places.long(), weights)

    @property
    def count(self) -> int:
        """How many norms were taken in (reads back from the device)."""
        return 0 if self._sums is None else int(self._sums[0])

    @property
    def total(self) -> float:
        """Their sum (reads back from the device)."""
        return 0.0 if self._sums is None else self._sums[1].item()

    def to_dict(self) -> dict:
        """Keys: mean, std (of the population), count, quantiles {"0.05": ...}."""
        count, total, squares = self._sums.tolist()
        mean = total / count
        return {
            "mean": mean,
            "std": max(squares / count - mean**2, 0.0) ** 0.5,
            "count": int(count),
            "quantiles": self._quantiles(count),
        }

    def _quantiles(self, count: float) -> dict[str, float]:
        """The middle of the bin in which the norm of each rank lies (rank: round half up of q * (count - 1))."""
        below = self._bins.cumsum(0)
        ranks = torch.tensor([int(q * (count - 1) + 0.5) + 1 for q in QUANTILES]).to(below)
        places = torch.searchsorted(below, ranks).double().cpu()
        values = torch.exp2(LOWEST_OCTAVE + (places + 0.5) / BINS_PER_OCTAVE)
        return {str(q): value for q, value in zip(QUANTILES, values.tolist())}


class LayerStatistics:
    """Means over tokens of what one layer does, for several groups of tokens (visual, text) at once."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def add(self, before: torch.Tensor, after: torch.Tensor, first: torch.Tensor, masks: torch.Tensor) -> None:
        """Takes in hidden states of shape (batch, tokens, hidden size) before and after the layer.

        `first` is what entered the first layer; `masks` are 0 and 1, of shape (groups, batch, tokens).
        """
        dtype = sum_dtype(after.device)
        measures = token_measures(before, after, first).flatten(1).to(dtype)
        masks = masks.flatten(1).to(dtype)
        # a padding token may hold anything, also what is not a number, and 0 * nan would be counted
        measures = measures.where(masks.any(dim=0), torch.zeros_like(measures))
        sums = torch.cat((measures, torch.ones_like(measures[:1]))) @ masks.T
        self._sums = sums if self._sums is None else self._sums + sums

    def to_dicts(self) -> list[dict[str, float]]:
        """For each group the means by the names of MEASURES; reads back from the device."""
        groups = []
        for *sums, count in self._sums.T.tolist():
            groups.append({name: total / count for name, total in zip(MEASURES, sums)})
        return groups


@torch.no_grad()
def token_measures(before: torch.Tensor, after: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """What a layer does to each token, in the order of MEASURES.

    With h the state before the layer, h' the one after it, dh = h' - h and C = |dh|: |h'|; C; the cosine of h and h';
    the effective angle, measured between h and h'; C/|h|; the cosine of h' and what entered the first layer; the
    effective angle by the paper's formula from C, phi and |h|; the angle if dh were orthogonal to h, atan(C/|h|).

    Args:
        before, after, first: shape (..., hidden size); computed in float32 at least, with one temporary of this shape.

    Returns:
        Shape (8, ...), angles in radians. A state of norm 0 has cosine 0.

    Source: arXiv 2512.08374, section 3 (tan(theta) = C sin(phi) / (|h| + C cos(phi))).
    """
    dtype = torch.promote_types(after.dtype, torch.float32)
    before, after, first = (state.detach().to(after.device, dtype) for state in (before, after, first))
    norm = _norm(before).clamp(min=SMALLEST_NORM)
    norm_after = _norm(after)
    safe_after = norm_after.clamp(min=SMALLEST_NORM)
    work = after - before
    update = _norm(work)
    along = work.mul_(before).sum(-1) / norm  # C cos(phi)
    across = (update.square() - along.square()).clamp(min=0).sqrt()  # C sin(phi)
    torch.mul(after, first, out=work)
    cosine_first = work.sum(-1) / (_norm(first).clamp(min=SMALLEST_NORM) * safe_after)
    # 2 atan(|u' - u| / |u' + u|) of the unit vectors keeps its accuracy for small turns, where acos loses it
    inverse = norm.reciprocal().unsqueeze(-1)
    torch.div(after, safe_after.unsqueeze(-1), out=work)
    apart = _norm(work.addcmul_(before, inverse, value=-1))
    together = _norm(work.addcmul_(before, inverse, value=2))
    return torch.stack(
        (
            norm_after,
            update,
            (norm + along) / safe_after,
            2 * torch.atan2(apart, together),
            update / norm,
            cosine_first,
            torch.atan2(across, norm + along),
            torch.atan2(update, norm),
        )
    )


def _norm(states: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(states, dim=-1)
