"""The aligned norm and GWC against a plain reference: a tensor hook on the un-fused normalised tensor, in float64."""

import copy
import shutil

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from normalign.modeling.aligned_norm import AlignedNorm, text_embedding_norm


KINDS = ("layernorm", "rmsnorm", "scale")
HIDDEN = 24


def reference(norm, x, gwc=True):
    """y = g * xhat + b, with a hook that divides the gradient of xhat by mu (METHOD: arXiv 2512.08374, GWC)."""
    if norm.kind == "layernorm":
        xhat = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + norm.eps)
    elif norm.kind == "rmsnorm":
        xhat = x / torch.sqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    else:
        xhat = x * 1.0
    if gwc and xhat.requires_grad:
        mu = max(norm.weight.detach().abs().mean().item(), norm.gwc_floor)
        xhat.register_hook(lambda grad: grad / mu)
    y = norm.weight * xhat
    return y if norm.bias is None else y + norm.bias


def gradients(function, x, parameters, dy):
    x = x.detach().clone().requires_grad_()
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], dy)]


def assert_same(actual, expected, rtol=1e-12):
    for a, e in zip(actual, expected, strict=True):
        scale = e.abs().max().clamp(min=1e-300)
        assert ((a - e).abs().max() / scale).item() <= rtol


def double_norm(kind, gain=None, **options):
    norm = AlignedNorm(HIDDEN, kind=kind, **options).double()
    with torch.no_grad():
        if gain is not None:
            norm.weight.copy_(gain[: norm.weight.numel()])
        if norm.bias is not None:
            norm.bias.copy_(torch.linspace(-1, 1, HIDDEN))
    return norm


