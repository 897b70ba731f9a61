"""Every family of vision-language models: its parts, its modality mask, its numbers, from the model's own tensors."""

from __future__ import annotations

import pytest
import torch
import transformers

from normalign import inspect_model
from normalign.configuration.errors import NormalignError
from normalign.inspection.inputs import build_inputs, modality_masks
from normalign.inspection.parts import find_parts
from normalign.inspection.record import record_norms

from .families import FAMILIES, picture
from .reference import layer_means, norm_figures, record


pytestmark = pytest.mark.both_generations

# two samples of different length: one image in one, two images of other sizes in the other
SAMPLES = [
    ("Hi", [picture(40, 24)]),
    ("What is the difference?", [picture(16, 16, seed=1), picture(20, 52, seed=2)]),
]


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request):
    generation = int(transformers.__version__.split(".")[0])
    if generation < request.param.since:
        pytest.skip(f"this tiny {request.param.name} is written for transformers {request.param.since}")
    return request.param


def recorded(model, family, inputs):
    """What passed through the model's parts, found by the names in its modeling file."""
    projector = model.get_submodule(family.projector)
    aligned_norm = getattr(projector, "aligned_norm", None)
    encoder = projector
    if family.name == "GLM-4.1V":
        encoder = model.model.visual.downsample  # its input is laid out as (tokens, width, side, side)
    if family.name == "Ovis2":
        encoder = model.model.vision_tower.head_linear
    layers = model.get_submodule(family.layers)
    kept = record(model, inputs, layers, encoder, None if aligned_norm is not None else projector)
    if aligned_norm is not None:
        kept.projector = record(model, inputs, [], aligned_norm).encoder
    return kept


def encoder_norms(family, kept, width):
    """Norms of the encoder's own tokens, which some projectors are handed four at a time."""
    (features,) = kept.encoder
    if family.name == "GLM-4.1V":
        return features.permute(0, 2, 3, 1).norm(dim=-1)
    return features.reshape(-1, width).norm(dim=-1)


def assert_report_equals_reference(report, model, family, inputs, masks, rel):
    kept = recorded(model, family, inputs)
    first = kept.before[0]
    expected = {
        "vision_encoder": encoder_norms(family, kept, model.config.vision_config.hidden_size),
        "projector": kept.projector[0].norm(dim=-1),  # Ovis asks its table for the indicator tokens afterwards
        "inserted": first[masks["visual"]].norm(dim=-1),
        "text_tokens": first[masks["text"]].norm(dim=-1),
    }
    for part, norms in expected.items():
        figures, measured = norm_figures(norms), report["interface"][part]
        assert measured["count"] == figures["count"], part
        assert measured["mean"] == pytest.approx(figures["mean"], rel=rel), part
        assert measured["std"] == pytest.approx(figures["std"], rel=1e-3, abs=rel * figures["mean"]), part
        assert measured["quantiles"] == pytest.approx(figures["quantiles"], rel=1.5e-3), part
    assert len(report["layers"]) == len(kept.after) == 3
    for layer, before, after in zip(report["layers"], kept.before, kept.after):
        for modality, mask in masks.items():
            figures = layer_means(before[mask], after[mask], first[mask])
            measured = {name: layer[modality][name] for name in figures}
            assert measured == pytest.approx(figures, rel=rel, abs=1e-6)


def test_parts_are_found(family):
    model, _ = family()
    parts = find_parts(model)
    assert parts.vision_encoder is model.get_submodule(family.vision_encoder)
    assert parts.projector is model.get_submodule(family.projector)
    assert parts.layers == list(model.get_submodule(family.layers))
    assert parts.embeddings is model.get_input_embeddings()
    assert (parts.aligned_norm is not None) == (family.name == "ours")
    assert parts.not_found == []


