"""What a report gives: the same figures as JSON, on the console, as pictures and on a page that needs nothing else."""

import base64
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from normalign import inspect_model
from normalign.configuration.errors import NormalignError
from normalign.inspection import NormReport, compare_reports, print_report
from normalign.inspection.compare import key_figures
from normalign.inspection.figures import PANELS, draw_evolution, draw_measured, draw_panel, measured_panels
from normalign.inspection.page import render_page
from normalign.inspection.report import write_json
from normalign.inspection.schema import number
from normalign.train_trl.digit_scenes import digit_scene_rows


ON_REQUEST = {"attention_mass", "attention_entropy", "controls", "gradients"}


def layer(index, scale):
    return {
        "norm_mean": scale * (1 + index),
        "update_norm_mean": 0.5,
        "update_ratio_mean": 0.5 / scale,
        "cosine_prev_mean": 0.9,
        "cosine_first_mean": 0.9 - 0.1 * index,
        "angle_mean_rad": 0.4 / scale,
        "angle_formula_mean_rad": 0.4 / scale,
        "isotropic_angle_rad": math.atan(0.5 / scale),
    }


def part(mean):
    quantiles = {q: mean * (0.5 + float(q)) for q in ("0.05", "0.25", "0.5", "0.75", "0.95")}
    return {"mean": mean, "std": mean / 10, "count": 64, "quantiles": quantiles}


def make(name="org/model", inserted=12.5, layers=3):
    """A report with all that can be measured."""
    shares = {"vision": 0.1, "projector": 0.2, "norm": 0.3, "language": 0.4}
    return {
        "schema": 1,
        "model": name,
        "images": 2,
        "prompts": 2,
        "text_embedding_norm": 0.5,
        "interface": {
            "vision_encoder": part(50.0),
            "projector": part(12.5),
            "inserted": part(inserted),
            "text_tokens": part(0.52),
        },
        "ratio": inserted / 0.5,
        "not_found": [],
        "aligned_norm": {"kind": "rmsnorm", "gain_abs_mean": 0.0125, "gwc": False},
        "layers": [
            {
                "visual": layer(index, inserted),
                "text": layer(index, 0.5),
                "attention": {"text_to_visual_mass": 0.25, "visual_entropy": 2.0, "visual_entropy_max": math.log(16)},
            }
            for index in range(layers)
        ],
        "controls": {
            "black": {"kl_mean": 1.25, "top1_changed": 0.5},
            "none": {"kl_mean": 2.5, "top1_changed": 1.0},
            "other": {"kl_mean": 0.75, "top1_changed": 0.5},
            "position_sensitivity_index": {"kl_mean": 0.1, "top1_changed": 0.0, "shuffles": 4},
        },
        "gradients": {
            "gwc_off": {"grad_norm": {"vision": 0.1, "projector": 0.2, "norm": 3.0, "language": 4.0}, "share": shares},
            "gwc_on": {"grad_norm": {"vision": 5.0, "projector": 10.0, "norm": 3.0, "language": 4.0}, "share": shares},
            "mu": 0.02,
            "predicted_factor": 50.0,
            "measured_factor": {"vision": 50.0, "projector": 50.0},
            "clip": {"max_grad_norm": 1.0, "factor_on": 0.08, "factor_off": 0.2},
        },
        "verdict": "Norm gap: visual tokens enter at 25 times the norm.",
        "verdict_figures": {"ratio": 25.0, "turns": {"first_layer_ratio": 0.04}, "arises_in": ["projector"]},
    }


def bare(name="org/model"):
    """A report of the norms alone, of a family whose vision encoder cannot be told apart."""
    data = make(name)
    data["interface"]["vision_encoder"] = None
    data["not_found"] = ["The vision encoder's output is not to be told apart."]
    data["controls"] = data["gradients"] = data["aligned_norm"] = None
    for row in data["layers"]:
        row["attention"] = None
    data["verdict"] = "<img src=x onerror=alert(1)>"
    return data


def shown(report, width=80):
    console = Console(file=StringIO(), width=width, highlight=False)
    print_report(report, console)
    return console.file.getvalue()


