"""The kept outputs of a frozen encoder: encoded once, the same training with them, and no wrong or torn ones used."""

import copy
import json
import logging
import pickle
import shutil
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, Image, Sequence
from PIL import Image as PillowImage
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import SiglipImageProcessor, SiglipVisionModel

from normalign.configuration.errors import NormalignError
from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign.train_trl import load_recipe, train, vision_cache
from normalign.train_trl.collators import PaddedCollator, PaddingFreeCollator
from normalign.train_trl.digit_scenes import digit_scenes_dataset
from normalign.train_trl.training import build_trainer, load_data, load_or_compose
from normalign.train_trl.vision_cache import (
    encoder_of,
    fill_cache,
    image_key,
    read_from_cache,
    without_decoding,
)


@pytest.fixture(scope="module")
def rows():
    """Twelve scenes, one or two without a picture, undecoded."""
    return without_decoding(digit_scenes_dataset(12, seed=0, stage=2, text_only_share=0.2))


@pytest.fixture(scope="module")
def pair(recipe_file, tmp_path_factory):
    """A tiny model with a frozen encoder, and its processor."""
    recipe = load_recipe(recipe_file(1, tmp_path_factory.mktemp("pair")))
    model, processor = load_or_compose(recipe, load_data(recipe))
    encoder_of(model).requires_grad_(False)
    return model, processor


@pytest.fixture
def encoded(pair, monkeypatch):
    """How many images the encoder was given, one number a pass; the first of an opening is a blank one."""
    counts, encoder = [], encoder_of(pair[0])
    handle = encoder.register_forward_pre_hook(lambda _, args: counts.append(len(args[0])))
    yield counts
    handle.remove()


def pictures(rows):
    return [image for row in rows for image in row["images"]]


# --- filling and reading


def test_each_image_is_encoded_once_for_all_runs(pair, rows, tmp_path, encoded):
    images = pictures(rows)
    assert len(images) < len(rows)
    cache = fill_cache(*pair, rows, tmp_path)
    assert encoded == [1, len(images)]
    again = fill_cache(*pair, rows, tmp_path)
    assert encoded == [1, len(images), 1]
    assert again.places == cache.places
    assert len(cache.places) == len(images)


def test_what_is_read_is_what_the_encoder_gives(pair, rows, tmp_path):
    model, processor = pair
    cache = fill_cache(model, processor, rows, tmp_path)
    decoded = digit_scenes_dataset(12, seed=0, stage=2, text_only_share=0.2)
    pixels = processor.image_processor(images=pictures(decoded), return_tensors="pt")["pixel_values"]
    layer = model.config.vision_feature_layer
    with torch.no_grad():
        expected = encoder_of(model)(pixels, output_hidden_states=True).hidden_states[layer]
    found = cache.read(pictures(rows)).view(-1, *cache.shape)
    assert cache.shape == (1, 4, 32)
    torch.testing.assert_close(found[:, 0], expected, atol=1e-6, rtol=1e-6)


def test_a_collator_gives_the_same_tokens_with_the_cache_as_without(pair, rows, tmp_path):
    model, processor = pair
    cache = fill_cache(model, processor, rows, tmp_path)
    batch = [rows[i] for i in range(len(rows))]
    for kind in (PaddedCollator, PaddingFreeCollator):
        plain = kind(processor, assistant_only_loss=True)(batch)
        cached = kind(processor, assistant_only_loss=True, vision_cache=cache)(batch)
        assert plain.keys() == cached.keys()
        for name in plain.keys() - {"pixel_values"}:
            assert torch.equal(plain[name], cached[name]), name
        assert cached["pixel_values"].shape == (len(pictures(rows)), 4 * 32)


