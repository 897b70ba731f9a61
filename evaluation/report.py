"""The results of an evaluation for people: a table beside the paper's figures, as text, Markdown and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .benchmarks import BENCHMARKS, PAPER, PAPER_ARMS


TABLE, FIGURE = "results.md", "results.png"


def table_rows(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table: a row for each task, and one for the average of nine.

    Columns that would be empty in every row are left out.
    """
    heads = [
        "task",
        "score",
        "95% interval",
        "n",
        "failed",
        "unparsed",
        "by our rules",
        "black images",
        "sees",
        "other",
    ]
    heads += [f"paper, {model.removesuffix('-Instruct')}" for model in PAPER]
    rows = []
    differences = (results.get("comparison") or {}).get("tasks", {})
    for name, task in results["tasks"].items():
        black = task.get("black_image")
        difference = differences.get(name)
        rows.append(
            [
                name,
                _figure(task["score"]) + ("*" if task["failed"] else ""),
                _interval(task),
                str(task["n"]),
                str(task["failed"]),
                str(task["unparsed"]) if "unparsed" in task else "",
                _figure(task["extracted_score"]) if "extracted_score" in task else "",
                _figure(black["score"]) if black else "",
                _signed(black["difference"]) if black else "",
                _signed(difference) if difference else "",
                *(_paper(model, name) for model in PAPER),
            ]
        )
        for kind, figures in task.get("kinds", {}).items():
            cells = [f"{name}: {kind}", _figure(figures["score"]), _interval(figures), str(figures["n"])]
            rows.append(cells + [""] * (len(heads) - len(cells)))
    if set(results["tasks"]) & set(BENCHMARKS):
        mean = results["average"]
        blank = [""] * 8
        rows.append(
            ["average of nine", "-" if mean is None else _figure(mean), *blank, *(_paper(m, "average") for m in PAPER)]
        )
    kept = [i for i in range(len(heads)) if i < 2 or any(row[i] for row in rows)]
    return [heads[i] for i in kept], [[row[i] for i in kept] for row in rows]


def notes(results: dict[str, Any]) -> list[str]:
    """What a reader must know beside the table, one sentence or two each."""
    said = []
    tasks = results["tasks"]
    if results.get("limit"):
        said.append(
            f"Only the first {results['limit']} rows of each task were asked (of MMLU, of each subject): a look, no result."
        )
    failed = {name: task for name, task in tasks.items() if task["failed"]}
    if failed:
        said.append(
            "* Rows that failed to run are in no score: "
            + "; ".join(f"{name} {task['failed']} ({task['failures'][0]})" for name, task in failed.items())
            + f". Every failure stands in samples/; run the same command again to try {_them(failed)} once more."
        )
    if any("unparsed" in task for task in tasks.values()):
        said.append("`unparsed` counts answers of which no option, or no yes or no, can be read by our rules.")
    if any("extracted_score" in task for task in tasks.values()):
        said.append(
            "`score` is the harness's own; `by our rules` reads the same answers by the rules of docs/evaluation.md. Where the "
            "two are apart, the answers have a form that the harness does not foresee."
        )
    if any(task.get("black_image") for task in tasks.values()):
        said.append(
            "`black images` is the score with every image black, and `sees` the difference over the same rows with its 95% "
            "interval: where that holds 0, the task does not show that the model looks at the image."
        )
    if comparison := results.get("comparison"):
        said.append(
            f"`other` is the difference to {comparison['model']} over the same rows, in points, with its paired 95% "
            f"interval."
        )
    if any(name in figures for name in tasks for figures in PAPER.values()):
        said.append(f"The paper's columns hold the figures of its Table 4 for {' / '.join(PAPER_ARMS)}.")
    missing = [name for name in BENCHMARKS if tasks.get(name, {}).get("score") is None]
    if missing and set(tasks) & set(BENCHMARKS):
        said.append(f"There is no average of nine without {', '.join(missing)}.")
    return said


def _them(failed: dict[str, Any]) -> str:
    return "it" if sum(task["failed"] for task in failed.values()) == 1 else "them"


def markdown(results: dict[str, Any]) -> str:
    """The table, what to know beside it, and how it was run."""
    heads, rows = table_rows(results)
    right = ["---", *["---:"] * (len(heads) - 1)]
    lines = [f"# Evaluation of {results['model']}", ""]
    escaped = ([cell.replace("|", "\\|") for cell in cells] for cells in rows)
    lines += [f"| {' | '.join(cells)} |" for cells in (heads, right, *escaped)]
    lines += ["", *(f"{note}\n" for note in notes(results))]
    harnesses = ", ".join(f"{name} {version}" for name, version in results["harness_version"].items())
    commit = f", commit {results['commit']}" if results.get("commit") else ""
    lines += [
        f"Scores in percent. Greedy decoding, {results['dtype']}, batch size {results['batch_size']}{commit}; "
        f"{harnesses + ', ' if harnesses else ''}transformers {results['versions']['transformers']}, torch "
        f"{results['versions']['torch']}, normalign {results['versions']['normalign']}; {results['date']}.",
    ]
    return "\n".join(lines) + "\n"


def save_report(results: dict[str, Any], out: Path) -> None:
    """Writes `out`/results.md and `out`/results.png."""
    (out / TABLE).write_text(markdown(results), encoding="utf-8")
    _draw(results, out / FIGURE)


def _draw(results: dict[str, Any], file: Path) -> None:
    from matplotlib.figure import Figure

    tasks = {name: task for name, task in results["tasks"].items() if task["score"] is not None}
    figure = Figure(figsize=(7, 1.2 + 0.45 * max(1, len(tasks))), layout="constrained")
    axes = figure.subplots()
    colors = ("#4c72b0", "#dd8452")
    for place, (name, task) in enumerate(tasks.items()):
        error = [[max(0.0, task["score"] - task["low"])], [max(0.0, task["high"] - task["score"])]]
        axes.barh(place, task["score"], height=0.6, color="#9fb8d8", xerr=error, ecolor="#30507a", capsize=3)
        black = (task.get("black_image") or {}).get("score")
        if black is not None:
            axes.plot([black] * 2, [place - 0.3, place + 0.3], color="black", linewidth=2)
        for model, color in zip(PAPER, colors, strict=True):
            if name in PAPER[model]:
                axes.scatter(
                    PAPER[model][name], [place] * len(PAPER_ARMS), s=22, color=color, zorder=3, edgecolor="white"
                )
    axes.set_yticks(range(len(tasks)), [BENCHMARKS[n].title if n in BENCHMARKS else n for n in tasks])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("score in percent, with 95% interval")
    # handles for what is drawn and for nothing else
    if any(task.get("black_image") for task in tasks.values()):
        axes.plot([], [], color="black", linewidth=2, label="black images")
    if any(name in figures for name in tasks for figures in PAPER.values()):
        for model, color in zip(PAPER, colors, strict=True):
            axes.scatter([], [], s=22, color=color, label=f"paper, {model} (three arms)")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def _figure(value: float | None) -> str:
    return "no score" if value is None else f"{value:.2f}"


def _interval(task: dict[str, Any]) -> str:
    return "" if task["low"] is None else f"{task['low']:.1f} to {task['high']:.1f}"


def _signed(difference: dict[str, float] | None) -> str:
    if difference is None:
        return "-"
    return f"{difference['value']:+.1f} ({difference['low']:+.1f} to {difference['high']:+.1f})"


def _paper(model: str, name: str) -> str:
    return " / ".join(f"{value:.1f}" for value in PAPER[model].get(name, ()))
