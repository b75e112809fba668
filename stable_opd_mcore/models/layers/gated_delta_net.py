"""The gated delta net: a recurrence over tokens that replaces attention in layers of Qwen3.5.

Each value head has a state S, a matrix from keys to values. Each token of a sequence decays S, then
corrects the value that S gives for its key (Yang, Kautz and Hatamizadeh, "Gated Delta Networks"):

    S <- exp(g) S,    S <- S + beta k (v - S' k)',    output S' q

with q, k and v from a short convolution over the tokens, and k and q normalised. `delta_rule` is
the definition, in plain torch and fp32. The rectangles of `Buckets` hold one sequence a row, so no
state passes from one packed sequence to the next; the cells after a sequence's end come later than
all of its tokens and do not change their outputs. With CUDA and the packages `fla` and
`causal_conv1d`, their kernels run over the packed tokens instead.

Key heads, with their value heads, are cut over the tensor ranks. Context parallelism is refused
(models/description/layout_refusal.py).

Shapes: T packed tokens, N sequences of a rectangle with L cells each, K key heads of this tensor
rank, V value heads, R of them to a key head, D and E the sizes of a key and a value, C channels of
the convolution (q, k and v of all heads), W its width, H hidden size.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from stable_opd_mcore.models.description.mixer_settings import DeltaNet
from stable_opd_mcore.models.layers.attention import (
    Buckets,
    PackedSequences,
    from_rectangles,
    to_rectangles,
)
from stable_opd_mcore.models.layers.linear import linear_options

_CHUNK = 64  # tokens whose products are computed at once
_NORM_EPS = 1e-6  # in the normalisation of queries and keys, as in `fla`


def delta_rule(
    query_NLVD: Tensor,
    key_NLVD: Tensor,
    value_NLVE: Tensor,
    decay_NLV: Tensor,
    beta_NLV: Tensor,
    state_NVDE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [N, L, V, E] in fp32, and the state after the last token.

    Within a chunk the corrections of all tokens solve one triangular system; from chunk to chunk
    only the state is passed. `decay` is g above, a logarithm and at most 0.
    """
    length = query_NLVD.shape[1]
    chunk = min(_CHUNK, length)
    q, k, v, g, beta = (
        _in_chunks(x.float(), chunk)
        for x in (query_NLVD, key_NLVD, value_NLVE, decay_NLV.unsqueeze(-1), beta_NLV.unsqueeze(-1))
    )
    q, k = _normalised(q) * q.shape[-1] ** -0.5, _normalised(k)
    g = g.cumsum(dim=-2)  # [N, V, chunks, chunk, 1], from the start of the chunk
    last = g[..., -1:, :]
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).triu(1)
    between = (g - g.mT).masked_fill(future, -torch.inf).exp()
    system = (beta * k) @ k.mT * between  # its diagonal is taken as 1
    solved = torch.linalg.solve_triangular(
        system, torch.cat((beta * v, beta * k * g.exp()), dim=-1), upper=False, unitriangular=True
    )
    corrected, of_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    inside = q @ k.mT * between
    q, k, kept = q * g.exp(), k * (last - g).exp(), last.exp()
    state = state_NVDE
    if state is None:
        state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for i in range(v.shape[2]):
        new = corrected[:, :, i] - of_state[:, :, i] @ state
        outputs.append(q[:, :, i] @ state + inside[:, :, i] @ new)
        state = kept[:, :, i] * state + k[:, :, i].mT @ new
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2), state


def _in_chunks(x_NLVX: Tensor, chunk: int) -> Tensor:
    """[N, V, chunks, chunk, X], zeros after the end: they neither decay nor change a state."""
    padded = F.pad(x_NLVX.transpose(1, 2), (0, 0, 0, -x_NLVX.shape[1] % chunk))
    return padded.unflatten(2, (-1, chunk))


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _NORM_EPS)


