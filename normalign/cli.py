"""The command line program `normalign`: each command is a thin wrapper around the function of one room.

A room is imported when its command runs, after the arguments have been checked: help and usage errors are quick.
"""

from __future__ import annotations

import json
import math
import sys
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from . import __version__
from .configuration.errors import NormalignError, RunStopped, quiet_optional_packages


# `click` is a package of its own or a part of typer, by typer's version: reach its base class without naming either.
_UsageError = typer.BadParameter.__base__


class _WrongUsage(NormalignError):
    """An error that ends the program with status 2."""


class _Program(TyperGroup):
    """A group of commands in which an error is one paragraph and `--debug` may stand anywhere."""

    def parse_args(self, ctx, args):
        if "--debug" in args:
            args = ["--debug", *(argument for argument in args if argument != "--debug")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, _UsageError, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            typer.echo("Interrupted; what was being written is not finished. Run the command again.", err=True)
            raise typer.Exit(130) from None
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            _say_error(error)
            raise typer.Exit(2 if isinstance(error, _WrongUsage) else getattr(error, "exit_status", 1)) from None


def _say_error(error: Exception) -> None:
    if isinstance(error, PermissionError) and error.filename is not None:
        paragraph = f"Permission denied: {error.filename}. Name a place that you may read and write, or have its rights changed."
    elif isinstance(error, OSError) and error.strerror and error.filename is not None:
        paragraph = f"{error.strerror}: {error.filename}"
    elif isinstance(error, NormalignError | OSError | ValueError):
        paragraph = str(error)
    else:
        paragraph = (
            f"Unexpected {type(error).__name__}: {error}. This may be a fault of normalign: "
            "run the same command with --debug to see where it happened."
        )
    console = Console(stderr=True, highlight=False)
    if not isinstance(error, RunStopped):
        console.print("[bold red]Error:[/]", end=" ")
    # one paragraph, but for the items of a list
    first, *items = paragraph.split("\n  - ")
    lines = [" ".join(first.split()), *(f"  - {' '.join(item.split())}" for item in items)]
    console.print("\n".join(lines), markup=False, soft_wrap=True)


app = typer.Typer(
    name="normalign",
    cls=_Program,
    help="Vision-language models whose visual tokens enter the language model at the norm of text tokens.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


class NormKind(str, Enum):
    """The kinds of aligned norm, see configuration."""

    layernorm = "layernorm"
    rmsnorm = "rmsnorm"
    scale = "scale"
    none = "none"


class DType(str, Enum):
    """Number formats that weights can be held in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _folder_to_write(given: str | Path) -> Path:
    """A folder's path with `~` resolved; that it may be written is checked where it is written."""
    if not str(given).strip():
        raise typer.BadParameter("'' names no folder.")
    folder = Path(given).expanduser()
    if folder.is_symlink() and not folder.exists():
        raise typer.BadParameter(f"'{folder}' is a link to a folder that is not there. Make that, or name another.")
    if folder.exists() and not folder.is_dir():
        raise typer.BadParameter(f"'{folder}' is a file. Name a folder.")
    return folder


def _folder_to_read(given: str | Path) -> Path:
    """The path of a folder that is there, with `~` resolved."""
    folder = Path(given).expanduser()
    if not str(given).strip() or not folder.is_dir():
        raise typer.BadParameter(f"There is no folder '{given}'.")
    return folder


def _file_to_read(given: str | Path) -> Path:
    """The path of a file that is there, with `~` resolved."""
    file = Path(given).expanduser()
    if not file.is_file():
        raise typer.BadParameter(f"There is no file '{given}'.")
    return file


def _model(given: str) -> str:
    if not given.strip():
        raise typer.BadParameter("'' names no model. Give a local folder or a Hub id.")
    return given


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A local folder or a Hub id.", show_default=False, parser=_model)
]
Out = Annotated[Path, typer.Option("--out", parser=_folder_to_write, metavar="DIR", help="Folder to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a folder that holds other files.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")]
ImagePaths = Annotated[
    list[Path] | None,
    typer.Option("--image", parser=_file_to_read, metavar="PATH", help="An image; may be given several times."),
]
CalibrationImages = Annotated[
    list[Path] | None,
    typer.Option(
        "--images",
        parser=_file_to_read,
        metavar="PATH...",
        help="For --norm scale: images whose projected tokens are measured, one or several.  "
        "[dim]default: generated ones[/]",
    ),
]
Norm = Annotated[NormKind | None, typer.Option("--norm", help="Kind of aligned norm.  [dim]default: layernorm[/]")]
GainInit = Annotated[
    str | None,
    typer.Option(
        metavar="text|N",
        help="Gain at the start: 'text' for the text norm over the root of the width, or a number above 0.  "
        "[dim]default: text[/]",
    ),
]
Gwc = Annotated[
    bool | None,
    typer.Option("--gwc/--no-gwc", help="Global Weight Compensation in the backward pass.  [dim]default: on[/]"),
]

DTypeOption = Annotated[DType | None, typer.Option("--dtype", help="Number format.  [dim]default: float32[/]")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"normalign {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(out: Out = Path("outputs/demo"), as_json: AsJson = False) -> None:
    """Go the whole way on built-in data, offline: compose, inspect, train, evaluate, export, reload."""
    from .demo import run_demo

    with _only_json(as_json):
        results = run_demo(out)
    if as_json:
        _print_json(results)


@app.command(context_settings={"allow_extra_args": True})
def compose(
    ctx: typer.Context,
    vision: Annotated[
        str,
        typer.Option(
            parser=_model,
            metavar="ID",
            help="Vision encoder: a local folder, a Hub id or a preset such as mini-vision.",
        ),
    ],
    text: Annotated[
        str,
        typer.Option(
            parser=_model,
            metavar="ID",
            help="Language model: a local folder, a Hub id or a preset such as mini-language.",
        ),
    ],
    out: Out,
    overwrite: Overwrite = False,
    norm: Norm = None,
    gain_init: GainInit = None,
    gwc: Gwc = None,
    vision_feature_layer: Annotated[
        int | None,
        typer.Option(metavar="N", help="Encoder layer to read, such as -2.  [dim]default: by the encoder[/]"),
    ] = None,
    dtype: DTypeOption = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=2**63 - 1, metavar="N", help="Seed of the projector's first weights.  [dim]default: random[/]"
        ),
    ] = None,
    images: CalibrationImages = None,
    as_json: AsJson = False,
) -> None:
    """Put a vision encoder and a language model together, aligned from the start."""
    aligned_norm = _aligned_norm(norm, gain_init, gwc)
    paths = _calibration_paths(ctx, images, norm)
    from .assembly import check_target, compose, save_whole

    with _only_json(as_json):
        sources = [vision, text]
        check_target(out, sources=sources, overwrite=overwrite)
        model, processor = compose(
            vision,
            text,
            aligned_norm,
            vision_feature_layer=vision_feature_layer,
            dtype=dtype and dtype.value,
            seed=seed,
            calibration_images=_opened(paths),
        )
        save_whole(model, processor, out, sources=sources, overwrite=overwrite)
    _report(_summary(model, out), as_json)


