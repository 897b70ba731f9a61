"""Writes the tables of result files into the pages that show them: python benchmarks/docs_tables.py"""

import json
import re
from pathlib import Path


CHECKOUT = Path(__file__).resolve().parents[1]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
# <!-- table: FILE --> ... <!-- end of table --> in a page
MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def table_of(result_file: Path) -> str:
    """Markdown of a result file: one row a case, then the machine and the version of torch."""
    result = json.loads(result_file.read_text(encoding="utf-8"))
    base = result["rows"][0]["case"].split(" (")[0]
    lines = [f"| case | median | time against {base} | peak memory against {base} |", "|---|---|---|---|"]
    for row in result["rows"]:
        milliseconds = f"{row['seconds_median'] * 1e3:.1f} ms"
        lines.append(f"| {row['case']} | {milliseconds} | {row['ratio']:.2f}x | {row['memory_ratio']:.2f}x |")
    versions, machine = result["versions"], result["machine"]
    lines += ["", f"torch {versions['torch']}, {machine['torch_threads']} threads, {machine['system']}."]
    return "\n".join(lines)


def main() -> None:
    """Brings every page up to date."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(MARKED.sub(lambda m: f"{m[1]}{table_of(CHECKOUT / m[2])}\n{m[4]}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
