"""The Space of a model: what is in its folder, and what a visitor sees who opens the app in a browser.

With NORMALIGN_SPACE_MODEL=FOLDER (a trained export, such as that of `normalign demo`) the app shows that model, and with
NORMALIGN_SCREENSHOT=FILE.png a picture of the page is kept for docs/space.md.
"""

import configparser
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import SpaceCard
from PIL import Image
from typer.testing import CliRunner

from normalign.assembly import save_whole
from normalign.cli import app as cli
from normalign.configuration.errors import NormalignError
from normalign.evaluation.generation import answer, generate_answers, load_model
from normalign.hub_upload import clean_process, export, export_space
from normalign.hub_upload.space import GRADIO_VERSION
from normalign.train_trl.digit_scenes import digit_scene_rows


CHECKOUT = Path(__file__).parents[2]
APP = CHECKOUT / "hub_upload" / "templates" / "space" / "app.py"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SECONDS = 60  # for one step in the browser; the start may share the machine with other tests
needs_gradio = pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="gradio is not installed")

# Without the packages that a Space has not, and without any address but this machine's own.
START = """
import runpy, sys
clean = runpy.run_path({clean!r})
sys.meta_path[:] = [clean["WithoutPackages"]({blocked!r}, list(sys.meta_path))]
assert not clean["can_import"]("normalign")

def stay_here(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple) and arguments[1][0] not in ("127.0.0.1", "::1"):
        print("REFUSED", arguments[1], file=sys.stderr, flush=True)
        raise OSError("The network is blocked in this process.")

sys.addaudithook(stay_here)
runpy.run_path("app.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def model_folder(composed, tmp_path_factory):
    if given := os.environ.get("NORMALIGN_SPACE_MODEL"):
        return Path(given)
    folder = tmp_path_factory.mktemp("space-model")
    return export(save_whole(*composed, folder / "composed"), folder / "export", license="apache-2.0")


@pytest.fixture(scope="module")
def space(model_folder, tmp_path_factory):
    return export_space(model_folder, tmp_path_factory.mktemp("spaces") / "space")


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """Path of a picture of digits, and a question about it."""
    rows = digit_scene_rows(10, split="test", text_only_share=0, kinds=["digit"])
    row = min(rows, key=lambda row: row["caption"].count("empty"))
    path = tmp_path_factory.mktemp("scene") / "scene.png"
    row["images"][0].resize((256, 256), Image.Resampling.NEAREST).save(path)
    return path, row["question"]


@pytest.fixture(scope="module")
def address(space, tmp_path_factory):
    """Where the app answers, started as a stranger would."""
    home = tmp_path_factory.mktemp("visitor")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = clean_process._environment(home) | {
        "GRADIO_SERVER_NAME": "127.0.0.1",
        "GRADIO_SERVER_PORT": str(port),
        "GRADIO_ANALYTICS_ENABLED": "False",
    }
    script = START.format(
        clean=str(CHECKOUT / "hub_upload" / "clean_process_main.py"), blocked=clean_process.OPTIONAL_PACKAGES
    )
    log = home / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", script], cwd=space, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 2 * SECONDS
        while not answers(f"http://127.0.0.1:{port}/"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait(SECONDS)
    said = log.read_text()
    assert "REFUSED" not in said and "Traceback" not in said, said


def answers(address):
    try:
        return urllib.request.urlopen(address, timeout=5).status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as started:
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        opened = started.chromium.launch(executable_path=program, args=options, timeout=SECONDS * 1000)
        yield opened
        opened.close()


@pytest.fixture
def page(browser, address):
    """The app, opened anew; nothing goes wrong on the page and nothing is asked of another server."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(SECONDS * 1000)
    complaints = []
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if is_elsewhere(request.url, address) else None)
    page.goto(address)
    page.locator("#question textarea").wait_for()
    yield page
    page.close()
    assert complaints == []


def is_elsewhere(url, address):
    return not url.startswith((address, "data:", "blob:"))


def ask(page, question, image=None):
    if image is not None:
        page.locator("#question input[type=file]").set_input_files(image)
        page.locator("#question img").first.wait_for()
    page.locator("#question textarea").fill(question)
    page.locator("#question textarea").press("Enter")


