"""record_norms: its hooks go away, it works in training and generation, and keeps nothing per token."""

import gc
import json
from pathlib import Path

import pytest
import torch

from normalign.configuration.errors import NormalignError
from normalign.inspection.record import record_norms

from .hooks import hooks_on
from .reference import layer_means, record


pytestmark = pytest.mark.both_generations


def test_hooks_are_gone_afterwards_also_after_an_error(tiny_model, tiny_batch):
    before = hooks_on(tiny_model)
    with record_norms(tiny_model):
        tiny_model(**tiny_batch)
        assert hooks_on(tiny_model) > before
    assert hooks_on(tiny_model) == before
    with pytest.raises(ZeroDivisionError), record_norms(tiny_model):
        1 / 0
    assert hooks_on(tiny_model) == before


def test_an_error_inside_the_forward_pass_leaves_no_hook_and_no_state(tiny_model, tiny_batch, monkeypatch):
    with record_norms(tiny_model) as recorder:
        with monkeypatch.context() as patch:
            patch.setattr(tiny_model.lm_head, "forward", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                tiny_model(**tiny_batch)
        assert recorder._masks is None and recorder._first is None
    assert hooks_on(tiny_model) == 0


def test_hooks_that_cannot_all_be_put_on_are_taken_off(tiny_model, monkeypatch):
    monkeypatch.setattr(tiny_model.get_decoder().layers[1], "register_forward_hook", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError), record_norms(tiny_model):
        pass
    assert hooks_on(tiny_model) == 0


def test_several_forward_passes_are_taken_together(tiny_model, tiny_batch):
    layers = tiny_model.get_decoder().layers
    visual = tiny_batch["input_ids"] == 60
    masks = {"visual": visual, "text": tiny_batch["attention_mask"].bool() & ~visual}
    batches = [tiny_batch, {**tiny_batch, "pixel_values": tiny_batch["pixel_values"] * 3}]
    kept = [record(tiny_model, batch, layers) for batch in batches]
    with record_norms(tiny_model) as recorder, torch.no_grad():
        for batch in batches:
            tiny_model(**batch)
    for i, layer in enumerate(recorder.to_dict()["layers"]):
        for modality, mask in masks.items():
            tokens = [
                torch.cat([states[mask] for states in column])
                for column in zip(*[(one.before[i], one.after[i], one.before[0]) for one in kept])
            ]
            assert layer[modality] == pytest.approx(layer_means(*tokens), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_is_left_alone_and_no_layer_is_counted_twice(tiny_model, tiny_batch, checkpointing):
    """Checkpointing runs each layer again in the backward pass."""
    labels = tiny_batch["input_ids"].where(tiny_batch["attention_mask"].bool(), -100)
    tiny_model.train()
    if checkpointing:
        tiny_model.gradient_checkpointing_enable()

    def gradients():
        tiny_model.zero_grad()
        tiny_model(**tiny_batch, labels=labels).loss.backward()
        return [p.grad.clone() for p in tiny_model.parameters() if p.grad is not None]

    plain = gradients()
    with record_norms(tiny_model) as recorder:
        recorded = gradients()
    assert all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))
    counts = [layer._sums[-1].tolist() for layer in recorder.layers]
    assert counts == [[8, 7]] * 2
    assert tiny_model.training


def test_a_model_in_peft_is_recorded_through_its_wrapper(tiny_model, tiny_batch):
    from peft import LoraConfig, get_peft_model

    with record_norms(tiny_model) as recorder, torch.no_grad():
        tiny_model(**tiny_batch)
    expected = recorder.to_dict()
    wrapped = get_peft_model(
        tiny_model, LoraConfig(target_modules=["q_proj"], modules_to_save=["multi_modal_projector"])
    )
    with record_norms(wrapped) as recorder, torch.no_grad():
        wrapped(**tiny_batch)
    measured = recorder.to_dict()
    assert measured["layers"] == expected["layers"]
    for part, figures in expected["interface"].items():
        assert measured["interface"][part] == figures
    assert hooks_on(wrapped) == 0


