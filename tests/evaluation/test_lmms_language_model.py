"""Text benchmarks of lm-eval on a vision-language model: the values are those of the language model inside."""

import pytest
import torch


pytest.importorskip("lm_eval", reason="needs lm-eval: `make test-eval` runs it where it is installed")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from normalign.evaluation.loglikelihood import log_likelihoods


pytestmark = pytest.mark.harness

PAIRS = [
    ("A digit is", " red"),
    ("The sum of two and two is ", "four, as you know"),
    ("Is there a 7?", "\nno"),
    ("Question: which colour has the digit? Answer:", " green"),
    ("Question: which colour has the digit? Answer:", " it has the colour of the others, white"),
]


@pytest.fixture(scope="module")
def bare(composed):
    """The language model alone, with the same weights."""
    model = composed[0]
    language_model = AutoModelForCausalLM.from_config(model.config.text_config).eval()
    language_model.model.load_state_dict(model.get_decoder().state_dict())
    language_model.lm_head.load_state_dict(model.lm_head.state_dict())
    return language_model


def harness(model, processor, batch_size=2, **options):
    return HFLM(
        pretrained=model,
        tokenizer=processor.tokenizer,
        backend="causal",
        batch_size=batch_size,
        device="cpu",
        **options,
    )


def by_harness(lm, pairs):
    requests = [
        Instance("loglikelihood", doc={}, arguments=pair, idx=i, metadata=("text", i, 1))
        for i, pair in enumerate(pairs)
    ]
    return lm.loglikelihood(requests, disable_tqdm=True)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_lm_eval_gives_our_model_the_values_of_the_bare_language_model(composed, bare, batch_size):
    model, processor = composed
    found = by_harness(harness(model, processor, batch_size), PAIRS)
    expected = by_harness(harness(bare, processor), PAIRS)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert len({round(value, 2) for value, _ in expected}) == len(PAIRS)


def test_our_log_likelihoods_of_bare_text_are_those_of_lm_eval(composed, bare):
    contexts, continuations = map(list, zip(*PAIRS, strict=True))
    found = log_likelihoods(*composed, contexts, [[]] * len(PAIRS), continuations, raw=True, batch_size=2)
    expected = by_harness(harness(bare, composed[1]), PAIRS)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_generation_from_text_alone_is_that_of_the_bare_language_model(composed, bare):
    ids = composed[1].tokenizer("Is there a 7 in", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        found, expected = (model.generate(ids, max_new_tokens=8, do_sample=False) for model in (composed[0], bare))
    assert torch.equal(found, expected)
