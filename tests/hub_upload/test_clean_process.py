"""A stranger's process, without normalign and without network, loads what we export and gets the same numbers."""

import copy
import inspect
import re
import shutil
import sys

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from normalign.configuration.errors import NormalignError
from normalign.hub_upload import ask_model, check_export, load_in_clean_process
from normalign.hub_upload.clean_process import OPTIONAL_PACKAGES

from .conftest import MAX_NEW_TOKENS


COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO_ID = "someone/tiny-aligned"
ASK = inspect.getsource(ask_model)

LOAD_EVERY_WAY = f"""
{ASK}
import sys, time, transformers
from transformers import pipeline

AUTO_CLASSES = ["AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModelForMultimodalLM", "AutoModel"]
if transformers.__version__.startswith("4."):
    AUTO_CLASSES[2] = "AutoModelForVision2Seq"  # has no AutoModelForMultimodalLM yet

asked = ARGUMENTS["image_paths"], ARGUMENTS["prompts"], {MAX_NEW_TOKENS}

# first without the flag, before any of the code has been run
refusals = RESULT["refusals"] = {{}}
for name, load in {{
    "AutoConfig": lambda: transformers.AutoConfig.from_pretrained(FOLDER),
    "AutoModelForImageTextToText": lambda: transformers.AutoModelForImageTextToText.from_pretrained(FOLDER),
    "pipeline": lambda: pipeline("image-text-to-text", model=FOLDER),
    "AutoProcessor": lambda: transformers.AutoProcessor.from_pretrained(FOLDER),
}}.items():
    start = time.monotonic()
    try:
        load()
        message = None
    except Exception as error:
        message = f"{{type(error).__name__}}: {{error}}"
    refusals[name] = (message, time.monotonic() - start)
RESULT["remote_modules_run_without_the_flag"] = [n for n in sys.modules if n.startswith("transformers_modules.")]

config = transformers.AutoConfig.from_pretrained(FOLDER, trust_remote_code=True)
processor = transformers.AutoProcessor.from_pretrained(FOLDER, trust_remote_code=True)
RESULT["config"] = (type(config).__name__, type(config).__module__, config.aligned_norm)
RESULT["processor"] = [base.__name__ for base in type(processor).__mro__]

arrays = {{}}
RESULT["models"] = {{}}
for name in AUTO_CLASSES:
    model, info = getattr(transformers, name).from_pretrained(FOLDER, trust_remote_code=True, output_loading_info=True)
    RESULT["models"][name] = {{
        "class": type(model).__name__,
        "problems": {{key: list(map(str, value)) for key, value in info.items() if value}},
        "mixes_in_generation": transformers.GenerationMixin in type(model).__bases__,
    }}
    if name == "AutoModel":
        inputs = processor.apply_chat_template(
            chat_messages(asked[1][0], asked[0][0]),
            add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
        )
        with torch.no_grad():
            arrays[name] = model(**inputs).last_hidden_state.numpy()
    else:
        RESULT["models"][name]["answers"], arrays[name] = ask(model, processor, *asked)

pipe = pipeline("image-text-to-text", model=FOLDER, trust_remote_code=True)
RESULT["pipeline_answers"] = ask_pipeline(pipe, *asked)

# from a repository of the Hub, as it lies in the cache, at a pinned commit
hub = {{"revision": "{COMMIT}", "trust_remote_code": True}}
model = transformers.AutoModelForImageTextToText.from_pretrained("{REPO_ID}", **hub)
processor = transformers.AutoProcessor.from_pretrained("{REPO_ID}", **hub)
RESULT["hub_module"] = type(model).__module__
arrays["hub"] = ask(model, processor, *asked)[1]
for name, loaded in {{"from_hub": model, "from_folder": pipe.model}}.items():
    loaded.save_pretrained(Path(ARGUMENTS["saved"]) / name)
    processor.save_pretrained(Path(ARGUMENTS["saved"]) / name)

exec(ARGUMENTS["card_example"], example := {{}})
RESULT["card_answer"] = example["answer"]
np.savez(ARGUMENTS["arrays"], **arrays)
"""

LOAD_SAVED_AGAIN = f"""
{ASK}
import json
from transformers import AutoModelForImageTextToText, AutoProcessor

arrays = {{}}
for folder in sorted(Path(FOLDER).iterdir()):
    RESULT[folder.name] = {{
        "auto_map": json.loads((folder / "config.json").read_text())["auto_map"],
        "code": sorted(file.name for file in folder.glob("*.py")),
    }}
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)
    arrays[folder.name] = ask(model, processor, ARGUMENTS["image_paths"], ARGUMENTS["prompts"], {MAX_NEW_TOKENS})[1]
np.savez(ARGUMENTS["arrays"], **arrays)
"""