class Page(HTMLParser):
    """The parts of a page that tests ask about."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.addresses, self.images, self.tables = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.addresses += [attributes[key] for key in ("src", "href", "srcset", "data", "action") if key in attributes]
        if tag == "img":
            self.images.append(attributes)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append(attributes.get("data-value"))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


def text_of(folder, name="report.html"):
    return (folder / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a report with all that can be measured."""
    return NormReport(make()).save(tmp_path_factory.mktemp("whole") / "new" / "folder")


@pytest.fixture(scope="module")
def norms_alone(tmp_path_factory):
    """The folder of a report of the norms alone, laid over one of everything."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "figures").mkdir()
    (folder / "figures" / "gradients.png").touch()
    return NormReport(bare("<script>alert(1)</script>")).save(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A comparison of unlike reports, and its folder."""
    comparison = compare_reports(make("x/one", layers=4), NormReport(bare("y/two")))
    return comparison, comparison.save(tmp_path_factory.mktemp("pair"))


def keys_of(value):
    """The keys of nested dictionaries, and of the first item of lists of them."""
    if isinstance(value, list):
        return [keys_of(item) for item in value[:1] if isinstance(item, dict)]
    return {key: keys_of(item) for key, item in value.items()} if isinstance(value, dict) else None


# --- files


def test_reports_of_these_tests_have_the_keys_of_measured_ones(composed):
    rows = digit_scene_rows(2, split="test", text_only_share=0)
    images, questions, answers = ([row[key] for row in rows] for key in ("images", "question", "answer"))
    extras = {"attention": True, "controls": True, "gradients": True, "answers": answers}
    report = inspect_model(*composed, images, questions, **extras)
    measured, made = report.to_dict(), make()
    assert measured.pop("verdict_figures") and made.pop("verdict_figures")
    assert keys_of(measured) == keys_of(made)
    assert set(PANELS) == set(measured_panels({"model": measured}))
    assert "Does the model look?" in shown(report)


def test_documented_keys_are_those_of_a_report():
    page = (Path(__file__).parents[2] / "docs" / "inspection.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`([^`]+)`", page.partition("## report.json")[2]))))

    def missing(keys):
        for key, below in keys.items():
            if key not in named and not key[0].isdigit() and key not in {"vision", "language", "norm"}:
                yield key
            for deeper in below if isinstance(below, list) else [below or {}]:
                yield from missing(deeper)

    made = make()
    del made["verdict_figures"]
    assert list(missing(keys_of(made))) == []


def test_saved_report_is_read_back_as_it_was(whole):
    assert NormReport.load(whole) == NormReport.load(whole / "report.json") == NormReport(make())


def test_one_picture_for_each_thing_that_was_measured_and_none_of_an_earlier_report(whole, norms_alone):
    assert {path.stem for path in (whole / "figures").iterdir()} == set(PANELS)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (whole / "figures").iterdir())
    assert {path.stem for path in (norms_alone / "figures").iterdir()} == set(PANELS) - ON_REQUEST


def test_what_is_not_a_finite_number_is_null_in_json(tmp_path):
    data = bare()
    data["layers"][0]["text"]["update_ratio_mean"] = math.inf
    data["interface"]["inserted"]["std"] = math.nan
    report = NormReport(data).to_dict()
    assert report["layers"][0]["text"]["update_ratio_mean"] is None and report["interface"]["inserted"]["std"] is None
    write_json(data, tmp_path / "report.json")
    assert json.loads(text_of(tmp_path, "report.json")) == report


@pytest.mark.parametrize("content", [None, "{", "[]", '{"schema": 2}'])
def test_a_file_that_is_no_report_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(NormalignError, match=r"report\.json"):
        NormReport.load(tmp_path)


# --- the page