def test_the_model_takes_features_in_place_of_pixels_and_pixels_still(recipe_file, rows, tmp_path):
    recipe = load_recipe(recipe_file(1, tmp_path))
    model, processor = load_or_compose(recipe, load_data(recipe))
    encoder_of(model).requires_grad_(False)
    keys = list(model.state_dict())
    batch = [rows[i] for i in range(4)]
    pixels = PaddedCollator(processor, assistant_only_loss=True)(batch)
    with torch.no_grad():
        expected = model(**pixels).logits
    cache = fill_cache(model, processor, rows, tmp_path / "cache")
    read_from_cache(model, cache)
    features = PaddedCollator(processor, assistant_only_loss=True, vision_cache=cache)(batch)
    with torch.no_grad():
        assert torch.equal(model(**pixels).logits, expected)
        torch.testing.assert_close(model(**features).logits, expected, atol=1e-6, rtol=1e-6)
    assert list(model.state_dict()) == keys
    # a copy encodes with its own weights
    other = copy.deepcopy(model)
    with torch.no_grad():
        encoder_of(other).embeddings.position_embedding.weight.zero_()
        assert not torch.allclose(other(**pixels).logits, expected, atol=1e-4)
        assert torch.equal(model(**pixels).logits, expected)


@pytest.mark.parametrize(("layers", "strategy"), [(-2, "default"), ([-3, -1], "full"), ([-3, -1], "default")])
@torch.no_grad()
def test_several_layers_and_a_class_token_are_kept_as_the_model_takes_them(tiny_config, tmp_path, layers, strategy):
    config = tiny_config(vision_feature_layer=layers)
    config.vision_feature_select_strategy = strategy
    torch.manual_seed(0)
    model = NormAlignLlavaForConditionalGeneration(config).eval()
    encoder_of(model).requires_grad_(False)
    processor = SimpleNamespace(image_processor=SiglipImageProcessor(size={"height": 16, "width": 16}))
    images = [PillowImage.linear_gradient("L").convert("RGB").rotate(90 * turns) for turns in range(2)]
    data = Dataset.from_dict({"images": [images]}).cast_column("images", Sequence(Image(decode=False)))
    cache = fill_cache(model, processor, data, tmp_path)
    assert cache.visual_tokens == (4 if strategy == "full" else 3)
    ids = torch.tensor([[1, *[60] * cache.visual_tokens * 2, 5]])
    pixels = processor.image_processor(images=images, return_tensors="pt")["pixel_values"]
    expected = model(input_ids=ids, pixel_values=pixels).logits
    read_from_cache(model, cache)
    found = model(input_ids=ids, pixel_values=cache.read(data[0]["images"])).logits
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    swapped = model(input_ids=ids, pixel_values=cache.read(data[0]["images"][::-1])).logits
    assert not torch.allclose(swapped, expected, atol=1e-4)


def test_a_training_with_the_cache_is_the_training_without(recipe_file, tmp_path, monkeypatch):
    """Two epochs and two data workers, the same weights and names; and the encoder does not run after the filling."""
    changes = {"epochs": 2, "data": {"rows": 8, "stage": 2}, "save_steps": 2}
    plain = train(recipe_file(1, tmp_path / "plain", **changes))
    passes, encode = [], SiglipVisionModel.forward

    def counted(self, pixel_values, **kwargs):
        passes.append(len(pixel_values))
        return encode(self, pixel_values, **kwargs)

    monkeypatch.setattr(SiglipVisionModel, "forward", counted)
    cached = recipe_file(1, tmp_path / "cached", cache_vision_features=True, dataloader_workers=2, **changes)
    folder = train(cached)
    # the blank image and those of the data; the four steps after it do not encode
    assert passes[-2] == 1 and 4 < passes[-1] <= 8
    assert (tmp_path / "cached" / "vision_cache" / "cache.json").is_file()
    for file in ("model.safetensors", "checkpoint-2/model.safetensors"):
        expected, found = load_file(plain / file), load_file(folder / file)
        assert expected.keys() == found.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=1e-6)
    losses = [
        [json.loads(line)["loss"] for line in (out / "train_log.jsonl").read_text().splitlines()]
        for out in (plain, folder)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_data_workers_read_it_and_it_crosses_processes(pair, rows, tmp_path):
    cache = fill_cache(*pair, rows, tmp_path)
    expected = cache.read(pictures(rows))
    assert torch.equal(pickle.loads(pickle.dumps(cache)).read(pictures(rows)), expected)
    loader = DataLoader(pictures(rows), batch_size=len(expected), num_workers=2, collate_fn=cache.read)
    assert torch.equal(next(iter(loader)), expected)


def test_bfloat16_is_kept_as_the_projector_would_round_it(pair, rows, tmp_path):
    full = fill_cache(*pair, rows, tmp_path / "full").read(pictures(rows))
    half = fill_cache(*pair, rows, tmp_path / "half", bfloat16=True).read(pictures(rows))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), full, atol=0.05, rtol=0.05)
    with pytest.raises(NormalignError, match="number type is bfloat16 there, float32 here"):
        fill_cache(*pair, rows, tmp_path / "half")