@pytest.fixture(scope="module")
def hub_cache(exported, tmp_path_factory):
    """The export as huggingface_hub keeps a downloaded repository, at one commit."""
    cache = tmp_path_factory.mktemp("hub")
    repo = cache / f"models--{REPO_ID.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    shutil.copytree(exported, repo / "snapshots" / COMMIT)
    return cache


def card_example(folder):
    """The card's Python example as written, but for the two names that a reader fills in and the picture."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for name, value in {"YOUR_NAME/YOUR_MODEL": REPO_ID, "FULL_COMMIT_HASH": COMMIT}.items():
        assert name in example
        example = example.replace(name, value)
    return example


@pytest.fixture(scope="module")
def loaded(exported, hub_cache, questions, tmp_path_factory):
    """What a clean process found when it loaded the export in every way there is, and saved it again."""
    work = tmp_path_factory.mktemp("loaded")
    example = card_example(exported).replace('"picture.png"', repr(questions[0][0]))
    arguments = {
        "image_paths": questions[0],
        "prompts": questions[1],
        "card_example": example,
        "arrays": str(work / "arrays.npz"),
        "saved": str(work / "saved"),
    }
    report = load_in_clean_process(exported, LOAD_EVERY_WAY, arguments, environment={"HF_HUB_CACHE": str(hub_cache)})
    return {**report, "arrays": dict(np.load(work / "arrays.npz")), "saved": work / "saved"}


pytestmark = pytest.mark.both_generations


def test_every_auto_class_gives_the_logits_of_the_model_in_memory(loaded, expected):
    """R21: by the auto classes of this generation, under the names that it has."""
    answers, logits = expected
    for name, found in loaded["result"]["models"].items():
        assert found["problems"] == {}
        if name == "AutoModel":
            assert found["class"] == "NormAlignLlavaModel"
        else:
            assert found["class"] == "NormAlignLlavaForConditionalGeneration"
            assert found["answers"] == answers
            assert np.array_equal(loaded["arrays"][name], logits)
    generation = "AutoModelForVision2Seq" if transformers.__version__.startswith("4.") else "AutoModelForMultimodalLM"
    assert generation in loaded["result"]["models"]


def test_auto_model_gives_the_hidden_states_of_the_model_in_memory(loaded, model, processor, questions):
    inputs = processor.apply_chat_template(
        ask_model.chat_messages(questions[1][0], questions[0][0]),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        assert np.array_equal(loaded["arrays"]["AutoModel"], model.model(**inputs).last_hidden_state.numpy())


def test_config_and_processor_load(loaded, model):
    """R67: the processor is a ProcessorMixin that AutoProcessor finds, as servers and trainers ask for."""
    name, module, settings = loaded["result"]["config"]
    assert name == "NormAlignLlavaConfig" and module.startswith("transformers_modules.")
    assert settings == model.config.aligned_norm
    first, *bases = loaded["result"]["processor"]
    assert first == "LlavaProcessor" and "ProcessorMixin" in bases


def test_the_model_has_generate_of_its_own(loaded):
    """R40: also on the newest transformers, as the class itself mixes it in."""
    for name, found in loaded["result"]["models"].items():
        assert found["mixes_in_generation"] == (name != "AutoModel")


def test_pipeline_answers_as_the_model_in_memory_and_knows_its_class(loaded, expected):
    assert loaded["result"]["pipeline_answers"] == expected[0]
    assert "is not supported for image-text-to-text" not in loaded["stderr"] + loaded["stdout"]


def test_without_the_flag_loading_is_refused_at_once_and_runs_no_code(loaded):
    """R65: with closed standard input, and no part of it asks a question."""
    refusals = loaded["result"]["refusals"]
    for name in ("AutoConfig", "AutoModelForImageTextToText", "pipeline"):
        message, seconds = refusals[name]
        assert message.startswith("ValueError") and "trust_remote_code=True" in message
        assert seconds < 10  # transformers' prompt would wait for 15
    assert refusals["AutoProcessor"][0] is None  # the processor is transformers' own
    assert loaded["result"]["remote_modules_run_without_the_flag"] == []


def test_nothing_reaches_for_the_network_or_for_an_optional_package(loaded):
    """R80, R87: nothing is downloaded, and neither normalign nor an optional package is there."""
    assert loaded["network_attempts"] == []
    assert {"normalign", "trl", "peft", "deepspeed", "flash_attn", "torchvision", "bitsandbytes"} <= set(
        loaded["blocked"]
    )


def test_a_pinned_commit_of_the_hub_loads_and_gives_the_same_logits(loaded, expected):
    """R83: the code that runs is that of the commit."""
    assert COMMIT in loaded["result"]["hub_module"]
    assert np.array_equal(loaded["arrays"]["hub"], expected[1])


def test_the_example_of_the_card_runs_as_written(loaded):
    assert isinstance(loaded["result"]["card_answer"], str)


def test_a_model_that_is_saved_again_loads_alone(loaded, model, processor, questions, expected, tmp_path):
    """R14, R83: from the installed class, a folder, a commit of the Hub and a merged adapter, always with all code of its own."""
    saved = tmp_path / "saved"
    shutil.copytree(loaded["saved"], saved)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=r".*language_model.*q_proj"))
    for name, source in {"from_local_class": model, "from_merged_adapter": adapted.merge_and_unload()}.items():
        source.save_pretrained(saved / name)
        processor.save_pretrained(saved / name)
    arguments = {"image_paths": questions[0], "prompts": questions[1], "arrays": str(tmp_path / "arrays.npz")}
    report = load_in_clean_process(saved, LOAD_SAVED_AGAIN, arguments)
    assert set(report["result"]) == {"from_local_class", "from_merged_adapter", "from_folder", "from_hub"}
    logits = np.load(tmp_path / "arrays.npz")
    for name, found in report["result"].items():
        assert not any("--" in reference for reference in found["auto_map"].values()), name
        assert len(found["auto_map"]) == 6, name
        assert found["code"] == ["aligned_norm.py", "configuration_normalign_llava.py", "modeling_normalign_llava.py"]
        assert np.array_equal(logits[name], expected[1]), name


def test_check_export_gives_answers_of_both_routes_and_logits(exported, questions, expected, tmp_path):
    report = check_export(exported, *questions, max_new_tokens=MAX_NEW_TOKENS, logits_file=tmp_path / "logits.npy")
    assert report["answers"] == report["pipeline_answers"] == expected[0]
    assert np.array_equal(report["logits"], expected[1])
    assert np.array_equal(np.load(report["logits_file"]), expected[1])
    assert report["model_class"] == report["pipeline_model_class"] == "NormAlignLlavaForConditionalGeneration"
    assert report["model_module"].startswith("transformers_modules.")
    assert report["normalign_importable"] is False
    assert report["network_attempts"] == []


# --- the clean process itself


def test_the_process_has_no_normalign_no_input_no_network_and_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script = """
import importlib.metadata, importlib.util, os, socket, sys
RESULT["found"] = [name for name in ARGUMENTS["blocked"] if importlib.util.find_spec(name) is not None]
RESULT["distributions"] = [d.metadata["Name"] for d in importlib.metadata.distributions()]
RESULT["input"] = sys.stdin.read()
RESULT["cwd"] = os.listdir()
RESULT["environment"] = dict(os.environ)
RESULT["path"] = sys.path
try:
    socket.create_connection(("127.0.0.1", 9))