@pytest.mark.parametrize("page", ["whole", "norms_alone", "pair"])
def test_page_loads_nothing_from_anywhere(page, request):
    folder = request.getfixturevalue(page)
    text = text_of(folder[1], "comparison.html") if page == "pair" else text_of(folder)
    addresses = Page(text).addresses
    assert addresses and all(address.startswith("data:image/svg+xml;base64,") for address in addresses)
    assert not re.findall(r"url\(|@import|fetch\(|XMLHttp", text)
    assert "default-src 'none'" in text, "the browser is told to load nothing either"


def test_page_shows_every_figure_that_was_measured(whole, norms_alone):
    titles = {name: panel.title for name, panel in PANELS.items()}
    assert "aligned norm: rmsnorm, mean |gain| 0.0125, GWC off" in text_of(whole)
    assert {image["alt"] for image in Page(text_of(whole)).images} == set(titles.values())
    page = Page(text_of(norms_alone))
    assert {image["alt"] for image in page.images} == {titles[name] for name in titles if name not in ON_REQUEST}
    words = " ".join(page.words)
    assert "Not found: The vision encoder's output is not to be told apart." in words
    assert "Does the model look?" not in words and "Gradients" not in words


def test_figures_on_the_page_are_whole_pictures_that_follow_a_dark_page(whole):
    for image in Page(text_of(whole)).images:
        picture = base64.b64decode(image["src"].partition(",")[2]).decode()
        root = ElementTree.fromstring(picture)
        assert "viewBox" in root.attrib and "width" not in root.attrib
        assert "prefers-color-scheme: dark" in picture
        painted = set(re.findall(r"(?:fill|stroke): (#\w+)", picture.partition("</style>")[2]))
        assert not painted, "a fixed colour would vanish on a dark page"


def test_tables_hold_the_numbers_of_the_report_in_full(whole):
    data = make()
    tables = Page(text_of(whole)).tables
    values = {value for table in tables for row in table for value in row if value}
    expected = [data["interface"]["projector"]["std"], data["controls"]["black"]["kl_mean"], 0.04]
    expected += [row[kind]["isotropic_angle_rad"] for row in data["layers"] for kind in ("visual", "text")]
    assert {str(value) for value in expected} <= values
    [layers] = [table for table in tables if len(table[0]) == 9]
    assert len(layers) == 2 + len(data["layers"]) and all(len(row) == 17 for row in layers[1:])


def test_names_from_outside_are_text_on_the_page_not_code(norms_alone):
    text = text_of(norms_alone)
    assert text.count("<script>") == 1 and "&lt;script&gt;alert(1)" in text
    assert "&lt;img src=x" in text


def test_the_same_report_gives_the_same_page(whole):
    reports = {"model": make()}
    assert render_page(reports, draw_measured(reports)) == text_of(whole)


# --- figures


def test_plot_draws_what_was_measured_or_what_is_asked_for():
    report = NormReport(make())
    assert len(NormReport(bare()).plot().axes) == len(set(PANELS) - ON_REQUEST)
    assert [axes.get_title(loc="left") for axes in report.plot("turns", "controls").axes] == [
        PANELS["turns"].title,
        PANELS["controls"].title,
    ]
    with pytest.raises(NormalignError, match="no figure gradients.*only when asked for"):
        NormReport(bare()).plot("gradients")


def test_lines_are_the_numbers_by_layer():
    data = make()
    axes = draw_panel("cosine_first", {"model": data}).axes[0]
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    expected = [row["visual"]["cosine_first_mean"] for row in data["layers"]]
    assert drawn == {"visual": expected, "text": expected}
    assert list(axes.lines[0].get_xdata()) == [1, 2, 3]


def test_bars_at_the_interface_are_means_and_whiskers_quantiles():
    axes = draw_panel("interface", {"model": make()}).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [50.0, 12.5, 12.5, 0.52]
    whiskers = [tuple(line.get_ydata()) for line in axes.lines if len(set(line.get_xdata())) == 1]
    assert (50 * 0.55, 50 * 1.45) in whiskers and (50 * 0.75, 50 * 1.25) in whiskers
    assert axes.get_yscale() == "log"


