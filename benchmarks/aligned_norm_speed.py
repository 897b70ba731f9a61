"""Speed and memory of the aligned norm's fused GWC against nn.LayerNorm and against a hook on the un-fused tensor.

    python benchmarks/aligned_norm_speed.py [--runs 20] [--device cpu] [--out benchmarks/results/aligned_norm_speed.json]

Forward plus backward; the three take turns in one process, so that the ratios hold on a noisy machine. Peak memory is
what the allocator saw in one forward and backward pass beyond what was there before it (CUDA's own count on a GPU).
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from record import peak_bytes, write_result
from torch import nn

from normalign.modeling.aligned_norm import AlignedNorm


SHAPES = [(4, 729, 3072), (8, 576, 2048)]


class HookedNorm(nn.Module):
    """The plain way: normalise, hook the normalised tensor, multiply."""

    def __init__(self, hidden_size: int, gain: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), gain))
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        xhat = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-6)
        mu = self.weight.detach().abs().mean().clamp(min=1e-3)
        xhat.register_hook(lambda grad: grad / mu)
        return xhat * self.weight + self.bias


def step(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> None:
    """One forward and backward pass with no gradient left over from before."""
    x.grad = None
    module.zero_grad(set_to_none=True)
    module(x).backward(dy)
    if x.is_cuda:
        torch.cuda.synchronize()


def peak_of_step(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> int:
    """Peak memory of one step that starts without gradients."""
    x.grad = None
    module.zero_grad(set_to_none=True)
    return peak_bytes(lambda: step(module, x, dy), str(x.device))


def main() -> None:
    """Measures every shape and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "aligned_norm_speed.json")
    args = parser.parse_args()
    rows = []
    for shape in SHAPES:
        torch.manual_seed(0)
        x = (torch.randn(shape, device=args.device) * 40).requires_grad_()
        dy = torch.randn(shape, device=args.device)
        aligned = AlignedNorm(shape[-1])
        aligned.set_target_norm_(1.09)
        modules = {
            "nn.LayerNorm": nn.LayerNorm(shape[-1], eps=1e-6),
            "fused GWC": aligned,
            "hook, un-fused": HookedNorm(shape[-1], aligned.weight[0].item()),
        }
        seconds = {name: [] for name in modules}
        for module in modules.values():
            step(module.to(args.device), x, dy)
        for _ in range(args.runs):
            for name, module in modules.items():
                start = time.perf_counter()
                step(module, x, dy)
                seconds[name].append(time.perf_counter() - start)
        median = {name: statistics.median(values) for name, values in seconds.items()}
        memory = {name: peak_of_step(module, x, dy) for name, module in modules.items()}
        for name in modules:
            rows.append(
                {
                    "case": f"{name} {shape}",
                    "seconds_median": median[name],
                    "ratio": median[name] / median["nn.LayerNorm"],
                    "peak_bytes": memory[name],
                    "memory_ratio": memory[name] / memory["nn.LayerNorm"],
                }
            )
            row = rows[-1]
            print(
                f"{row['case']:<36} {row['seconds_median'] * 1e3:8.2f} ms  {row['ratio']:.3f}x"
                f"  memory {row['memory_ratio']:.3f}x"
            )
    write_result(args.out, rows, device=args.device, runs=args.runs)


if __name__ == "__main__":
    main()