def test_mask_names_every_token(family):
    """Visual is exactly where what enters the first layer differs from the text embedding of the token's id."""
    model, processor = family()
    inputs = build_inputs(model, processor, SAMPLES)
    masks = modality_masks(find_parts(model), inputs)
    (first, *_) = record(model, inputs, model.get_submodule(family.layers)).before
    with torch.no_grad():
        embedded = model.get_input_embeddings()(inputs["input_ids"]).double()
    seen = inputs["attention_mask"].bool()
    replaced = ((first - embedded).abs().amax(dim=-1) > 0) & seen
    assert not seen.all()
    assert torch.equal(masks["visual"], replaced)
    assert torch.equal(masks["text"], seen & ~replaced)
    for row, (prompt, images) in enumerate(SAMPLES):
        text = processor.tokenizer.decode(inputs["input_ids"][row][masks["text"][row]])
        assert prompt in text
        assert masks["visual"][row].sum() >= 4 * len(images)


def test_numbers_equal_a_plain_reference_in_float64(family):
    model, processor = family()
    inputs = build_inputs(model, processor, SAMPLES)
    with record_norms(model) as recorder, torch.no_grad():
        model(**inputs, use_cache=False)
    masks = modality_masks(recorder.parts, inputs)
    assert_report_equals_reference(recorder.to_dict(), model, family, inputs, masks, rel=1e-5)


def test_bfloat16_is_measured_in_float32(family):
    model, processor = family.fresh()
    model = model.to(torch.bfloat16)
    inputs = build_inputs(model, processor, SAMPLES[:1])
    assert inputs["pixel_values"].dtype == torch.bfloat16
    with record_norms(model) as recorder, torch.no_grad():
        model(**inputs, use_cache=False)
    masks = modality_masks(recorder.parts, inputs)
    assert_report_equals_reference(recorder.to_dict(), model, family, inputs, masks, rel=1e-5)


def test_padding_is_never_counted(family):
    """A padded batch has the tokens of its samples alone."""
    model, processor = family()
    together, alone = [], []
    for batches, reports in (([SAMPLES], together), ([SAMPLES[:1], SAMPLES[1:]], alone)):
        with record_norms(model) as recorder, torch.no_grad():
            for samples in batches:
                model(**build_inputs(model, processor, samples), use_cache=False)
        reports.append(recorder.to_dict())
    for part in ("inserted", "text_tokens"):
        figures = together[0]["interface"][part]
        assert figures["count"] == alone[0]["interface"][part]["count"]
        assert figures["mean"] == pytest.approx(alone[0]["interface"][part]["mean"], rel=1e-5)


def test_whole_inspection(family):
    """Everything at once, from images and prompts; the effective angle agrees with the formula in every layer."""
    model, processor = family()
    report = inspect_model(
        model,
        processor,
        [images for _, images in SAMPLES],
        [prompt for prompt, _ in SAMPLES],
        attention=True,
        controls=True,
        gradients=True,
        answers=["yes", "no"],
    ).to_dict()
    assert (report["images"], report["prompts"]) == (3, 2)
    assert report["not_found"] == []
    for layer in report["layers"]:
        for modality in ("visual", "text"):
            formula = layer[modality]["angle_formula_mean_rad"]
            assert layer[modality]["angle_mean_rad"] == pytest.approx(formula, rel=1e-5)
        assert 0 < layer["attention"]["text_to_visual_mass"] < 1
    assert report["controls"]["black"]["kl_mean"] > 0
    assert report["gradients"]["gwc_off"]["grad_norm"]["vision"] > 0


def test_text_only_model_is_named_in_one_paragraph():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL))
    with pytest.raises(NormalignError, match="LlamaForCausalLM cannot be inspected.*config.image_token_id") as error:
        find_parts(model)
    assert "language model without vision" in str(error.value) and "\n" not in str(error.value)


