"""The pages in docs/: their Python examples run, their links lead somewhere, their tables come from result files."""

import json
import re
from pathlib import Path

import pytest


CHECKOUT = Path(__file__).parents[2]
PAGES = sorted((CHECKOUT / "docs").glob("*.md"))


def table_of(result_file: Path) -> str:
    """The table that a page shows of a benchmark's result file."""
    result = json.loads(result_file.read_text(encoding="utf-8"))
    lines = ["| case | median | time against the first | memory against the first |", "|---|---|---|---|"]
    for row in result["rows"]:
        milliseconds = f"{row['seconds_median'] * 1e3:.1f} ms"
        lines.append(f"| {row['case']} | {milliseconds} | {row['ratio']:.2f}x | {row['memory_ratio']:.2f}x |")
    versions, machine = result["versions"], result["machine"]
    lines += ["", f"torch {versions['torch']}, {machine['torch_threads']} threads, {machine['system']}."]
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_of_the_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for example in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(example, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_of_the_page_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_tables_of_benchmarks_are_those_of_the_result_files():
    found = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name, shown in re.findall(r"<!-- table: (\S+) -->\n(.*?)<!-- end of table -->", text, re.DOTALL):
            assert shown.strip() == table_of(CHECKOUT / name), f"{page.name} differs from {name}"
            found += 1
    assert found
