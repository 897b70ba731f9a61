"""A loss that is not finite stops the run before the weights are touched, with the step and the first module that did it."""

import pytest
import torch

from normalign.configuration.errors import NormalignError
from normalign.train_trl.not_finite import refuse_loss_not_finite


NAN = torch.tensor(float("nan"))


def test_the_first_module_that_overflows_is_named(tiny_model, tiny_batch):
    """FAULTS R70."""
    layer = tiny_model.model.language_model.layers[1].mlp.down_proj
    tiny_model(**tiny_batch)  # transformers puts hooks of its own on at the first pass
    before = [len(module._forward_hooks) for module in tiny_model.modules()]
    handle = layer.register_forward_hook(lambda module, args, output: output * float("inf"))
    with pytest.raises(NormalignError) as error:
        refuse_loss_not_finite(tiny_model, tiny_batch, NAN, 7, ["Row 12 of a.json", "Row 40 of b.json"])
    handle.remove()
    assert "nan in step 7: model.language_model.layers.1.mlp.down_proj is the first module" in str(error.value)
    assert "In the batch: Row 12 of a.json, Row 40 of b.json." in str(error.value)
    assert [len(module._forward_hooks) for module in tiny_model.modules()] == before


def test_a_weight_or_a_picture_that_is_not_finite_is_named_itself(tiny_model, tiny_batch):
    pictures = {**tiny_batch, "pixel_values": tiny_batch["pixel_values"] * float("inf")}
    with pytest.raises(NormalignError, match="the batch's pixel_values are not finite"):
        refuse_loss_not_finite(tiny_model, pictures, NAN, 1, [])
    with torch.no_grad():
        tiny_model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(NormalignError, match="because the weight lm_head.weight is not finite"):
        refuse_loss_not_finite(tiny_model, tiny_batch, NAN, 1, [])


def test_rows_of_padding_alone_do_not_make_the_loss_nan(tiny_model, tiny_batch):
    """FAULTS R70."""
    ids, mask = tiny_batch["input_ids"].clone(), tiny_batch["attention_mask"].clone()
    ids, mask = torch.cat([ids, torch.zeros_like(ids[:1])]), torch.cat([mask, torch.zeros_like(mask[:1])])
    labels = ids.masked_fill(mask == 0, -100)
    loss = tiny_model(input_ids=ids, attention_mask=mask, pixel_values=tiny_batch["pixel_values"], labels=labels).loss
    assert torch.isfinite(loss)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in tiny_model.parameters() if p.grad is not None)
