"""The look at every row before the first step: what it finds, what is done about it, and the masks of three tokenizers."""

import copy
import io
import json
import logging
import os
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from normalign.cli import app
from normalign.configuration.errors import NormalignError
from normalign.train_trl import check, load_recipe, train
from normalign.train_trl.__main__ import main
from normalign.train_trl.data_sets import load_data
from normalign.train_trl.recipe import DataSettings, Recipe
from normalign.train_trl.row_check import check_rows, longest_row, without_bad_rows
from normalign.train_trl.training import build_trainer, check_processor, load_or_compose


def png():
    buffer = io.BytesIO()
    Image.effect_noise((32, 24), 40).save(buffer, "PNG")
    return buffer.getvalue()


def user(*parts):
    return {
        "role": "user",
        "content": [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts],
    }


def assistant(words):
    return {"role": "assistant", "content": words}


GOOD = {"messages": [user(None, "Which?"), assistant("Red")], "images": ["good.png"]}
ROWS = [
    (GOOD, None),
    ({"messages": [user("2 + 2"), assistant("4")]}, None),
    ({**GOOD, "images": ["gone.png"]}, "missing image"),
    ({**GOOD, "images": ["cut.png"]}, "broken image"),
    ({**GOOD, "images": ["empty.png"]}, "broken image"),
    ({"messages": [user("2 + 2")]}, "no supervised token"),
    ({**GOOD, "images": ["good.png", "good.png"]}, "placeholders"),
    ({"messages": [user("What does <image> mean?"), assistant("It")]}, "placeholders"),
    ({"messages": [user("Which?"), assistant("an <image>")]}, "placeholder in an answer"),
    ({"messages": [user("long " * 200), assistant("It")]}, "too long"),
    ({"messages": []}, "malformed"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "malformed"),
    (
        {
            "messages": [user(None, "A", None, "B"), assistant("C"), user("D"), assistant("E")],
            "images": ["good.png"] * 2,
        },
        None,
    ),
]
KINDS = {
    "malformed": 2,
    "missing image": 1,
    "broken image": 2,
    "placeholders": 2,
    "placeholder in an answer": 1,
    "no supervised token": 1,
    "too long": 1,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    (folder / "good.png").write_bytes(png())
    (folder / "cut.png").write_bytes(png()[:300])
    (folder / "empty.png").write_bytes(b"")
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row, _ in ROWS))
    return path


def recipe_of(path, on_bad_row="error", max_length=120, workers=2, streaming=False):
    data = DataSettings(name="trl", path=str(path), streaming=streaming)
    options = {"on_bad_row": on_bad_row, "max_length": max_length, "dataloader_workers": workers, "max_steps": 1}
    return Recipe(output_dir="out", model="model", data=data, **options)


@pytest.fixture(scope="module")
def checked(file, composed):
    recipe = recipe_of(file)
    rows = load_data(recipe)
    report = check_rows(rows, composed[1], recipe, progress=False)
    return SimpleNamespace(recipe=recipe, rows=rows, report=report, processor=composed[1])


# --- what it finds


def test_every_bad_row_is_found_with_its_kind_number_and_file(checked, file):
    """R02, R28, R37."""
    report = checked.report
    assert [(bad.index, bad.kind) for bad in report.bad] == [(n, kind) for n, (_, kind) in enumerate(ROWS) if kind]
    assert report.kinds == KINDS and report.rows == len(ROWS) and report.whole
    for bad in report.bad:
        assert bad.row == bad.index and bad.source == str(file)
        assert bad.reason.startswith(f"Row {bad.index} of {file} ") or bad.reason.startswith(
            f"Row {bad.index} of {file}:"
        )
    reasons = {bad.index: bad.reason for bad in report.bad}
    assert f"the image {file.parent / 'gone.png'} cannot be read: No such file" in reasons[2]
    assert "cut.png cannot be read" in reasons[3] and "empty.png cannot be read" in reasons[4]
    assert "its answer is missing" in reasons[5]
    assert "has 2 images, but 1 image placeholder in its text" in reasons[6]
    assert "has 0 images, but 1 image placeholder in its text" in reasons[7]
    assert "its dialogue is empty" in reasons[10]


