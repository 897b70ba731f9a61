"""Answers by generation: batches, images and no images, scores, and image files of every kind."""

import functools
import json
import shutil

import pytest
import torch
from PIL import Image

from normalign.configuration.errors import NormalignError
from normalign.evaluation.generation import answer, answer_rows, exact_match, generate_answers, load_model, open_image
from normalign.train_trl.digit_scenes import digit_scene_rows


@pytest.fixture(scope="module")
def rows():
    return digit_scene_rows(10, split="test", text_only_share=0.3)


def test_batched_answers_equal_single_ones_in_order(composed, rows):
    """Images and text-only rows mixed; left padding changes nothing."""
    assert {bool(row["images"]) for row in rows} == {True, False}
    counted = []
    together = answer_rows(*composed, rows, batch_size=4, progress=counted.append, max_new_tokens=8)
    alone = [answer_rows(*composed, [row], max_new_tokens=8)[0] for row in rows]
    assert together == alone
    assert sum(counted) == len(rows)
    # the language model alone reads its answers from the caption of a text-only row
    text_only = [i for i, row in enumerate(rows) if not row["images"]]
    assert sum(together[i] == rows[i]["answer"] for i in text_only) >= 2


def test_several_images_and_none_in_one_call(composed, rows):
    images = [row["images"][0] for row in rows if row["images"]][:2]
    two = [
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Is there a 7?"}]}
    ]
    none = [{"role": "user", "content": [{"type": "text", "text": "Is there a 7?"}]}]
    answers = generate_answers(*composed, [two, none], [images, []], max_new_tokens=4)
    assert len(answers) == 2 and all(isinstance(text, str) for text in answers)


def test_an_error_while_answering_is_raised(composed, rows):
    with pytest.raises((ValueError, RuntimeError, IndexError, StopIteration)):
        generate_answers(*composed, [rows[0]["messages"][:1]], [[rows[0]["images"][0]] * 2])


def test_chat_answers_about_an_image_file(folder, composed, rows, tmp_path):
    row = next(row for row in rows if row["images"])
    row["images"][0].save(tmp_path / "scene.png")
    text = answer(str(folder), row["question"], [tmp_path / "scene.png"], max_new_tokens=8)
    assert text == answer_rows(*composed, [row], max_new_tokens=8)[0]


def test_loading_runs_no_code_of_the_folder(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "modeling_normalign_llava.py").write_text("raise SystemExit('ran code of the folder')")
    model, _ = load_model(copy)
    assert type(model).__module__ == "normalign.modeling.modeling_normalign_llava"
    assert model.dtype == torch.float32 and not model.training


