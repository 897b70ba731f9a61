"""The card's validator names field and reason of each fault, offline, and lets good cards through."""

import getpass

import pytest

from normalign.configuration.errors import NormalignError
from normalign.hub_upload import Problem, check_card, export


GOOD = {"license": "mit", "library_name": "transformers", "pipeline_tag": "image-text-to-text"}

# put together, so that no file of the project names a path of one machine
SCRATCH = "/" + "tmp/run-3"


def card(extra="", text="A model.", **fields):
    lines = [f"{key}: {value}" for key, value in {**GOOD, **fields}.items() if value is not None]
    return "\n".join(["---", *lines, *([extra] if extra else []), "---", "", text, ""])


def problems(*args, **fields):
    return [(problem.field, problem.reason) for problem in check_card(card(*args, **fields))]


def only(*args, **fields):
    found = problems(*args, **fields)
    assert len(found) == 1, found
    return ": ".join(found[0])


@pytest.mark.both_generations
def test_the_card_that_export_writes_has_no_problem(exported):
    assert check_card(exported / "README.md") == []
    assert check_card(str(exported / "README.md")) == []
    assert check_card((exported / "README.md").read_text(encoding="utf-8")) == []


def test_a_full_card_has_no_problem():
    extra = """\
title: "Aligned: a model"
language: [en, "no", yue, code]
tags: [normalign, "1.0"]
datasets: [squad, owner/data.set-1]
base_model: [google/siglip-base-patch16-224, Qwen/Qwen3-8B]
base_model_relation: finetune
model-index:
- name: aligned
  results:
  - task: {type: image-text-to-text}
    dataset: {type: mmstar, name: MMStar}
    metrics:
    - {type: average, value: 41.2}
    - {type: exact match, value: 3}"""
    assert check_card(card(extra)) == []
    assert check_card(card(extra).replace("\n", "\r\n")) == []
    assert check_card("\ufeff" + card(extra)) == []


def test_a_title_with_a_colon_is_told_to_be_quoted():
    found = check_card("---\nlicense: mit\ntitle: Aligned: a model\n---\n")
    assert [problem.field for problem in found] == ["metadata"]
    assert "line 3 ('title: Aligned: a model')" in found[0].reason and "must stand in quotes" in found[0].reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no metadata at all\n", "does not start with a block"),
        ("---\nlicense: mit\n", "does not start with a block"),
        ("", "does not start with a block"),
        ("---\n---\ntext\n", "holds no fields"),
        ("---\n- license\n---\n", "holds no fields"),
        ("---\ntags: [a\n---\n", "broken YAML"),
        ("---\ntags:\n\t- a\n---\n", "line 3"),
        (
            "---\nlicense: mit\nlicense: other\n---\n",
            "line 3 ('license: other'): the key 'license' stands there twice",
        ),
        ("---\nlicense: !!python/object/apply:os.getcwd []\n---\n", "could not determine a constructor"),
        ("---\ndate: 2024-13-45\n---\n", "broken YAML: month"),
    ],
)
def test_metadata_that_cannot_be_read_is_one_problem(text, reason):
    found = check_card(text)
    assert [problem.field for problem in found] == ["metadata"]
    assert reason in found[0].reason


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"license": None}, "license: missing"),
        ({"license": ""}, "license: missing"),
        ({"license": "Apache-2.0"}, "license: 'Apache-2.0' is no license id of the Hub; did you mean 'apache-2.0'?"),
        ({"license": "my-own-terms"}, "'my-own-terms' is no license id"),
        ({"license": "[mit, 3]"}, "license[1]: 3 is no license id"),
        ({"license": "other", "license_link": "LICENSE"}, "license_name: missing"),
        ({"license": "other", "license_name": "[]", "license_link": "LICENSE"}, "license_name: missing or no text"),
        ({"library_name": None}, "library_name: missing"),
        ({"library_name": 4}, "library_name: missing or no text"),
        ({"library_name": "trans formers"}, "library_name: 'trans formers' is no name"),
        ({"pipeline_tag": "image-to-texts"}, "pipeline_tag: 'image-to-texts' is no task of the Hub; the nearest is"),
        ({"pipeline_tag": "[image-text-to-text]"}, "pipeline_tag: ['image-text-to-text'] is no task"),
        ({"tags": "normalign"}, "tags: must be a list of texts"),
        ({"tags": "[a, 1.0]"}, "tags[1]: must be a text, not 1.0"),
        ({"tags": "[null]"}, "tags[0]: must be a text, not None"),
        ({"language": "no"}, "language: YAML reads the code no (Norwegian) as false"),
        ({"language": "[en, english]"}, "language[1]: 'english' is no ISO 639 code"),
        ({"language": "en-US"}, "belongs in language_bcp47"),
        ({"language": "xx"}, "language: 'xx' is no ISO 639 code"),
        ({"language": 7}, "language: must be a language code"),
        ({"datasets": "[null]"}, "datasets[0]: is null"),
        ({"datasets": ""}, "datasets: is null"),
        ({"datasets": "[a/b/c]"}, "datasets[0]: must be a data set's Hub id, not 'a/b/c'"),
        ({"base_model": "my-model"}, "base_model: must be a model's Hub id (owner/name), not 'my-model'"),
        ({"base_model": "[a/b, '../b']"}, "base_model[1]: must be a model's Hub id"),
        ({"base_model": "null"}, "base_model: must be a model's Hub id (owner/name), not None"),
        ({"base_model_relation": "child"}, "base_model_relation: must be one of adapter"),
        ({"title": 3}, "title: must be a text"),
    ],
)
def test_each_field_is_named_with_its_fault(fields, expected):
    assert expected in only(**fields)


