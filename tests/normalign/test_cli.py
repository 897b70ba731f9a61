"""The command line program: help, exit statuses, errors as one paragraph, JSON alone on stdout."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner

from normalign import __version__
from normalign.cli import app
from normalign.configuration.errors import NormalignError
from normalign.train_trl import RecipeError


COMMANDS = ["demo", "compose", "graft", "inspect", "train", "chat", "export"]


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


@pytest.fixture
def room(monkeypatch):
    """Puts a function in place of a room's own: `room("hub_upload", export=lambda ...: ...)`."""

    def replace(name, **functions):
        module = ModuleType(f"normalign.{name}")
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, f"normalign.{name}", module)

    return replace


def failing(error):
    def raise_it(*args, **kwargs):
        raise error

    return raise_it


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"normalign {command}" in result.stdout
    assert "--json" in result.stdout


def test_program_help_names_every_command():
    result = run("--help")
    assert result.exit_code == 0
    assert all(command in result.stdout for command in COMMANDS)


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"normalign {__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["export", "model", "--out", "folder", "--no-such-option"],
        ["export", "model"],
        ["compose", "--vision", "a", "--text", "b", "--out", "c", "--norm", "batchnorm"],
        ["compose", "--vision", "a", "--text", "b", "--out", "c", "--gain-init", "large"],
        ["train", "no_such_recipe.yaml"],
        ["chat", "model", "--image", "no_such_image.png"],
        ["chat", "model", "--json"],
        ["inspect", "model", "--images", __file__, "no_such_image.png"],
        ["inspect", "model", "--images", __file__, "--gradients"],
        ["inspect", "model", "--prompt", "What?", "--gradients"],
        ["inspect", "model", "--answer", "a cat"],
    ],
)
def test_wrong_usage_exits_with_2(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("kind", [NormalignError, OSError, ValueError])
def test_an_error_is_one_paragraph_and_exits_with_1(room, kind):
    room("hub_upload", export=failing(kind("The folder has no config.json.\n  Give a folder  of save_pretrained.")))
    result = run("export", "model", "--out", "folder")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "Error: The folder has no config.json. Give a folder of save_pretrained.\n"


def test_an_error_of_the_file_system_names_the_file(room):
    room("hub_upload", export=failing(FileNotFoundError(2, "No such file or directory", "model/config.json")))
    assert run("export", "model", "--out", "folder").stderr == "Error: No such file or directory: model/config.json\n"


def test_brackets_in_an_error_are_shown_as_they_are(room):
    room("hub_upload", export=failing(ValueError("expected shape [3, 224] [red]")))
    assert run("export", "model", "--out", "folder").stderr == "Error: expected shape [3, 224] [red]\n"


def test_an_unexpected_error_says_how_to_see_more(room):
    room("hub_upload", export=failing(RuntimeError("size mismatch")))
    result = run("export", "model", "--out", "folder")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: Unexpected RuntimeError: size mismatch.")
    assert "--debug" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--debug", "export"], ["export", "--debug"]])
def test_debug_gives_the_traceback(room, arguments):
    error = NormalignError("what and where")
    room("hub_upload", export=failing(error))
    result = run(*arguments, "model", "--out", "folder")
    assert result.exit_code == 1
    assert result.exception is error
    assert "Error:" not in result.stderr


def test_debug_prints_the_traceback_and_plain_runs_do_not():
    program = [sys.executable, "-m", "normalign", "chat", "no/such/folder/of/a/model", "--prompt", "?"]
    script = "import sys; sys.modules['normalign.evaluation.generation'] = None"  # importing the room then fails
    code = f"{script}; sys.argv = {program[2:]!r}; from normalign.cli import main; main()"
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    debug = subprocess.run(
        [sys.executable, "-c", code.replace("'chat'", "'--debug', 'chat'")], capture_output=True, text=True
    )
    assert (plain.returncode, debug.returncode) == (1, 1)
    assert plain.stderr.startswith("Error: ")
    assert "Traceback" not in plain.stderr
    assert "Traceback" in debug.stderr


def test_help_is_quick_and_imports_no_torch():
    code = "import sys; from normalign.cli import app; print({'torch', 'transformers', 'trl'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_python_dash_m_normalign_is_the_program():
    done = subprocess.run([sys.executable, "-m", "normalign", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"normalign {__version__}\n"


class Saved:
    """Stands for a model or a processor: notes where it was saved."""

    def __init__(self):
        self.config = SimpleNamespace(aligned_norm={"kind": "rmsnorm", "target_norm": 1.09})
        self.folder = None

    def parameters(self):
        return []

    def save_pretrained(self, folder):
        self.folder = folder


def test_compose_passes_only_the_settings_that_were_given(room, tmp_path):
    calls, model, processor = [], Saved(), Saved()

    def compose(*args, **kwargs):
        calls.append((args, kwargs))
        return model, processor

    room("assembly", compose=compose)
    result = run(
        "compose",
        "--vision",
        "v",
        "--text",
        "t",
        "--out",
        tmp_path,
        "--norm",
        "rmsnorm",
        "--gain-init",
        "0.5",
        "--no-gwc",
    )
    assert result.exit_code == 0, result.stderr
    assert calls.pop() == (
        ("v", "t", {"kind": "rmsnorm", "gain_init": 0.5, "gwc": False}),
        {"vision_feature_layer": None, "dtype": None, "seed": None},
    )
    assert model.folder == processor.folder == tmp_path
    assert "aligned_norm.target_norm" in result.stdout

    run("compose", "--vision", "v", "--text", "t", "--out", tmp_path, "--seed", "3", "--dtype", "bfloat16")
    assert calls.pop() == (("v", "t", None), {"vision_feature_layer": None, "dtype": "bfloat16", "seed": 3})


def test_json_stands_alone_on_stdout(room, tmp_path):
    def graft(model, aligned_norm):
        print("loading")
        return Saved(), Saved()

    room("assembly", graft=graft)
    result = run("graft", "model", "--out", tmp_path, "--json")
    assert json.loads(result.stdout) == {
        "out": str(tmp_path),
        "parameters": 0,
        "aligned_norm": {"kind": "rmsnorm", "target_norm": 1.09},
    }
    assert result.stderr == "loading\n"


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("stage: 1\n")
    return path


def test_train_hands_on_further_options_as_overrides(monkeypatch, recipe):
    calls = []
    monkeypatch.setattr("normalign.train_trl.train", lambda *args: calls.append(args) or Path("run"))
    result = run("train", recipe, "--learning-rate", "1e-4", "--data.seed=3", "--shift", "-1", "--json")
    assert json.loads(result.stdout) == {"out": "run"}
    assert calls == [(recipe, {"learning_rate": "1e-4", "data.seed": "3", "shift": "-1"})]


@pytest.mark.parametrize("extra", [["--learning_rate"], ["--a", "--b", "1"], ["stray"]])
def test_train_refuses_an_override_without_a_value(monkeypatch, recipe, extra):
    monkeypatch.setattr("normalign.train_trl.train", failing(AssertionError("must not run")))
    result = run("train", recipe, *extra)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")


def test_a_recipe_that_cannot_be_run_is_wrong_usage(monkeypatch, recipe):
    monkeypatch.setattr("normalign.train_trl.train", failing(RecipeError("recipe.yaml: unknown key 'stag'.")))
    result = run("train", recipe)
    assert (result.exit_code, result.stderr) == (2, "Error: recipe.yaml: unknown key 'stag'.\n")


def test_chat_answers_one_prompt(room, tmp_path):
    room("evaluation.generation", answer=lambda *args: f"seen {args[2]}, {args[3]} tokens")
    image = tmp_path / "scene.png"
    image.touch()
    result = run("chat", "model", "--image", image, "--prompt", "What is it?", "--max-new-tokens", "5")
    assert result.stdout == f"seen {[str(image)]}, 5 tokens\n"
    result = run("chat", "model", "--prompt", "What is it?", "--json")
    assert json.loads(result.stdout)["answer"] == "seen [], 128 tokens"


def test_chat_without_a_prompt_loads_once_and_reads_questions_until_an_empty_line(room, tmp_path):
    loads = []

    def generate_answers(model, processor, conversations, images, max_new_tokens):
        [[message]] = conversations
        return [f"<{message['content'][-1]['text']}, {len(message['content']) - 1} image, {images[0][0]}>"]

    room(
        "evaluation.generation",
        load_model=lambda model: loads.append(model) or ("model", "processor"),
        open_image=lambda path: Path(path).stem,
        generate_answers=generate_answers,
    )
    image = tmp_path / "scene.png"
    image.touch()
    result = run("chat", "model", "--image", image, stdin="one\ntwo\n\nthree\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "<one, 1 image, scene>\n<two, 1 image, scene>\n"
    assert loads == ["model"]


@pytest.fixture
def inspection(room):
    """Stands for the rooms that load and inspect: notes calls, and what is saved where."""

    class Report:
        def __init__(self, data):
            self.data = data

        def to_dict(self):
            return self.data

        def save(self, folder):
            seen.saved.append((self.data["model"], folder))

        @classmethod
        def load(cls, path):
            return cls({"model": f"saved in {path.name}"})

    def inspect_model(model, processor, images, progress, **options):
        progress("norms", 1, len(images))
        seen.calls.append((model, images, options))
        return Report({"model": "a path in the cache", "ratio": 12.5})

    def compare_reports(first, second):
        return Report({"model": [first.data["model"], second.data["model"]]})

    seen = SimpleNamespace(calls=[], saved=[])
    room(
        "inspection",
        inspect_model=inspect_model,
        compare_reports=compare_reports,
        print_report=lambda report: print("tables of", report.data["model"]),
        NormReport=Report,
    )
    room(
        "evaluation.generation",
        load_model=lambda model: (f"{model} loaded", "processor"),
        open_image=lambda path: path.stem,
    )
    return seen


@pytest.fixture
def three_images(tmp_path):
    paths = [tmp_path / f"{name}.png" for name in "abc"]
    for path in paths:
        path.touch()
    return paths


NOT_ASKED_FOR = {"attention": False, "controls": False, "gradients": False, "answers": None}


def test_inspect_takes_several_images_writes_the_report_and_shows_it(inspection, three_images, tmp_path):
    out = tmp_path / "report"
    result = run("inspect", "m", "--images", *three_images, "--prompt", "What?", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert inspection.calls == [("m loaded", ["a", "b", "c"], {**NOT_ASKED_FOR, "prompts": ["What?"]})]
    assert inspection.saved == [("m", out)]
    assert result.stdout.startswith("tables of m\n") and str(out / "report.html") in result.stdout


def test_inspect_without_images_looks_at_built_in_scenes_with_their_questions_and_answers(inspection):
    result = run("inspect", "m", "--attention", "--controls", "--gradients", "--json")
    assert json.loads(result.stdout) == {"model": "m", "ratio": 12.5}
    [(_, scenes, options)] = inspection.calls
    assert [image.mode for image in scenes] == ["RGB"] * 8
    assert all(prompt[-1] in "?." for prompt in options["prompts"]) and len(options["prompts"]) == 8
    assert all(options["answers"]) and len(options["answers"]) == 8
    assert options["attention"] and options["controls"] and options["gradients"]


def test_inspect_teaches_one_answer_to_all_images(inspection, three_images):
    assert run("inspect", "m", "--images", *three_images, "--gradients", "--answer", "a cat").exit_code == 0
    assert inspection.calls[0][2]["answers"] == ["a cat"] * 3


def test_inspect_compares_with_a_second_model_or_a_report(inspection, three_images, tmp_path):
    result = run("inspect", "m", "--compare", "n", "--images", *three_images, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert [call[0] for call in inspection.calls] == ["m loaded", "n loaded"]
    assert inspection.saved == [("m", tmp_path / "out"), (["m", "n"], tmp_path / "out" / "comparison")]
    assert "comparison.html" in result.stdout

    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "report.json").touch()
    result = run("inspect", "m", "--compare", tmp_path / "before", "--images", *three_images, "--json")
    assert json.loads(result.stdout) == {"model": ["m", "saved in before"]}
    assert len(inspection.calls) == 3


def test_demo_prints_results_as_json(room, tmp_path):
    room("demo", run_demo=lambda out: {"accuracy": 0.9, "export": out / "export"})
    result = run("demo", "--out", tmp_path, "--json")
    assert json.loads(result.stdout) == {"accuracy": 0.9, "export": str(tmp_path / "export")}


def test_export_replaces_a_folder_of_other_files_only_when_told_to(room, tmp_path):
    calls = []
    room("hub_upload", export=lambda *args, **kwargs: calls.append((args, kwargs)) or tmp_path)
    assert json.loads(run("export", "model", "--out", tmp_path, "--json").stdout) == {"out": str(tmp_path)}
    run("export", "model", "--out", tmp_path, "--overwrite")
    assert calls == [(("model", tmp_path), {"overwrite": False}), (("model", tmp_path), {"overwrite": True})]