# --- which image is which


def test_an_image_is_known_by_its_content(tmp_path):
    red, blue = PillowImage.new("RGB", (9, 7), "red"), PillowImage.new("RGB", (9, 7), "blue")
    red.save(tmp_path / "a.png")
    red.save(tmp_path / "b.png")
    content = (tmp_path / "a.png").read_bytes()
    forms = [tmp_path / "a.png", str(tmp_path / "b.png"), content, {"bytes": content, "path": "elsewhere"}]
    forms.append({"bytes": None, "path": str(tmp_path / "a.png")})
    assert len({image_key(form) for form in forms}) == 1
    assert image_key(red) == image_key(red.copy()) != image_key(blue)
    # the same bytes in another shape are another picture
    assert image_key(red) != image_key(PillowImage.new("RGB", (7, 9), "red"))


def test_an_image_that_the_cache_lacks_is_an_error(pair, rows, tmp_path):
    cache = fill_cache(*pair, rows.select([0, 1]), tmp_path)
    with pytest.raises(NormalignError, match="is not in the vision cache"):
        cache.read([PillowImage.new("RGB", (8, 8), "red")])


def test_rows_stay_undecoded():
    data = Dataset.from_dict({"images": [[{"bytes": b"no image", "path": None}], []]})
    data = data.cast_column("images", Sequence(Image()))
    assert without_decoding(data)[0]["images"][0]["bytes"] == b"no image"


# --- what is refused


def test_another_encoder_is_refused_with_what_differs(pair, rows, tmp_path):
    model, processor = pair
    fill_cache(model, processor, rows, tmp_path)
    weight = next(encoder_of(model).parameters())
    with torch.no_grad():
        weight[0] += 1
    with pytest.raises(NormalignError, match="another encoder or image size: the encoder's weights are not the same"):
        fill_cache(model, processor, rows, tmp_path)
    with torch.no_grad():
        weight[0] -= 1


