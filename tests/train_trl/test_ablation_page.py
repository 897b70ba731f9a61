"""The page of an ablation: what it shows, in HTML that needs nothing beside it and in Markdown with its pictures."""

import base64
import json
import re
import struct
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from normalign.inspection.figures import svg
from normalign.train_trl.ablation_figures import PANELS, draw_ablation
from normalign.train_trl.ablation_page import write_page
from normalign.train_trl.ablation_summary import sentences, summarise

from .ablation_results import held_out, result, settings


ARMS = {"none": None, "default": (1.0, 0.999), "aligned_gwc": (0.0305, 0.0326)}


class Page(HTMLParser):
    """Tables as rows of cells, the sources of pictures, and all words."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.pictures, self.tags, self.words, self._cell = [], {}, set(), "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag == "img":
            self.pictures[dict(attributes)["alt"]] = dict(attributes)["src"]
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._cell = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data):
        self.words += data
        if self._cell:
            self.tables[-1][-1][-1] += data

    def row(self, name):
        """The cells of the one row of that name, by the words above them."""
        [found] = [(table[0], row) for table in self.tables for row in table[1:] if row[0] == name]
        return dict(zip(*found, strict=True))


@pytest.fixture(scope="module")
def summary():
    """Three arms, three seeds; read back from JSON, as the page has to be made from the file alone."""
    accuracies = {"none": 0.5, "default": 0.5, "aligned_gwc": 0.6}
    ratios = {"none": 30, "default": 30, "aligned_gwc": 1}
    runs = [
        result(arm, seed, accuracies[arm] + 0.02 * seed, gain=gain, ratio=ratios[arm])
        for arm, gain in ARMS.items()
        for seed in range(3)
    ]
    for run in runs[4:6]:  # two seeds of the arm default never reach any level
        run["curve"] = [{**point, **held_out(0.0)} for point in run["curve"]]
    made = summarise(runs, list(ARMS), {**settings(3), "overrides": {"name": "<script>alert(1)</script>"}})
    return json.loads(json.dumps(made))


@pytest.fixture(scope="module")
def folder(summary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablation")
    assert write_page(summary, folder) == folder / "ablation.html"
    return folder


@pytest.fixture(scope="module")
def page(folder):
    return Page((folder / "ablation.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def markdown(folder):
    return (folder / "ablation.md").read_text(encoding="utf-8")


def test_every_figure_is_in_the_page_and_beside_the_markdown(page, markdown, folder):
    assert list(page.pictures) == [panel.title for panel in PANELS.values()]
    named = dict(re.findall(r"!\[(.+)\]\((figures/\w+\.png)\)", markdown))
    assert named == {panel.title: f"figures/{name}.png" for name, panel in PANELS.items()}
    for file in named.values():
        header = (folder / file).read_bytes()[:24]
        assert header[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", header[16:24]) > (600, 400)


def test_pictures_in_the_page_follow_its_colours(page):
    for source in page.pictures.values():
        drawn = base64.b64decode(source.removeprefix("data:image/svg+xml;base64,")).decode()
        ElementTree.fromstring(drawn)
        assert "prefers-color-scheme: dark" in drawn


def test_the_page_loads_nothing_and_runs_nothing(folder, page):
    text = (folder / "ablation.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not {"script", "link", "iframe"} & page.tags
    assert not re.findall(r"""(?:src|href)=["'](?!data:)|url\(|@import""", text)


def test_settings_are_shown_as_words_and_not_as_markup(page, markdown):
    assert "<script>alert(1)</script>" in page.words
    assert '"recipes": ["demo/stage1.yaml", "demo/stage2.yaml"]' in page.words
    assert "demo/stage1.yaml" in markdown


def test_the_sentences_are_those_of_the_summary(summary, page, markdown):
    for sentence in sentences(summary):
        words = re.sub(r"^\([a-e]\) ", "", sentence)
        assert words in page.words
        assert words.replace("|", "\\|") in markdown


def test_the_gain_has_the_columns_of_the_papers_table_5(page):
    [(head, row)] = [(t[0], row) for t in page.tables for row in t if "L2, end" in t[0] and row[0] == "aligned_gwc"]
    assert head[1:4] == ["mean |gain|, start", "mean |gain|, end", "L2, end"]
    assert [cell.split(" ")[0] for cell in row[1:]] == ["0.03050", "0.03260", "0.3260", "6.89%"]


def test_tables_give_means_with_intervals(page, markdown):
    [at_the_end] = [table for table in page.tables if table[1][0] == "accuracy on questions" and "none" in table[0]]
    assert at_the_end[0][1:] == list(ARMS)
    # 0.5, 0.52 and 0.54 on one kind, half of it on the other; t is 4.3027
    assert at_the_end[1][1] == "0.390 (0.353 to 0.427)"
    assert "| accuracy on questions | 0.390 (0.353 to 0.427) |" in markdown


def test_steps_say_how_many_runs_reached_a_level(page):
    arms = {"": "accuracy on questions of 0.25", "none": "20 (3 of 3)", "default": "no median (1 of 3)"}
    assert page.row("accuracy on questions of 0.25").items() >= arms.items()
    assert page.row("accuracy on questions of 0.9")["none"] == "never (0 of 3)"


def test_every_row_of_a_markdown_table_has_as_many_cells_as_its_head(markdown):
    tables = [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", markdown, flags=re.MULTILINE)]
    assert len(tables) == 7
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
        assert len(table) > 2


def test_nothing_is_shown_that_was_not_measured(page, markdown):
    for text in (page.words, markdown):
        assert not re.search(r"\b(nan|None|inf|Undefined)\b", text)
    assert page.row("clipping factor, had GWC been off, stage1")["none"] == "-"


def test_one_arm_and_one_seed_have_a_page_without_what_needs_more():
    summary = summarise([result("none", 0)], ["none"], settings(1))
    drawn = draw_ablation(summary)
    assert set(PANELS) - set(drawn) == {"differences", "gain"}
    assert "var(--ink)" in svg(drawn["accuracy"])
