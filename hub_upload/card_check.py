"""Checks a model card's metadata and text without a network, so that a bad card is found before hours of upload.

Source of the rules: https://huggingface.co/docs/hub/model-cards and the metadata specification in huggingface/hub-docs
(modelcard.md).
"""

import difflib
import getpass
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..configuration.errors import NormalignError


# https://huggingface.co/docs/hub/repositories-licenses
_LICENSE_IDS = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
openrail++ afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0
cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0
cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl
lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl openmdw-1.0
ofl-1.1 osl-3.0 postgresql ncsa unlicense zlib pddl deepfloyd-if-license fair-noncommercial-research-license llama2
llama3 llama3.1 llama3.2 llama3.3 llama4 gemma grok2-community lgpl-lr unknown other
"""
# https://huggingface.co/tasks
_TASK_NAMES = """
any-to-any audio-classification audio-text-to-text audio-to-audio automatic-speech-recognition depth-estimation
document-question-answering feature-extraction fill-mask graph-ml image-classification image-feature-extraction
image-segmentation image-text-to-image image-text-to-text image-text-to-video image-to-3d image-to-image
image-to-text image-to-video keypoint-detection mask-generation multiple-choice object-detection other
question-answering reinforcement-learning robotics sentence-similarity summarization table-question-answering
table-to-text tabular-classification tabular-regression tabular-to-text text-classification text-generation
text-ranking text-retrieval text-to-3d text-to-audio text-to-image text-to-speech text-to-video
time-series-forecasting token-classification translation unconditional-image-generation video-classification
video-text-to-text video-to-video visual-document-retrieval visual-question-answering voice-activity-detection
zero-shot-classification zero-shot-image-classification zero-shot-object-detection
"""
_TWO_LETTER_CODES = """
aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo
es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg
ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn
no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss st su sv sw
ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""
LICENSES = frozenset(_LICENSE_IDS.split())
PIPELINE_TAGS = frozenset(_TASK_NAMES.split())
_ISO_639_1 = frozenset(_TWO_LETTER_CODES.split())
_LANGUAGE_WORDS = {"code", "multilingual", "other"}
_RELATIONS = ("adapter", "merge", "quantized", "finetune")
# Accounts that many machines have: their names tell nothing about a person.
_COMMON_ACCOUNTS = {"root", "user", "users", "admin", "ubuntu", "debian", "runner", "jovyan", "nobody", "test"}
_TEMPLATE = Path(__file__).parent / "model_card.md.jinja"

