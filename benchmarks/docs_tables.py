"""Writes what result files say into the pages that show it: python benchmarks/docs_tables.py"""

import json
import re
from pathlib import Path


CHECKOUT = Path(__file__).resolve().parents[1]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
# <!-- from: FILE --> ... <!-- end --> in a page
MARKED = re.compile(r"(<!-- from: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TRAINED_PARTS = {"vision": "vision encoder", "projector": "projector", "language": "language model"}


def speed(result: dict) -> str:
    """One row a case of a comparison of speed and memory, then the machine and the version of torch."""
    base = result["rows"][0]["case"].split(" (")[0]
    lines = [f"| case | median | time against {base} | peak memory against {base} |", "|---|---|---|---|"]
    for row in result["rows"]:
        milliseconds = f"{row['seconds_median'] * 1e3:.1f} ms"
        lines.append(f"| {row['case']} | {milliseconds} | {row['ratio']:.2f}x | {row['memory_ratio']:.2f}x |")
    versions, machine = result["versions"], result["machine"]
    lines += ["", f"torch {versions['torch']}, {machine['torch_threads']} threads, {machine['system']}."]
    return "\n".join(lines)


def ratios(result: dict) -> str:
    """One row a case with its ratio to the case that it is compared with, then the machine and the version of torch."""
    lines = ["| case | median | ratio |", "|---|---|---|"]
    for row in result["rows"]:
        seconds = row["seconds_median"]
        shown = f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"
        lines.append(f"| {row['case']} | {shown} | {row['ratio']:.2f}x |")
    versions, machine = result["versions"], result["machine"]
    lines += ["", f"torch {versions['torch']}, {machine['torch_threads']} thread(s), {machine['system']}."]
    return "\n".join(lines)


def demo(result: dict) -> str:
    """What the demo came to, and how long it took."""
    return (
        f"On {result['machine']['torch_threads']} processor threads it took {result['seconds']:.0f} seconds. Of "
        f"{result['questions']} questions about held-out scenes {result['accuracy']:.1%} were answered right; with black\n"
        f"pictures in their place {result['accuracy_black_image']:.1%}, where the best blind guess gets {result['chance']:.1%}."
    )


def norm_gap(result: dict) -> str:
    """What the picture shows, in words."""
    none, aligned = result["reports"]["no norm"], result["reports"]["aligned norm"]
    turn = none["layers"][0]["visual"]["angle_mean_rad"], none["layers"][0]["text"]["angle_mean_rad"]
    return (
        f"*Two mini backbones, before any training: projected tokens have {none['ratio']:.0f} times the norm of text tokens, "
        f"and the first\nlayer turns them by {turn[0]:.2f} rad where it turns text tokens by {turn[1]:.2f}; behind the aligned "
        f"norm the ratio is {aligned['ratio']:.2f} and they\nturn alike. Drawn by [benchmarks/norm_gap.py]"
        f"(benchmarks/norm_gap.py).*"
    )


def inspection_smollm2(result: dict) -> str:
    """What the inspection found in a real language model, without and with the aligned norm."""
    none, aligned = result["reports"]["no norm"], result["reports"]["aligned norm"]
    rows = {
        "T, mean norm of text embeddings": lambda data: data["text_embedding_norm"],
        "norm of visual tokens out of the vision encoder": lambda data: data["interface"]["vision_encoder"]["mean"],
        "out of the projector": lambda data: data["interface"]["projector"]["mean"],
        "where they enter the language model": lambda data: data["interface"]["inserted"]["mean"],
        "ratio to T": lambda data: data["ratio"],
        "turn in the first layer, visual tokens (rad)": lambda data: data["layers"][0]["visual"]["angle_mean_rad"],
        "text tokens (rad)": lambda data: data["layers"][0]["text"]["angle_mean_rad"],
        "turn over all layers, visual tokens against text tokens": lambda data: data["verdict_figures"]["turns"][
            "ratio"
        ],
    }
    lines = ["| | no norm | aligned norm |", "|---|---|---|"]
    lines += [f"| {words} | {value(none):#.3g} | {value(aligned):#.3g} |" for words, value in rows.items()]
    gain = aligned["verdict_figures"]["gain"]
    return "\n".join([*lines, "", f"T is {none['text_embedding_norm']:.2f}, so the gain starts at {gain:.3f}."])


def recipe_costs(result: dict) -> str:
    """Memory of one GPU by what it is for, and the hours of an epoch, worked out."""
    lines = [
        "| recipe | GPUs | weights | gradients | AdamW | bf16 copies | activations | in all | rows at once, at most | hours |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        memory = row["memory_gb"]
        names = ("weights_float32", "gradients", "adamw", "bfloat16_copies", "activations")
        total = f"{memory['total']:.0f} GB" if row["fits"] else f"**{memory['total']:.0f} GB: does not fit**"
        gpus = str(row["gpus"]) if row["gpus"] == 1 else f"{row['gpus']}, {row['how']}"
        cells = [row["recipe"], gpus, *(f"{memory[name]:.1f}" for name in names), total]
        lines.append("| " + " | ".join([*cells, str(row["most_rows_at_once"]), f"{row['hours']:.1f}"]) + " |")
    assumed = result["assumed"]
    counts = {row["recipe"].split("/")[0]: row["parameters"] for row in result["rows"]}
    kept = {row["recipe"].split("/")[0]: row["kept_bytes_per_token_and_layer"] for row in result["rows"]}
    lines += ["", "Parameters (vision, projector, language; in millions) and bytes kept per token and layer:"]
    for name, parts in counts.items():
        millions = ", ".join(f"{parts[part] / 1e6:,.1f}" for part in ("vision", "projector", "language"))
        lines.append(f"- {name}: {millions}; {kept[name] / 1e3:.1f} kB")
    rows, text = assumed["rows"], assumed["text_tokens_per_row"]
    lines += [
        "",
        f"Assumed: {rows['stage1']:,} rows of {text['stage1']} text tokens in stage 1, {rows['stage2']:,} rows of "
        f"{text['stage2']} in stage 2; {assumed['share_of_gpu_flops']:.0%} of a\nGPU's {assumed['gpu_flops'] / 1e12:.0f} "
        f"TFLOP/s; {assumed['reserve_gb']} GB for buffers and fragments.",
    ]
    return "\n".join(lines)


def evidence(result: dict) -> str:
    """One row an arm with means and 95% intervals over seeds, then what the numbers support."""
    from normalign.train_trl.ablation_summary import sentences

    stages = [stage["stage"] for stage in result["stages"]]
    rows = {f"accuracy on the curve's rows after {stage}": f"after/{stage}/accuracy" for stage in stages[:-1]}
    rows |= {
        "accuracy on questions": "accuracy",
        "its mean over the training": "area/accuracy",
        "loss on questions (nats a token)": "question_loss",
        "loss on captions": "caption_loss",
        "accuracy on text alone": "text_only_accuracy",
        "norm of projected tokens, start": "projected_norm/before",
        "end": "projected_norm/after",
        "norm of inserted over text tokens, start": "ratio/before",
        "end ": "ratio/after",
        "turns of visual over text tokens, start": "turn_ratio/before",
        "end  ": "turn_ratio/after",
        "mean gain, start": "gain/start",
        "end   ": "gain/end",
        "moved, of its length": "gain/movement",
    }
    arms = result["arms"]
    for part, words in TRAINED_PARTS.items():
        updates = [arm["measures"].get(f"{stages[-1]}/update/{part}", {"mean": 0})["mean"] for arm in arms.values()]
        if max(updates) > 0:  # a frozen part has no gradient and no update
            rows[f"gradient norm of the {words}, before clipping, in {stages[-1]}"] = f"{stages[-1]}/grad_norm/{part}"
            rows[f"relative update of the {words}"] = f"{stages[-1]}/update/{part}"
    rows["clipping factor in " + stages[-1]] = f"{stages[-1]}/clip_factor"
    lines = ["| | " + " | ".join(arms) + " |", "|---|" + "---|" * len(arms)]
    for words, measure in rows.items():
        cells = [_with_interval(arm["measures"].get(measure)) for arm in arms.values()]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    seeds = result["settings"]["seeds"]
    minutes, threads = result["seconds_of_all_runs"] / 60, result["machine"]["torch_threads"]
    lines += [
        "",
        f"Means over {seeds} seeds with 95% intervals. The runs took {minutes:.0f} minutes in all, added up, each in a process of {threads} thread(s)\nbeside other work on the machine.",
    ]
    return "\n".join([*lines, "", *(f"- {sentence}" for sentence in sentences(result))])


def _with_interval(figures: dict | None) -> str:
    if figures is None:
        return "-"
    mean = f"{figures['mean']:.3g}"
    return mean if figures["low"] is None else f"{mean} ({figures['low']:.3g} to {figures['high']:.3g})"


def gwc_effect(result: dict) -> str:
    """How much larger the steps of each part are with GWC, measured and predicted, and how the gain's number type matters."""
    lines = [
        "| optimizer | clipped | encoder | encoder's steps, measured | predicted | projector's | predicted | "
        "language model's | predicted | clipping factor without, with GWC |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [
            row["optimizer"],
            "yes" if row["clipped"] else "no",
            "trained" if row["encoder_trained"] else "frozen",
        ]
        for part in ("vision", "projector", "language"):
            for figures in (row["measured"], row["predicted"]):
                cells.append(f"{figures[part]:.3g}x" if part in figures else "-")
        cells.append(f"{row['clip_factor']['plain']:.3g}, {row['clip_factor']['gwc']:.3g}")
        lines.append("| " + " | ".join(cells) + " |")
    inverse = result["rows"][0]["inverse_mu"]
    lines += [
        "",
        f"Means over {result['steps']} steps of {result['batch']} rows; 1/mu is {inverse:.1f}; clipped at {result['max_grad_norm']:g}.",
        "",
        "| gain starts at | held in | channels that moved | mean movement | of its start |",
        "|---|---|---|---|---|",
    ]
    for row in result["gain"]:
        share = row["moved_abs_mean"] / row["start_abs_mean"]
        lines.append(
            f"| {row['start_abs_mean']:.3g} | {row['dtype']} | {row['channels_that_moved']:.0%} | "
            f"{row['moved_abs_mean']:.2g} | {share:.2%} |"
        )
    lines += ["", f"AdamW at 1e-3, {result['gain'][0]['steps']} steps of stage 1, without GWC.", ""]
    return "\n".join([*lines, *_gwc_by_optimizer(result["rows"])])


def _gwc_by_optimizer(rows: list[dict]) -> list[str]:
    """One sentence an optimizer: by how much GWC changed the steps, at the least and at the most, and how far it clipped."""

    def bounds(rows: list[dict]) -> str:
        steps = sorted((ratio, part) for row in rows for part, ratio in row["measured"].items())
        # which part it is, where there is a difference to speak of
        shown = [
            f"{ratio:.3g}x" + (f" ({TRAINED_PARTS.get(part, part)})" if abs(ratio - 1) > 0.01 else "")
            for ratio, part in (steps[0], steps[-1])
        ]
        return "1x for all parts" if shown == ["1x", "1x"] else " to ".join(shown)

    said = []
    for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
        plain, clipped = (
            [r for r in rows if r["optimizer"] == optimizer and r["clipped"] == on] for on in (False, True)
        )
        shrunk = [row["clip_factor"]["plain"] / row["clip_factor"]["gwc"] for row in clipped]
        said.append(
            f"- {optimizer}: not clipped, {bounds(plain)}; clipped, {bounds(clipped)}, with a clipping factor "
            f"{min(shrunk):.1f} to {max(shrunk):.1f} times smaller."
        )
    return ["Smallest and largest ratio of a part's steps, with GWC to without, by optimizer:", "", *said]


def smollm2(result: dict) -> str:
    """Held-out caption loss of each arm on the way, and the norms at start and end."""
    steps = [point["step"] for point in result["rows"][0]["curve"]]
    lines = [
        "| arm | "
        + " | ".join(f"step {step}" for step in steps)
        + " | projected norm, first to last logged step | mean gain |",
        "|---|" + "---|" * (len(steps) + 2),
    ]
    for row in result["rows"]:
        first, last = row["log"][0], row["log"][-1]
        gain = "aligned_norm/gain_abs_mean"
        moved = "-" if first[gain] is None else f"{first[gain]:.4f} to {last[gain]:.4f}"
        norms = f"{first['norm/visual_in']:.3g} to {last['norm/visual_in']:.3g}"
        losses = " | ".join(f"{point['loss']:.3f}" for point in row["curve"])
        lines.append(f"| {row['case']} | {losses} | {norms} | {moved} |")
    text = result["rows"][0]["log"][0]["norm/text"]
    by_loss = sorted(result["rows"], key=lambda row: row["caption_loss"])
    order = ", ".join(f"{row['case']} {row['caption_loss']:.2f}" for row in by_loss)
    minutes = sum(row["seconds_median"] for row in result["rows"]) / 60
    return "\n".join(
        [
            *lines,
            "",
            f"Loss on held-out captions (nats a token), one seed an arm. Norm of text tokens: {text:.2f}. After "
            f"{steps[-1]} steps of {result['batch']} rows,\nfrom the lowest loss to the highest: {order}. The four took "
            f"{minutes:.0f} minutes on {result['machine']['torch_threads']} thread(s), beside other work.",
        ]
    )


TEXTS = {
    "aligned_norm_speed": speed,
    "collating_speed": ratios,
    "demo": demo,
    "encoder": evidence,
    "evaluation_speed": ratios,
    "gwc_effect": gwc_effect,
    "inspection_smollm2": inspection_smollm2,
    "inspection_speed": speed,
    "load_time": ratios,
    "norm_gap": norm_gap,
    "padding_free_speed": ratios,
    "recipe_costs": recipe_costs,
    "scratch": evidence,
    "smollm2": smollm2,
    "summary": evidence,
    "training_speed": ratios,
    "vision_cache_speed": ratios,
}


def text_of(result_file: Path) -> str:
    """What a page shows of a result file."""
    return TEXTS[result_file.stem](json.loads(result_file.read_text(encoding="utf-8")))


def main() -> None:
    """Brings every page up to date."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(MARKED.sub(lambda m: f"{m[1]}{text_of(CHECKOUT / m[2])}\n{m[4]}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