def test_lengths_count_the_tokens_of_images(checked):
    """R02: a row is as long as what the processor makes of it."""
    good = [n for n, (_, kind) in enumerate(ROWS) if kind is None]
    for index in good:
        row = checked.rows[index]
        text = checked.processor.apply_chat_template(row["messages"], tokenize=False)
        images = [Image.new("RGB", (9, 9))] * len(row["images"])
        ids = checked.processor(text=[text], images=images or None, add_special_tokens=False)["input_ids"][0]
        assert checked.report.lengths[index] == len(ids)
    longest = checked.report.lengths[9]
    assert f"has {longest} tokens" in {bad.index: bad.reason for bad in checked.report.bad}[9]
    recipe = recipe_of(checked.recipe.data.path, max_length=longest)
    assert "too long" not in check_rows(checked.rows, checked.processor, recipe, progress=False).kinds


def test_without_a_limit_the_language_models_positions_are_it(file, composed):
    model, _ = composed
    recipe = recipe_of(file, max_length=None)
    assert longest_row(recipe, model.config) == model.config.text_config.max_position_embeddings
    assert longest_row(recipe_of(file, max_length=7), model.config) == 7
    assert longest_row(recipe, None) is None


def test_each_image_is_opened_once(file, composed, monkeypatch):
    opened, real = [], Image.open
    monkeypatch.setattr(Image, "open", lambda source, *a, **o: opened.append(source) or real(source, *a, **o))
    recipe = recipe_of(file)
    check_rows(load_data(recipe), composed[1], recipe, progress=False)
    names = [path.name for path in opened if hasattr(path, "name")]
    assert sorted(names) == ["cut.png", "empty.png", "gone.png", *["good.png"] * 5]


def test_the_shares_of_two_processes_make_one_report(file, composed, checked, monkeypatch):
    """The gathering stands in for two processes, of which the second comes first."""
    sent = {}

    def gather(shares, mine):
        sent[int(os.environ["RANK"])] = mine
        shares[:] = [sent.get(0, mine), sent[1]]

    monkeypatch.setattr("accelerate.PartialState", lambda cpu: None)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        report = check_rows(load_data(checked.recipe), composed[1], checked.recipe, progress=False)
    assert [len(lengths) for _, lengths in (sent[0], sent[1])] == [7, 6]
    assert report.bad == checked.report.bad and report.rows == checked.report.rows
    assert report.lengths == checked.report.lengths


# --- what is done about it


def test_error_lists_them_and_says_where_all_are(checked):
    with pytest.raises(NormalignError) as caught:
        without_bad_rows(checked.rows, checked.report, checked.processor, checked.recipe)
    words = str(caught.value)
    assert words.startswith("10 of 13 rows cannot be trained on: 2 malformed, 1 missing image, 2 broken image,")
    assert all(f"Row {bad.index} of " in words for bad in checked.report.bad)
    assert "--on_bad_row skip" in words and "--check --json" in words and words.count("\n  - ") == 10


def test_skip_leaves_them_out_and_says_how_many_of_which_kind(checked, caplog):
    recipe = recipe_of(checked.recipe.data.path, on_bad_row="skip")
    with caplog.at_level(logging.WARNING):
        rows = without_bad_rows(checked.rows, checked.report, checked.processor, recipe)
    assert [row["row"] for row in rows] == [0, 1, 12]
    assert rows["length"][:] == [checked.report.lengths[n] for n in (0, 1, 12)]
    assert "10 of 13 rows cannot be trained on: 2 malformed, 1 missing image" in caplog.text


def test_nothing_left_is_an_error(tmp_path, composed):
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": [user("only a question")]}))
    recipe = recipe_of(tmp_path / "x.jsonl", on_bad_row="skip")
    rows = load_data(recipe)
    report = check_rows(rows, composed[1], recipe, progress=False)
    with pytest.raises(
        NormalignError, match="1 of 1 rows cannot be trained on.*So nothing is left(.|\\n)*- Row 0 of "
    ):
        without_bad_rows(rows, report, composed[1], recipe)


def test_an_empty_answer_is_no_answer(tmp_path, composed):
    dialogues = [
        [user("a"), {"role": "assistant", "content": " "}],
        [user("a"), {"role": "assistant", "content": "b"}],
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"messages": turns}) for turns in dialogues))
    recipe = recipe_of(tmp_path / "x.jsonl")
    report = check_rows(load_data(recipe), composed[1], recipe, progress=False)
    assert [(bad.row, bad.kind) for bad in report.bad] == [(0, "no supervised token")]
    assert "its answer is empty" in report.bad[0].reason


def test_a_file_of_the_other_form_is_told_so(tmp_path, composed):
    (tmp_path / "x.json").write_text(json.dumps([{"conversations": [{"from": "human", "value": "a"}]}]))
    recipe = recipe_of(tmp_path / "x.json")
    report = check_rows(load_data(recipe), composed[1], recipe, progress=False)
    assert "Rows of conversations are data.name: llava" in report.bad[0].reason