def test_model_without_image_token_is_named_in_one_paragraph():
    """Image and text side by side, as in CLIP, where no visual token enters a language model."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        vision, transformers.LlamaConfig(**_SMALL), projection_dim=8
    )
    with pytest.raises(NormalignError, match="VisionTextDualEncoderModel.*lacks an image token") as error:
        find_parts(transformers.VisionTextDualEncoderModel(config))
    assert "set config.image_token_id" in str(error.value) and "\n" not in str(error.value)


def test_remote_code_model_without_the_interface_is_named_in_one_paragraph():
    class Foreign(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = torch.nn.Linear(4, 4)

    with pytest.raises(NormalignError, match="Foreign cannot be inspected: it lacks an image token") as error:
        find_parts(Foreign())
    for missing in ("get_input_embeddings", "get_decoder", "layers"):
        assert missing in str(error.value)
    assert "\n" not in str(error.value)


def test_what_cannot_be_told_apart_is_null_and_explained():
    """A vision encoder that config.vision_config does not describe: tokens are measured, its own output is not."""
    model, processor = FAMILIES[0].fresh()
    model.config.vision_config = transformers.BertConfig()
    inputs = build_inputs(model, processor, SAMPLES[:1])
    with record_norms(model) as recorder, torch.no_grad():
        model(**inputs, use_cache=False)
    assert recorder.parts.vision_encoder is None and recorder.parts.projector is None
    report = recorder.to_dict()
    assert report["interface"]["vision_encoder"] is None and report["interface"]["projector"] is None
    assert report["interface"]["inserted"]["count"] == 16
    assert "vision encoder" in report["not_found"][0] and "config.vision_config" in report["not_found"][0]


_SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "vocab_size": 8,
}


class _RemoteCodeModel(transformers.PreTrainedModel):
    """Laid out as InternVL's own code: a causal language model inside, the projector a plain Sequential."""

    config_class = transformers.InternVLConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.vision_model = transformers.AutoModel.from_config(config.vision_config)
        self.language_model = transformers.AutoModelForCausalLM.from_config(config.text_config)
        width = config.vision_config.hidden_size
        self.mlp1 = torch.nn.Sequential(
            torch.nn.LayerNorm(width), torch.nn.Linear(width, config.text_config.hidden_size)
        )
        self.post_init()

    def get_input_embeddings(self):
        return self.language_model.get_input_embeddings()

    def forward(self, input_ids, attention_mask=None, pixel_values=None, use_cache=None):
        embedded = self.get_input_embeddings()(input_ids)
        features = self.mlp1(self.vision_model(pixel_values).last_hidden_state[:, 1:])
        visual = (input_ids == self.config.image_token_id).unsqueeze(-1)
        embedded = embedded.masked_scatter(visual, features)
        return self.language_model(inputs_embeds=embedded, attention_mask=attention_mask, use_cache=use_cache)


def test_remote_code_model_with_other_names_is_measured():
    internvl = next(family for family in FAMILIES if family.name == "InternVL")
    torch.manual_seed(0)
    model = _RemoteCodeModel(internvl()[0].config).eval()
    ids = torch.tensor([[1, *[model.config.image_token_id] * 16, 20, 21]])
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16)}
    with record_norms(model) as recorder, torch.no_grad():
        model(**inputs)
    parts = recorder.parts
    assert parts.vision_encoder is model.vision_model and parts.projector is model.mlp1
    assert parts.layers == list(model.language_model.model.layers)
    masks = modality_masks(parts, inputs)
    layers = model.language_model.model.layers
    kept = record(model, inputs, layers, model.mlp1, model.mlp1)
    report = recorder.to_dict()
    assert report["interface"]["vision_encoder"]["mean"] == pytest.approx(kept.encoder[0].norm(dim=-1).mean().item())
    assert report["interface"]["projector"]["mean"] == pytest.approx(kept.projector[0].norm(dim=-1).mean().item())
    mask = masks["visual"]
    expected = layer_means(kept.before[2][mask], kept.after[2][mask], kept.before[0][mask])
    assert {name: report["layers"][2]["visual"][name] for name in expected} == pytest.approx(expected, rel=1e-5)