except OSError as error:
    RESULT["network"] = str(error)
"""
    report = load_in_clean_process(tmp_path, script, {"blocked": list(OPTIONAL_PACKAGES)})
    result = report["result"]
    assert result["found"] == []
    assert "transformers" in result["distributions"]
    assert not {"normalign", "trl", "peft"} & set(result["distributions"])
    assert result["input"] == "" and result["cwd"] == []
    assert "HF_TOKEN" not in result["environment"] and str(tmp_path) not in result["path"]
    assert "network is blocked" in result["network"] and len(report["network_attempts"]) == 1


def test_a_failing_script_is_one_paragraph_with_the_whole_output_as_its_cause(tmp_path):
    with pytest.raises(NormalignError, match="cannot be used in a process of its own.*ValueError: broken") as caught:
        load_in_clean_process(tmp_path, "raise ValueError('broken')")
    assert "\n" not in str(caught.value)
    assert "Traceback" in str(caught.value.__cause__)


def test_a_script_that_hangs_is_ended(tmp_path):
    with pytest.raises(NormalignError, match="took more than 1 seconds"):
        load_in_clean_process(tmp_path, "import time; time.sleep(60)", timeout=1)


def test_a_process_that_would_find_a_blocked_package_is_refused(tmp_path):
    with pytest.raises(NormalignError, match="Still importable in the clean process: json"):
        load_in_clean_process(tmp_path, "", blocked=("json",), python=sys.executable)
