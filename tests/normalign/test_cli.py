"""The command line program: help, exit statuses, errors as one paragraph, JSON alone on stdout."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from normalign import __version__
from normalign.cli import app
from normalign.configuration.backbones import resolve_backbone
from normalign.configuration.errors import NormalignError, RunStopped
from normalign.train_trl import RecipeError


COMMANDS = ["demo", "compose", "graft", "inspect", "train", "evaluate", "chat", "export", "push", "verify"]


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


# --- compose and graft, for real


MINI = ["compose", "--vision", "mini-vision", "--text", "mini-language"]


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model that the program composed of the mini backbones, for tests that only read it."""
    out = tmp_path_factory.mktemp("composed") / "model"
    result = run(*MINI, "--out", out, "--seed", "0", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["out"] == str(out)
    return out


@pytest.fixture
def copy(model, tmp_path):
    """A copy of that model, to be damaged."""
    return shutil.copytree(model, tmp_path / "copy")


@pytest.fixture
def scene(tmp_path):
    path = tmp_path / "scene.png"
    Image.effect_mandelbrot((64, 64), (-2, -1.5, 1, 1.5), 20).convert("RGB").save(path)
    return path


def settings_of(folder):
    return json.loads((Path(folder) / "config.json").read_text())


@pytest.fixture
def paragraph(capfd):
    """A function that runs the program, which must fail with this status and one paragraph, which it gives."""

    def fail(*arguments, status=1):
        result = run(*arguments)
        assert result.exit_code == status, result.stderr
        assert result.stdout == ""
        # the table that transformers prints goes to the real stderr
        assert "MISSING" not in capfd.readouterr().err
        if status == 1:
            assert result.stderr.splitlines()[-1].startswith("Error: ") and "Unexpected" not in result.stderr
        return result.stderr.splitlines()[-1] if status == 1 else " ".join(result.stderr.replace("│", " ").split())

    return fail


def test_compose_saves_what_was_asked_for_and_says_it(tmp_path):
    out = tmp_path / "model"
    result = run(*MINI, "--out", out, "--norm", "rmsnorm", "--gain-init", "0.5", "--no-gwc", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.stderr
    settings = settings_of(out)
    norm = settings["aligned_norm"]
    assert (norm["kind"], norm["gain_init"], norm["gwc"]) == ("rmsnorm", 0.5, False)
    assert settings["dtype"] == "bfloat16"
    assert f"aligned_norm.target_norm  {norm['target_norm']:.4g}" in result.stdout


def test_the_same_seed_gives_the_same_weights_in_float32(model, tmp_path):
    run(*MINI, "--out", tmp_path / "again", "--seed", "0")
    assert settings_of(model)["dtype"] == "float32"
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


@pytest.mark.parametrize("command", [MINI, ["graft", "no/such-model"]])
def test_a_folder_in_use_is_refused_before_the_long_work(paragraph, copy, command, monkeypatch):
    for name in ("compose", "graft"):
        monkeypatch.setattr(f"normalign.assembly.{name}", failing(AssertionError("the long work was begun")))
    before = names(copy)
    assert "is not empty" in paragraph(*command, "--out", copy)
    assert "holds the folder copy" in paragraph(*command, "--out", copy.parent, "--overwrite")
    assert names(copy) == before


def test_overwrite_replaces_files_and_never_a_source(paragraph, copy, tmp_path):
    vision, text = (
        shutil.copytree(resolve_backbone(f"mini-{part}"), tmp_path / part) for part in ("vision", "language")
    )
    arguments = ["compose", "--vision", vision, "--text", text, "--overwrite", "--out"]
    for source in (vision, text, tmp_path):
        before = names(source)
        assert "would replace what it is made from" in paragraph(*arguments, source)
        assert names(source) == before
    assert "would replace what it is made from" in paragraph("graft", copy, "--out", copy, "--overwrite")
    (copy / "stale.txt").touch()
    result = run(*arguments, copy)
    assert result.exit_code == 0, result.stderr
    assert "stale.txt" not in names(copy)


def test_graft_of_none_says_that_nothing_was_inserted(tmp_path, caplog):
    plain = tmp_path / "plain"
    assert run(*MINI, "--out", plain, "--norm", "none").exit_code == 0
    caplog.clear()
    result = run("graft", plain, "--out", tmp_path / "none", "--norm", "none", "--dtype", "bfloat16", "--json")
    assert json.loads(result.stdout)["aligned_norm"]["kind"] == "none"
    assert settings_of(tmp_path / "none")["dtype"] == "bfloat16"
    assert "Nothing was inserted" in caplog.text and "needs no training" in caplog.text
    assert "re-alignment" not in caplog.text and "without it" not in caplog.text
    caplog.clear()
    assert run("graft", plain, "--out", tmp_path / "grafted").exit_code == 0
    assert "re-alignment training" in caplog.text and "Nothing" not in caplog.text


def test_the_norm_scale_is_measured_on_the_images_that_are_given(tmp_path, scene, caplog):
    def gain(name, *images):
        result = run(*MINI, "--out", tmp_path / name, "--norm", "scale", "--seed", "0", *images)
        assert result.exit_code == 0, result.stderr
        weights = load_file(tmp_path / name / "model.safetensors")
        return weights["model.multi_modal_projector.aligned_norm.weight"].mean().item()

    generated = gain("generated")
    assert "measured on 4 generated images and may be off on real ones" in caplog.text and "--images" in caplog.text
    caplog.clear()
    black = tmp_path / "black.png"
    Image.new("RGB", (64, 64)).save(black)
    one, two = gain("one", "--images", scene), gain("two", "--images", scene, black)
    assert "generated" not in caplog.text
    assert len({generated, one, two}) == 3


def test_home_is_meant_by_a_tilde(model, tmp_path, scene, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "home-model").symlink_to(model)
    assert run(*MINI, "--out", "~/new").exit_code == 0
    assert "config.json" in names(tmp_path / "new")
    result = run("inspect", "~/home-model", "--images", "~/scene.png", "~/scene.png", "--out", "~/report")
    assert result.exit_code == 0, result.stderr
    assert "report.json" in names(tmp_path / "report")
    result = run("chat", "~/home-model", "--image", "~/scene.png", "--prompt", "How many?", "--max-new-tokens", "2")
    assert result.exit_code == 0, result.stderr
    assert run("export", "~/home-model", "--out", "~/export").exit_code == 0


# --- what users get wrong


def commands_on(folder):
    return [
        ["inspect", folder],
        ["chat", folder, "--prompt", "?"],
        ["export", folder, "--out", folder.parent / "out"],
        ["graft", folder, "--out", folder.parent / "out"],
        ["compose", "--vision", folder, "--text", "mini-language", "--out", folder.parent / "out"],
        ["compose", "--vision", "mini-vision", "--text", folder, "--out", folder.parent / "out"],
    ]


@pytest.mark.parametrize(("content", "words"), [("[]", "holds a list"), ("{broken", "is broken"), ("", "is empty")])
def test_a_config_that_is_none_is_named_by_every_command(paragraph, copy, content, words):
    (copy / "config.json").write_text(content)
    for command in commands_on(copy):
        message = paragraph(*command)
        assert str(copy / "config.json") in message and words in message


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[: len(whole) // 2], lambda whole: b"", lambda whole: b"\xff" * 64]
)
def test_weights_that_are_cut_off_or_corrupt_are_named(paragraph, copy, damage):
    file = copy / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    for command in commands_on(copy)[:3]:
        message = paragraph(*command)
        assert f"{file} is truncated or corrupt. Copy or download it again" in message


def test_weights_that_are_missing_are_named_and_never_random(paragraph, copy):
    weights = load_file(copy / "model.safetensors")
    weights.pop("model.multi_modal_projector.linear_1.weight")
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    for command in commands_on(copy)[:3]:
        message = paragraph(*command)
        assert "multi_modal_projector.linear_1.weight" in message and "would be random" in message


def test_a_processor_without_a_chat_template_is_named(paragraph, copy):
    (copy / "chat_template.jinja").unlink()
    for command in commands_on(copy)[:3]:
        message = paragraph(*command)
        assert "has no chat template" in message and str(copy) in message and "Copy chat_template.jinja" in message


@pytest.mark.parametrize("part", ["mini-vision", "mini-language"])
def test_a_part_of_a_model_cannot_be_asked_or_inspected(paragraph, part):
    for arguments in (["inspect", part], ["chat", part, "--prompt", "?"]):
        message = paragraph(*arguments)
        assert "not a vision-language model" in message and "normalign compose" in message and len(message) < 400


def test_a_whole_model_is_no_part_to_compose_of(paragraph, model, tmp_path):
    for command in commands_on(model)[-2:]:
        message = paragraph(*command[:-1], tmp_path / "out")
        assert "is already a vision-language model" in message and "graft" in message and "inspect" in message


def test_the_text_of_the_image_token_in_a_prompt_is_refused(paragraph, model, scene):
    for arguments in (["chat", model, "--image", scene], ["inspect", model]):
        assert "holds the text <image>" in paragraph(*arguments, "--prompt", "What is <image>?")


def test_a_state_before_the_first_layer_can_be_read(tmp_path):
    result = run(*MINI, "--out", tmp_path / "model", "--vision-feature-layer", "0")
    assert result.exit_code == 0, result.stderr
    assert run("inspect", tmp_path / "model").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*MINI, "--out", ""], "'' names no folder"),
        ([*MINI, "--out", __file__], "is a file"),
        ([*MINI, "--out", "x", "--gain-init", "0"], "finite number above 0, got 0"),
        ([*MINI, "--out", "x", "--gain-init", "-1"], "finite number above 0, got -1"),
        ([*MINI, "--out", "x", "--gain-init", "inf"], "finite number above 0, got inf"),
        ([*MINI, "--out", "x", "--gain-init", "nan"], "finite number above 0, got nan"),
        ([*MINI, "--out", "x", "--seed", str(2**63)], "--seed"),
        ([*MINI, "--out", "x", "--seed", "-1"], "--seed"),
        ([*MINI, "--out", "x", "--images", __file__], "for --norm scale alone"),
        ([*MINI, "--out", "x", "stray"], "unexpected extra argument (stray)"),
        (["compose", "--vision", "", "--text", "b", "--out", "x"], "'' names no model"),
        (["inspect", ""], "'' names no model"),
        (["demo", "--out", ""], "'' names no folder"),
    ],
)
def test_values_that_can_never_do_are_wrong_usage(paragraph, arguments, words):
    assert words in paragraph(*arguments, status=2)