@app.command(context_settings={"allow_extra_args": True})
def graft(
    ctx: typer.Context,
    model: Model,
    out: Out,
    overwrite: Overwrite = False,
    norm: Norm = None,
    gain_init: GainInit = None,
    gwc: Gwc = None,
    dtype: DTypeOption = None,
    images: CalibrationImages = None,
    as_json: AsJson = False,
) -> None:
    """Insert the aligned norm into a finished model, which then needs training to be of use again."""
    aligned_norm = _aligned_norm(norm, gain_init, gwc)
    paths = _calibration_paths(ctx, images, norm)
    from .assembly import check_target, graft, save_whole

    with _only_json(as_json):
        check_target(out, sources=[model], overwrite=overwrite)
        grafted, processor = graft(model, aligned_norm, dtype=dtype and dtype.value, calibration_images=_opened(paths))
        save_whole(grafted, processor, out, sources=[model], overwrite=overwrite)
    _report(_summary(grafted, out), as_json)


@app.command(context_settings={"allow_extra_args": True})
def inspect(
    ctx: typer.Context,
    model: Model,
    images: Annotated[
        list[Path] | None,
        typer.Option(
            parser=_file_to_read,
            metavar="PATH...",
            help="Images to look at, one or several.  [dim]default: eight built-in scenes with their questions[/]",
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to put beside each image.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(parser=_folder_to_write, metavar="DIR", help="Folder for report.json, report.html and figures."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="MODEL2", help="A second model, or the folder of a report, to lay beside it."),
    ] = None,
    attention: Annotated[bool, typer.Option("--attention", help="Also attention from text to visual tokens.")] = False,
    controls: Annotated[
        bool, typer.Option("--controls", help="Also black, no and other images: does the model look?")
    ] = False,
    gradients: Annotated[bool, typer.Option("--gradients", help="Also gradients, with GWC on and off.")] = False,
    answer: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Answer that --gradients teaches; built-in scenes have their own."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the norms of visual and text tokens where they meet and through the layers."""
    paths = [*(images or []), *_further_images(ctx)]
    if gradients and answer is None and (paths or prompt is not None):
        raise typer.BadParameter("Gradients need an --answer to the prompt.", param_hint="'--gradients'")
    if answer is not None and not gradients:
        raise typer.BadParameter("Only --gradients uses an answer.", param_hint="'--answer'")
    from .inspection import compare_reports, print_report

    with _only_json(as_json):
        pictures, prompts, answers = _what_to_inspect(paths, prompt, answer)
        options = {"attention": attention, "controls": controls, "gradients": gradients}
        options |= {"prompts": prompts, "answers": answers if gradients else None}
        saved = None if compare is None else _saved_report(compare)  # what is broken is named before the work
        result = report = _inspected(model, pictures, options)
        if compare is not None:
            other = saved or _inspected(compare, pictures, options)
            result = compare_reports(report, other)
        if out is not None:
            report.save(out)
            if compare is not None:
                result.save(out / "comparison")
    if as_json:
        _print_json(result.to_dict())
        return
    print_report(result)
    if out is not None:
        page = out / "report.html" if compare is None else out / "comparison" / "comparison.html"
        typer.echo(f"\nThe report with its figures: {page}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    ctx: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", show_default=False, help="A YAML file, or the name of one that comes with us."
        ),
    ],
    show: Annotated[bool, typer.Option("--show", help="Print the resolved recipe; train nothing.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Only look at every row of the data; ends with status 1 when some are bad."),
    ] = False,
    sanity: Annotated[
        bool,
        typer.Option(
            "--sanity", help="Overfit eight rows and say at which stage their answers are lost; keep nothing."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train with TRL by a recipe. Further options replace its settings: [bold]--learning_rate 1e-4 --data.seed 3[/]."""
    from .train_trl import RecipeError, load_recipe, parse_overrides, recipe_as_yaml, train
    from .train_trl import check as check_data

    try:
        if show:
            loaded = load_recipe(recipe, parse_overrides(ctx.args))
            _print_json(asdict(loaded)) if as_json else typer.echo(recipe_as_yaml(loaded), nl=False)
            return
        with _only_json(as_json):
            changes = parse_overrides(ctx.args)
            if check:
                report = check_data(recipe, changes)
            elif sanity:
                from .train_trl.sanity import sanity_check

                result = sanity_check(load_recipe(recipe, changes))
            else:
                result = {"out": str(train(recipe, changes))}
    except RecipeError as error:
        raise _WrongUsage(str(error)) from error
    if check:
        _print_json(report.to_dict()) if as_json else report.show()
        raise typer.Exit(1 if report.bad else 0)
    _report(result, as_json)
    if result.get("broken") is not None:
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def ablate(
    ctx: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", show_default=False, help="The last stage's; those before it are found by from_stage."
        ),
    ],
    out: Out,
    arms: Annotated[
        str, typer.Option(metavar="NAME,...", help="What is compared; the first is what the others are compared with.")
    ] = "none,default,aligned,aligned_gwc",
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Runs of each arm.")] = 5,
    processes: Annotated[int, typer.Option(min=1, metavar="N", help="Runs at once.")] = 1,
    questions: Annotated[int, typer.Option(min=1, metavar="N", help="Held-out questions at the end of a run.")] = 600,
    measure_every: Annotated[int, typer.Option(min=1, metavar="N", help="Steps between measurements.")] = 25,
    as_json: AsJson = False,
) -> None:
    """Compare arms of the norm over several seeds, alike in all else: a page with figures, intervals and findings.

    Further options replace settings of the recipes, as with train. Stopped and called again, it goes on.
    """
    from .train_trl import RecipeError, parse_overrides
    from .train_trl.ablate import ablate

    names = [name.strip() for name in arms.split(",") if name.strip()]
    try:
        with _only_json(as_json), _run_bar() as say:
            folder = ablate(
                recipe,
                names,
                seeds,
                out,
                parse_overrides(ctx.args),
                processes=processes,
                progress=say,
                questions=questions,
                measure_every=measure_every,
            )
    except RecipeError as error:
        raise _WrongUsage(str(error)) from error
    if as_json:
        _print_json(_read_json(folder / "summary.json"))
    else:
        _report({"summary": str(folder / "summary.json"), "page": str(folder / "ablation.html")}, as_json)


@contextmanager
def _run_bar():
    """One bar over all runs, on stderr, with the time left; call it with the last run's name, runs done, and of how many."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True)) as bars:
        task = bars.add_task("")
        yield lambda name, done, total: bars.update(task, completed=done, total=total, description=f"last: {name}")


@app.command()
def chat(
    model: Model,
    image: ImagePaths = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Ask this and stop; without it, questions are read one by one.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Longest answer.")] = 128,
    as_json: AsJson = False,
) -> None:
    """Ask a model about images."""
    if as_json and prompt is None:
        raise typer.BadParameter("--json needs a --prompt to answer.")
    images = [str(path) for path in image or []]
    if prompt is None:
        _answer_typed_questions(model, images, max_new_tokens)
        return
    from .evaluation.generation import answer

    with _only_json(as_json):
        reply = answer(model, prompt, images, max_new_tokens)
    if as_json:
        _print_json({"model": model, "prompt": prompt, "images": images, "answer": reply})
    else:
        typer.echo(reply)


class Control(str, Enum):
    """What stands in for the images when a model's sight is tested."""

    black = "black"


def _batch_size(given: str) -> int | str:
    if given == "auto":
        return given
    if not given.isdecimal() or int(given) == 0:
        raise typer.BadParameter(
            f"'{given}' is neither 'auto' nor a number of 1 or more.", param_hint="'--batch-size'"
        )
    return int(given)


def _task_data(given: list[str] | None) -> dict[str, Path]:
    """`NAME=FOLDER` as given, by name; the folders are there."""
    pairs = {}
    for item in given or []:
        name, equals, folder = item.partition("=")
        if not equals or not name.strip() or not folder.strip():
            raise typer.BadParameter(f"'{item}' is not BENCHMARK=FOLDER.", param_hint="'--task-data'")
        if name.strip() in pairs:
            raise typer.BadParameter(f"'{name.strip()}' is given twice.", param_hint="'--task-data'")
        pairs[name.strip()] = Path(folder.strip()).expanduser()
        if not pairs[name.strip()].is_dir():
            raise typer.BadParameter(f"There is no folder '{folder.strip()}'.", param_hint="'--task-data'")
    return pairs


@app.command()
def evaluate(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A local folder or a Hub id.", show_default=False)
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Benchmarks by name, or `paper` for the paper's nine; see --list."),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            parser=_file_to_read, metavar="FILE.jsonl", help="Questions of your own; may be given several times."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=_folder_to_write,
            metavar="DIR",
            help="Folder for results and answers; run again, it goes on.  [dim]default: outputs/evaluation/NAME[/]",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ask only the first N rows of each task, for a look.")
    ] = None,
    batch_size: Annotated[
        str, typer.Option(metavar="auto|N", help="Rows at a time; auto halves it when memory does not suffice.")
    ] = "auto",
    control: Annotated[
        Control | None, typer.Option(help="Ask everything again with black images: is the image looked at?")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(parser=_folder_to_read, metavar="DIR", help="--out of another model, for paired differences."),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Examples before each question of hellaswag and mmlu.  [dim]default: 0[/]"
        ),
    ] = None,
    task_data: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="A local copy of a benchmark's data set; may be given several times."),
    ] = None,
    dtype: Annotated[
        DType | None, typer.Option(help="Number format.  [dim]default: as stored; float32 without a GPU[/]")
    ] = None,
    list_tasks: Annotated[
        bool, typer.Option("--list", help="Show the benchmarks, what each needs, and stop.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure a model on the paper's nine benchmarks, or on questions of your own."""
    if list_tasks:
        _list_benchmarks(as_json)
        return
    if model is None or not model.strip():
        raise typer.BadParameter("Name a model: a local folder or a Hub id.", param_hint="'MODEL'")
    if not tasks and not data:
        raise typer.BadParameter("Name benchmarks (--tasks paper) or a file of questions (--data FILE.jsonl).")
    size, folders = _batch_size(batch_size), _task_data(task_data)
    from .evaluation.evaluating import evaluate as evaluated
    from .evaluation.report import save_report

    folder = out or Path("outputs/evaluation") / (Path(model).name or "model")
    with _only_json(as_json), _stage_bars(leave=True) as progress:
        results = evaluated(
            model,
            folder,
            tasks,
            data=data or [],
            limit=limit,
            batch_size=size,
            black_images=control is Control.black,
            num_fewshot=num_fewshot,
            compare=compare,
            task_data=folders,
            dtype=None if dtype is None else dtype.value,
            progress=progress,
        )
    if not results:  # one of several processes, and not the first
        return
    save_report(results, folder)
    _write_eval_results(results, folder)
    if as_json:
        _print_json(results)
    else:
        _show_results(results, folder)
    if nothing := [name for name, task in results["tasks"].items() if task["score"] is None]:
        raise NormalignError(
            f"No row of {', '.join(nothing)} could be run; the first failure: "
            f"{results['tasks'][nothing[0]].get('failures', ['none is recorded'])[0]}. All of them stand in {folder / 'samples'}."
        )


def _list_benchmarks(as_json: bool) -> None:
    from .evaluation.benchmarks import BENCHMARKS

    if as_json:
        _print_json({name: asdict(benchmark) for name, benchmark in BENCHMARKS.items()})
        return
    heads = ("task", "harness", "metric", "rows", "needs", "measures")
    rows = [
        (
            b.name,
            b.harness,
            b.metric,
            f"{b.rows:,}",
            ", ".join(what for what, needed in (("a login", b.login), ("a judge", b.judge)) if needed) or "nothing",
            b.measures,
        )
        for b in BENCHMARKS.values()
    ]
    _print_table(heads, rows)


def _show_results(results: dict[str, Any], folder: Path) -> None:
    from .evaluation.report import notes, table_rows

    _print_table(*table_rows(results))
    for note in notes(results):
        typer.echo(f"\n{note}")
    typer.echo(f"\nResults, table and figure: {folder}; every answer: {folder / 'samples'}")


def _print_table(heads, rows) -> None:
    """A table, or several with the first column in each where one would be wider than the terminal."""
    from rich import box
    from rich.table import Table

    console = Console(highlight=False)
    # beside its text each column takes two spaces and a line's width, and the table one more
    widths = [max(len(row[i]) for row in (heads, *rows)) + 3 for i in range(len(heads))]
    parts, room = [], 0
    for i in range(1, len(heads)):
        if not parts or widths[i] > room:
            parts.append([0])
            room = console.width - widths[0] - 1
        parts[-1].append(i)
        room -= widths[i]
    for part in parts:
        table = Table(box=box.SIMPLE_HEAD)
        for i in part:
            figures = all(row[i][:1] in "+-.0123456789" for row in rows)
            table.add_column(heads[i], no_wrap=i == 0, justify="right" if figures else "left")
        for row in rows:
            table.add_row(*(row[i] for i in part))
        console.print(table, markup=False)


def _write_eval_results(results: dict[str, Any], folder: Path) -> None:
    """The Hub's own files of results beside ours, for tasks that were measured in full."""
    from .hub_upload.eval_results import EVAL_RESULTS, eval_result_files

    for name, text in eval_result_files(results).items():
        (folder / EVAL_RESULTS).mkdir(exist_ok=True)
        (folder / EVAL_RESULTS / name).write_text(text, encoding="utf-8")


@app.command()
def export(
    model: Model,
    out: Out,
    overwrite: Overwrite = False,
    license: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="License for the card, or 'other'.  [dim]default: license files, else the base models[/]",
        ),
    ] = None,
    license_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of a license that is 'other'.")
    ] = None,
    license_link: Annotated[
        str | None, typer.Option(metavar="URL", help="Where the text of a license that is 'other' stands.")
    ] = None,
    base_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID", help="Hub id of a base model; may be given several times.  [dim]default: as composed[/]"
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(parser=_file_to_read, metavar="FILE", help="A results.json whose scores the card shows."),
    ] = None,
    inspection: Annotated[
        Path | None,
        typer.Option(
            parser=_folder_to_read, metavar="DIR", help="A report of inspect on MODEL, for table and figure."
        ),
    ] = None,
    recipe: Annotated[
        list[Path] | None,
        typer.Option(
            parser=_file_to_read,
            metavar="FILE",
            help="A recipe it was trained by; several in the order of the stages.  [dim]default: recipe.yaml in MODEL[/]",
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Largest weight file: 5GB, 200KB.  [dim]default: by transformers[/]"),
    ] = None,
    space: Annotated[
        bool, typer.Option("--space", help="Write a Gradio app, for a Space, of a model that was exported before.")
    ] = False,
    repo_id: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="With --space: the repository from which the app loads the model."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="COMMIT", help="With --space: its revision.  [dim]default: the newest[/]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a self-contained folder for the Hub: weights, code, processor and card. An adapter is merged into its base."""
    if space:
        if any((license, license_name, license_link, base_model, results, inspection, recipe, max_shard_size)):
            raise typer.BadParameter(
                "A Space takes none of the options that are for the model and its card.", param_hint="'--space'"
            )
        from .hub_upload import export_space

        with _only_json(as_json):
            folder = export_space(model, out, repo_id=repo_id, revision=revision, overwrite=overwrite)
        _report({"out": str(folder)}, as_json)
        return
    if repo_id or revision:
        raise typer.BadParameter("Only --space takes it.", param_hint="'--repo-id'" if repo_id else "'--revision'")
    scores = None if results is None else _read_json(results)
    from .hub_upload import export

    with _only_json(as_json):
        folder = export(
            model,
            out,
            overwrite=overwrite,
            license=license,
            license_name=license_name,
            license_link=license_link,
            base_model=base_model or None,
            results=scores,
            inspection=inspection,
            recipes=recipe or (),
            max_shard_size=max_shard_size,
        )
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    _report({"out": str(folder), "files": files}, as_json)


@app.command()
def push(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", show_default=False, help="What export wrote.", parser=_folder_to_read)
    ],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", show_default=False, help="The repository: owner/name.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(metavar="TAG", help="Put this tag on the result.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would go, and send nothing.")] = False,
    load_check: Annotated[
        bool, typer.Option("--load-check/--no-load-check", help="Load the folder in a clean process first.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Send an exported folder to the Hub; run again after an interruption, it goes on where it stopped."""
    from .hub_upload import push

    def say(name: str, done: int, total: int) -> None:
        typer.echo(f"{_size(done)} of {_size(total)} sent; now {name}", err=True)

    with _only_json(as_json):
        result = push(
            folder,
            repo_id,
            private=private,
            revision=revision,
            dry_run=dry_run,
            progress=say,
            load_check=load_check,
        )
    if as_json:
        _print_json(result.to_dict())
    elif dry_run:
        _say_plan(result)
    else:
        tag = f" (tag {result.tag})" if result.tag else ""
        typer.echo(f"{result.url}: {len(result.sent)} files sent, {len(result.skipped)} were there already.")
        typer.echo(f"Commit to pin: {result.commit}{tag}\n\n{result.snippet}", nl=False)


def _say_plan(result) -> None:
    """What a push would do, file by file."""
    for name in result.sent:
        typer.echo(f"send    {_size(result.sizes[name]):>9}  {name}")
    for name in result.skipped:
        typer.echo(f"keep    {_size(result.sizes[name]):>9}  {name}")
    for name in result.deleted:
        typer.echo(f"remove             {name}")
    state = "a new repository" if result.created else "which was compared"
    if not result.compared:
        state = "which could not be asked what it has"
    typer.echo(
        f"\nNothing was sent: {len(result.sent)} files, {_size(result.bytes_sent)}, would go to {result.url}, {state}."
    )


def _size(count: int) -> str:
    """Bytes as people read them, such as 4.21 GB."""
    amount, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.3g} {units[0]}"


@app.command()
def verify(
    source: Annotated[
        str,
        typer.Argument(metavar="DIR_OR_REPO", help="A local folder or a Hub id.", show_default=False, parser=_model),
    ],
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="Branch, tag or commit of a Hub id.  [dim]default: main[/]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a model would run under trust_remote_code, and whether code, weights and card are as they should be.

    Nothing of the model is run. Ends with status 1 when something is not as it should be.
    """
    from .hub_upload import print_verification, verify

    with _only_json(as_json):
        found = verify(source, revision=revision)
    if as_json:
        _print_json(found.to_dict())
    else:
        print_verification(found)
    raise typer.Exit(0 if found.verdict == "passes" else 1)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise typer.BadParameter(f"'{path}' is no JSON: {error}", param_hint="'--results'") from None
    if not isinstance(content, dict):
        raise typer.BadParameter(f"'{path}' holds no results: it is not a JSON object.", param_hint="'--results'")
    return content


def _aligned_norm(kind: NormKind | None, gain_init: str | None, gwc: bool | None) -> dict[str, Any] | None:
    """The settings that were given; what is left out keeps the default of the config."""
    settings = {"kind": kind and kind.value, "gain_init": _gain_init(gain_init), "gwc": gwc}
    return {key: value for key, value in settings.items() if value is not None} or None


def _gain_init(given: str | None) -> str | float | None:
    if given in (None, "text"):
        return given
    try:
        number = float(given)
    except ValueError:
        raise typer.BadParameter(f"'{given}' is neither 'text' nor a number.", param_hint="'--gain-init'") from None
    if not (math.isfinite(number) and number > 0):
        raise typer.BadParameter(f"The gain must be a finite number above 0, got {given}.", param_hint="'--gain-init'")
    return number


def _calibration_paths(ctx: typer.Context, images: list[Path] | None, norm: NormKind | None) -> list[Path]:
    """The images of `--images`, which the norm `scale` alone looks at."""
    if ctx.args and not images:
        raise typer.BadParameter(f"Got unexpected extra argument ({ctx.args[0]})")
    if images and norm != NormKind.scale:
        raise typer.BadParameter("They are measured for --norm scale alone: leave them out.", param_hint="'--images'")
    return [*(images or []), *_further_images(ctx)]


def _opened(paths: list[Path]) -> list | None:
    """The images, or None for none."""
    from .evaluation.generation import open_image

    return [open_image(path) for path in paths] or None


def _further_images(ctx: typer.Context) -> list[Path]:
    """What follows the first path of `--images a.png b.png c.png`."""
    paths = [Path(argument).expanduser() for argument in ctx.args]
    for path in paths:
        if not path.is_file():
            raise typer.BadParameter(f"There is no image '{path}'.", param_hint="'--images'")
    return paths


def _what_to_inspect(
    paths: list[Path], prompt: str | None, answer: str | None
) -> tuple[list, list | None, list | None]:
    """Images, prompts and answers: the user's, or eight scenes of the built-in data with their questions and answers."""
    from .evaluation.generation import open_image

    if paths:
        for path in paths:
            open_image(path)  # a file that cannot be read is named before the model is loaded
        pictures, prompts, answers = [partial(open_image, path) for path in paths], None, None
    else:
        from .train_trl.digit_scenes import digit_scene_rows

        rows = digit_scene_rows(8, split="test", text_only_share=0)
        pictures = [image for row in rows for image in row["images"]]
        prompts, answers = [row["question"] for row in rows], [row["answer"] for row in rows]
    if prompt is not None:
        prompts = [prompt]
    if answer is not None:
        answers = [answer] * len(pictures)
    return pictures, prompts, answers


def _inspected(model: str, pictures: list, options: dict[str, Any]):
    """The report of one model, with a progress bar over the samples of each stage."""
    from .evaluation.generation import check_prompt, load_model
    from .inspection import inspect_model

    loaded, processor = load_model(model)
    for prompt in options["prompts"] or ():
        check_prompt(processor, prompt)
    with _stage_bars() as advance:
        report = inspect_model(loaded, processor, pictures, progress=advance, **options)
    report.data["model"] = model
    return report


@contextmanager
def _stage_bars(leave: bool = False):
    """A bar for each stage of the work, on stderr: call it with the stage's name, what is done, and of how much."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    tasks: dict[str, Any] = {}
    columns = TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bars = Progress(*columns, console=Console(stderr=True), transient=not leave)

    def advance(stage: str, done: int, total: int) -> None:
        bars.start()  # does nothing the second time
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage)
        bars.update(tasks[stage], completed=done, total=total)

    try:
        yield advance
    finally:
        if tasks:  # else an empty line would stand before the error
            bars.stop()


def _saved_report(path: str):
    """The norm report in a folder or file, or None where the path is a model's."""
    found = Path(path)
    if found.suffix != ".json" and not (found / "report.json").is_file():
        return None
    from .inspection import NormReport

    return NormReport.load(found)


def _answer_typed_questions(model: str, images: list[str], max_new_tokens: int) -> None:
    """Answers line by line, each question by itself, until an empty line; the model is loaded once."""
    from .evaluation.generation import generate_answers, load_model, open_image

    pictures = [open_image(path) for path in images]
    loaded, processor = load_model(model)
    if sys.stdin.isatty():
        typer.echo("Ask about the images given with --image; an empty line ends.", err=True)
    while question := _next_question():
        content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": question}]
        conversation = [{"role": "user", "content": content}]
        typer.echo(generate_answers(loaded, processor, [conversation], [pictures], max_new_tokens=max_new_tokens)[0])


def _next_question() -> str:
    """The next line that is typed, or '' at an empty line or the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _summary(model, out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "aligned_norm": model.config.aligned_norm,
    }


def _only_json(as_json: bool):
    """While a room works, what it prints goes to stderr, so that stdout holds the JSON alone."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def _print_json(result: dict[str, Any]) -> None:
    typer.echo(json.dumps(result, indent=2, default=str))


def _report(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(result)
        return
    rows = _flat(result)
    width = max(len(key) for key, _ in rows)
    for key, value in rows:
        typer.echo(f"{key:{width}}  {value}")


def _flat(result: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as rows of dotted key and value; lists stay in the JSON."""
    rows = []
    for key, value in result.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            rows.append((f"{prefix}{key}", _readable(value)))
    return rows


def _readable(value: Any) -> str:
    if type(value) is int:
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Run the program; exits with 0 when done, 1 when it failed, 2 when called wrongly, 130 when interrupted."""
    quiet_optional_packages()
    app(prog_name="normalign")