def test_evolution_shows_the_first_layer_by_step():
    reports = [make(inserted=12.5), make(inserted=6.0), bare()]
    norms, turns, layers = draw_evolution([0, 10, 20], reports).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in norms.lines}
    assert drawn["visual tokens, inserted"] == [12.5, 6.0, 12.5]
    assert list(turns.lines[0].get_ydata()) == [0.4 / 12.5, 0.4 / 6.0, 0.4 / 12.5]
    assert len(layers.lines) == 6


# --- console


def test_console_tables_fit_eighty_columns_and_show_each_measure():
    text = shown(NormReport(make()))
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for words in ("vision encoder", "Through the layers", "Attention", "Does the model look?", "GWC on", "Norm gap:"):
        assert words in text
    assert "50.00" in text and "1/mu: 50.00" in text


def test_console_thins_many_layers_and_says_so():
    text = shown(NormReport(make(layers=30)))
    assert "12 of 30 layers; --json and --out give all" in text
    rows = re.findall(r"^  (\d+) .*%", text, re.MULTILINE)
    assert (rows[0], rows[-1], len(rows)) == ("1", "30", 12)


def test_console_shows_brackets_of_names_as_they_are():
    data = bare("model[red]")
    data["verdict"] = "No gap [bold]."
    text = shown(NormReport(data))
    assert "model[red]" in text and "No gap [bold]." in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (12345, "12,345"),
        (1.0, "1.000"),
        (0.40142, "0.4014"),
        (39.96, "39.96"),
        (9999.6, "10,000"),
        (123456.7, "123,457"),
        (6.5e-8, "6.500e-08"),
        (float("nan"), "nan"),
        (True, "True"),
        ("projector", "projector"),
    ],
)
def test_numbers_are_short_and_keep_their_figures(value, text):
    assert number(value) == text


# --- comparison


def test_comparison_pairs_the_figures_of_both():
    data = compare_reports(make("before"), make("after", inserted=0.5)).to_dict()
    assert data["labels"] == ["before", "after"]
    assert data["figures"]["ratio, inserted / T"] == {"first": 25.0, "second": 1.0, "factor": 0.04}
    assert data["figures"]["cosine of last layer to first, text"]["factor"] is None
    assert data["layers"][2]["visual"]["norm_mean"] == [37.5, 1.5]
    assert data["reports"] == [make("before"), make("after", inserted=0.5)]


def test_comparison_of_unlike_reports_leaves_gaps(pair):
    comparison, folder = pair
    data = json.loads(text_of(folder, "comparison.json"))
    assert data == comparison.to_dict()
    assert data["figures"]["mean norm, vision encoder"] == {"first": 50.0, "second": None, "factor": None}
    assert len(data["layers"]) == 4 and data["layers"][3]["text"]["norm_mean"] == [2.0, None]


def test_comparison_shows_both_models_as_pictures_page_and_tables(pair):
    comparison, folder = pair
    assert {path.stem for path in (folder / "figures").iterdir()} == set(PANELS)
    page = Page(text_of(folder, "comparison.html"))
    words = " ".join(" ".join(page.words).split())
    assert "one and two" in words and "x/one" in words and "y/two" in words
    assert len(page.images) == len(PANELS)
    text = shown(comparison)
    assert "one" in text and "two" in text and "Norm gap:" in text and "<img" in text


def test_lines_of_two_models_differ():
    axes = draw_panel("turns", {"one": make(), "two": bare()}).axes[0]
    assert [(line.get_label(), line.get_linestyle()) for line in axes.lines] == [
        ("visual, one", "-"),
        ("text, one", "-"),
        ("visual, two", "--"),
        ("text, two", "--"),
    ]


def test_labels_of_equal_models_differ():
    assert list(compare_reports(make(), make()).reports) == ["model, first", "model, second"]
    assert list(compare_reports(make(), make(), ("step 0", "step 100")).reports) == ["step 0", "step 100"]
    with pytest.raises(NormalignError, match="different labels"):
        compare_reports(make(), make(), ("a", "a"))


def test_key_figures_leave_out_what_was_not_measured():
    assert not any("image" in name or "attention" in name for name in key_figures(bare()))