def test_a_link_to_nothing_is_no_folder_to_write(paragraph, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for command in (["demo"], MINI, ["export", "m"]):
        assert "is a link to a folder that is not there" in paragraph(*command, "--out", tmp_path / "link", status=2)


def test_a_place_without_permission_gets_a_remedy(room):
    room("hub_upload", export=failing(PermissionError(13, "Permission denied", "there/out")))
    message = run("export", "model", "--out", "folder").stderr
    assert message.startswith("Error: Permission denied: there/out. Name a place that you may read and write")


def test_the_help_says_the_number_format_that_is_the_default():
    for command in ("compose", "graft"):
        assert "float32" in run(command, "--help").stdout.split("--dtype")[1].split("--")[0]


def test_an_interrupted_program_says_so_in_one_line_and_exits_with_130(room):
    room("hub_upload", export=failing(KeyboardInterrupt()))
    result = run("export", "model", "--out", "folder")
    assert result.exit_code == 130
    assert result.stderr.startswith("Interrupted; ") and result.stderr.count("\n") == 1


def test_control_c_ends_the_real_program_with_130(tmp_path):
    code = (
        "import os, signal; from normalign.cli import main; import normalign.demo, time, sys\n"
        # what runs in the background of a shell has been told to ignore it
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "normalign.demo.run_demo = lambda out: (os.kill(os.getpid(), signal.SIGINT), time.sleep(20))\n"
        "sys.argv = ['normalign', 'demo']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 130
    assert done.stderr.startswith("Interrupted; ") and "Traceback" not in done.stderr


# --- train


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
    assert calls == [(str(recipe), {"learning_rate": "1e-4", "data.seed": "3", "shift": "-1"})]


def test_train_shows_the_resolved_recipe_and_trains_nothing(monkeypatch):
    monkeypatch.setattr("normalign.train_trl.train", failing(AssertionError("must not run")))
    result = run("train", "llava15_qwen25_7b/stage1", "--show", "--arm", "none")
    assert result.exit_code == 0
    shown = yaml.safe_load(result.stdout)
    assert (shown["compose"]["text"], shown["arm"]) == ("qwen2.5-7b-instruct", "none")
    assert json.loads(run("train", "demo/stage1", "--show", "--json").stdout)["batch_size"] == 32


def test_a_list_of_rows_keeps_its_lines_and_a_stop_is_no_error(monkeypatch, recipe):
    monkeypatch.setattr("normalign.train_trl.train", failing(NormalignError("Two  rows\nare bad:\n  - one\n  - two")))
    assert run("train", recipe).stderr == "Error: Two rows are bad:\n  - one\n  - two\n"
    monkeypatch.setattr("normalign.train_trl.train", failing(RunStopped("Stopped by SIGTERM.")))
    result = run("train", recipe)
    assert (result.exit_code, result.stderr) == (143, "Stopped by SIGTERM.\n")


def test_a_recipe_that_is_not_there_is_wrong_usage_with_the_names_of_those_that_are():
    result = run("train", "demo/stage3.yaml")
    assert result.exit_code == 2
    assert "There is no recipe demo/stage3.yaml. Did you mean demo/stage" in result.stderr
    assert "llava15_llama32_3b/stage1" in result.stderr


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


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        (["--model", "nope"], 1, "The model 'nope' could not be loaded"),
        (["--model", ""], 2, "model is empty"),
        (["--output_dir", ""], 2, "output_dir is empty"),
        (["--output_dir", __file__], 2, "which is a file"),
        (["--seed", "-1"], 2, "seed must be from 0"),
        (["--optimizer", "adamw"], 2, "Near it are adamw_torch"),
        (
            ["--compose.vision", "v", "--compose.text", "t", "--compose.aligned_norm.eps", "0"],
            2,
            "aligned_norm.eps must",
        ),
    ],
)
def test_train_says_what_is_wrong_with_a_setting(paragraph, tmp_path, changes, status, words):
    recipe = tmp_path / "my.yaml"
    recipe.write_text(f"output_dir: {tmp_path / 'run'}\nmodel: a/b\ndata: {{rows: 4}}\n")
    message = paragraph("train", recipe, *changes, status=status)
    assert words in message and (status == 1 or "my.yaml" in message)
    assert not (tmp_path / "run").exists()