@cache
def has_kernels() -> bool:
    """Whether the optional kernels can run in this process."""
    packages = ("fla", "causal_conv1d")
    return torch.cuda.is_available() and all(map(importlib.util.find_spec, packages))


def delta_net_engine() -> str:
    """What computes gated delta nets in this process, as a line at a run's start."""
    if has_kernels():
        return "gated delta nets by fla and causal_conv1d"
    return "gated delta nets in plain torch, without fla and causal_conv1d"


@dataclass(frozen=True)
class DeltaNetSubmodules:
    """The linear layers of one engine: torch's or Transformer Engine's."""

    in_proj: Any
    out_proj: Any


@dataclass(frozen=True)
class DeltaNetState:
    """What N rows keep of the tokens so far, for the next ones."""

    inputs_NWC: Tensor  # the last W - 1 inputs of the convolution; 0 before the first token
    state_NVDE: Tensor

    def select(self, index_N: Tensor) -> DeltaNetState:
        """Row i becomes the old row `index_N[i]`."""
        return DeltaNetState(self.inputs_NWC[index_N], self.state_NVDE[index_N])


class GatedDeltaNet(MegatronModule):
    """Replaces Megatron's self-attention: [T, 1, H], or its sequence-parallel slice, in and out."""

    def __init__(
        self,
        config: Any,
        submodules: DeltaNetSubmodules,
        net: DeltaNet,
        layer_number: int,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number, self.net, self.tp_group = layer_number, net, pg_collection.tp
        ranks = self.tp_group.size()
        self.num_keys, self.num_values = net.num_key_heads // ranks, net.num_value_heads // ranks
        column, row = linear_options(config, self.tp_group)
        self.in_proj = submodules.in_proj(config.hidden_size, net.channels + net.values, **column)
        # A projection of its own, always Megatron's: decay and beta are too sensitive for FP8.
        self.in_proj_ba = ColumnParallelLinear(
            config.hidden_size, 2 * net.num_value_heads, **column
        )
        self.out_proj = submodules.out_proj(net.values, config.hidden_size, **row)
        channels = net.channels // ranks
        self.conv_weight = torch.nn.Parameter(torch.empty(channels, 1, net.conv_width))
        self.dt_bias = torch.nn.Parameter(torch.empty(self.num_values))
        self.A_log = torch.nn.Parameter(torch.empty(self.num_values))
        self.norm_weight = torch.nn.Parameter(torch.empty(net.value_dim))
        self.norm_weight.sequence_parallel = config.sequence_parallel  # pyright: ignore

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        assert attention_mask is None, "a mask would hide nothing else in packed sequences"
        inputs, gates, decay, beta = (x.squeeze(1) for x in self.projected(hidden_states))
        if has_kernels():
            output = self._by_kernels(inputs, decay, beta, packed_seq_params)
        else:
            assert isinstance(packed_seq_params, PackedSequences)
            output = self._by_rectangles(inputs, decay, beta, packed_seq_params.buckets)
        return self.finished(output, gates)

    def projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[..., H] -> inputs of the convolution [..., C], output gates [..., V, E], and in fp32 the
        decay and beta [..., V]."""
        of_keys = 2 * self.net.key_dim + self.net.values_per_key * self.net.value_dim
        heads = self.in_proj(hidden)[0].unflatten(-1, (self.num_keys, -1))
        gates = heads[..., of_keys:].unflatten(-1, (-1, self.net.value_dim)).flatten(-3, -2)
        of_value_heads = self.in_proj_ba(hidden)[0].unflatten(-1, (self.num_keys, 2, -1))
        beta, a = (x.flatten(-2) for x in of_value_heads.float().unbind(dim=-2))
        decay = -self.A_log.float().exp() * F.softplus(a + self.dt_bias.float())
        return heads[..., :of_keys].flatten(-2), gates, decay, beta.sigmoid()

    def finished(self, output: Tensor, gates: Tensor) -> tuple[Tensor, Tensor | None]:
        """Normalise each head of [T, V, E] or [T, B, V, E], multiply by its gate, and project."""
        weight = self.norm_weight
        if self.tp_group.size() > 1 and not self.config.sequence_parallel:
            # Each rank has the gradient of its own heads; under sequence parallelism Megatron sums.
            weight = copy_to_tensor_model_parallel_region(weight, group=self.tp_group)
        epsilon = self.config.layernorm_epsilon
        normed = F.rms_norm(output.float(), (self.net.value_dim,), None, epsilon)
        normed = weight * normed.to(gates.dtype) * F.silu(gates.float())
        rows = normed.to(gates.dtype).flatten(-2)
        return self.out_proj(rows if rows.dim() == 3 else rows.unsqueeze(1))

    def mixed(
        self, inputs_NLC: Tensor, decay_NLV: Tensor, beta_NLV: Tensor, before: DeltaNetState | None
    ) -> tuple[Tensor, DeltaNetState]:
        """Convolution and recurrence of N rows, which continue `before`: [N, L, V, E]."""
        width = self.net.conv_width - 1
        if before is None:
            inputs = F.pad(inputs_NLC, (0, 0, width, 0))
        else:
            inputs = torch.cat((before.inputs_NWC, inputs_NLC), dim=1)
        channels = inputs.shape[-1]
        convolved = F.conv1d(inputs.mT, self.conv_weight, groups=channels)
        heads = self._heads(F.silu(convolved).mT)
        state = None if before is None else before.state_NVDE
        output, state = delta_rule(*heads, decay_NLV, beta_NLV, state)
        return output, DeltaNetState(inputs[:, inputs.shape[1] - width :], state)

    def _heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [..., V, D] and values [..., V, E] of [..., C]."""
        D, R = self.net.key_dim, self.net.values_per_key
        groups = convolved.unflatten(-1, (self.num_keys, -1))
        query, key, value = groups.split((D, D, R * self.net.value_dim), dim=-1)
        value = value.unflatten(-1, (R, -1)).flatten(-3, -2)
        return query.repeat_interleave(R, dim=-2), key.repeat_interleave(R, dim=-2), value

    def _by_rectangles(
        self, inputs_TC: Tensor, decay_TV: Tensor, beta_TV: Tensor, buckets: Buckets
    ) -> Tensor:
        rectangles = (to_rectangles(x, buckets) for x in (inputs_TC, decay_TV, beta_TV))
        outputs = [
            self.mixed(inputs_NLC, decay_NLV, beta_NLV, None)[0].flatten(0, 1)
            for inputs_NLC, decay_NLV, beta_NLV in zip(*rectangles, strict=True)
        ]
        return from_rectangles(outputs, buckets)

    def _by_kernels(
        self, inputs_TC: Tensor, decay_TV: Tensor, beta_TV: Tensor, packed: PackedSeqParams
    ) -> Tensor:
        from causal_conv1d import causal_conv1d_fn  # pyright: ignore
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore

        cu_seqlens: Any = packed.cu_seqlens_q
        sequences = torch.arange(len(cu_seqlens) - 1, device=inputs_TC.device, dtype=torch.int32)
        sequence_of_token = sequences.repeat_interleave(
            cu_seqlens.diff(), output_size=len(inputs_TC)
        )
        convolved = causal_conv1d_fn(
            inputs_TC[None].mT,  # the kernel wants the channels last in memory
            self.conv_weight.squeeze(1),
            activation="silu",
            seq_idx=sequence_of_token[None],
        )
        heads = self._heads(convolved.mT)
        output, _ = chunk_gated_delta_rule(
            *heads,
            g=decay_TV[None],
            beta=beta_TV[None].to(inputs_TC.dtype),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens.long(),
        )
        return output[0]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Megatron's, with this module's own parameters cut over the tensor ranks, which Megatron
        would save as replicated."""
        tree: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        cut: dict[str, int] = {"conv_weight": 0, "dt_bias": 0, "A_log": 0}
        assert metadata is not None
        return tree | make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            cut,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
