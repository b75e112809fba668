"""The delta rule against its definition token by token, continued states, and the kernels' path.

The layer within a model: test_huggingface.py, and on every layout parallel/test_pipeline.py.
"""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from stable_opd_mcore.models import hidden_states
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.models.layers import gated_delta_net
from stable_opd_mcore.models.layers.gated_delta_net import delta_rule
from stable_opd_mcore.parallel.world import World
from tests.models import tiny


def token_by_token(q, k, v, decay, beta, state) -> tuple[Tensor, Tensor]:
    """The recurrence of the module's docstring, in fp64."""
    q, k, v, decay, beta, state = (x.double() for x in (q, k, v, decay, beta, state))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    outputs = []
    for t in range(q.shape[1]):
        state = decay[:, t, :, None, None].exp() * state
        predicted = torch.einsum("nvde,nvd->nve", state, k[:, t])
        corrected = beta[:, t, :, None] * (v[:, t] - predicted)
        state = state + torch.einsum("nvd,nve->nvde", k[:, t], corrected)
        outputs.append(torch.einsum("nvde,nvd->nve", state, q[:, t]) / q.shape[-1] ** 0.5)
    return torch.stack(outputs, dim=1), state


def random_inputs(length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, length, 3, 6), (2, length, 3, 6), (2, length, 3, 10)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    decay = -3 * torch.rand(2, length, 3, generator=generator)
    beta = torch.rand(2, length, 3, generator=generator)
    return [q, k, v, decay, beta, torch.randn(2, 3, 6, 10, generator=generator)]


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
def test_chunks_give_outputs_state_and_gradients_of_the_recurrence(length: int) -> None:
    results = []
    for rule in (delta_rule, token_by_token):
        inputs = [x.requires_grad_() for x in random_inputs(length)]
        output, state = rule(*inputs)
        weights = torch.linspace(-1, 1, output.numel()).view_as(output)
        loss = (output * weights).sum() + state.square().sum()
        results.append([output, state, *torch.autograd.grad(loss, inputs)])
    for found, expected in zip(*results, strict=True):
        scale = expected.abs().max().clamp(min=1e-6)
        assert ((found - expected).abs().max() / scale) < 2e-5


def test_the_state_of_inputs_in_bf16_is_in_fp32() -> None:
    inputs = random_inputs(70, torch.bfloat16)
    output, state = delta_rule(*inputs)
    assert output.dtype == state.dtype == torch.float32
    torch.testing.assert_close(state.double(), token_by_token(*inputs)[1], rtol=1e-4, atol=1e-4)


def test_a_state_continues_where_another_call_ended() -> None:
    *inputs, state = random_inputs(90)
    whole, last = delta_rule(*inputs, state)
    first, middle = delta_rule(*(x[:, :17] for x in inputs), state)
    second, end = delta_rule(*(x[:, 17:] for x in inputs), middle)
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(end, last, rtol=1e-4, atol=1e-5)


def test_kernels_get_what_gives_the_same_hidden_states(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins with the kernels' arguments, because a CPU has none of them."""
    (chunk,) = build_model(tiny.architecture("qwen3_5"), world)
    batch = tiny.microbatch([70, 3, 1, 9])
    expected = forward_hidden(chunk, batch)
    kernels = {"causal_conv1d": ModuleType("conv"), "fla": ModuleType("fla")}
    kernels["fla.ops"] = ModuleType("ops")
    kernels["fla.ops.gated_delta_rule"] = ModuleType("rule")
    kernels["causal_conv1d"].causal_conv1d_fn = _convolved  # pyright: ignore
    kernels["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = _chunked  # pyright: ignore
    for name, module in kernels.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(gated_delta_net, "has_kernels", lambda: True)
    torch.testing.assert_close(forward_hidden(chunk, batch), expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(hidden_states, "has_kernels", lambda: True)
    # With Transformer Engine nothing reads rectangles.
    monkeypatch.setattr(hidden_states, "transformer_engine_is_usable", lambda: True)
    assert type(hidden_states._packed_sequences(batch, chunk)) is PackedSeqParams


def _convolved(x: Tensor, weight: Tensor, activation: str, seq_idx: Tensor) -> Tensor:
    """[1, C, T], as the package's reference computes it for each sequence by itself."""
    assert x.stride(1) == 1
    assert activation == "silu"
    assert seq_idx.dtype == torch.int32
    parts = x.split(seq_idx[0].bincount().tolist(), dim=2)
    padded = (F.pad(part, (weight.shape[1] - 1, 0)) for part in parts)
    return torch.cat(
        [F.silu(F.conv1d(part, weight[:, None], groups=len(weight))) for part in padded], dim=2
    )


def _chunked(q, k, v, *, g, beta, use_qk_l2norm_in_kernel: bool, cu_seqlens: Tensor):
    assert use_qk_l2norm_in_kernel
    assert cu_seqlens.dtype == torch.int64
    lengths = cu_seqlens.diff().tolist()
    inputs = zip(*(x.split(lengths, dim=1) for x in (q, k, v, g, beta)), strict=True)
    return torch.cat([delta_rule(*parts)[0] for parts in inputs], dim=1), None
