"""Multi-head latent attention: keys and values are made from a narrow latent of each token.

DeepSeek-V2 (arXiv 2405.04434, section 2.1), V3 and GLM-4.7-Flash have it. A token's keys and values
of all heads are products of one latent [L]; a further part of the key, which alone is rotated, is
the same for all heads. Queries are made from the token, or from a latent of their own.

Tensor ranks have some heads each. The products that give the latents, and their norms, are the same
on every rank, so the gradient of the shared key is summed over the ranks. Files hold rotated
elements in pairs of neighbours; here an element's partner is half of them away, which changes no
score, because queries and keys are ordered alike.

While it decodes, the embedded engine keeps only latent and shared key: `absorbed` multiplies the
queries by what would make keys of the latents.

Letters: T tokens, H hidden size, A heads of this tensor rank, L latent, K key elements that are not
rotated, D rotated ones, V value elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.layers.attention import PackedSequences, packed_attention
from stable_opd_mcore.models.layers.linear import ReplicatedLinear, linear_options
from stable_opd_mcore.models.layers.rotary import rotate

_NORM_EPS = 1e-6  # of the latents' norms, in transformers whatever rms_norm_eps is


@dataclass(frozen=True)
class LatentSubmodules:
    """The layers of one engine: torch's or Transformer Engine's."""

    column: Any
    row: Any
    norm: Any
    core: Any = None  # attention over heads; None: torch's


class LatentAttention(MegatronModule):
    """Replaces Megatron's self-attention: [T, 1, H], or its sequence-parallel slice, in and out."""

    rotary: int = 0  # the place of its rotary positions in Architecture.rotaries()

    def __init__(
        self,
        config: Any,
        submodules: LatentSubmodules,
        architecture: Architecture,
        layer_number: int,
        pg_collection: Any,
        cp_comm_type: str = "p2p",
        **unused: Any,
    ) -> None:
        super().__init__(config)
        latent = architecture.latent
        assert latent is not None
        self.layer_number, self.latent, self.tp_group = layer_number, latent, pg_collection.tp
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.num_heads = heads // self.tp_group.size()
        self.scale = architecture.softmax_scale or architecture.head_dim**-0.5
        column, row = linear_options(config, self.tp_group)
        norm: dict[str, Any] = {"config": config, "eps": _NORM_EPS}
        rank = latent.query_rank
        if rank is not None:
            self.q_down = ReplicatedLinear(config, hidden, rank)
            self.q_norm = submodules.norm(hidden_size=rank, **norm)
        self.q_up = submodules.column(rank or hidden, heads * architecture.head_dim, **column)
        self.kv_down = ReplicatedLinear(config, hidden, latent.rank + latent.rotated_dim)
        self.kv_norm = submodules.norm(hidden_size=latent.rank, **norm)
        width = heads * (latent.plain_dim + latent.value_dim)
        self.kv_up = submodules.column(latent.rank, width, **column)
        self.linear_proj = submodules.row(heads * latent.value_dim, hidden, **row)
        self.core_attention = None
        if submodules.core is not None:
            self.core_attention = submodules.core(
                config=config,
                layer_number=layer_number,
                attn_mask_type=AttnMaskType.padding_causal,
                attention_type="self",
                softmax_scale=self.scale,
                k_channels=architecture.head_dim,
                v_channels=latent.value_dim,
                pg_collection=pg_collection,
                cp_comm_type=cp_comm_type,
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSequences,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Each sequence's causal attention to itself."""
        assert attention_mask is None, "a mask would hide nothing else in packed sequences"
        queries, latents, shared_key = self.projected(hidden_states)
        if self.tp_group.size() > 1:
            if self.config.sequence_parallel:
                shared_key = gather_from_sequence_parallel_region(shared_key, group=self.tp_group)
            else:
                shared_key = copy_to_tensor_model_parallel_region(shared_key, group=self.tp_group)
        made = self.kv_up(latents)[0].unflatten(-1, (self.num_heads, -1))
        keys, values = made.split((self.latent.plain_dim, self.latent.value_dim), dim=-1)
        rotation = rotary_pos_emb[self.rotary]
        shared_key = rotate(shared_key, rotation).expand(-1, -1, self.num_heads, -1)
        queries, keys = rotate(queries, rotation), torch.cat((shared_key, keys), dim=-1)
        if self.core_attention is None:
            packed = packed_seq_params
            mixed = packed_attention(queries, keys, values, packed.buckets, packed.keys, self.scale)
        else:
            heads = (x.squeeze(1).contiguous() for x in (queries, keys, values))
            mixed = self.core_attention(
                *heads,
                None,
                attn_mask_type=AttnMaskType.padding_causal,
                packed_seq_params=packed_seq_params,
            )
            mixed = mixed.reshape(mixed.shape[0], 1, -1)
        return self.linear_proj(mixed)

    def projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., A, D + K] whose first elements are to be rotated, normalised latents [...,
        L], and the shared key [..., 1, D]; the last two of this rank's tokens."""
        latent = self.latent
        narrow = self.q_norm(self.q_down(hidden)[0]) if latent.query_rank is not None else hidden
        queries = self.q_up(narrow)[0].unflatten(-1, (self.num_heads, -1))
        plain, rotated = queries.split((latent.plain_dim, latent.rotated_dim), dim=-1)
        # What YaRN multiplies rotated elements by, of queries and keys at once
        rotated = _halves(rotated)
        if latent.rotated_factor != 1.0:
            rotated = rotated * latent.rotated_factor
        latents, shared = self.kv_down(hidden)[0].split((latent.rank, latent.rotated_dim), dim=-1)
        queries = torch.cat((rotated, plain), dim=-1)
        return queries, self.kv_norm(latents), _halves(shared).unsqueeze(-2)

    def absorbed(self, queries: Tensor, weights_LAX: Tensor) -> Tensor:
        """Queries [..., A, D + L] for keys of a shared key and a latent each.

        weights_LAX: `key_value_weights`.
        """
        rotated, plain = queries.split((self.latent.rotated_dim, self.latent.plain_dim), dim=-1)
        of_keys_LAK = weights_LAX[..., : self.latent.plain_dim]
        return torch.cat((rotated, torch.einsum("...ak,lak->...al", plain, of_keys_LAK)), dim=-1)

    def values_of(self, mixed: Tensor, weights_LAX: Tensor) -> Tensor:
        """[..., A V] of mixed latents [..., A, L]."""
        of_values_LAV = weights_LAX[..., self.latent.plain_dim :]
        return torch.einsum("...al,lav->...av", mixed, of_values_LAV).flatten(-2)

    def key_value_weights(self) -> Tensor:
        """What makes keys and values of a latent, low-rank factors included: [L, A, K + V]."""
        weight: Tensor = self.kv_up.weight
        one = torch.eye(self.latent.rank, dtype=weight.dtype, device=weight.device)
        return self.kv_up(one.unsqueeze(1))[0].squeeze(1).unflatten(-1, (self.num_heads, -1))


def _halves(pairs: Tensor) -> Tensor:
    """Elements in pairs of neighbours, the first ones of all pairs before the second ones."""
    return torch.cat((pairs[..., 0::2], pairs[..., 1::2]), dim=-1)
