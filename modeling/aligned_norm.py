"""The aligned norm: brings projected visual tokens to the norm of text tokens, with Global Weight Compensation (GWC).

Source: Li et al., "The Unseen Bias: How Norm Discrepancy in Pre-Norm MLLMs Leads to Visual Information Loss",
ICLR 2026, arXiv 2512.08374.
"""

import math

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


_ROWS_AT_ONCE = 8192


def text_embedding_norm(
    embeddings: nn.Module | torch.Tensor, eps: float = 1e-6, vocab_size: int | None = None
) -> float:
    """Mean L2 norm T of a language model's text embeddings, as they are where visual tokens are inserted.

    Args:
        embeddings: the input embedding module, or a table of shape (rows, hidden_size). A module is called on its
            token ids, so a scale that it applies itself (Gemma 3) is part of T.
        eps: rows whose norm is at most eps (padding, rows kept for later tokens) are left out.
        vocab_size: only the first `vocab_size` rows are read; None reads all.

    Returns:
        T, computed in float32 (float64 for a float64 table).

    Raises:
        ValueError: the table is empty, on the meta device, has no row above eps, or holds a value that is not finite.

    Source: arXiv 2512.08374, section 4 (mean over the rows of W_e).
    """
    table = embeddings.weight if isinstance(embeddings, nn.Module) else embeddings
    if table.device.type == "meta" or table.numel() == 0 or table.dim() != 2:
        raise ValueError(
            f"The text embedding norm needs a table of shape (rows, hidden_size) with its values in memory, but this "
            f"one has shape {tuple(table.shape)} on device '{table.device}'. Load the weights first, gather a sharded "
            f"table, or set aligned_norm.target_norm in the config."
        )
    rows = table.shape[0] if vocab_size is None else min(vocab_size, table.shape[0])
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, rows, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, rows)
            if isinstance(embeddings, nn.Module):
                block = embeddings(torch.arange(start, stop, device=table.device))
            else:
                block = table[start:stop]
            norms = block.to(torch.promote_types(block.dtype, torch.float32)).norm(dim=-1)
            kept = norms[~(norms <= eps)]
            total += kept.double().sum().item()
            count += kept.numel()
    if count == 0 or not math.isfinite(total):
        what = "no row" if count == 0 else "a value that is not finite in a row"
        raise ValueError(
            f"The text embedding table of shape {tuple(table.shape)} has {what} with a norm above {eps} among its "
            f"first {rows} rows, so the norm of text tokens cannot be measured. Were the language model's weights loaded?"
        )
    return total / count


def _compensated_gain(weight: torch.Tensor, floor: float) -> torch.Tensor:
    """g / mu with mu = max(mean |g|, floor)."""
    return weight / weight.abs().mean().clamp(min=floor)


def _compute_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


def _is_exporting() -> bool:
    # before torch 2.7 export could not be told from compilation
    return getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)()