GAINS = {
    "positive": torch.linspace(0.01, 0.03, HIDDEN),
    "negative": -torch.linspace(0.5, 2.0, HIDDEN),
    "mixed": torch.linspace(-0.7, 0.9, HIDDEN),
    "tiny": torch.linspace(1e-5, 9e-5, HIDDEN),
    "zero": torch.zeros(HIDDEN),
}


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gwc", [True, False])
def test_gradients_equal_the_hook_reference_in_float64(kind, gain, gwc):
    torch.manual_seed(0)
    norm = double_norm(kind, GAINS[gain], gwc=gwc)
    x, dy = torch.randn(3, 5, HIDDEN).double() * 40 + 3, torch.randn(3, 5, HIDDEN).double()
    parameters = list(norm.parameters())
    expected = gradients(lambda x: reference(norm, x, gwc), x, parameters, dy)
    assert_same(gradients(norm, x, parameters, dy), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_the_reference_after_training(kind):
    torch.manual_seed(0)
    norm = double_norm(kind)
    norm.set_target_norm_(0.8)
    linear = nn.Linear(HIDDEN, HIDDEN).double()
    optimizer = torch.optim.AdamW([*norm.parameters(), *linear.parameters()], lr=0.01)
    x, target = torch.randn(32, HIDDEN).double(), torch.randn(32, HIDDEN).double()
    for _ in range(20):
        optimizer.zero_grad()
        (norm(linear(x)) - target).square().mean().backward()
        optimizer.step()
    assert kind == "scale" or norm.weight.std() > 0
    parameters, dy = list(norm.parameters()), torch.randn(32, HIDDEN).double()
    assert_same(
        gradients(norm, x, parameters, dy), gradients(lambda x: reference(norm, x), x, parameters, dy), rtol=1e-12
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_holds_without_gwc_and_where_mu_is_one(kind):
    """GWC is no derivative of the forward values, except where mu is 1; there it must pass gradcheck itself."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, HIDDEN, dtype=torch.float64, requires_grad=True)
    plain = double_norm(kind, GAINS["mixed"], gwc=False)
    assert torch.autograd.gradcheck(plain, (x,))
    unit = double_norm(kind, torch.ones(HIDDEN), gwc=True)
    assert unit.mu == 1
    assert torch.autograd.gradcheck(unit, (x,))


@pytest.mark.parametrize("kind", KINDS)
def test_forward_values_do_not_depend_on_gwc(kind):
    norm = AlignedNorm(HIDDEN, kind=kind)
    norm.set_target_norm_(1.09)
    x = torch.randn(2, 7, HIDDEN) * 30
    with_gwc = norm(x.clone().requires_grad_())
    norm.gwc = False
    assert torch.equal(with_gwc, norm(x.clone().requires_grad_()))
    with torch.no_grad():
        assert torch.equal(with_gwc, norm(x))


def test_visual_tokens_leave_with_norm_T():
    norm = AlignedNorm(512)
    norm.set_target_norm_(0.8)
    y = norm(torch.randn(4, 9, 512) * 50 + 7)
    torch.testing.assert_close(y.norm(dim=-1), torch.full((4, 9), 0.8), rtol=1e-5, atol=0)
    assert norm.weight[0].item() == pytest.approx(0.8 / 512**0.5, rel=1e-6)
    rms = AlignedNorm(512, kind="rmsnorm")
    rms.set_target_norm_(0.8)
    torch.testing.assert_close(rms(torch.randn(4, 512) * 50).norm(dim=-1), torch.full((4,), 0.8), rtol=1e-5, atol=0)
    scale = AlignedNorm(512, kind="scale")
    scale.set_target_norm_(0.8, input_norm=40.0)
    assert scale.weight.tolist() == pytest.approx([0.02])


def test_mu_is_the_mean_absolute_gain_with_a_floor():
    norm = AlignedNorm(4)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([-0.02, 0.02, 0.04, -0.04]))
    assert norm.mu.item() == pytest.approx(0.03)
    norm.set_gain_(1e-5)
    assert norm.mu.item() == pytest.approx(1e-3)
    norm.gwc = False
    assert norm.mu.item() == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_input_gives_its_dtype_and_float32_accuracy(kind, dtype):
    """R52: computed in float32, output in the input's dtype, whatever the dtypes of input and parameters are."""
    torch.manual_seed(0)
    exact = double_norm(kind, GAINS["positive"])
    x, dy = torch.randn(3, HIDDEN).to(dtype), torch.randn(3, HIDDEN).to(dtype)
    expected = gradients(exact, x.double(), list(exact.parameters()), dy.double())
    for parameter_dtype in (torch.float32, dtype):
        norm = AlignedNorm(HIDDEN, kind=kind)
        for name, parameter in exact.named_parameters():
            setattr(norm, name, nn.Parameter(parameter.detach().to(parameter_dtype)))
        actual = gradients(norm, x, list(norm.parameters()), dy)
        assert actual[0].dtype == actual[1].dtype == dtype
        assert all(a.dtype == parameter_dtype for a in actual[2:])
        assert_same([a.double() for a in actual], expected, rtol=1e-2)
        with torch.no_grad():
            assert norm(x).dtype == dtype


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_leaves_dtype_and_gradients_alone(enabled):
    torch.manual_seed(0)
    norm = AlignedNorm(HIDDEN)
    norm.set_target_norm_(0.5)
    x, dy = torch.randn(3, HIDDEN), torch.randn(3, HIDDEN)
    expected = gradients(norm, x, list(norm.parameters()), dy)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        actual = gradients(norm, x, list(norm.parameters()), dy)
        half = norm(x.bfloat16().requires_grad_())
    assert_same(actual, expected, rtol=0)
    assert half.dtype == torch.bfloat16


def test_parameters_stay_float32_when_the_model_is_cast_down():
    norm = nn.Sequential(AlignedNorm(HIDDEN), nn.Linear(HIDDEN, 2))
    norm[0].set_gain_(1.001)
    before = norm[0].weight.detach().clone()
    for cast in (norm.bfloat16, norm.half, lambda: norm.to(torch.bfloat16)):
        cast()
        assert norm[0].weight.dtype == norm[0].bias.dtype == torch.float32
        assert torch.equal(norm[0].weight, before)
    assert norm[1].weight.dtype == torch.bfloat16
    assert norm.double()[0].weight.dtype == torch.float64
    assert norm.half()[0].weight.dtype == torch.float32
    assert AlignedNorm(HIDDEN).to("meta").weight.device.type == "meta"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_gradients_equal_eager(kind, backend):
    """R48: one graph, nothing dropped; compiled before or after the first eager call."""
    if backend == "inductor" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("inductor needs a C++ compiler, and this machine has none")
    torch._dynamo.reset()
    torch.manual_seed(0)
    norm = AlignedNorm(HIDDEN, kind=kind)
    norm.set_target_norm_(0.5)
    x, dy = torch.randn(3, 5, HIDDEN), torch.randn(3, 5, HIDDEN)
    compiled = torch.compile(norm, fullgraph=True, backend=backend)
    for gwc in (True, False):
        norm.gwc = gwc
        expected = gradients(norm, x, list(norm.parameters()), dy)
        assert_same(gradients(compiled, x, list(norm.parameters()), dy), expected, rtol=2e-6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), norm(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_rescales_once_on_the_full_gradient(reentrant):
    """R49: features used twice, recomputed in the backward pass; the gradient is that of a run without checkpoints."""
    torch.manual_seed(0)
    norm, linear = double_norm("layernorm", GAINS["positive"]), nn.Linear(HIDDEN, HIDDEN).double()
    x, dy = torch.randn(4, HIDDEN).double(), torch.randn(4, HIDDEN).double()

    def twice(y):
        return y * 2 + y.sin()

    parameters = [*norm.parameters(), *linear.parameters()]
    plain = gradients(lambda x: twice(norm(linear(x))), x, parameters, dy)
    for again in (False, True):
        inside = (lambda x: twice(norm(linear(x)))) if again else (lambda x: norm(linear(x)))
        outside = (lambda y: y) if again else twice
        actual = []
        x_ = x.clone().requires_grad_()
        y = outside(checkpoint(inside, x_, use_reentrant=reentrant))
        y.backward(dy)
        actual = [y.detach(), x_.grad, *(p.grad for p in parameters)]
        assert_same(actual, plain)
        for p in parameters:
            p.grad = None


def test_deepcopy_is_independent_and_equal():
    norm = double_norm("layernorm", GAINS["mixed"])
    twin = copy.deepcopy(norm)
    x, dy = torch.randn(4, HIDDEN).double(), torch.randn(4, HIDDEN).double()
    assert_same(gradients(twin, x, list(twin.parameters()), dy), gradients(norm, x, list(norm.parameters()), dy))
    twin.set_gain_(5.0)
    assert norm.weight.max() < 1


@pytest.mark.parametrize("gwc", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_exported_graph_keeps_values_and_gradients(kind, gwc):
    """torch.export knows no backward function of our own, so the graph holds plain steps with the same gradients."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), AlignedNorm(HIDDEN, kind=kind, gwc=gwc)).double()
    module[1].set_target_norm_(0.5)
    x, dy = torch.randn(2, HIDDEN).double(), torch.randn(2, HIDDEN).double()
    expected = gradients(module, x, list(module.parameters()), dy)
    for training in (True, False):
        exported = torch.export.export(module.train(training), (x,)).module()
        parameters = [exported.get_parameter(name) for name, _ in module.named_parameters()]
        assert_same(gradients(exported, x, parameters, dy), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_norm_still_compensates_what_stands_before(kind):
    norm = double_norm(kind, GAINS["positive"])
    x, dy = torch.randn(4, HIDDEN).double(), torch.randn(4, HIDDEN).double()
    free = gradients(norm, x, list(norm.parameters()), dy)
    norm.requires_grad_(False)
    assert_same(gradients(norm, x, [], dy), free[:2])


def test_in_place_consumer_and_features_written_by_index():
    """R24: what follows may write in place; the module returns a fresh tensor, not a view with a hook."""
    norm = double_norm("layernorm", GAINS["positive"])
    x, dy = torch.randn(4, HIDDEN).double(), torch.randn(4, HIDDEN).double()
    parameters = list(norm.parameters())
    plain = gradients(lambda x: torch.relu(norm(x)), x, parameters, dy)
    assert_same(gradients(lambda x: norm(x).relu_(), x, parameters, dy), plain)

    def merged(x):
        embeddings = torch.zeros(6, HIDDEN, dtype=torch.float64)
        embeddings[torch.tensor([0, 2, 3, 5])] = norm(x)
        return embeddings.relu_()[[0, 2, 3, 5]]

    assert_same(gradients(merged, x, parameters, dy), plain)


def test_calling_forward_directly_compensates_too():
    """R91: the compensation is part of the function itself; no module hook that a direct call would skip."""
    norm = double_norm("layernorm", GAINS["positive"])
    x, dy = torch.randn(4, HIDDEN).double(), torch.randn(4, HIDDEN).double()
    parameters = list(norm.parameters())
    assert_same(gradients(norm.forward, x, parameters, dy), gradients(norm, x, parameters, dy), rtol=0)
    assert norm._forward_hooks == {} and norm._backward_hooks == {} and norm._backward_pre_hooks == {}
    assert norm(x.requires_grad_()).grad_fn.name() == "_LayerNormGWCBackward"


def test_no_grad_and_input_without_gradient_take_the_plain_path():
    norm = AlignedNorm(HIDDEN)
    x = torch.randn(2, HIDDEN)
    assert "NativeLayerNorm" in norm(x).grad_fn.name()
    norm(x).sum().backward()
    torch.testing.assert_close(norm.bias.grad, torch.full((HIDDEN,), 2.0))
    with torch.no_grad():
        assert norm(x.requires_grad_()).grad_fn is None


@pytest.mark.parametrize("kind", KINDS)
def test_one_vector_alone(kind):
    norm = double_norm(kind, GAINS["positive"])
    x, dy = torch.randn(HIDDEN).double(), torch.randn(HIDDEN).double()
    parameters = list(norm.parameters())
    assert_same(gradients(norm, x, parameters, dy), gradients(lambda x: reference(norm, x), x, parameters, dy))


def test_empty_batch_of_features():
    norm = AlignedNorm(HIDDEN)
    x = torch.randn(0, 5, HIDDEN, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.shape == (0, 5, HIDDEN)
    assert torch.equal(norm.weight.grad, torch.zeros(HIDDEN))


@pytest.mark.parametrize(
    ("options", "named"),
    [({"kind": "batchnorm"}, "batchnorm"), ({"eps": 0.0}, "eps"), ({"gwc_floor": -1.0}, "gwc_floor")],
)
def test_bad_options_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        AlignedNorm(HIDDEN, **options)


@pytest.mark.parametrize("T", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_target_norm_is_refused(T):
    with pytest.raises(ValueError, match="target norm"):
        AlignedNorm(HIDDEN).set_target_norm_(T)


def test_text_embedding_norm_leaves_zero_rows_out():
    table = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-9, 0.0], [0.0, 1.0], [100.0, 0.0]])
    assert text_embedding_norm(table, vocab_size=4) == 3.0
    assert text_embedding_norm(nn.Embedding.from_pretrained(table), vocab_size=4) == 3.0
    assert text_embedding_norm(table) == pytest.approx(106 / 3)


def test_text_embedding_norm_is_float32_for_bfloat16_tables():
    torch.manual_seed(0)
    table = torch.randn(20_000, 8).bfloat16()
    assert text_embedding_norm(table) == pytest.approx(table.double().norm(dim=-1).mean().item(), rel=1e-6)


def test_text_embedding_norm_includes_the_modules_own_scale():
    """R75: T is measured where visual tokens are inserted."""

    class Scaled(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 39.0

    embedding = Scaled(10, 4)
    assert text_embedding_norm(embedding) == pytest.approx(39 * text_embedding_norm(embedding.weight), rel=1e-6)


@pytest.mark.parametrize(
    "table",
    [torch.zeros(5, 4), torch.empty(0), torch.empty(5, 4, device="meta"), torch.full((5, 4), float("nan"))],
    ids=["all-zero", "empty", "meta", "nan"],
)
def test_text_embedding_norm_of_nothing_raises(table):
    """R30: never NaN or 0."""
    with pytest.raises(ValueError, match="text"):
        text_embedding_norm(table)
