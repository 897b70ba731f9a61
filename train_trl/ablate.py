"""Trains the arms of an ablation over several seeds, alike but for the norm, and measures each run in the same way.

`normalign ablate RECIPE --arms none,aligned --seeds 5 --out DIR` writes, under DIR:

    settings.json              what is compared; a run that was stopped goes on only with the same settings
    runs/seed0/none/stage1/    the folder of each training
    runs/seed0/none/curve.jsonl, result.json   held-out figures on the way, and all figures of the run at its end
    summary.json, page         what all runs say together (see ablation_summary and ablation_page)
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from ..configuration.errors import NormalignError
from .recipe import ARMS, Recipe, RecipeError
from .recipe_reading import find_recipe, load_recipe


Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Ablation:
    """What is compared.

    Args:
        recipes: recipe files of the stages, first to last.
        arms: names of `recipe.ARMS`.
        seeds: how many; seed s adds s to the recipe's seeds of weights, order and drawn data, in every arm alike.
        overrides: changes to all recipes, by dotted key.
        questions, captions, text_only: held-out rows that are measured at the end.
        curve_rows: of each of these kinds, how many are measured on the way.
        measure_every: optimizer steps between two measurements.
    """

    recipes: list[str]
    arms: list[str]
    seeds: int
    overrides: dict[str, Any] = field(default_factory=dict)
    questions: int = 600
    captions: int = 100
    text_only: int = 200
    curve_rows: int = 96
    measure_every: int = 25


def ablate(
    recipe: str | Path,
    arms: Sequence[str],
    seeds: int,
    out: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    processes: int = 1,
    progress: Progress | None = None,
    **settings: int,
) -> Path:
    """Runs what is not yet done of an ablation, then summarises all of it.

    Args:
        recipe: the last stage's recipe; the stages that it goes on from are the recipes of their names beside it.
        arms: names of `recipe.ARMS`; the first is what the others are compared with.
        seeds: how many, at least 1.
        out: the folder; one of an ablation with the same settings is gone on with.
        overrides: changes to the recipes, by dotted key.
        processes: how many runs at once, each with its share of the processor's threads.
        progress: called with what was done last, runs done and runs in all.
        settings: other fields of `Ablation`.

    Returns:
        `out`, with summary.json and the page.

    Raises:
        NormalignError: an arm, recipe or setting does not fit, or `out` holds something else.
    """
    overrides = dict(overrides or {})
    ablation = Ablation([str(file) for file in stages_of(recipe, overrides)], list(arms), seeds, overrides, **settings)
    _check(ablation)
    out = _open_folder(Path(out).expanduser(), ablation)
    jobs = [(ablation, arm, seed, str(_run_folder(out, arm, seed))) for seed in range(seeds) for arm in arms]
    todo = [job for job in jobs if not (Path(job[3]) / "result.json").is_file()]
    done = len(jobs) - len(todo)
    say = progress or (lambda what, done, total: None)
    say("found", done, len(jobs))
    for name in _run_all(todo, processes):
        done += 1
        say(name, done, len(jobs))

    from .ablation_page import write_page
    from .ablation_summary import summarise

    results = [json.loads((Path(job[3]) / "result.json").read_text(encoding="utf-8")) for job in jobs]
    summary = summarise(results, ablation.arms, asdict(ablation))
    _write_json(out / "summary.json", summary)
    write_page(summary, out)
    return out


def stages_of(recipe: str | Path, overrides: Mapping[str, Any]) -> list[Path]:
    """The recipe files from the first stage to this one, by `from_stage`, each beside the next.

    Raises:
        RecipeError: a stage has no file, the stages go in a circle, or the first one does not compose.
    """
    file = find_recipe(recipe)
    files = [file]
    while (loaded := load_recipe(files[0], overrides)).from_stage is not None:
        earlier = files[0].parent / f"{loaded.from_stage}.yaml"
        if not earlier.is_file():
            raise RecipeError(
                f"{files[0]} goes on from stage {loaded.from_stage!r}, whose recipe is sought as {earlier}, but there is none."
            )
        if earlier in files:
            raise RecipeError(f"{files[0]} and {earlier} go on from each other: one of them has to compose.")
        files.insert(0, earlier)
    if loaded.compose is None:
        raise RecipeError(
            f"{files[0]} goes on from a model, whose norm is what it is. An ablation starts each arm from the backbones: "
            f"give a recipe with a `compose` block."
        )
    return files


def _check(ablation: Ablation) -> None:
    unknown = [arm for arm in ablation.arms if arm not in ARMS]
    if unknown or not ablation.arms:
        raise NormalignError(f"There is no arm {', '.join(unknown) or 'given'}. Choose from {', '.join(ARMS)}.")
    if len(set(ablation.arms)) < len(ablation.arms):
        raise NormalignError(f"An arm is named twice: {', '.join(ablation.arms)}.")
    counts = ("questions", "captions", "text_only", "curve_rows", "measure_every")
    for name in counts:
        if getattr(ablation, name) < 1:
            raise NormalignError(f"{name} must be at least 1, got {getattr(ablation, name)}: each is measured.")
    if ablation.seeds < 1:
        raise NormalignError(f"An ablation needs at least one seed, got {ablation.seeds}.")
    for file in ablation.recipes:
        recipe = load_recipe(file, ablation.overrides)
        if [source.name for source in recipe.data.sources()] != ["digit_scenes"]:
            raise NormalignError(
                f"{file} trains on {recipe.data.name}: an ablation measures on held-out rows of the built-in scenes, so it "
                f"trains on digit_scenes alone for now."
            )


def _open_folder(out: Path, ablation: Ablation) -> Path:
    note = out / "settings.json"
    settings = json.loads(json.dumps({**asdict(ablation), "recipes": [_content(file) for file in ablation.recipes]}))
    if note.is_file():
        found = json.loads(note.read_text(encoding="utf-8"))
        # more seeds or arms may be added to what is there
        differing = sorted(key for key in settings if key not in ("arms", "seeds") and found.get(key) != settings[key])
        if differing:
            raise NormalignError(
                f"{out} holds an ablation with another {' and '.join(differing)}. Go on with the same settings, or name "
                f"another folder with --out."
            )
    elif out.exists() and any(out.iterdir()):
        raise NormalignError(f"{out} is not empty and holds no ablation. Name another folder with --out.")
    out.mkdir(parents=True, exist_ok=True)
    _write_json(note, settings)
    return out


def _content(file: str) -> dict[str, Any]:
    return asdict(load_recipe(file))


def _run_folder(out: Path, arm: str, seed: int) -> Path:
    return out / "runs" / f"seed{seed}" / arm


def _run_all(jobs: list[tuple], processes: int) -> Iterator[str]:
    """The names of the runs as they end; one that fails ends the others at their next chance."""
    if processes == 1 or len(jobs) < 2:
        for job in jobs:
            yield _run(*job)
        return
    threads = max(1, torch.get_num_threads() // processes)
    with ProcessPoolExecutor(processes, get_context("spawn"), _start_worker, (threads, os.getpid())) as pool:
        futures = [pool.submit(_run, *job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start_worker(threads: int, parent: int) -> None:
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)

    def end_with_parent() -> None:
        # a worker that outlived a killed ablation would write among the runs of the next one
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


# --- one run


def _run(ablation: Ablation, arm: str, seed: int, folder: str) -> str:
    """Trains and measures one arm with one seed; result.json is written last. What a stopped run left is done again."""
    from ..assembly.loading import quiet_transformers

    with _quiet(), quiet_transformers():
        _train_and_measure(ablation, arm, seed, Path(folder))
    return f"{arm}, seed {seed}"


def _train_and_measure(ablation: Ablation, arm: str, seed: int, folder: Path) -> None:
    from ..evaluation.generation import load_model
    from .held_out import HeldOut, digit_scene_held_out
    from .training import check_settings, run

    start = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    stages, curve, ends = [], [], {}
    for file in ablation.recipes:
        recipe = _of_run(load_recipe(file, {**ablation.overrides, "arm": arm}), seed, folder)
        check_settings(recipe)

        def callbacks(model, processor, recipe=recipe):
            rows = digit_scene_held_out(*[ablation.curve_rows] * 3)
            if not ends:
                norm = model.get_aligned_norm()
                ends["before"], ends["gain"] = _inspect(model, processor), norm and norm.weight.detach().clone()
            return [_curve(HeldOut(processor, rows), ablation.measure_every, recipe.name, curve)]

        run(recipe, callbacks)
        stages.append({"stage": recipe.name, **_means_of_log(recipe)})
    model, processor = load_model(recipe.output_dir)
    rows = digit_scene_held_out(ablation.questions, ablation.captions, ablation.text_only, seed=3)
    result = {
        "arm": arm,
        "seed": seed,
        "seconds": round(time.perf_counter() - start, 1),
        "held_out": HeldOut(processor, rows).measure(model),
        "curve": curve,
        "stages": stages,
        "before": ends["before"],
        "after": _inspect(model, processor),
        "gain": _gain(model, ends["gain"]),
        "gain_start": None if ends["gain"] is None else ends["gain"].abs().mean().item(),
    }
    _write_json(folder / "result.json", result)
    # what was measured stays; the weights of dozens of runs would fill the disk
    for weights in folder.glob("*/*.safetensors"):
        weights.unlink()


def _of_run(recipe: Recipe, seed: int, folder: Path) -> Recipe:
    """The recipe with its seeds moved on by `seed`, writing into the run's folder."""
    compose = recipe.compose
    if compose is not None:
        compose = replace(compose, seed=(recipe.seed if compose.seed is None else compose.seed) + seed)
    return replace(
        recipe,
        # what a frozen encoder makes of an image is the same in every arm
        cache_vision_features=recipe.tune.vision == "frozen",
        cache_dir=str(folder.parents[1] / "vision_cache"),
        output_dir=str(folder / recipe.name),
        seed=recipe.seed + seed,
        data=replace(recipe.data, seed=recipe.data.seed + 1000 * seed),
        compose=compose,
    )