def wait_for_answer(page, number):
    """The text of answer `number` once it is complete: the norms are shown with the last of it."""
    page.wait_for_function(f"document.querySelector('.norms')?.dataset.answers === '{number}'")
    return page.locator("#chat [data-testid=bot]").nth(number - 1).inner_text().strip()


def measured(model, processor, path, question):
    """Norms of an image's tokens before and after the aligned norm, and the mean over the prompt's text tokens."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(images=Image.open(path), text=text, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        after = model.get_image_features(pixel_values=inputs["pixel_values"], return_dict=True).pooler_output[0]
        features = model.model.vision_tower(inputs["pixel_values"], output_hidden_states=True)
        projector = model.model.multi_modal_projector
        hidden = features.hidden_states[model.config.vision_feature_layer]
        before = projector.linear_2(projector.act(projector.linear_1(hidden)))[0]
        embedded = model.get_input_embeddings()(
            inputs["input_ids"][inputs["input_ids"] != model.config.image_token_id]
        )
    return before.norm(dim=-1), after.norm(dim=-1), embedded.norm(dim=-1).mean().item()


# --- the folder


def test_the_folder_holds_the_app_and_the_model(space, model_folder):
    top = {"README.md", "app.py", "model", "requirements.txt", "settings.json"}
    assert {path.name for path in space.iterdir()} == top
    assert (space / "app.py").read_bytes() == APP.read_bytes()
    shipped = {path.name: path.read_bytes() for path in model_folder.iterdir()}
    assert {path.name: path.read_bytes() for path in (space / "model").iterdir()} == shipped
    texts = [path.read_text() for path in space.iterdir() if path.is_file()]
    assert not [text for text in texts if str(model_folder) in text or str(space.parent) in text]


def test_the_metadata_is_that_of_a_gradio_space(space):
    data = SpaceCard.load(space / "README.md").data
    assert (data.sdk, data.sdk_version, data.app_file, data.pinned) == ("gradio", GRADIO_VERSION, "app.py", False)
    assert (data.license, data.title, data.models) == ("apache-2.0", "Chat with an aligned model", None)
    assert len(data.short_description) <= 60 and len(data.emoji) == 1
    colours = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
    assert {data.colorFrom, data.colorTo} <= colours


def test_the_app_asks_for_what_the_package_is_tested_with():
    setup = configparser.ConfigParser()
    setup.read(CHECKOUT / "setup.cfg", encoding="utf-8")
    ours = (setup["options"]["install_requires"] + setup["options.extras_require"]["space"]).split()
    assert set((APP.parent / "requirements.txt").read_text().split()) <= set(ours)
    assert f"\ngradio=={GRADIO_VERSION}\n" in (CHECKOUT / "constraints.txt").read_text()


def test_a_model_of_the_hub_is_loaded_at_one_commit_and_not_copied(model_folder, tmp_path):
    by_id = export_space("owner/name", tmp_path / "by-id", revision=COMMIT)
    of_folder = export_space(model_folder, tmp_path / "of-folder", repo_id="owner/name", revision=COMMIT)
    for folder in (by_id, of_folder):
        assert not (folder / "model").exists()
        settings = json.loads((folder / "settings.json").read_text())
        assert settings == {"title": "Chat with name", "repo_id": "owner/name", "revision": COMMIT}
        card = SpaceCard.load(folder / "README.md")
        assert (card.data.models, card.data.license) == (["owner/name"], "apache-2.0")
        assert COMMIT in card.text


def test_a_revision_that_is_no_commit_is_looked_up(monkeypatch, tmp_path):
    from normalign.hub_upload import space as room

    class Hub:
        def model_info(self, repo_id, revision):
            return type("Info", (), {"sha": {("owner/name", "v1"): COMMIT}[repo_id, revision]})

    monkeypatch.setattr(room, "HfApi", Hub)
    folder = export_space("owner/name", tmp_path / "space", revision="v1")
    assert json.loads((folder / "settings.json").read_text())["revision"] == COMMIT


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ("", {}, "has no name"),
        ("no-such-folder", {}, "no-such-folder does not exist"),
        ("owner/name", {"repo_id": "owner/other"}, "name one of them"),
        ("owner/name", {}, "did not tell the newest commit of owner/name: HF_HUB_OFFLINE is set.*--revision"),
        ("owner/name", {"revision": "v1"}, "the revision v1 of owner/name"),
        ("EXPORT", {"revision": COMMIT}, "Name the repository too"),
        ("EXPORT", {"repo_id": "name", "revision": COMMIT}, "'name' is no name of a repository"),
        ("CHECKPOINT", {}, "normalign export"),
    ],
)
def test_what_cannot_become_a_space_is_refused(given, options, said, exported, checkpoint, tmp_path):
    given = {"EXPORT": exported, "CHECKPOINT": checkpoint}.get(given, given)
    with pytest.raises(NormalignError, match=f"(?s){said}"):
        export_space(given, tmp_path / "space", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_space_replaces_an_earlier_one_and_nothing_else(exported, tmp_path):
    space = export_space(exported, tmp_path / "space")
    (space / "app.py").write_text("changed by its owner")
    with pytest.raises(NormalignError):
        export_space(exported, space)
    assert (space / "app.py").read_text() == "changed by its owner"
    export_space(exported, space, overwrite=True)
    assert (space / "app.py").read_bytes() == APP.read_bytes()

    (space / "photos").mkdir()
    with pytest.raises(NormalignError, match="holds the folder photos"):
        export_space(exported, space, overwrite=True)
    with pytest.raises(NormalignError, match="would replace what it is made from"):
        export_space(exported, exported, overwrite=True)
    other = tmp_path / "other"
    (other / "model").mkdir(parents=True)
    with pytest.raises(NormalignError, match="holds the folder model"):
        export_space(exported, other, overwrite=True)


def test_the_program_writes_a_space(exported, tmp_path):
    runner = CliRunner()
    options = ["--space", "--repo-id", "owner/name", "--revision", COMMIT, "--json"]
    done = runner.invoke(cli, ["export", str(exported), "--out", str(tmp_path / "space"), *options])
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"out": str(tmp_path / "space")})
    assert json.loads((tmp_path / "space" / "settings.json").read_text())["revision"] == COMMIT
    for wrong in (["--repo-id", "owner/name"], ["--revision", COMMIT], ["--space", "--license", "mit"]):
        done = runner.invoke(cli, ["export", str(exported), "--out", str(tmp_path / "other"), *wrong])
        assert done.exit_code == 2 and wrong[0] in done.stderr and not (tmp_path / "other").exists()


# --- the app's own functions


@pytest.fixture(scope="module")
def app(space):
    spec = importlib.util.spec_from_file_location("app_of_the_space", space / "app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def norms_by_the_app(app, model, processor, *image_paths):
    content = [{"type": "image", "path": path} for path in image_paths] + [{"type": "text", "text": "w10 w11"}]
    inputs, room = app.model_inputs(model, processor, [{"role": "user", "content": content}])
    with app.recorded_norms(model) as found:
        list(app.answer_in_pieces(model, processor, inputs, 2))
    return app.norms_of(model, processor, inputs, found), room


@needs_gradio
def test_a_model_without_a_norm_shows_the_projector_alone(app, make_model, processor, questions):
    model = make_model(aligned_norm={"kind": "none"})
    norms, room = norms_by_the_app(app, model, processor, questions[0][0])
    assert (norms.after, norms.shape, len(norms.before)) == (None, (2, 2), 4)
    assert room == 128 - 8, "user, four visual tokens, w10, w11, assistant"
    page = app.norms_page(norms, images=1, answers=1)
    assert "this model has no aligned norm" in page and page.count("<rect") == 4
    assert "no aligned norm" not in app.page_without_norms(
        model
    ) and "after the aligned" not in app.page_without_norms(model)


@needs_gradio
def test_of_several_images_the_last_is_shown(app, model, processor, questions, scene):
    first, last = questions[0][0], str(scene[0])
    both, _ = norms_by_the_app(app, model, processor, first, last)
    alone, _ = norms_by_the_app(app, model, processor, last)
    assert both.before == pytest.approx(alone.before, rel=1e-5)
    assert both.before != pytest.approx(norms_by_the_app(app, model, processor, first)[0].before, rel=1e-2)
    assert "of the last image" in app.norms_page(both, images=2, answers=1)


@needs_gradio
def test_the_app_loads_the_repository_at_its_commit(app, monkeypatch):
    asked = []

    class Loader:
        @staticmethod
        def from_pretrained(source, **options):
            asked.append((source, options["revision"], options["trust_remote_code"]))
            return torch.nn.Identity()

    monkeypatch.setattr(app, "SETTINGS", {"repo_id": "owner/name", "revision": COMMIT})
    monkeypatch.setattr(app, "AutoProcessor", Loader)
    monkeypatch.setattr(app, "AutoModelForImageTextToText", Loader)
    app.load_model()
    assert asked == [("owner/name", COMMIT, True)] * 2


@needs_gradio
def test_tokens_of_unknown_layout_are_a_strip(app, model, processor, questions, monkeypatch):
    monkeypatch.setattr(model.config.vision_config, "patch_size", 4)
    norms, _ = norms_by_the_app(app, model, processor, questions[0][0])
    assert norms.shape is None and len(norms.before) == len(norms.after) == 4
    page = app.norms_page(norms, images=1, answers=1)
    assert page.count('class="strip"') == 2 and "token 4: " in page and "is not known" in page


@needs_gradio
def test_a_failure_while_answering_reaches_the_visitor(app, model, processor, monkeypatch):
    monkeypatch.setattr(model, "generate", lambda **_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        list(app.answer_in_pieces(model, processor, {}, 2))


@needs_gradio
def test_the_picture_is_what_the_model_sees(app, processor):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    pixels = processor.image_processor(image, return_tensors="pt")["pixel_values"][0]
    assert np.array_equal(np.asarray(app.seen_picture(pixels, processor.image_processor)), np.asarray(image))


# --- the app in a browser


@needs_gradio
def test_a_visitor_sees_the_models_answer_and_the_norms(page, model_folder, scene):
    path, question = scene
    again = "How many digits are there?"
    ask(page, question, path)
    first = wait_for_answer(page, 1)
    assert first and first == answer(str(model_folder), question, [path])

    model, processor = load_model(model_folder)
    before, after, text = measured(model, processor, path, question)
    shown = page.locator(".norms rect title").all_text_contents()
    numbers = [float(title.rpartition(": ")[2]) for title in shown]
    assert numbers == pytest.approx([*before.tolist(), *after.tolist()], rel=1e-3)
    side = round(len(before) ** 0.5)
    assert shown[len(before) - 1].startswith(f"row {side}, column {side}: ")
    means = [float(bar) for bar in page.locator(".norms .bar b").all_inner_texts()]
    expected = [before.mean().item(), after.mean().item(), text]
    assert means == pytest.approx(expected, rel=6e-3)
    ratios = [float(bold.partition(" ")[0]) for bold in page.locator(".norms .sentence b").all_inner_texts()]
    assert ratios == pytest.approx([expected[0] / text, expected[1] / text], rel=6e-3)

    ask(page, again)
    second = wait_for_answer(page, 2)
    conversation = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]},
        {"role": "assistant", "content": [{"type": "text", "text": first}]},
        {"role": "user", "content": [{"type": "text", "text": again}]},
    ]
    [expected] = generate_answers(model, processor, [conversation], [[Image.open(path)]], max_new_tokens=128)
    assert second == expected

    if picture := os.environ.get("NORMALIGN_SCREENSHOT"):
        page.mouse.move(0, 0)
        page.screenshot(path=picture)


@needs_gradio
def test_what_cannot_be_answered_is_said_and_what_was_typed_stays(page, scene):
    def refused(words):
        page.get_by_text(re.compile(words)).wait_for()
        assert page.locator("#chat [data-testid=user]").count() == 0

    ask(page, "Which digit?")
    refused("Add an image first")
    assert page.locator("#question textarea").input_value() == "Which digit?"
    ask(page, "", scene[0])
    refused("Write a question about the image")
    ask(page, "What is <image> here?")
    refused("stands for an image in this model")
    ask(page, "digit " * 3000)
    refused(r"The dialogue has [\d,]+ tokens with its images, and the model takes")
    ask(page, scene[1])
    wait_for_answer(page, 1)


@needs_gradio
def test_an_example_is_asked_at_once_and_a_dialogue_begins_anew(page):
    page.get_by_text("Which digit is at the top left?").click()
    wait_for_answer(page, 1)
    assert page.locator(".norms rect").count() > 0
    page.get_by_role("button", name="New dialogue").click()
    page.get_by_text("Ask about an image, and the L2 norm").wait_for()
    assert page.locator("#chat [data-testid=user]").count() == 0