_FRONT_MATTER = re.compile(r"\ufeff?\s*---[ \t]*\r?\n(.*?)(?:\r?\n)?^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_ID = r"[A-Za-z0-9][\w.-]{0,95}"
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_LOCAL_PATHS = (
    re.compile(r"(?<![\w.:/])/(?:home|Users|root|tmp|mnt|workspace|scratch|var|opt|srv|private)/[^\s)\"'`<>|]+"),
    re.compile(r"\b[A-Za-z]:\\[^\s)\"'`<>|]+"),
    re.compile(r"\bfile://[^\s)\"'`<>|]+"),
)


@dataclass(frozen=True)
class Problem:
    """What is wrong with a card: the field (dotted, with the place in a list) and the reason."""

    field: str
    reason: str

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, as the Hub does; PyYAML would keep the last without a word."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key, str):
                continue
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key '{key}' stands there twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def check_card(path_or_text: str | os.PathLike) -> list[Problem]:
    """The problems of a model card, in the order of its fields; an empty list for a card that can be uploaded.

    Args:
        path_or_text: the path of a README.md, or the text of a card (a string with a line break).

    Raises:
        NormalignError: there is no such file, or it is no UTF-8 text.
    """
    text = _text(path_or_text)
    data = _metadata(text)
    if isinstance(data, Problem):
        return [data, *_text_problems(text)]
    problems = []
    for check in (_license, _tags, _language, _names, _base_model, _datasets, _model_index):
        problems += check(data)
    return [*problems, *_text_problems(text)]


def _text(path_or_text: str | os.PathLike) -> str:
    if isinstance(path_or_text, str) and ("\n" in path_or_text or not path_or_text.strip()):
        return path_or_text
    path = Path(path_or_text)
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise NormalignError(f"The card {path} is not UTF-8 text ({error.reason}). Save it as UTF-8.") from error
    except OSError as error:
        raise NormalignError(
            f"The card {path} cannot be read ({error.strerror}). Name a README.md, or give a card's text."
        ) from error


def _metadata(text: str) -> dict | Problem:
    """The block between the `---` lines at the start, or what is wrong with it."""
    block = _FRONT_MATTER.match(text)
    if block is None:
        return Problem("metadata", "the card does not start with a block of metadata between two lines of ---")
    try:
        data = yaml.load(block.group(1), Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        return Problem("metadata", _yaml_reason(error, block.group(1).splitlines()))
    except ValueError as error:  # a date such as 2024-13-45
        return Problem("metadata", f"broken YAML: {error}")
    if not isinstance(data, dict):
        return Problem("metadata", "the block between the --- lines holds no fields")
    return data


def _yaml_reason(error: yaml.YAMLError, lines: list[str]) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = getattr(error, "problem", None) or " ".join(str(error).split())
    if mark is None:
        return f"broken YAML: {what}"
    line = lines[mark.line] if mark.line < len(lines) else ""
    hint = ""
    if "mapping values are not allowed" in what and re.match(r"\s*(- )?[\w-]+:\s+[^\"'\s]", line):
        hint = "; a value with a ':' in it must stand in quotes"
    # one line more in the file: the --- above
    return f"broken YAML in line {mark.line + 2} ({line.strip()!r}): {what}{hint}"


def _is_id(value: object, *, owner: bool) -> bool:
    pattern = rf"{_ID}/{_ID}" if owner else rf"({_ID}/)?{_ID}"
    return isinstance(value, str) and bool(re.fullmatch(pattern, value)) and "--" not in value and ".." not in value


def _listed(value: object) -> list[tuple[str, object]]:
    """Each value of a field that may hold one or a list, with what stands behind the field's name in a report."""
    return [(f"[{i}]", item) for i, item in enumerate(value)] if isinstance(value, list) else [("", value)]


# --- fields


def _license(data: dict) -> Iterator[Problem]:
    if data.get("license") is None:
        yield Problem("license", "missing; write one of the Hub's license ids, or 'other' with a license_name")
        return
    for place, value in _listed(data["license"]):
        if not isinstance(value, str) or value not in LICENSES:
            near = difflib.get_close_matches(str(value).lower(), LICENSES, n=1)
            hint = f"did you mean '{near[0]}'? Otherwise " if near else ""
            yield Problem(
                f"license{place}", f"{value!r} is no license id of the Hub; {hint}write 'other' and a license_name"
            )
        elif value == "other":
            if not _is_text(data.get("license_name")):
                yield Problem("license_name", "missing or no text; it must say which license 'other' stands for")
            if not _is_license_link(data.get("license_link")):
                yield Problem(
                    "license_link",
                    "'other' needs it: the address (https://...) of the license's text, or the name of a file in the "
                    f"repository such as LICENSE, not {data.get('license_link')!r}",
                )


def _is_license_link(value: object) -> bool:
    return _is_text(value) and bool(re.fullmatch(r"https?://\S+|[\w-][\w.-]*", value))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _tags(data: dict) -> Iterator[Problem]:
    if "tags" not in data:
        return
    if not isinstance(data["tags"], list):
        yield Problem("tags", f"must be a list of texts, not {data['tags']!r}")
        return
    for place, value in _listed(data["tags"]):
        if not _is_text(value):
            yield Problem(f"tags{place}", f"must be a text, not {value!r}; a number or a word like yes goes in quotes")


def _language(data: dict) -> Iterator[Problem]:
    if "language" not in data:
        return
    for place, value in _listed(data["language"]):
        field = f"language{place}"
        if value is False:
            yield Problem(field, "YAML reads the code no (Norwegian) as false; write it in quotes")
        elif not isinstance(value, str):
            yield Problem(field, f"must be a language code such as en, not {value!r}")
        elif value not in _ISO_639_1 | _LANGUAGE_WORDS and not re.fullmatch(r"[a-z]{3}", value):
            more = "; a code with a region or script belongs in language_bcp47" if "-" in value else ""
            yield Problem(field, f"{value!r} is no ISO 639 code of two or three small letters{more}")


def _names(data: dict) -> Iterator[Problem]:
    if not _is_text(data.get("library_name")):
        yield Problem("library_name", "missing or no text; the Hub shows how to load the model by it")
    elif not re.fullmatch(r"[A-Za-z0-9][\w.-]*", data["library_name"]):
        yield Problem("library_name", f"{data['library_name']!r} is no name of a library")
    if "pipeline_tag" in data and (not isinstance(tag := data["pipeline_tag"], str) or tag not in PIPELINE_TAGS):
        near = difflib.get_close_matches(str(tag), PIPELINE_TAGS, n=1)
        yield Problem(
            "pipeline_tag", f"{tag!r} is no task of the Hub" + (f"; the nearest is '{near[0]}'" if near else "")
        )
    if "title" in data and not _is_text(data["title"]):
        yield Problem("title", f"must be a text, not {data['title']!r}")


def _base_model(data: dict) -> Iterator[Problem]:
    if "base_model" in data:
        for place, value in _listed(data["base_model"]):
            if not _is_id(value, owner=True):
                yield Problem(f"base_model{place}", f"must be a model's Hub id (owner/name), not {value!r}")
    if (relation := data.get("base_model_relation")) is not None and relation not in _RELATIONS:
        yield Problem("base_model_relation", f"must be one of {', '.join(_RELATIONS)}, not {relation!r}")


def _datasets(data: dict) -> Iterator[Problem]:
    if "datasets" not in data:
        return
    for place, value in _listed(data["datasets"]):
        if not _is_id(value, owner=False):
            what = "is null" if value is None else f"must be a data set's Hub id, not {value!r}"
            yield Problem(f"datasets{place}", f"{what}; leave the field out where there is none")


def _model_index(data: dict) -> Iterator[Problem]:
    if "model-index" not in data:
        return
    if not isinstance(data["model-index"], list):
        yield Problem("model-index", "must be a list of models with name and results")
        return
    for i, model in enumerate(data["model-index"]):
        field = f"model-index[{i}]"
        if not isinstance(model, dict):
            yield Problem(field, "must have the fields name and results")
            continue
        if not _is_text(model.get("name")):
            yield Problem(f"{field}.name", "missing or no text")
        if not isinstance(model.get("results"), list):
            yield Problem(f"{field}.results", "missing or no list")
            continue
        for k, result in enumerate(model["results"]):
            yield from _result(f"{field}.results[{k}]", result)


def _result(field: str, result: object) -> Iterator[Problem]:
    if not isinstance(result, dict):
        yield Problem(field, "must have the fields task, dataset and metrics")
        return
    for part, keys in (("task", ("type",)), ("dataset", ("type", "name"))):
        block = result.get(part)
        for key in keys:
            if not isinstance(block, dict) or not _is_text(block.get(key)):
                yield Problem(f"{field}.{part}.{key}", "missing or no text")
    metrics = result.get("metrics")
    if not isinstance(metrics, list) or not metrics:
        yield Problem(f"{field}.metrics", "missing, empty or no list")
        return
    for i, metric in enumerate(metrics):
        place = f"{field}.metrics[{i}]"
        if not isinstance(metric, dict) or not _is_text(metric.get("type")):
            yield Problem(f"{place}.type", "missing or no text")
        value = metric.get("value") if isinstance(metric, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            yield Problem(f"{place}.value", f"must be a finite number, not {value!r}")


# --- what must not be told to the world


def _text_problems(text: str) -> Iterator[Problem]:
    account = account_name()
    for number, line in enumerate(text.splitlines(), 1):
        field = f"line {number}"
        if _TOKEN.search(line):
            # the token itself stays out of every report and log
            yield Problem(
                field, "holds a Hugging Face token (hf_...); take it out, and revoke it if it was ever shared"
            )
        for pattern in _LOCAL_PATHS:
            for found in pattern.finditer(line):
                yield Problem(field, f"names the local path {found.group().rstrip('.,;:')}")
        # not as a part of a path or id: an owner on the Hub may be called as the account is
        if account and re.search(rf"(?<![\w/.@-]){re.escape(account)}(?![\w/-])", line):
            yield Problem(field, f"names the account {account} of this machine")


def account_name() -> str | None:
    """The account's name on this machine, where it may tell who somebody is; None for root, user and the like."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for its user
        return None
    # an account called like a word of every card ("norm") could not export anything
    ordinary = _COMMON_ACCOUNTS | set(re.findall(r"\w+", _TEMPLATE.read_text(encoding="utf-8").lower()))
    return name if len(name) > 2 and name.lower() not in ordinary else None