def _curve(held_out, every: int, stage: str, curve: list[dict[str, Any]]):
    from .held_out import HeldOutCurve

    return HeldOutCurve(held_out, every, lambda step, figures: curve.append({"stage": stage, "step": step, **figures}))


def _inspect(model, processor) -> dict[str, Any]:
    """Norms where the tokens meet, and how fast each kind turns, on 16 held-out scenes."""
    from ..inspection import inspect_model
    from .digit_scenes import digit_scene_rows

    rows = digit_scene_rows(16, seed=2, split="test", text_only_share=0)
    data = inspect_model(model, processor, [row["images"][0] for row in rows], [row["question"] for row in rows]).data
    return {
        "text_norm": data["text_embedding_norm"],
        "projected_norm": data["interface"]["projector"]["mean"],
        "inserted_norm": data["interface"]["inserted"]["mean"],
        "ratio": data["ratio"],
        "turns": [{kind: layer[kind]["angle_mean_rad"] for kind in ("visual", "text")} for layer in data["layers"]],
        "turn_ratio": data["verdict_figures"]["turns"]["ratio"],
    }


def _gain(model, start: torch.Tensor | None) -> dict[str, float] | None:
    norm = model.get_aligned_norm()
    if norm is None:
        return None
    gain = norm.weight.detach().float()
    moved = (gain - start).norm() / start.norm()
    return {"abs_mean": gain.abs().mean().item(), "l2": gain.norm().item(), "relative_movement": moved.item()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars and tables of each training, which would bury the one bar over all runs."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield
    finally:
        if shown:
            enable_progress_bar()


_KEPT_OF_LOG = ("step", "loss", "aligned_norm/gain_abs_mean", "aligned_norm/gain_l2", "norm/visual_in", "norm/ratio")
_MEANS_OF_LOG = ("clip_factor", "grad_norm/", "update/")


def _means_of_log(recipe: Recipe) -> dict[str, Any]:
    """Of train_log.jsonl a few keys line by line, and means over the logged steps of gradients, clipping and updates."""
    from .training import LOG_NAME

    lines = [json.loads(line) for line in (Path(recipe.output_dir) / LOG_NAME).read_text("utf-8").splitlines()]
    means = {}
    for key in lines[0]:
        values = [line[key] for line in lines if isinstance(line[key], int | float)]
        if key.startswith(_MEANS_OF_LOG) and values:
            means[key] = fmean(values)
    return {"means": means, "log": [{key: line[key] for key in _KEPT_OF_LOG} for line in lines]}


def _write_json(file: Path, content: Any) -> None:
    """Whole or not at all."""
    aside = file.with_name(f".{file.name}")
    aside.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    aside.replace(file)
