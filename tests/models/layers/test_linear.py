"""The products of the torch layers against their definition, by themselves and in a layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.layers import linear as module
from stable_opd_mcore.models.layers.linear import TorchColumnLinear, TorchRowLinear, linear
from tests.models import tiny

SIZES = [(1, 1, 1), (5, 7, 3), (130, 257, 129), (0, 8, 4)]  # T, H, O


@pytest.fixture(scope="module")
def layers(world):
    """A column and a row layer, with and without a bias: 32 to 64, 32 to 32."""
    attention = build_model(tiny.architecture("qwen2"), world)[0].decoder.layers[0].self_attention
    assert type(attention.linear_qkv) is TorchColumnLinear
    assert type(attention.linear_proj) is TorchRowLinear
    return {"with bias": attention.linear_qkv, "without": attention.linear_proj}


def operands(sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    tokens, inputs, outputs = sizes
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, 1, inputs), (outputs, inputs), (outputs,))
    x, w, b = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, w, b


def test_linear_is_the_product_and_the_bias():
    for sizes in SIZES:
        for dtype in [torch.float32, torch.bfloat16, torch.float64]:
            x, w, b = operands(sizes, dtype)
            rounding = torch.finfo(dtype).eps * 16 * max(1, sizes[1]) ** 0.5
            transposed = w.t().contiguous().t()
            for weight, bias in ((w, b), (w, None), (transposed, b), (transposed, None)):
                y = linear(x, weight, bias)
                exact = F.linear(x.double(), w.double(), None if bias is None else bias.double())
                assert y.dtype == dtype
                torch.testing.assert_close(y.double(), exact, rtol=rounding, atol=rounding)


def test_without_onednn_the_product_is_torchs(monkeypatch):
    x, w, b = operands((5, 7, 3), torch.float32)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(module, "_onednn", None)
    assert torch.equal(linear(x, w, b), F.linear(x, w, b))


@pytest.mark.parametrize("name", ["with bias", "without"])
def test_gradients_of_a_layer_are_those_of_the_product(layers, name):
    layer = layers[name]
    x = torch.randn(9, 1, 32).requires_grad_()
    g = torch.randn(9, 1, layer.weight.shape[0])
    given = [x, layer.weight, *([] if layer.bias is None else [layer.bias])]
    expected = torch.autograd.grad(F.linear(*given), given, g)
    found = torch.autograd.grad(layer(x)[0], given, g)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_weights_gradient_is_added_to_main_grad(layers):
    """And not returned, so that Megatron's hook does not add it once more."""
    weight = torch.nn.Parameter(torch.randn(3, 7))
    weight.main_grad = torch.ones(3, 7)  # an earlier micro-batch's
    x, g = torch.randn(9, 1, 7), torch.randn(9, 1, 3)
    options = {"allreduce_dgrad": False, "sequence_parallel": False}
    layers["without"]._forward_impl(x, weight, None, **options).backward(g)
    torch.testing.assert_close(weight.main_grad, 1 + g[:, 0].t() @ x[:, 0])
    assert weight.grad_added_to_main_grad
    assert not weight.grad.any()


def test_frozen_weights_get_no_gradient(layers):
    weight, x = torch.randn(3, 7), torch.randn(9, 1, 7).requires_grad_()
    options = {"allreduce_dgrad": False, "sequence_parallel": False}
    layers["without"]._forward_impl(x, weight, None, **options).sum().backward()
    torch.testing.assert_close(x.grad[0, 0], weight.sum(dim=0))
