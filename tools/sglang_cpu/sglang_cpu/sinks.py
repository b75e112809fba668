"""Attention with sinks, and over the tokens of a draft, in plain torch: SGLang has both for CPUs
with AMX only.

SGLang's model registry imports this module, which puts its attention in place of "torch_native" and
"intel_amx". gpt-oss takes only the second, which is the first where there is no AMX. Every layer's
cache holds all tokens: --disable-hybrid-swa-memory.

Letters: A query heads, T queries and S keys of a sequence, D head size.
"""

from copy import copy
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.layers.attention import torch_native_backend
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


@register_attention_backend("intel_amx")
@register_attention_backend("torch_native")
class PlainAttention(torch_native_backend.TorchNativeAttnBackend):
    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *more: Any, **named: Any
    ) -> Tensor:
        sinks = named.pop("sinks", None)
        with _attending_to(sinks):
            return super().forward_extend(q, k, v, layer, _with_lengths(batch), *more, **named)

    def forward_decode(self, *arguments: Any, sinks: Tensor | None = None, **named: Any) -> Tensor:
        with _attending_to(sinks):
            return super().forward_decode(*arguments, **named)


def _with_lengths(batch: Any) -> Any:
    """The batch with the lengths before and after its new tokens, which SGLang leaves out where
    they are a chain that the student judges, or one that the draft reads."""
    is_judged = batch.forward_mode.is_target_verify()
    if not is_judged and batch.extend_prefix_lens is not None:
        return batch
    batch = copy(batch)
    if is_judged:
        batch.extend_seq_lens = torch.full_like(batch.seq_lens, batch.spec_info.draft_token_num)
        batch.seq_lens = batch.seq_lens + batch.extend_seq_lens
    batch.extend_prefix_lens = batch.seq_lens - batch.extend_seq_lens
    return batch


def _attending_to(sinks_A: Tensor | None) -> Any:
    """A context in which torch_native's attention has these sinks, if any."""
    attend = scaled_dot_product_attention if sinks_A is None else partial(_attend, sinks_A)
    return patch.object(torch_native_backend, "scaled_dot_product_attention", attend)


def _attend(
    sinks_A: Tensor,
    queries_1ATD: Tensor,
    *keys_and_values: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    **settings: Any,
) -> Tensor:
    """A sink is one more key, whose score is the sink and whose value is zero."""
    num_queries, num_keys = queries_1ATD.shape[2], keys_and_values[0].shape[2]
    if attn_mask is None:
        attn_mask = torch.ones(num_queries, num_keys, dtype=torch.bool)
        attn_mask = attn_mask.tril() if is_causal else attn_mask
    bias_ATS = queries_1ATD.new_zeros(len(sinks_A), num_queries, num_keys + 1)
    bias_ATS[..., :-1].masked_fill_(~attn_mask, float("-inf"))
    bias_ATS[..., -1] = sinks_A[:, None]
    longer = (pad(tensor, (0, 0, 0, 1)) for tensor in keys_and_values)
    return scaled_dot_product_attention(queries_1ATD, *longer, attn_mask=bias_ATS, **settings)
