"""The demo: the whole way on built-in data, offline, in minutes on a laptop's processor.

Composes a vision-language model from two mini backbones, inspects the norms, trains both stages, answers held-out
questions with and without seeing the pictures, exports, and loads the export in a process that has no normalign.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from .assembly.saving import named_folder, save_whole
from .configuration.errors import NormalignError


QUESTIONS = 600
SHOWN = 8
MARKER = ".normalign-demo"
MARKER_VERSION = 1


def run_demo(out: str | Path = "outputs/demo", *, questions: int = QUESTIONS, overrides: dict | None = None) -> dict:
    """Runs the demo and writes everything into `out`.

    Args:
        out: the folder. The files of an earlier demo are replaced, which that has noted in `.normalign-demo`.
        questions: held-out questions to answer, once with the picture and once with a black one.
        overrides: changes to both training recipes by dotted key, such as {"max_steps": 20}.

    Returns:
        what `out/results.json` holds: accuracy, accuracy_black_image, chance, seconds, text_norm, visual_norm_before,
        visual_norm_after, export, and more beside them.

    Raises:
        NormalignError: `out` holds something else, or the export does not give the model's own logits.
    """
    out = _empty_folder(out)
    # the rooms are imported once the folder is found to do
    import torch
    from rich.console import Console
    from transformers.utils import logging

    from .assembly import compose
    from .assembly.loading import quiet_transformers
    from .evaluation.generation import answer_rows, exact_match, load_model
    from .hub_upload import export
    from .inspection import inspect_model
    from .train_trl import train
    from .train_trl.digit_scenes import chance_accuracy, digit_scene_rows

    console = Console()
    # bars of a fraction of a second would bury the ones that matter
    logging.disable_progress_bar()
    start = time.perf_counter()
    seconds: dict[str, float] = {}

    @contextmanager
    def phase(name: str, words: str, *written: str) -> Iterator[None]:
        console.rule(f"[bold]{words}", align="left")
        began = time.perf_counter()
        try:
            yield
        finally:
            # a demo that was broken off can be run again in the same folder
            _note_written(out, *written)
        seconds[name] = round(time.perf_counter() - began, 1)
        console.print(f"[dim]{seconds[name]:.0f} s, {time.perf_counter() - start:.0f} s in all[/]")

    recipes = files("normalign.configuration") / "recipes" / "demo"
    held_out = digit_scene_rows(questions, seed=1, split="test", text_only_share=0)
    pictures = [row["images"][0] for row in held_out[:SHOWN]]

    with phase("compose", "1  Compose: mini vision encoder + mini language model", "composed"):
        # the two stages ask for the arm aligned_gwc, which is the default block of the config
        with quiet_transformers():  # it says that torchvision is not there; the images are resized by Pillow
            model, processor = compose("mini-vision", "mini-language", seed=0, dtype=torch.float32)
        save_whole(model, processor, out / "composed")

    with phase("inspect", "2  Inspect: the norm gap and what the aligned norm does to it", "inspection"):
        before = inspect_model(model, processor, pictures)
        before.save(out / "inspection" / "before_training")
        interface = before.data["interface"]
        T = before.data["text_embedding_norm"]
        console.print(
            f"text tokens {T:.3f}   vision encoder {interface['vision_encoder']['mean']:.1f}   projected "
            f"{interface['projector']['mean']:.2f} ({interface['projector']['mean'] / T:.1f}x text)   after the aligned "
            f"norm {interface['inserted']['mean']:.3f} ({before.data['ratio']:.2f}x text)"
        )
        del model

    for stage, words in (
        ("stage1", "3  Train stage 1: projector and norm, on captions"),
        ("stage2", "4  Train stage 2: projector, norm and language model, on questions"),
    ):
        with phase(stage, words, stage):
            source = {"model": str(out / "composed")} if stage == "stage1" else {"from_stage": "stage1"}
            train(
                recipes / f"{stage}.yaml",
                {**source, "output_dir": str(out / stage), **(overrides or {})},
            )

    with phase(
        "evaluate", f"5  Evaluate: {questions} held-out questions, then the same with black pictures", "inspection"
    ):
        model, processor = load_model(out / "stage2")
        after = inspect_model(model, processor, pictures)
        after.save(out / "inspection" / "after_training")
        with _progress(console, 2 * questions) as advance:
            answers = answer_rows(model, processor, held_out, progress=advance)
            black = answer_rows(model, processor, [_blackened(row) for row in held_out], progress=advance)
        accuracy, by_kind = exact_match(held_out, answers)
        accuracy_black, black_by_kind = exact_match(held_out, black)
        scores = {
            "questions": questions,
            "accuracy": accuracy,
            "accuracy_black_image": accuracy_black,
            "chance": chance_accuracy(held_out),
        }

    with phase("export", "6  Export, and load the export in a process without normalign", "export", "pictures"):
        folder = export(out / "stage2", out / "export", results=scores, license="apache-2.0")
        _save_pictures(out / "pictures", pictures)
        reload = _reload(folder, model, processor, out / "pictures", held_out[: len(pictures)])
        console.print(f"logits bit-equal; `pipeline` gives the same {len(reload['answers'])} answers")

    results = {
        **scores,
        "seconds": round(time.perf_counter() - start, 1),
        "text_norm": T,
        "visual_norm_before": interface["projector"]["mean"],
        "visual_norm_after": interface["inserted"]["mean"],
        "visual_norm_after_training": after.data["interface"]["inserted"]["mean"],
        "ratio_after_training": after.data["ratio"],
        "export": str(folder),
        "accuracy_by_kind": by_kind,
        "accuracy_black_image_by_kind": black_by_kind,
        "vision_encoder_norm": interface["vision_encoder"]["mean"],
        "gain_start": T / model.config.text_config.hidden_size**0.5,
        "gain_end": model.get_aligned_norm().weight.abs().mean().item(),
        "seconds_by_phase": seconds,
        "reload": reload,
        "machine": {"system": platform.platform(terse=True), "threads": torch.get_num_threads()},
        "versions": {name: version(name) for name in ("normalign", "torch", "transformers", "trl")},
    }
    try:
        (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        figure = _draw(held_out[:SHOWN], answers[:SHOWN], out / "held_out_scenes.png")
    finally:
        _note_written(out, "results.json", "held_out_scenes.png")
    _print_results(console, results, figure)
    return results


def _empty_folder(out: str | Path) -> Path:
    """`out`, empty but for the demo's marker; what an earlier demo wrote there is removed, anything else is refused.

    Raises:
        NormalignError: the folder is not a demo's, or holds something that the demo has not written as it is now.
    """
    out = named_folder(out)
    if out.exists() and any(out.iterdir()):
        written = _read_marker(out)
        entries = _entries(out)
        strange = sorted(name for name, state in entries.items() if name != MARKER and written.get(name) != state)
        if strange:
            raise NormalignError(
                f"The folder {out} holds {', '.join(strange[:3])}, of which the demo has no record: it is not from the "
                f"demo, was changed after it, or a demo was killed while it wrote. Nothing was removed. Give an empty or "
                f"new folder with --out, or remove this one yourself."
            )
        # files before the folders that they lie in
        for name in sorted(set(entries) - {MARKER}, reverse=True):
            path = out / name
            path.rmdir() if name.endswith("/") else path.unlink()
    out.mkdir(parents=True, exist_ok=True)
    _write_marker(out, {})
    return out


def _read_marker(out: Path) -> dict[str, Any]:
    """What the demo noted that it has written into `out`.

    Raises:
        NormalignError: there is no note of a demo.
    """
    try:
        marker = json.loads((out / MARKER).read_text(encoding="utf-8"))
        if marker["version"] == MARKER_VERSION and isinstance(marker["written"], dict):
            return marker["written"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    found = ", ".join(sorted(path.name for path in out.iterdir())[:3])
    raise NormalignError(
        f"The folder {out} holds {found} and no {MARKER} of a demo, so it is not replaced. Give an empty or new folder "
        f"with --out."
    )


def _write_marker(out: Path, written: dict[str, Any]) -> None:
    about = "Written by `normalign demo`: the files that the next demo in this folder may remove."
    marker = {"version": MARKER_VERSION, "about": about, "written": written}
    (out / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")


def _note_written(out: Path, *names: str) -> None:
    """Adds to the marker what now lies under these names of `out`."""
    found = {name: state for name, state in _entries(out).items() if name.split("/")[0] in names}
    _write_marker(out, {**_read_marker(out), **found})


def _entries(out: Path) -> dict[str, Any]:
    """All that lies in `out`, by relative name: [size, time of the last change] of a file, None for a folder ("name/")."""
    entries: dict[str, Any] = {}
    for folder, folders, names in os.walk(out):
        here = Path(folder)
        links = [name for name in folders if (here / name).is_symlink()]
        for name in set(folders) - set(links):
            entries[f"{(here / name).relative_to(out).as_posix()}/"] = None
        for name in [*names, *links]:
            state = (here / name).lstat()
            entries[(here / name).relative_to(out).as_posix()] = [state.st_size, state.st_mtime_ns]
    return entries


@contextmanager
def _progress(console, total: int):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.update(task, advance=count)


def _blackened(row: dict[str, Any]) -> dict[str, Any]:
    from PIL import Image

    return {**row, "images": [Image.new("RGB", image.size) for image in row["images"]]}


def _save_pictures(folder: Path, pictures: list) -> None:
    folder.mkdir()
    for number, picture in enumerate(pictures):
        picture.save(folder / f"scene{number}.png")


def _reload(folder: Path, model, processor, pictures: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Asks the export in a clean process and compares it with the model in memory.

    Raises:
        NormalignError: logits or answers differ.
    """
    import numpy as np

    from .hub_upload import check_export
    from .hub_upload.ask_model import ask

    paths = [pictures / f"scene{number}.png" for number in range(len(rows))]
    questions = [row["question"] for row in rows]
    answers, logits = ask(model, processor, paths, questions)
    found = check_export(folder, paths, questions)
    if not np.array_equal(found["logits"], logits):
        difference = float(np.abs(found["logits"] - logits).max())
        raise NormalignError(f"The export {folder} gives other logits than the trained model (by up to {difference}).")
    if found["answers"] != answers or found["pipeline_answers"] != answers:
        raise NormalignError(
            f"The export {folder} answers {found['answers']} (through pipeline: {found['pipeline_answers']}), but the "
            f"trained model {answers}."
        )
    kept = ("answers", "pipeline_answers", "model_class", "transformers_version", "normalign_importable")
    return {**{key: found[key] for key in kept}, "logits_bit_equal": True, "questions": questions}