@pytest.mark.parametrize("content", [None, "{}", '{"model_type": "no_such_type"}'])
def test_what_is_no_model_gets_one_paragraph(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(NormalignError, match=str(tmp_path)) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_language_model_and_a_model_with_code_of_its_own_are_told_from_others(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        NormalignError, match="type 'llama', which is not a vision-language.*normalign compose"
    ) as caught:
        load_model(tmp_path)
    assert len(str(caught.value)) < 400
    (tmp_path / "config.json").write_text('{"model_type": "strange", "auto_map": {"AutoConfig": "strange.Strange"}}')
    with pytest.raises(NormalignError, match="code of its own, which is not run here.*inspect_model takes any model"):
        load_model(tmp_path)


@pytest.fixture
def adapter(folder, tmp_path):
    """A folder with an adapter of the model in `folder`, and the answers of both together."""
    from peft import LoraConfig, get_peft_model

    base, processor = load_model(folder)
    torch.manual_seed(0)
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=r".*language_model.*q_proj"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", adapted.merge_and_unload().eval()


def base_of(adapter, name):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": name}))


@pytest.mark.parametrize("base", ["absolute", "relative"])
@pytest.mark.parametrize("own_processor", [False, True])
def test_the_folder_of_an_adapter_is_loaded_with_its_base_model(adapter, folder, composed, base, own_processor):
    path, expected = adapter
    if base == "relative":
        shutil.copytree(folder, path.parent / "base")
        base_of(path, "../base")
    if own_processor:
        composed[1].save_pretrained(path)
    model, processor = load_model(path)
    ids = processor.tokenizer("Is there a 7?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
        assert not torch.allclose(model(ids).logits, composed[0](ids).logits, atol=0.1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/nowhere/base", "The base model '/nowhere/base' is not there"),
        ("nobody/no-such-model", "'nobody/no-such-model' could not be loaded"),
        ("", "does not name its base model"),
        (None, "does not name its base model"),
    ],
)
def test_an_adapter_without_a_base_model_is_refused(adapter, name, words):
    base_of(adapter[0], name)
    with pytest.raises(NormalignError, match=words):
        load_model(adapter[0])
    (adapter[0] / "adapter_config.json").write_text("[")
    with pytest.raises(NormalignError, match="adapter_config.json is broken or does not name its base model"):
        load_model(adapter[0])


def test_a_text_with_the_image_token_is_refused(composed):
    for content in ("a <image> b", [{"type": "text", "text": "a <image> b"}]):
        with pytest.raises(NormalignError, match="holds the text <image>"):
            generate_answers(*composed, [[{"role": "user", "content": content}]], [[]])


def spelled(composed, monkeypatch, texts):
    """Makes the model say these texts, row by row, whatever it is asked; the list that it gives grows by one a step."""
    scripts = [composed[1].tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    model, lengths = composed[0], []
    forward = type(model).forward

    @functools.wraps(forward)  # generate() looks at the signature
    def scripted(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        for row, script in enumerate(scripts):
            token = script[len(lengths)] if len(lengths) < len(script) else self.generation_config.eos_token_id
            output.logits[row, -1] = -1e9
            output.logits[row, -1, token] = 0
        lengths.append(len(lengths) + 1)
        return output

    monkeypatch.setattr(type(model), "forward", scripted)
    return lengths


def asked(question="Is there a 7?", times=1):
    return [[{"role": "user", "content": [{"type": "text", "text": question}]}]] * times


def test_an_answer_ends_before_the_first_stop_text(composed, monkeypatch):
    texts = ["the digit is red\nand it is green", "one two three four five six seven eight", "\nred\nblue"]
    lengths = spelled(composed, monkeypatch, texts)
    answers = generate_answers(*composed, asked(times=3), [[]] * 3, max_new_tokens=40, stop=["\n", "", " four"])
    # the line break that the third begins with is only the space around an answer
    assert answers == ["the digit is red", "one two three", "red"]
    longest = max(len(composed[1].tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
    assert len(lengths) < longest, "generation ends when all rows have come to a stop text"


def test_a_stop_text_in_the_prompt_stops_nothing(composed, monkeypatch):
    spelled(composed, monkeypatch, ["red or green"])
    question = "Say red:\n\n"
    assert generate_answers(*composed, asked(question), [[]], max_new_tokens=20, stop=["\n", "Say"]) == [
        "red or green"
    ]


def test_decoding_is_greedy_whatever_the_model_is_set_to(composed, rows, monkeypatch):
    expected = answer_rows(*composed, rows[:3], max_new_tokens=6)
    for name, value in {"do_sample": True, "temperature": 5.0, "num_beams": 3}.items():
        monkeypatch.setattr(composed[0].generation_config, name, value)
    assert answer_rows(*composed, rows[:3], max_new_tokens=6) == expected


def test_exact_match_counts_over_all_and_by_kind():
    rows = [{"kind": k, "answer": a} for k, a in (("digit", "7"), ("digit", "3"), ("colour", "red"))]
    assert exact_match(rows, ["7", "8", "red"]) == (pytest.approx(2 / 3), {"colour": 1.0, "digit": 0.5})
    assert exact_match(rows, ["7.", "3 ", "Red"])[0] == 0
    with pytest.raises(ValueError):
        exact_match(rows, ["7"])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F"])
def test_image_files_of_every_mode_open_as_rgb(tmp_path, mode):
    image = Image.new("RGB", (5, 4), (200, 30, 30))
    path = tmp_path / ("image.tiff" if mode in ("CMYK", "F", "I;16") else "image.png")
    (Image.new("I;16", (5, 4), 40000) if mode == "I;16" else image.convert(mode)).save(path)
    opened = open_image(path)
    assert opened.mode == "RGB" and opened.size == (5, 4)
    if mode in ("RGB", "RGBA"):
        assert opened.getpixel((2, 2)) == (200, 30, 30)


def test_transparency_is_laid_on_white_and_exif_turns_the_image(tmp_path):
    Image.new("RGBA", (3, 2), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert open_image(tmp_path / "clear.png").getpixel((0, 0)) == (255, 255, 255)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (3, 2)).save(tmp_path / "turned.jpg", exif=exif)
    assert open_image(tmp_path / "turned.jpg").size == (2, 3)


def test_broken_and_missing_image_files_are_named(tmp_path):
    (tmp_path / "text.png").write_text("no image")
    for name in ("text.png", "missing.png"):
        with pytest.raises(NormalignError, match=name):
            open_image(tmp_path / name)
