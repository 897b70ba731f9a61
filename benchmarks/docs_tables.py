"""Writes what result files say into the pages that show it: python benchmarks/docs_tables.py"""

import json
import re
from pathlib import Path


CHECKOUT = Path(__file__).resolve().parents[1]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
# <!-- from: FILE --> ... <!-- end --> in a page
MARKED = re.compile(r"(<!-- from: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


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


TEXTS = {"aligned_norm_speed": speed, "demo": demo, "norm_gap": norm_gap}


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