def test_train_names_a_recipe_that_is_no_text(paragraph, tmp_path):
    (tmp_path / "picture.yaml").write_bytes(b"\x89PNG\xff\x00")
    assert "picture.yaml is not a text file" in paragraph("train", tmp_path / "picture.yaml", status=2)


# --- the other commands


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
        seen.calls.append((model, [image() if callable(image) else image for image in images], options))
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
        check_prompt=lambda processor, prompt: None,
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
    (tmp_path / ".eval_results").mkdir()
    for name in ("README.md", ".eval_results/pope.yaml"):
        (tmp_path / name).touch()
    written = {"out": str(tmp_path), "files": [".eval_results/pope.yaml", "README.md"]}
    assert json.loads(run("export", "model", "--out", tmp_path, "--json").stdout) == written
    run("export", "model", "--out", tmp_path, "--overwrite")
    assert [args for args, _ in calls] == [("model", tmp_path)] * 2
    assert [options["overwrite"] for _, options in calls] == [False, True]


def test_export_hands_on_what_is_said_for_the_card(room, tmp_path):
    given = {}
    room("hub_upload", export=lambda model, out, **options: given.update(options) or out)
    files = {name: str(tmp_path / name) for name in ("results.json", "one.yaml", "two.yaml")}
    for file in files.values():
        Path(file).write_text('{"accuracy": 0.5}')
    options = ["--license", "other", "--license-name", "x", "--license-link", "https://x", "--max-shard-size", "2GB"]
    options += ["--base-model", "a/b", "--base-model", "c/d", "--inspection", str(tmp_path)]
    results = ["--results", files["results.json"]]
    recipes = ["--recipe", files["one.yaml"], "--recipe", files["two.yaml"]]
    out = str(tmp_path / "out")
    assert run("export", "m", "--out", out, *options, *results, *recipes).exit_code == 0
    assert given == {
        "overwrite": False,
        "license": "other",
        "license_name": "x",
        "license_link": "https://x",
        "base_model": ["a/b", "c/d"],
        "results": {"accuracy": 0.5},
        "inspection": tmp_path,
        "recipes": [Path(files["one.yaml"]), Path(files["two.yaml"])],
        "max_shard_size": "2GB",
    }
    assert run("export", "m", "--out", out, "--recipe", tmp_path / "three.yaml").exit_code == 2
    for content in ("[1]", "{"):
        (tmp_path / "results.json").write_text(content)
        assert run("export", "m", "--out", out, *results).exit_code == 2


def test_a_mistyped_preset_gets_the_nearest_one():
    message = run("inspect", "mini-visoin").stderr
    assert "no folder 'mini-visoin' here; the nearest preset is 'mini-vision'" in message


def test_push_needs_a_folder_that_is_there_and_hands_its_options_on(room, tmp_path):
    given = {}

    def push(folder, repo_id, **options):
        given.update(options, folder=folder, repo_id=repo_id)
        options["progress"]("1 of 1: x", 1_000, 2_500_000)
        return SimpleNamespace(to_dict=lambda: {"commit": "0" * 40})

    room("hub_upload", push=push)
    assert run("push", tmp_path / "nothing", "a/b").exit_code == 2
    assert given == {}
    done = run("push", tmp_path, "a/b", "--private", "--revision", "v1", "--dry-run", "--no-load-check", "--json")
    assert json.loads(done.stdout) == {"commit": "0" * 40}
    assert "1 kB of 2.5 MB sent; now 1 of 1: x" in done.stderr
    assert given.pop("progress") is not None
    assert given == {
        "folder": tmp_path,
        "repo_id": "a/b",
        "private": True,
        "revision": "v1",
        "dry_run": True,
        "load_check": False,
    }
