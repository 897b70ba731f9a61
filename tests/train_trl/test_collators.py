"""Batches: what is in them, rows end to end that do not see one another, and rows of like length together."""

import copy
import io
import json
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, skip_first_batches
from datasets import Dataset, Image, Sequence
from PIL import Image as PillowImage
from safetensors.torch import load_file
from torch.utils.data import BatchSampler

from normalign.configuration.errors import NormalignError
from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign.train_trl import load_recipe, train
from normalign.train_trl.collators import (
    IGNORED,
    SDPA_BY_ROW,
    PaddedCollator,
    PaddingFreeCollator,
    lay_end_to_end,
    prepare_padding_free,
    sdpa_by_row,
)
from normalign.train_trl.length_groups import LengthGroups, row_lengths
from normalign.train_trl.training import build_trainer, load_data, load_or_compose


IMAGE_TOKEN = 60  # of tiny_config
IMAGE = [IMAGE_TOKEN] * 4
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"head_dim": 12, "sliding_window": 4, "num_hidden_layers": 6},
}


def picture(colour):
    return PillowImage.new("RGB", (20, 30), colour)


def as_png(image):
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def row(question, answer, *images):
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
    return {
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ],
        "images": list(images),
    }


@pytest.fixture
def rows():
    """One image, none, two images, none."""
    return [
        row("What colour is it?", "red", picture("red")),
        row("How are you? " * 6, "well, and you?"),
        row("Which is darker?", "the second", picture("white"), picture("navy")),
        row("Yes?", "no"),
    ]


@pytest.fixture(scope="module")
def token_batch():
    """Rows of one image, none, two and none as a padded batch for `tiny_config`, and each row's ids and images."""
    rows = [[1, *IMAGE, 5, 6, 7], [1, *range(8, 18)], [1, *IMAGE, 3, *IMAGE, 9], [1, 20]]
    longest = max(map(len, rows))
    ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in rows])
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    batch = {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": ids.masked_fill((ids == 0) | (ids == IMAGE_TOKEN), IGNORED),
        "pixel_values": pixels,
    }
    return SimpleNamespace(batch=batch, rows=rows, images=[pixels[:1], None, pixels[1:], None])


@pytest.fixture
def family(tiny_config):
    """A function that makes a tiny random model of a language model family with an attention implementation."""

    def make(name, attention="sdpa", **text):
        torch.manual_seed(0)
        model = NormAlignLlavaForConditionalGeneration(tiny_config(name, {**FAMILIES.get(name, {}), **text})).eval()
        model.get_decoder().config._attn_implementation = attention
        return model

    return make


# --- padded


def test_labels_are_the_assistants_words_and_its_end_of_turn(composed, rows):
    """R05: rows with one image, none and several in one batch."""
    _, processor = composed
    batch = PaddedCollator(processor, assistant_only_loss=True)(rows)
    learnt = [processor.tokenizer.decode(labels[labels != IGNORED]).strip() for labels in batch["labels"]]
    assert learnt == [f"{answer}<|im_end|>" for answer in ("red", "well, and you?", "the second", "no")]
    per_image = 16
    placeholders = (batch["input_ids"] == processor.image_token_id).sum(1).tolist()
    assert placeholders == [per_image, 0, 2 * per_image, 0]
    assert batch["pixel_values"].shape == (3, 3, 64, 64)
    brightness = batch["pixel_values"].mean((1, 2, 3))
    assert brightness[1] > brightness[0] > brightness[2]


def test_a_batch_without_an_image_has_no_pixel_values(composed, rows):
    """R05: only text."""
    for kind in (PaddedCollator, PaddingFreeCollator):
        batch = kind(composed[1], assistant_only_loss=True)([rows[1], {**rows[3], "images": None}])
        assert "pixel_values" not in batch


