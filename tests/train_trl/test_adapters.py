"""LoRA and QLoRA: what gets an adapter, what is trained, what is saved, and what comes back of it."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from normalign.assembly.adapters import base_model_of, load_adapter, refuse_broken_adapter
from normalign.configuration.errors import NormalignError
from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign.train_trl import RecipeError, load_recipe, train
from normalign.train_trl.adapters import expected_keys, quantize_language_
from normalign.train_trl.callbacks import InterfaceProbe
from normalign.train_trl.parts import (
    PARTS,
    freeze,
    parameters_by_part,
    part_of,
    training_table,
    unused_vision_parameters,
)
from normalign.train_trl.training import adapted, build_trainer, load_data, load_or_compose


TINY_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
TINY_VISION |= {"image_size": 16, "patch_size": 8}
BOTH = {"vision": "lora", "language": "lora"}
LANGUAGE = {"language": "lora"}


@pytest.fixture
def made(recipe_file, tmp_path):
    """A function that makes a model with the adapters of a changed stage 1 recipe: recipe, model, processor."""

    def make(overrides=None, **changes):
        recipe = load_recipe(recipe_file(1, tmp_path, **changes), overrides)
        torch.manual_seed(0)
        model, processor = load_or_compose(recipe, load_data(recipe))
        if "lora" in (recipe.tune.vision, recipe.tune.language):
            model = adapted(model, recipe)
        freeze(model, recipe.tune)
        return recipe, model, processor

    return make


@pytest.fixture(scope="module")
def run(recipe_file, tmp_path_factory):
    """The folder of a run with adapters on both parts, and the model and a batch as they were when it ended."""
    folder = tmp_path_factory.mktemp("adapters")
    kept = {}
    with pytest.MonkeyPatch.context() as patch:
        from normalign.train_trl import training

        save = training.save

        def note(trainer, output_dir):
            batch = trainer.data_collator([load_data(trainer.recipe)[0]])
            batch.pop("labels")
            with torch.no_grad():
                kept["logits"] = trainer.model.eval()(**batch).logits
            kept["batch"] = dict(batch)
            return save(trainer, output_dir)

        patch.setattr(training, "save", note)
        out = train(recipe_file(1, folder, tune=BOTH, save_steps=1, learning_rate=0.02, lora={"rank": 2}))
    return out, kept["batch"], kept["logits"]


def trained_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# --- which layers


def test_adapters_go_on_linear_layers_of_the_language_model_alone(made):
    """R59: neither lm_head nor vision tower nor projector."""
    recipe, model, _ = made(tune=LANGUAGE)
    adapted_layers = {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    base = model.get_base_model()
    prefix = "base_model.model."
    every = {f"{prefix}{name}" for name, m in base.named_modules() if hasattr(m, "lora_A")}
    assert adapted_layers == every
    assert all(name.startswith(f"{prefix}model.language_model.layers.") for name in every)
    assert len(every) == 7 * base.config.text_config.num_hidden_layers


def test_encoder_layers_behind_the_visual_tokens_get_no_adapter(made):
    recipe, model, _ = made(tune=BOTH)
    layers = {
        int(name.split("encoder.layers.")[1].split(".")[0]) for name in trained_names(model) if "vision_tower" in name
    }
    last = model.config.vision_config.num_hidden_layers - 1
    assert model.config.vision_feature_layer == -2
    assert layers == set(range(last))


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["self_attn"], "self_attn is a container (LlamaAttention), which holds k_proj, o_proj, q_proj, v_proj."),
        (["q_pro"], "q_pro is no layer of the model; did you mean q_proj?"),
        (["lm_head"], "lm_head is no layer of the language part that an adapter goes on."),
        (["multi_modal_projector"], "multi_modal_projector is a container (NormAlignLlavaMultiModalProjector)."),
    ],
)
def test_a_target_that_is_no_layer_is_told_the_right_names(made, targets, words):
    """R34."""
    with pytest.raises(RecipeError) as caught:
        made(tune=LANGUAGE, lora={"language_targets": targets})
    assert words in str(caught.value) and "q_proj, k_proj, v_proj, o_proj" in str(caught.value)


def test_targets_are_last_names_of_each_part(made):
    recipe, model, _ = made(tune=BOTH, lora={"language_targets": ["q_proj"], "vision_targets": ["fc1"]})
    layers = {name.split(".lora_")[0] for name in trained_names(model) if ".lora_" in name}
    assert {name.rpartition(".")[2] for name in layers if "language_model" in name} == {"q_proj"}
    assert {name.rpartition(".")[2] for name in layers if "vision_tower" in name} == {"fc1"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tune": {"language": "full", "vision": "lora"}}, "tune.language: full does not go with an adapter"),
        ({"tune": {"language": "full"}, "quantization": "4bit"}, "needs tune.language: lora, got full"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(recipe_file, tmp_path, changes, words):
    with pytest.raises(RecipeError, match=words):
        train(recipe_file(1, tmp_path, **changes))


def test_quantization_without_its_package_names_the_extra(recipe_file, tmp_path, monkeypatch):
    monkeypatch.setattr("normalign.train_trl.adapters.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"needs the extra 'quant': pip install 'normalign\[quant\]'"):
        train(recipe_file(1, tmp_path, tune=LANGUAGE, quantization="4bit"))


# --- what is trained


@pytest.mark.parametrize(
    ("tune", "quantization"),
    [(BOTH, None), (LANGUAGE, None), ({"vision": "lora"}, None), ({}, None), (BOTH, "4bit"), (LANGUAGE, "4bit")],
    ids=["both", "language", "vision", "none", "both-4bit", "language-4bit"],
)
def test_with_checkpointing_exactly_what_is_trained_gets_a_gradient(made, tune, quantization):
    """R50, R52: and a frozen encoder builds no graph; in 4 bits too, where the norm stays in float32."""
    if quantization:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    options = {"quantization": quantization} if quantization else {}
    recipe, model, processor = made(tune=tune, gradient_checkpointing=True, max_steps=1, **options)
    grads, graphs = {}, []
    trainer = build_trainer(model, processor, load_data(recipe), recipe)
    tower = next(module for name, module in model.named_modules() if name.endswith("vision_tower"))
    tower.register_forward_hook(lambda m, args, output: graphs.append(output.hidden_states[-2].requires_grad))
    # an adapter's B is zero at first, which would keep the gradient from its A
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)

    class Note(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            grads.update({n: p.grad.abs().sum().item() for n, p in model.named_parameters() if p.grad is not None})

    trainer.add_callback(Note())
    trainer.train()
    without = {name for name, size in grads.items() if size == 0}
    # a constant that is added to all keys changes no attention
    assert {name for name in without if "k_proj.bias" not in name} == set()
    assert grads.keys() == trained_names(model)
    assert set(graphs) == {"vision" in tune}
    assert trainer.args.activation_checkpointing and trainer.args.activation_checkpointing_kwargs == {
        "use_reentrant": False
    }
    norm = [p for n, p in model.named_parameters() if part_of(n) == "norm" and p.requires_grad]
    assert len(norm) == 2 and all(parameter.dtype == torch.float32 for parameter in norm)
    if quantization:
        from bitsandbytes.nn import Linear4bit

        packed = [name for name, module in model.named_modules() if isinstance(module, Linear4bit)]
        assert len([name for name in packed if name.endswith("base_layer")]) == 14
        assert not [name for name in packed if "lm_head" in name or "vision_tower" in name]


@pytest.mark.parametrize("frozen", [("norm",), ("projector",), ("projector", "norm")])
def test_what_is_saved_whole_is_trained_only_where_the_recipe_says_so(made, frozen):
    _, model, _ = made(tune={**LANGUAGE, **dict.fromkeys(frozen, "frozen")})
    parts = parameters_by_part(model)
    for part in ("projector", "norm"):
        trained = {name for name, parameter in parts[part] if parameter.requires_grad}
        whole = {name for name, _ in parts[part] if ".original_module." not in name}
        assert trained == (set() if part in frozen else whole)
        assert len(whole) == len(parts[part]) // 2


def test_a_norm_that_its_config_fixes_stays_fixed_under_adapters(made):
    with pytest.raises(NormalignError, match="aligned_norm.trainable is false"):
        made({"compose.aligned_norm.trainable": False}, tune=LANGUAGE)
    _, model, _ = made({"compose.aligned_norm.trainable": False}, tune={**LANGUAGE, "norm": "frozen"})
    assert not [name for name in trained_names(model) if "aligned_norm" in name]


def test_the_table_counts_adapters_and_the_log_measures_them(made, run):
    from rich.console import Console

    recipe, model, _ = made(tune=LANGUAGE, lora={"rank": 2})
    console = Console(width=100)
    with console.capture() as capture:
        console.print(training_table(model, recipe.learning_rate, "x", {}))
    lines = [line.replace("│", "").split() for line in capture.get().splitlines()]
    count = sum(p.numel() for n, p in model.named_parameters() if ".lora_" in n)
    base = sum(p.numel() for n, p in model.named_parameters() if part_of(n) == "language") - count
    assert ["language", "adapted", f"{count:,}", "of", f"{base:,}", "0.001"] in lines
    assert ["norm", "trained", "64", "0.001"] in lines
    out, _, _ = run
    for line in (out / "train_log.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["aligned_norm/gwc_fired"] is True
        assert all(record[f"update/{part}"] > 0 and record[f"grad_norm/{part}"] > 0 for part in PARTS)


def test_the_probe_measures_the_projector_that_is_trained(made):
    _, model, processor = made(tune=LANGUAGE)
    with InterfaceProbe(model) as probe:
        model.get_base_model().get_image_features(pixel_values=torch.randn(1, 3, 32, 32)[..., :16, :16])
    assert probe.visual_out.value() == pytest.approx(model.config.aligned_norm["target_norm"], rel=0.05)


# --- encoder weights that nothing depends on


def test_encoder_weights_behind_the_visual_tokens_are_frozen_and_named(made, caplog):
    with caplog.at_level(logging.WARNING, logger="normalign.train_trl.parts"):
        _, model, _ = made(tune={"vision": "full"})
    unused = {name for name, _ in unused_vision_parameters(model)}
    last = model.config.vision_config.num_hidden_layers - 1
    assert f"encoder.layers.{last}, post_layernorm." in caplog.text
    model(
        input_ids=torch.tensor([[model.config.image_token_id] * 4 + [5, 6]]), pixel_values=torch.randn(1, 3, 16, 16)
    ).logits.sum().backward()
    encoder = dict(parameters_by_part(model)["vision"])
    assert {name for name, parameter in encoder.items() if parameter.grad is None} == unused
    assert {name for name, parameter in encoder.items() if not parameter.requires_grad} == unused


@pytest.mark.parametrize(("layer", "gone"), [(-1, 0), (-3, 2), (1, 2), ([-2, 1], 1)])
def test_what_is_unused_follows_the_feature_layer(tiny_config, layer, gone):
    model = NormAlignLlavaForConditionalGeneration(tiny_config(vision_feature_layer=layer))
    names = [name for name, _ in unused_vision_parameters(model)]
    assert len({name.split("layers.")[1].split(".")[0] for name in names if "layers." in name}) == gone


@pytest.mark.parametrize(("kind", "layer"), [("clip_vision_model", -2), ("dinov2", -1), ("siglip_vision_model", -1)])
def test_what_is_unused_is_what_gets_no_gradient_in_other_encoders(tiny_config, kind, layer):
    from transformers import AutoConfig, LlavaConfig, LlavaForConditionalGeneration

    ours = tiny_config()
    vision = {**TINY_VISION, "vision_use_head": True, "use_mask_token": True}
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=AutoConfig.for_model(kind, **vision).to_dict(),
            text_config=ours.text_config.to_dict(),
            vision_feature_layer=layer,
            vision_feature_select_strategy="full",
        )
    )
    torch.stack(list(model.get_image_features(pixel_values=torch.randn(1, 3, 16, 16)).pooler_output)).sum().backward()
    encoder = dict(parameters_by_part(model)["vision"])
    unused = {name for name, _ in unused_vision_parameters(model)}
    assert {name for name, parameter in encoder.items() if parameter.grad is None} == unused and unused


# --- what is saved


def test_an_adapter_folder_loads_in_a_clean_process_with_the_same_logits(run, tmp_path):
    """R26: projector, norm and LoRA in one folder; the base that was composed lies beside it."""
    out, batch, logits = run
    torch.save(batch, tmp_path / "batch.pt")
    code = (
        "import sys; sys.modules['normalign'] = None\n"
        "import torch\n"
        "from transformers import AutoModelForImageTextToText, AutoProcessor\n"
        "folder, work = sys.argv[1:]\n"
        "model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True).eval()\n"
        "processor = AutoProcessor.from_pretrained(folder)\n"
        "assert 'generation' in processor.chat_template\n"
        "with torch.no_grad(): torch.save(model(**torch.load(f'{work}/batch.pt')).logits, f'{work}/logits.pt')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(out), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits)
    names = {path.name for path in out.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "processor_config.json", "base"} <= names
    assert not names & {"config.json", "model.safetensors", "README.md", "training_args.bin"}
    assert {path.name for path in (out / "checkpoint-1").iterdir()} >= {"adapter_config.json", "recipe.yaml"}


def test_an_adapter_finds_its_base_where_the_whole_run_was_moved(run, tmp_path):
    out, batch, logits = run
    moved = tmp_path / "elsewhere"
    shutil.copytree(out, moved)
    for folder in (moved, moved / "checkpoint-2"):
        file = folder / "adapter_config.json"
        settings = json.loads(file.read_text())
        assert settings["base_model_name_or_path"] == str(out / "base")
        settings["base_model_name_or_path"] = str(tmp_path / "gone" / "base")
        file.write_text(json.dumps(settings))
        assert base_model_of(folder) == str(moved / "base")
        model = load_adapter(NormAlignLlavaForConditionalGeneration.from_pretrained(moved / "base"), folder)
        with torch.no_grad():
            assert torch.equal(model(**batch).logits, logits)


@pytest.mark.parametrize("fault", ["empty", "missing", "gone"])
def test_a_broken_adapter_fails_the_run_as_soon_as_it_is_saved(made, recipe_file, tmp_path, monkeypatch, fault):
    """R82: the failed run leaves no finished folder and no checkpoint."""
    from peft import PeftModel

    save = PeftModel.save_pretrained

    def broken(self, folder, **kwargs):
        save(self, folder, **kwargs)
        file = Path(folder) / "adapter_model.safetensors"
        weights = load_file(file)
        key = next(key for key in weights if "aligned_norm" in key)
        if fault == "empty":
            weights[key] = torch.empty(0)
        else:
            weights.pop(key)
        save_file(weights, file)
        if fault == "gone":
            file.unlink()

    monkeypatch.setattr(PeftModel, "save_pretrained", broken)
    words = {"empty": "are empty .*aligned_norm", "missing": "are missing .*aligned_norm", "gone": "was not saved"}
    with pytest.raises(NormalignError, match=words[fault]):
        train(recipe_file(1, tmp_path, tune=LANGUAGE, max_steps=1, save_steps=1))
    left = {path.name for path in (tmp_path / "stage1").iterdir()}
    assert left == {"train_log.jsonl", "recipe.yaml", "base"}


def test_what_was_saved_is_what_is_expected(run, made):
    out, _, _ = run
    _, model, _ = made(tune=BOTH, lora={"rank": 2})
    refuse_broken_adapter(out, expected_keys(model))
    assert {part_of(key) for key in expected_keys(model)} == set(PARTS)


def test_a_second_adapter_with_another_saved_set_is_told_the_difference(run, tmp_path):
    """R32: the set is fixed by our recipes."""
    out, batch, _ = run
    base = NormAlignLlavaForConditionalGeneration.from_pretrained(out / "base")
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).save_pretrained(tmp_path / "b")
    model = load_adapter(NormAlignLlavaForConditionalGeneration.from_pretrained(out / "base"), out)
    with pytest.raises(NormalignError, match="it saves no module whole, the other one multi_modal_projector"):
        load_adapter(model, tmp_path / "b")
    with torch.no_grad():
        second = load_adapter(model, out / "checkpoint-1")(**batch).logits
        alone = load_adapter(
            NormAlignLlavaForConditionalGeneration.from_pretrained(out / "base"), out / "checkpoint-1"
        )(**batch).logits
    assert torch.equal(second, alone)


def test_a_run_does_not_start_from_an_adapter(run, recipe_file, tmp_path):
    out, _, _ = run
    with pytest.raises(NormalignError, match=r"holds an adapter, not a whole model.*normalign export"):
        train(recipe_file(1, tmp_path, model=str(out)))
    with pytest.raises(RecipeError, match=r"has left an adapter, not a whole model.*normalign export"):
        train(recipe_file(2, out.parent))


def test_weights_in_4_bits_stay_as_they_are_in_eval_mode(tiny_model, tiny_batch, monkeypatch):
    """bitsandbytes lays them out anew for some processors, with rounded scales, and could not train on them after that."""
    modules = pytest.importorskip("bitsandbytes.nn.modules", reason="bitsandbytes is not installed")
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)
    layers = quantize_language_(tiny_model)
    packed = {name: value.clone() for name, value in tiny_model.named_parameters() if value.dtype == torch.uint8}
    with torch.no_grad():
        tiny_model.eval()(**tiny_batch)
    assert len(packed) == layers > 0
    assert all(torch.equal(tiny_model.get_parameter(name), value) for name, value in packed.items())


def test_a_run_in_4_bits_goes_on_to_the_same_weights(recipe_file, tmp_path):
    """R89."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    changes = {"tune": LANGUAGE, "quantization": "4bit", "save_steps": 1, "max_steps": 2, "lora": {"rank": 2}}
    out = train(recipe_file(1, tmp_path, **changes))
    whole = load_file(out / "adapter_model.safetensors")
    shutil.rmtree(out / "checkpoint-2")
    (out / "adapter_config.json").unlink()
    train(recipe_file(1, tmp_path, **changes))
    again = load_file(out / "adapter_model.safetensors")
    assert all(torch.equal(again[key], whole[key]) for key in whole) and again.keys() == whole.keys()
    assert {weight.dtype for weight in load_file(out / "base" / "model.safetensors").values()} == {torch.float32}