class _LayerNormGWC(torch.autograd.Function):
    """LayerNorm whose backward hands the input the gradient of the gain g/mu in place of g.

    LayerNorm's gradient is linear in the gain for the input and does not use the gain for gain and bias, so this is
    the library's own fused backward called with another gain.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, eps, floor):
        dtype = _compute_dtype(x, weight)
        y, mean, rstd = torch.native_layer_norm(x.to(dtype), x.shape[-1:], weight.to(dtype), bias.to(dtype), eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.floor = floor
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, mean, rstd, weight, bias = ctx.saved_tensors
        dtype = _compute_dtype(x, weight)
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dy.to(dtype).contiguous(),
            x.to(dtype),
            x.shape[-1:],
            mean,
            rstd,
            _compensated_gain(weight.to(dtype), ctx.floor),
            bias.to(dtype),
            list(ctx.needs_input_grad[:3]),
        )
        return (
            None if dx is None else dx.to(x.dtype),
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(bias.dtype),
            None,
            None,
        )


class _RMSNormGWC(torch.autograd.Function):
    """RMSNorm with the same exchange of g for g/mu in the input's gradient."""

    @staticmethod
    def forward(ctx, x, weight, eps, floor):
        dtype = _compute_dtype(x, weight)
        wide = x.to(dtype)
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.floor = floor
        return (wide * rstd * weight.to(dtype)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, rstd, weight = ctx.saved_tensors
        dtype = _compute_dtype(x, weight)
        dy, xhat = dy.to(dtype), x.to(dtype) * rstd
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dxhat = dy * _compensated_gain(weight.to(dtype), ctx.floor)
            dx = (rstd * (dxhat - xhat * (dxhat * xhat).mean(-1, keepdim=True))).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dweight = (dy * xhat).reshape(-1, weight.numel()).sum(0).to(weight.dtype)
        return dx, dweight, None, None


class _ScaleGWC(torch.autograd.Function):
    """One factor s for all values, whose input gradient is s/mu."""

    @staticmethod
    def forward(ctx, x, weight, floor):
        dtype = _compute_dtype(x, weight)
        ctx.save_for_backward(x, weight)
        ctx.floor = floor
        return (x.to(dtype) * weight.to(dtype)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dtype = _compute_dtype(x, weight)
        dy = dy.to(dtype)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = (dy * _compensated_gain(weight.to(dtype), ctx.floor)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dweight = (dy * x.to(dtype)).sum().reshape(weight.shape).to(weight.dtype)
        return dx, dweight, None


class AlignedNorm(nn.Module):
    """Norm after the projector whose gain starts so small that a visual token has the norm of a text token.

    Args:
        hidden_size: the language model's width D.
        kind: `layernorm`, `rmsnorm` (no re-centring, no bias) or `scale` (one factor, no normalising).
        eps: added to the variance.
        gwc: divide the gradient that reaches the input by mu = max(mean |gain|, gwc_floor). Values and the gradients of
            gain and bias do not change. Costs nothing where no gradient is wanted.
        gwc_floor: the delta of the paper.

    Shapes: input and output (..., hidden_size); `weight` (hidden_size,), or (1,) for `scale`; `bias` (hidden_size,)
    for `layernorm` alone. The output has the input's dtype; the parameters are float32 and stay so under
    `.to(bfloat16)` and `.half()`, since steps of a gain near 1 are lost in bfloat16.

    Raises:
        ValueError: an unknown kind, or a size, eps or floor that is not positive.

    Source: arXiv 2512.08374, sections 4.1 (norm) and 4.2 (GWC).
    """

    def __init__(
        self,
        hidden_size: int,
        kind: str = "layernorm",
        eps: float = 1e-6,
        gwc: bool = True,
        gwc_floor: float = 1e-3,
    ):
        super().__init__()
        if kind not in ("layernorm", "rmsnorm", "scale"):
            raise ValueError(f"AlignedNorm has the kinds 'layernorm', 'rmsnorm' and 'scale', not {kind!r}.")
        if hidden_size < 1 or not eps > 0 or not gwc_floor > 0:
            raise ValueError(
                f"AlignedNorm needs positive hidden_size, eps and gwc_floor, got {hidden_size}, {eps} and {gwc_floor}."
            )
        self.hidden_size, self.kind, self.eps, self.gwc, self.gwc_floor = hidden_size, kind, eps, gwc, gwc_floor
        self.weight = nn.Parameter(torch.empty(1 if kind == "scale" else hidden_size, dtype=torch.float32))
        if kind == "layernorm":
            self.bias = nn.Parameter(torch.empty(hidden_size, dtype=torch.float32))
        else:
            self.register_parameter("bias", None)
        self.set_gain_(1.0)

    def set_gain_(self, gain: float) -> None:
        """Sets every gain to `gain` and the bias to zero; values marked as already loaded by transformers stay."""
        # through torch.nn.init, which transformers replaces by versions that leave loaded weights alone
        nn.init.constant_(self.weight, gain)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def set_target_norm_(self, T: float, input_norm: float | None = None) -> None:
        """Sets gain and bias so that a visual token leaves with L2 norm T.

        Args:
            T: the target norm, see `text_embedding_norm`.
            input_norm: for `scale` alone, the mean norm of the projected tokens; sqrt(hidden_size) when None.

        Raises:
            ValueError: T or input_norm is not a positive finite number.
        """
        reference = math.sqrt(self.hidden_size)
        if self.kind == "scale" and input_norm is not None:
            reference = input_norm
        for name, value in (("target norm T", T), ("norm of the projected tokens", reference)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"The {name} must be a positive finite number, got {value}.")
        self.set_gain_(T / reference)

    @property
    def mu(self) -> torch.Tensor:
        """GWC's divisor max(mean |gain|, gwc_floor), a scalar; 1 when GWC is off."""
        if not self.gwc:
            return torch.ones((), device=self.weight.device)
        return self.weight.detach().float().abs().mean().clamp(min=self.gwc_floor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        compensate = self.gwc and torch.is_grad_enabled() and x.requires_grad
        if compensate and not _is_exporting():
            if self.kind == "layernorm":
                return _LayerNormGWC.apply(x, self.weight, self.bias, self.eps, self.gwc_floor)
            if self.kind == "rmsnorm":
                return _RMSNormGWC.apply(x, self.weight, self.eps, self.gwc_floor)
            return _ScaleGWC.apply(x, self.weight, self.gwc_floor)
        dtype = _compute_dtype(x, self.weight)
        wide, weight = x.to(dtype), self.weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        if compensate:
            y = self._forward_in_plain_steps(wide, weight, bias)
        elif self.kind == "layernorm":
            y = F.layer_norm(wide, x.shape[-1:], weight, bias, self.eps)
        else:
            y = self._normalise(wide) * weight
        return y.to(x.dtype)

    def _forward_in_plain_steps(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """GWC without a backward function of its own, which an exported graph would lose: slower, the same gradients."""
        xhat = self._normalise(x)
        held, mu = xhat.detach(), weight.detach().abs().mean().clamp(min=self.gwc_floor)
        y = (held + (xhat - held) / mu) * weight
        return y if bias is None else y + bias

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "layernorm":
            return F.layer_norm(x, x.shape[-1:], eps=self.eps)
        if self.kind == "rmsnorm":
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x

    def _apply(self, fn, recurse=True):
        def keep_float32(tensor):
            moved = fn(tensor)
            return tensor.to(moved.device, torch.float32) if moved.dtype in (torch.bfloat16, torch.float16) else moved

        return super()._apply(keep_float32, recurse)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, kind={self.kind}, eps={self.eps}, gwc={self.gwc}, gwc_floor={self.gwc_floor}"