def _draw(rows: list[dict[str, Any]], answers: list[str], path: Path) -> Path:
    """Held-out scenes with question, answer and truth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.4), layout="constrained")
    for axis, row, given in zip(figure.subplots(2, (len(rows) + 1) // 2).flat, rows, answers):
        axis.imshow(row["images"][0])
        axis.axis("off")
        right = given == row["answer"]
        axis.set_title(
            f"{row['question']}\n{given}   ({'right' if right else 'truth: ' + row['answer']})",
            fontsize=10,
            color="darkgreen" if right else "darkred",
        )
    figure.savefig(path, dpi=110)
    return path


def _print_results(console, results: dict[str, Any], figure: Path) -> None:
    from rich.table import Table

    table = Table(title="Held-out accuracy (exact match)", title_justify="left")
    for column in ("question kind", "with picture", "black picture"):
        table.add_column(column, justify="left" if column == "question kind" else "right")
    for kind, share in results["accuracy_by_kind"].items():
        table.add_row(kind, f"{share:.3f}", f"{results['accuracy_black_image_by_kind'][kind]:.3f}")
    table.add_section()
    table.add_row("all", f"{results['accuracy']:.3f}", f"{results['accuracy_black_image']:.3f}")
    console.print(table)
    console.print(f"chance, the best answers without a picture: {results['chance']:.3f}")
    console.print(
        f"norms: text {results['text_norm']:.3f}; visual {results['visual_norm_before']:.2f} out of the projector, "
        f"{results['visual_norm_after']:.3f} behind the aligned norm at the start, "
        f"{results['visual_norm_after_training']:.3f} after training ({results['ratio_after_training']:.2f}x text; gain "
        f"{results['gain_start']:.4f} -> {results['gain_end']:.4f})"
    )
    console.print(f"picture: {figure}\nexport:  {results['export']}\n{results['seconds']:.0f} seconds in all")