def test_images_may_come_undecoded(composed, rows, tmp_path):
    collator = PaddedCollator(composed[1], assistant_only_loss=True)
    expected = collator(rows)
    picture("white").save(tmp_path / "white.png")
    rows[0]["images"] = [{"bytes": as_png(picture("red")), "path": None}]
    rows[2]["images"] = [str(tmp_path / "white.png"), {"bytes": None, "path": str(tmp_path / "white.png")}]
    found = collator(rows)
    assert torch.equal(found["pixel_values"][:2], expected["pixel_values"][:2])
    assert torch.equal(found["pixel_values"][1], found["pixel_values"][2])


def test_no_row_is_cut(composed):
    """R02, R04: a limit would cut into an image's placeholders; a row is longer than the model's limit and stays whole."""
    _, processor = composed
    batch = PaddingFreeCollator(processor, assistant_only_loss=True)([row("word " * 3000, "yes", picture("red"))])
    assert batch["input_ids"].shape[1] > 3000
    assert processor.tokenizer.decode(batch["input_ids"][0, -4:]).strip().endswith("yes<|im_end|>")


# --- padding-free


def test_rows_lie_end_to_end_with_positions_that_start_anew():
    batch = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 0, 0], [9, 4, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]),
        "labels": torch.tensor([[5, 6, 7], [8, -100, -100], [9, 4, -100]]),
        "pixel_values": torch.ones(1, 3, 2, 2),
    }
    laid = lay_end_to_end(batch, boundaries=True)
    assert laid["input_ids"].tolist() == [[5, 6, 7, 8, 9, 4]]
    assert laid["labels"].tolist() == [[-100, 6, 7, -100, -100, 4]]
    assert laid["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert laid["cu_seq_lens_q"].tolist() == laid["cu_seq_lens_k"].tolist() == [0, 3, 4, 6]
    assert laid["cu_seq_lens_q"].dtype == torch.int32
    assert laid["max_length_q"] == laid["max_length_k"] == 3
    assert torch.equal(laid["pixel_values"], batch["pixel_values"])
    assert "attention_mask" not in laid
    assert set(lay_end_to_end(batch)) == {"input_ids", "labels", "position_ids", "pixel_values"}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_row_among_others_gives_what_it_gives_alone(family, token_batch, name, attention):
    """R13: positions and attention do not leak from row to row; sliding windows and text-only rows included."""
    model = family(name, attention)
    alone = [
        model(input_ids=torch.tensor([ids]), pixel_values=pixels, use_cache=False).logits[0]
        for ids, pixels in zip(token_batch.rows, token_batch.images)
    ]
    padded = model(**token_batch.batch, use_cache=False)
    assert prepare_padding_free(model) is False
    assert model.get_decoder().config._attn_implementation == (SDPA_BY_ROW if attention == "sdpa" else "eager")
    laid = model(**lay_end_to_end(token_batch.batch), use_cache=False)
    torch.testing.assert_close(laid.logits[0], torch.cat(alone), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(laid.loss, padded.loss, atol=1e-5, rtol=1e-5)
    # and what a padded batch gives is left as it was
    torch.testing.assert_close(model(**token_batch.batch, use_cache=False).logits, padded.logits, atol=0, rtol=0)


@torch.no_grad()
def test_another_row_changes_not_a_bit(family, token_batch):
    """R13: whatever stands before it."""
    model = family("llama")
    prepare_padding_free(model)
    batch = lay_end_to_end(token_batch.batch)
    before = model(**batch, use_cache=False).logits[0]
    batch["input_ids"][0, 9:12] = 33  # in the second row, which begins at 8 and has 11 tokens
    after = model(**batch, use_cache=False).logits[0]
    assert torch.equal(before[:8], after[:8]) and torch.equal(before[19:], after[19:])
    assert not torch.allclose(before[8:19], after[8:19], atol=1e-3)


def test_attention_by_row_is_attention_over_the_whole_mask():
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(1, 2, 9, 4, generator=generator) for _ in range(3)]
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4]])
    row_of = (positions[0] == 0).cumsum(0)
    mask = (row_of[:, None] == row_of) & torch.ones(9, 9, dtype=torch.bool).tril()
    module = SimpleNamespace(is_causal=True)
    found, _ = sdpa_by_row(module, *states, mask[None, None], position_ids=positions)
    expected = torch.nn.functional.scaled_dot_product_attention(*states, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(found, expected)


def test_projector_and_norm_get_the_gradient_of_the_padded_batch(family, token_batch):
    """With GWC, which divides it by mu."""
    gradients = []
    for laid in (False, True):
        model = family("llama").train()
        assert model.get_aligned_norm().gwc
        if laid:
            prepare_padding_free(model)
        model(**(lay_end_to_end(token_batch.batch) if laid else token_batch.batch), use_cache=False).loss.backward()
        projector = model.model.multi_modal_projector
        gradients.append({name: weight.grad for name, weight in projector.named_parameters()})
    assert {"aligned_norm.weight", "linear_1.weight"} <= gradients[0].keys()
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mamba2", {"num_heads": 4, "head_dim": 24}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("falcon_h1", {}),
    ],
)
def test_language_models_that_mix_rows_are_refused_by_name(family, name, text):
    """R13: state spaces and convolutions carry from row to row, whatever the mask says."""
    with pytest.raises(NormalignError, match=f"language model of type '{name}'.*batching: padded"):
        prepare_padding_free(family(name, "eager", **text))