def test_a_stream_is_looked_at_while_it_runs(file, composed, caplog):
    recipe = recipe_of(file, on_bad_row="skip", streaming=True)
    rows = load_data(recipe)
    report = check_rows(rows, composed[1], recipe, progress=False)
    assert report.kinds == KINDS and not report.whole
    with caplog.at_level(logging.WARNING):
        kept = list(without_bad_rows(rows, report, composed[1], recipe))
    assert sorted(row["row"] for row in kept) == [0, 1, 12]
    assert "10 of the first 13 rows of the stream cannot be trained on" in caplog.text
    assert "Left out" in caplog.text and "number 10 of this reader" in caplog.text
    with pytest.raises(NormalignError, match="of the first 13 rows of the stream cannot be trained on"):
        without_bad_rows(rows, report, composed[1], recipe_of(file, streaming=True))
    report.bad.clear()  # as if the bad ones came after the first thousand
    with pytest.raises(NormalignError, match="Row .* To leave such rows out, set on_bad_row: skip"):
        list(without_bad_rows(rows, report, composed[1], recipe_of(file, streaming=True)))


# --- whole runs


def test_training_stops_before_it_starts_or_trains_on_the_good_rows(file, recipe_file, tmp_path):
    data = {"name": "trl", "path": str(file)}
    path = recipe_file(1, tmp_path, data=data, batch_size=3, max_steps=1, max_length=150)
    with pytest.raises(NormalignError, match="of 13 rows cannot be trained on"):
        train(path)
    assert not (tmp_path / "stage1").exists()
    out = train(path, {"on_bad_row": "skip"})
    assert len((out / "train_log.jsonl").read_text().splitlines()) == 1
    report = check(path)
    assert report.kinds == KINDS


def test_the_check_alone_as_a_command(file, recipe_file, tmp_path, capsys):
    """Of both programs: status 1 with bad rows, 0 without; JSON alone on stdout; nothing is written."""
    path = str(recipe_file(1, tmp_path, data={"name": "trl", "path": str(file)}, max_length=150))

    def called(*arguments):
        done = CliRunner().invoke(app, ["train", path, "--check", *arguments])
        return done.exit_code, done.stdout

    status, out = called("--json")
    report = json.loads(out)
    assert status == 1 and report["kinds"] == KINDS and report["good"] == 3 and len(report["bad"]) == 10
    assert report["bad"][0] == {**report["bad"][0], "row": 2, "source": str(file), "kind": "missing image"}
    status, out = called()
    assert status == 1 and "13 rows looked at, 3 good, 10 bad" in out and "missing image" in out
    status, out = called("--data.name", "digit_scenes", "--data.rows", "8")
    assert status == 0 and "8 rows looked at, 8 good, 0 bad" in out
    assert called("--data.path", "gone.json")[0] == 2
    assert main([path, "--check", "--max_length", "149"]) == 1
    assert "limit: 149" in capsys.readouterr().out
    assert not (tmp_path / "stage1").exists()


# --- batches that teach nothing


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_without_a_supervised_token_changes_nothing(recipe_file, tmp_path, accumulation):
    """R69: alone, and as one of the parts of a step."""
    recipe = load_recipe(
        recipe_file(1, tmp_path, max_steps=1, gradient_accumulation=accumulation, tune={"language": "full"})
    )
    model, processor = load_or_compose(recipe, load_data(recipe))
    model.requires_grad_(True)
    model.model.vision_tower.requires_grad_(False)
    trainer = build_trainer(model, processor, load_data(recipe), recipe)
    collate, calls = trainer.data_collator, []

    def silent(rows):
        batch = collate(rows)
        calls.append(len(rows))
        if len(calls) == 1:
            batch["labels"][:] = -100
        return batch

    trainer.data_collator = silent
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    after = model.state_dict()
    assert all(torch.isfinite(value).all() for value in after.values())
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert bool(moved) == (accumulation == 2)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_row_of_padding_alone_spoils_no_other(tiny_model, tiny_batch, attention):
    """R70: the attention mask of a row may be all zero."""
    tiny_model.set_attn_implementation(attention)
    alone = {key: value[:1] for key, value in tiny_batch.items()}
    expected = tiny_model(**alone).logits
    ids = torch.cat([alone["input_ids"], torch.zeros_like(alone["input_ids"])])
    mask = torch.cat([alone["attention_mask"], torch.zeros_like(alone["attention_mask"])])
    labels = ids.masked_fill(mask == 0, -100)
    output = tiny_model(input_ids=ids, attention_mask=mask, pixel_values=alone["pixel_values"], labels=labels)
    output.loss.backward()
    assert torch.isfinite(output.logits).all()
    assert torch.allclose(output.logits[0], expected[0], atol=1e-5)
    assert all(torch.isfinite(p.grad).all() for p in tiny_model.parameters() if p.grad is not None)


