"""Writes a benchmark's rows to benchmarks/results/NAME.json beside the machine and the versions they were measured on."""

import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def machine() -> dict:
    """What a reader needs to know of the machine: processor, cores, threads, memory, GPU."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict:
    """Python and the libraries whose versions bear on a figure."""
    found = {"python": platform.python_version()}
    for package in ("normalign", "torch", "transformers", "trl", "peft", "accelerate"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """Highest sum of what was allocated and not yet freed during a run, beyond what was there before it."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    live = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def write_result(path: Path, rows: list[dict], **more) -> None:
    """Writes {machine, versions, rows, ...}; each row has at least `case`, `seconds_median` and `ratio`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "versions": versions(), "rows": rows, **more}, indent=2) + "\n")
    print(f"written to {path}")