@pytest.mark.parametrize("link", ["LICENSE", "LICENSE-vision.txt", "https://example.org/terms"])
def test_a_license_that_is_other_and_named_with_a_link_is_right(link):
    assert problems(license="other", license_name="llama-3-research", license_link=link) == []


@pytest.mark.parametrize("link", [None, "see above", "../LICENSE", "''"])
def test_a_license_that_is_other_without_a_link_is_not(link):
    assert "license_link: 'other' needs it" in only(license="other", license_name="x", license_link=link)


RESULT = "task: {type: t}, dataset: {type: d, name: D}, metrics: [{type: m, value: 1}]"


def index_of(*results):
    return "[{name: x, results: [" + ", ".join(f"{{{result}}}" for result in results) + "]}]"


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("{name: x}", "model-index: must be a list"),
        ("[x]", "model-index[0]: must have the fields name and results"),
        ("[{results: []}]", "model-index[0].name: missing"),
        ("[{name: x}]", "model-index[0].results: missing"),
        ("[{name: x, results: [3]}]", "model-index[0].results[0]: must have the fields"),
        (index_of(RESULT.replace("task: {type: t}", "task: {}")), ".task.type: missing"),
        (index_of(RESULT.replace("type: d, ", "")), ".dataset.type: missing"),
        (index_of(RESULT.replace(", name: D", "")), ".dataset.name: missing"),
        (index_of(RESULT.replace("{type: m, value: 1}", "")), ".metrics: missing, empty"),
        (index_of(RESULT.replace("type: m, ", "")), ".metrics[0].type: missing"),
        (index_of(RESULT.replace("1}", "'0.9'}")), "must be a finite number, not '0.9'"),
        (index_of(RESULT.replace("1}", ".nan}")), "must be a finite number, not nan"),
        (index_of(RESULT.replace("1}", "true}")), "must be a finite number, not True"),
        (
            index_of(RESULT, RESULT.replace(", value: 1", "")),
            "results[1].metrics[0].value",
        ),
    ],
)
def test_each_fault_of_model_index_is_named_with_its_place(index, expected):
    assert expected in only(**{"model-index": index})


def test_every_fault_of_a_card_is_named_at_once():
    fields = [field for field, _ in problems(license=None, datasets="[null]", tags="x", text="/home/me/model")]
    assert fields == ["license", "tags", "datasets[0]", "line 8"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see /home/me/models/x.", "names the local path /home/me/models/x"),
        (f"trained in `{SCRATCH}`", f"names the local path {SCRATCH}"),
        (r"at C:\Users\Someone\model", r"names the local path C:\Users\Someone\model"),
        ("[here](file:///data/x)", "names the local path file:///data/x"),
    ],
)
def test_a_local_path_in_the_text_is_found_with_its_line(text, expected):
    assert only(text=text) == f"line 7: {expected}"


@pytest.mark.parametrize(
    "text", ["https://example.org/home/page", "owner/model", "and/or", "1/2", "`~/x`", "key: a/tmp/b"]
)
def test_what_is_no_local_path_is_left_alone(text):
    assert problems(text=text) == []


def test_a_token_is_found_and_never_repeated():
    token = "hf_" + "aB3" * 12
    found = only(text=f"use token={token}")
    assert "line 7: holds a Hugging Face token" in found and token not in found and "aB3" not in found
    assert "holds a Hugging Face token" in only(f"note: {token}")
    assert problems(text="set hf_token and hf_hub") == []


def test_the_account_of_this_machine_is_found_but_not_in_ids(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "jdoe1")
    assert only(text="trained by jdoe1.") == "line 7: names the account jdoe1 of this machine"
    assert problems(text="see jdoe1/model and https://huggingface.co/jdoe1", base_model="jdoe1/base") == []
    monkeypatch.setattr(getpass, "getuser", lambda: "norm")
    assert problems(text="the norm of a token") == []


def test_a_card_that_is_not_there_or_no_text_is_named(tmp_path):
    with pytest.raises(NormalignError, match="missing.md cannot be read"):
        check_card(tmp_path / "missing.md")
    (tmp_path / "README.md").write_bytes(b"---\nlicense: \xff\n---\n")
    with pytest.raises(NormalignError, match="README.md is not UTF-8 text"):
        check_card(tmp_path / "README.md")


def test_a_problem_reads_as_field_and_reason():
    assert str(Problem("license", "missing")) == "license: missing"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"license": "Apache 2"}, "license: 'Apache 2' is no license id.*license, base models"),
        ({"base_model": "/home/me/model"}, r"base_model\[0\]: must be a model's Hub id.*names the local path"),
    ],
)
def test_export_writes_no_card_that_would_be_rejected(checkpoint, tmp_path, options, expected):
    with pytest.raises(NormalignError, match=expected):
        export(checkpoint, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