def test_generated_tokens_are_text(tiny_model, tiny_batch):
    with record_norms(tiny_model) as recorder:
        tiny_model.generate(**tiny_batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    # the prompts' tokens (8 visual and 7 text) once, then three of the four new tokens of each row go in again
    assert recorder.inserted.count == 8
    assert recorder.text_tokens.count == 7 + 2 * 3


def test_memory_does_not_grow_with_the_number_of_forward_passes(tiny_model, tiny_batch):
    def tensors():
        gc.collect()
        return sum(torch.is_tensor(thing) for thing in gc.get_objects())

    with record_norms(tiny_model) as recorder, torch.no_grad():
        tiny_model(**tiny_batch)
        before, sizes = tensors(), [layer._sums.shape for layer in recorder.layers]
        for _ in range(5):
            tiny_model(**tiny_batch)
        assert tensors() == before
        assert [layer._sums.shape for layer in recorder.layers] == sizes


def test_inputs_may_be_given_by_position(tiny_model, tiny_batch):
    with record_norms(tiny_model) as recorder, torch.no_grad():
        tiny_model(tiny_batch["input_ids"], tiny_batch["pixel_values"], tiny_batch["attention_mask"])
    assert (recorder.inserted.count, recorder.text_tokens.count) == (8, 7)


def test_without_attention_mask_every_token_counts(tiny_model, tiny_batch):
    tiny_batch.pop("attention_mask")
    with record_norms(tiny_model) as recorder, torch.no_grad():
        tiny_model(**tiny_batch)
    assert (recorder.inserted.count, recorder.text_tokens.count) == (8, 8)


def test_embeddings_instead_of_ids_are_refused(tiny_model):
    with record_norms(tiny_model), pytest.raises(NormalignError, match="called without input_ids"):
        tiny_model(inputs_embeds=torch.zeros(1, 3, 48))


def test_no_visual_token_is_an_error_that_names_the_id(tiny_model):
    with record_norms(tiny_model) as recorder, torch.no_grad():
        tiny_model(input_ids=torch.tensor([[1, 5, 6]]))
    with pytest.raises(NormalignError, match="No visual token.*id 60"):
        recorder.to_dict()


def test_T_is_the_norm_where_visual_tokens_are_inserted(tiny_model, tiny_batch):
    """A decoder that multiplies embeddings on their way to the first layer, as Gemma's did up to transformers 4."""
    with record_norms(tiny_model) as recorder, torch.no_grad():
        tiny_model(**tiny_batch)
    plain = recorder.to_dict()
    decoder = tiny_model.get_decoder()
    decoder.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "inputs_embeds": kwargs["inputs_embeds"] * 7}), with_kwargs=True
    )
    with record_norms(tiny_model) as recorder, torch.no_grad():
        tiny_model(**tiny_batch)
    scaled = recorder.to_dict()
    assert scaled["text_embedding_norm"] == pytest.approx(7 * plain["text_embedding_norm"], rel=1e-5)
    assert scaled["ratio"] == pytest.approx(plain["ratio"], rel=1e-5)


def test_layers_agree_with_output_hidden_states(tiny_model, tiny_batch):
    """The usual way to hidden states, whose last one comes after the final norm."""
    with record_norms(tiny_model) as recorder, torch.no_grad():
        states = tiny_model(**tiny_batch, output_hidden_states=True).hidden_states
    visual = tiny_batch["input_ids"] == 60
    layer = recorder.to_dict()["layers"][0]["visual"]
    before, after = (state[visual].double() for state in states[:2])
    assert layer == pytest.approx(layer_means(before, after, before), rel=1e-5, abs=1e-6)


def test_recorded_speed_and_memory_keep_their_limits():
    """benchmarks/inspection_speed.py, at 30 layers of width 576 and 1,000 tokens."""
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "inspection_speed.json"
    rows = [row for row in json.loads(file.read_text())["rows"] if row["case"].startswith("record_norms")]
    assert len(rows) == 2
    for row in rows:
        assert row["ratio"] <= 1.15 and row["memory_ratio"] <= 1.05