def test_another_layer_or_image_size_is_refused(pair, rows, tmp_path, monkeypatch):
    model, processor = pair
    fill_cache(model, processor, rows, tmp_path)
    monkeypatch.setattr(model.config, "vision_feature_layer", -1)
    with pytest.raises(NormalignError, match=r"layers is \[-2\] there, \[-1\] here"):
        fill_cache(model, processor, rows, tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(processor.image_processor, "image_mean", [0.1, 0.1, 0.1])
    with pytest.raises(NormalignError, match=r"image processor.image_mean is \[0.5, 0.5, 0.5\] there, \[0.1"):
        fill_cache(model, processor, rows, tmp_path)


def test_an_encoder_that_is_trained_is_refused(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file(1, tmp_path, cache_vision_features=True))
    data = load_data(recipe)
    model, processor = load_or_compose(recipe, data)
    encoder_of(model).encoder.layers[0].requires_grad_(True)
    with pytest.raises(NormalignError, match="the vision encoder is trained"):
        build_trainer(model, processor, data, recipe)
    assert not (tmp_path / "vision_cache").exists()


def test_streamed_rows_are_refused(pair, rows, tmp_path):
    with pytest.raises(NormalignError, match="data.streaming: false"):
        fill_cache(*pair, rows.to_iterable_dataset(), tmp_path)


def test_a_disk_without_the_room_is_refused_before_anything_is_encoded(pair, rows, tmp_path, monkeypatch, encoded):
    usage = namedtuple("usage", "total used free")
    need = len(pictures(rows)) * 4 * 32 * 4
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, need - 1))
    with pytest.raises(NormalignError, match=r"images x 4 tokens x 32 values x 4 bytes = 0\.0 MB, but its disk has"):
        fill_cache(*pair, rows, tmp_path)
    assert encoded == [1]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, need))
    assert len(fill_cache(*pair, rows, tmp_path).places) == len(pictures(rows))


# --- what was broken off


@pytest.fixture
def small_shards(monkeypatch):
    """Two images a shard."""
    monkeypatch.setattr(vision_cache, "_SHARD_BYTES", 2 * 4 * 32 * 4)


def test_a_torn_shard_alone_is_encoded_again(pair, rows, tmp_path, encoded, small_shards, caplog):
    images = pictures(rows)
    expected = fill_cache(*pair, rows, tmp_path).read(images)
    shards = sorted(tmp_path.glob("features-*"))
    assert len(shards) == -(-len(images) // 2) > 2
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[: len(whole) // 2])
    encoded.clear()
    with caplog.at_level(logging.WARNING):
        cache = fill_cache(*pair, rows, tmp_path)
    assert f"{shards[1]} is not whole" in caplog.text
    assert encoded == [1, 2]
    torch.testing.assert_close(cache.read(images), expected, atol=1e-6, rtol=1e-6)
    assert sorted(tmp_path.glob("features-*")) == shards


def test_a_run_that_was_broken_off_goes_on_where_it_was(pair, rows, tmp_path, encoded, small_shards, monkeypatch):
    images = pictures(rows)
    write, written = vision_cache._write_shard, []

    def break_off(*args):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(write(*args))

    monkeypatch.setattr(vision_cache, "_write_shard", break_off)
    with pytest.raises(KeyboardInterrupt):
        fill_cache(*pair, rows, tmp_path)
    monkeypatch.setattr(vision_cache, "_write_shard", write)
    encoded.clear()
    cache = fill_cache(*pair, rows, tmp_path)
    assert sum(encoded) == 1 + len(images) - 4
    assert len(cache.places) == len(images)


def test_a_full_disk_is_one_paragraph_and_leaves_no_part_behind(pair, rows, tmp_path, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(vision_cache, "save_file", full)
    with pytest.raises(NormalignError, match="could not be written .*No space left"):
        fill_cache(*pair, rows, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cache.json"]


@pytest.fixture
def process(monkeypatch):
    """A function that makes this one of two processes, which do not wait for each other."""

    def become(index):
        state = SimpleNamespace(num_processes=2, process_index=index, is_main_process=index == 0)
        state.device, state.wait_for_everyone = torch.device("cpu"), lambda: None
        monkeypatch.setattr("accelerate.PartialState", lambda: state)

    return become


def test_of_two_processes_each_encodes_a_share(pair, rows, tmp_path, encoded, process):
    images = pictures(rows)
    process(1)
    with pytest.raises(NormalignError, match="images that another process encoded are not in the vision cache"):
        fill_cache(*pair, rows, tmp_path)
    share = sum(encoded) - 1
    assert 0 < share < len(images)
    encoded.clear()
    process(0)
    cache = fill_cache(*pair, rows, tmp_path)
    # as this one began later, it lacked only what was its own
    assert sum(encoded) - 1 == len(images) - share
    assert len(cache.places) == len(images)