# --- masks


def byte_level():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*specials, *letters, "th", "Ġt"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("Ġ", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def unigram():
    """As of sentencepiece: words begin with a mark, spaces are part of the pieces, turns have no tokens of their own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted({*"▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:?.,+!\n"})
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁the", -2.0), ("▁R", -3.0), *((letter, -5.0) for letter in letters)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", pad_token="<unk>")


def adding_bos():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["<s>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*specials, *letters])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    options = {"bos_token": "<s>", "eos_token": "<|eot_id|>", "pad_token": "<|eot_id|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


DIALOGUE = [
    {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
    user(None, "What is the number?\nRed, or the other?"),
    {"role": "assistant", "content": [{"type": "text", "text": "Red, the 7."}]},
    user("And here", None, "and", None),
    {"role": "assistant", "content": [{"type": "text", "text": "the Red"}]},
]
ANSWERS = ["Red, the 7.", "the Red"]


@pytest.mark.parametrize(
    ("make", "family", "starts_with"),
    [(byte_level, "chatml", None), (unigram, "llava", None), (adding_bos, "llama3", "<s>")],
)
def test_the_mask_is_the_assistants_tokens_where_images_are_expanded(tmp_path, make, family, starts_with):
    """R07, R28: for three kinds of tokenizers, against the places of the answers in the rendered text."""
    from transformers import LlavaProcessor, SiglipImageProcessorPil

    from normalign.assembly.chat_templates import chat_template_for

    tokenizer = make()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    template = chat_template_for(tokenizer)
    assert template.family == family
    image_processor = SiglipImageProcessorPil(size={"height": 16, "width": 16})
    processor = LlavaProcessor(
        image_processor, tokenizer, patch_size=4, vision_feature_select_strategy="full", chat_template=template.text
    )
    images = [Image.new("RGB", (20, 20), name) for name in ("red", "green", "blue")]
    places = iter(images)
    filled = [
        {**m, "content": [{**p, "image": next(places)} if p["type"] == "image" else p for p in m["content"]]}
        for m in DIALOGUE
    ]
    output = processor.apply_chat_template(
        [filled],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        processor_kwargs={"add_special_tokens": False},
    )
    ids, mask = list(output["input_ids"][0]), [int(value) for value in output["assistant_masks"][0]]

    # the oracle: where the answers and the token that ends them stand in the expanded text
    text = processor.apply_chat_template(DIALOGUE, tokenize=False).replace("<image>", "<image>" * 16)
    taught, start = set(), 0
    for answer in ANSWERS:
        begin = text.index(answer + template.end_of_turn, start)
        start = begin + len(answer + template.end_of_turn)
        taught |= set(range(begin, start))
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert ids == tokens["input_ids"]
    expected = [int(any(place in taught for place in range(*span))) for span in tokens["offset_mapping"]]
    assert mask == expected
    assert ids.count(processor.image_token_id) == 3 * 16
    if starts_with:
        assert [n for n, token in enumerate(ids) if token == tokenizer.bos_token_id] == [0] and mask[0] == 0

    # the check counts the same
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": DIALOGUE, "images": ["a.png"] * 3}))
    images[0].save(tmp_path / "a.png")
    recipe = recipe_of(tmp_path / "x.jsonl", max_length=len(ids))
    report = check_rows(load_data(recipe), processor, recipe, progress=False)
    assert list(report.lengths) == [len(ids)] and not report.bad
    report = check_rows(
        load_data(recipe), processor, recipe_of(recipe.data.path, max_length=len(ids) - 1), progress=False
    )
    assert report.kinds == {"too long": 1}


def test_the_chat_template_is_the_same_in_processor_and_tokenizer_after_reloading(composed, tmp_path):
    """R77."""
    from transformers import AutoProcessor, AutoTokenizer

    composed[1].save_pretrained(tmp_path)
    found = [AutoProcessor.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)]
    texts = [one.apply_chat_template(DIALOGUE, tokenize=False) for one in (*found, composed[1])]
    assert texts[0] == texts[1] == texts[2]


def test_two_different_chat_templates_are_refused(composed):
    """R77."""
    processor = copy.deepcopy(composed[1])
    check_processor(processor)
    processor.tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(NormalignError, match="processor and its tokenizer have different chat templates"):
        check_processor(processor)