def test_a_language_model_whose_positions_run_on_is_refused(family):
    model = family("llama")
    forward = model.get_decoder().rotary_emb.forward
    tables = torch.nn.Embedding(16, 48)

    def absolute(states, position_ids):
        states += tables(torch.arange(states.shape[1]))
        return forward(states, position_ids=position_ids)

    model.get_decoder().rotary_emb.forward = absolute
    with pytest.raises(NormalignError, match="'llama': its positions do not start anew"):
        prepare_padding_free(model)


def test_the_check_leaves_modes_and_random_numbers_as_they_are(family):
    model = family("llama").train()
    model.model.language_model.layers[0].eval()
    modes, state = [module.training for module in model.modules()], torch.random.get_rng_state()
    prepare_padding_free(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), state)


@torch.no_grad()
def test_boundaries_for_flash_attention_do_not_reach_the_vision_encoder(family, token_batch):
    """They are those of text; the encoder's FlashAttention would cut its images by them."""
    model, seen = family("llama"), {}
    model.get_decoder().config._attn_implementation = "flash_attention_2"
    assert prepare_padding_free(model) is True
    assert model.get_decoder().config._attn_implementation == "flash_attention_2"
    model.get_decoder().config._attn_implementation = "eager"
    for name in ("vision_tower", "language_model"):
        part = getattr(model.model, name)
        # hooks of a module run in the order they were put on
        part.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: seen.update({name: kwargs}), with_kwargs=True
        )
    model(**lay_end_to_end(token_batch.batch, boundaries=True), use_cache=False)
    assert not {"cu_seq_lens_q", "max_length_q"} & seen["vision_tower"].keys()
    assert {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"} <= seen["language_model"].keys()


@pytest.fixture(scope="module")
def trained(recipe_file, tmp_path_factory):
    """Weights and logged losses of four steps of two parts each, both ways."""
    results = {}
    for batching in ("padded", "padding_free"):
        folder = tmp_path_factory.mktemp(batching)
        changes = {"batching": batching, "gradient_accumulation": 2, "data": {"rows": 16, "stage": 2}}
        out = train(recipe_file(1, folder, **changes))
        log = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
        results[batching] = load_file(out / "model.safetensors"), log
    return results


def test_training_padding_free_gives_the_weights_of_training_padded(trained):
    """The loss is a mean over the same supervised tokens, over both parts of a step; one row in ten is text alone."""
    (padded, padded_log), (laid, laid_log) = trained["padded"], trained["padding_free"]
    assert [record["loss"] for record in laid_log] == pytest.approx(
        [record["loss"] for record in padded_log], abs=1e-5
    )
    assert len(laid_log) == 4
    for name, weight in padded.items():
        torch.testing.assert_close(laid[name], weight, atol=1e-5, rtol=1e-4)


def test_a_batch_without_a_supervised_token_leaves_the_weights_finite(composed, recipe_file, tmp_path):
    """R69: its loss is 0, not 0 / 0."""
    recipe = load_recipe(recipe_file(1, tmp_path, batching="padding_free"))
    data = load_data(recipe)
    model, processor = load_or_compose(recipe, data)
    trainer = build_trainer(model, processor, data, recipe)
    batch = trainer.data_collator([data[0], data[1]])
    batch["labels"].fill_(IGNORED)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.training_step(model, batch, torch.tensor(0))
    assert loss.item() == 0
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


# --- rows of like length


def lengths_of(count=200):
    return torch.randint(10, 400, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def test_each_row_comes_once_and_batches_are_of_like_length():
    lengths = lengths_of()
    order = list(LengthGroups(lengths, 8, seed=1))
    assert sorted(order) == list(range(200))

    def padding(rows):
        batches = [[lengths[i] for i in rows[start : start + 8]] for start in range(0, 200, 8)]
        return 1 - sum(map(sum, batches)) / sum(max(batch) * len(batch) for batch in batches)

    assert padding(order) < 0.2 < 0.4 < padding(range(200))
    assert lengths[order[0]] == max(lengths)
    means = [sum(lengths[i] for i in order[start : start + 8]) for start in range(0, 200, 8)]
    assert means[1:] != sorted(means[1:], reverse=True)


def test_the_order_follows_from_seed_and_epoch_alone():
    sampler, again = LengthGroups(lengths_of(), 8, seed=1), LengthGroups(lengths_of(), 8, seed=1)
    torch.manual_seed(5)
    first = list(sampler)
    torch.manual_seed(6)
    assert first == list(again)
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(LengthGroups(lengths_of(), 8, seed=2)) != first


@pytest.mark.parametrize("count", [1, 3, 8, 9, 16, 17, 33])
def test_few_rows_come_once_too(count):
    assert sorted(LengthGroups(lengths_of(count), 8)) == list(range(count))


def test_processes_share_a_step_of_like_rows():
    """accelerate deals the batches of a step out in turn; together they are one group."""
    lengths = lengths_of(64)
    shards = [
        list(BatchSamplerShard(BatchSampler(LengthGroups(lengths, 8), 4, False), num_processes=2, process_index=i))
        for i in range(2)
    ]
    order = list(LengthGroups(lengths, 8))
    assert [[*a, *b] for a, b in zip(*shards)] == [order[start : start + 8] for start in range(0, 64, 8)]


def test_lengths_are_those_of_the_tokens_without_decoding_an_image(composed, rows):
    _, processor = composed
    expected = PaddedCollator(processor, assistant_only_loss=True)(rows)["attention_mask"].sum(1).tolist()
    plain = [{**r, "images": [{"bytes": as_png(i), "path": None} for i in r["images"]]} for r in rows]
    data = Dataset.from_list(plain).cast_column("images", Sequence(Image()))
    assert row_lengths(data, processor) == expected
    # what is no image at all has a length too
    broken = [{**r, "images": [{"bytes": b"no image", "path": None} for _ in r["images"]]} for r in plain]
    assert row_lengths(Dataset.from_list(broken).cast_column("images", Sequence(Image())), processor) == expected


def test_streamed_rows_cannot_be_grouped(composed, rows):
    data = Dataset.from_list([{**r, "images": []} for r in rows]).to_iterable_dataset()
    with pytest.raises(NormalignError, match="group_by_length .* data.streaming: false"):
        row_lengths(data, composed[1])


def test_a_resumed_run_goes_on_in_the_same_order(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file(1, tmp_path, group_by_length=True, data={"rows": 24, "stage": 2}))
    data = load_data(recipe)
    model, processor = load_or_compose(recipe, data)

    def batches(skip):
        trainer = build_trainer(copy.deepcopy(model), processor, data, recipe)
        loader = trainer.get_train_dataloader()
        loader = skip_first_batches(loader, skip) if skip else loader
        loader.set_epoch(1)
        return [batch["input_ids"].tolist() for batch in loader]

    whole = batches(0)
    assert len(whole) == 6
    torch.manual_seed(99)
    assert batches(2) == whole[2:]
