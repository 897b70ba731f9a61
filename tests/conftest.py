"""Settings every test runs under (set before anything else is imported) and the fixtures that rooms share."""

import atexit
import importlib.util
import os
import shutil
import tempfile


# Offline, and with a cache of its own in each process: no test depends on what a developer has downloaded, and
# parallel workers do not write the same remote-code modules.
_hf_home = tempfile.mkdtemp(prefix="normalign-tests-")
atexit.register(shutil.rmtree, _hf_home, ignore_errors=True)

os.environ.update(
    HF_HOME=_hf_home,
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_EVALUATE_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    MPLBACKEND="Agg",
    NO_COLOR="1",
)

import pytest  # noqa: E402


TINY_TEXT = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "vision_use_head": False,
}
IMAGE_TOKEN = 60


def pytest_runtest_setup(item):
    """A test marked `harness` imports lmms-eval and lm-eval, which have an environment of their own."""
    missing = [name for name in ("lmms_eval", "lm_eval") if importlib.util.find_spec(name) is None]
    if missing and item.get_closest_marker("harness"):
        pytest.skip(f"needs {' and '.join(missing)}: `make test-eval` runs it where they are installed")


@pytest.fixture(scope="session")
def tiny_config():
    """A function that makes a config of ours: SigLIP of 4 visual tokens, language model of `text_type`."""
    from transformers import AutoConfig

    from normalign.modeling.configuration_normalign_llava import NormAlignLlavaConfig

    def make(text_type="llama", text=None, tie=False, config_class=NormAlignLlavaConfig, **options):
        text = {**TINY_TEXT, **(text or {}), "tie_word_embeddings": tie}
        return config_class(
            vision_config=AutoConfig.for_model("siglip_vision_model", **TINY_VISION).to_dict(),
            text_config=AutoConfig.for_model(text_type, **text).to_dict(),
            image_token_index=IMAGE_TOKEN,
            image_seq_length=4,
            vision_feature_select_strategy="full",
            tie_word_embeddings=tie,
            **options,
        )

    return make


@pytest.fixture
def tiny_model(tiny_config):
    """A fresh random model of ours, float32, in eval."""
    import torch

    from normalign.modeling.modeling_normalign_llava import NormAlignLlavaForConditionalGeneration

    torch.manual_seed(0)
    return NormAlignLlavaForConditionalGeneration(tiny_config()).eval()


@pytest.fixture
def tiny_batch():
    """Two rows, one image each, the second padded on the left."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[1, *[IMAGE_TOKEN] * 4, 5, 6, 7], [0, 1, *[IMAGE_TOKEN] * 4, 8, 9]])
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
    }


@pytest.fixture(scope="session")
def composed():
    """A model and processor composed of the mini backbones that ship with the package; not to be changed."""
    import torch

    from normalign.assembly import compose

    return compose("mini-vision", "mini-language", seed=0, dtype=torch.float32)
