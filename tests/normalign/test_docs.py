"""The pages in docs/: their Python examples run, their links lead somewhere, their tables come from result files."""

import re
import runpy
from pathlib import Path

import pytest


CHECKOUT = Path(__file__).parents[2]
PAGES = sorted((CHECKOUT / "docs").glob("*.md"))
TABLES = runpy.run_path(str(CHECKOUT / "benchmarks" / "docs_tables.py"))


# The examples of hub.md need a Hub: tests/hub_upload/test_hub_page.py runs them.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "hub.md"], ids=lambda page: page.name)
def test_python_examples_of_the_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for example in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(example, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_of_the_page_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_figures_in_the_pages_are_those_of_the_result_files():
    found = set()
    for page in TABLES["PAGES"]:
        for _, name, shown, _ in TABLES["MARKED"].findall(page.read_text(encoding="utf-8")):
            expected = TABLES["text_of"](CHECKOUT / name)
            assert shown.strip() == expected, f"{page.name} differs from {name}: run benchmarks/docs_tables.py"
            found.add(Path(name).stem)
    recorded = {file.stem for file in (CHECKOUT / "benchmarks" / "results").rglob("*.json")}
    assert found == recorded & set(TABLES["TEXTS"])


def test_every_recipe_key_is_documented():
    from dataclasses import fields

    from normalign.train_trl.recipe import ARMS, ComposeSettings, DataSettings, Recipe, TuneSettings

    page = (CHECKOUT / "docs" / "training.md").read_text(encoding="utf-8")
    keys = [field.name for block in (Recipe, ComposeSettings, DataSettings, TuneSettings) for field in fields(block)]
    assert [name for name in [*keys, *ARMS] if not re.search(rf"[`.]{name}\b", page)] == []
