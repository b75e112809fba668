"""Attention sinks and sliding windows in plain torch.

A sink is a learned logit of a head. It takes part in the softmax over a token's scores and has no
value, so a head may attend to nothing. A sliding window lets a token read only the last tokens.
gpt-oss has both, and Mistral, Qwen2 and Qwen3 may have the window. Transformer Engine computes them
itself, from a parameter of the same name.

Letters: N sequences, G key-value groups with R query heads each, T queries and S keys of a
sequence, D head size, A = G R query heads of this tensor rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.nn import Module, Parameter

from stable_opd_mcore.errors import UserError

_CUDNN = 91800  # 9.18


class AttentionSinks(Module):
    """The sinks of a layer. It replaces Megatron's `core_attention`, with the same parameter."""

    def __init__(self, config: Any, pg_collection: Any, **unused: Any) -> None:
        super().__init__()
        self._group = pg_collection.tp
        heads = config.num_attention_heads // self._group.size()
        self.softmax_offset = Parameter(torch.empty(heads, dtype=config.params_dtype))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def sinks_of(attention: Any) -> Tensor | None:
    """The sinks of an attention layer, [A]; None: it has none."""
    return getattr(attention.core_attention, "softmax_offset", None)


def window_of(attention: Any) -> int | None:
    """Tokens, itself included, that a token of this attention layer reads; None: all before it."""
    config, number = attention.config, attention.layer_number
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number):
        return None
    return config.window_size[0] + 1


def causal_bias(
    length: int, window: int | None, places: Tensor | None = None, *, like: Tensor
) -> Tensor:
    """What is added to the scores of sequences of `length`: 0 where a token is read, else -inf.

    places: where the queries are in their sequences, [N, T, 1], for [N, 1, 1, T, length]; None:
        they are all tokens of one, for [length, length].
    """
    keys = torch.arange(length, device=like.device)
    behind = (keys[:, None] if places is None else places[:, None, None]) - keys
    hidden = behind < 0
    if window is not None:
        hidden = hidden | (behind >= window)
    return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def attend_with_sinks(
    queries_NATD: Tensor,
    keys_NGSD: Tensor,
    values_NGSD: Tensor,
    sinks_A: Tensor | None,
    *,
    bias: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Attention with a sink in each head's softmax, [N, A, T, D].

    Args:
        sinks_A: None: there are none.
        bias: what is added to the scores, of a shape that broadcasts to [N, 1, 1, T, S].
        scale: what the scores are multiplied by; None: 1/sqrt(D).
    """
    groups, length = keys_NGSD.shape[1], queries_NATD.shape[2]
    stacked = queries_NATD.unflatten(1, (groups, -1)).flatten(2, 3)  # a group's heads share keys
    factor = 1 / math.sqrt(keys_NGSD.shape[-1]) if scale is None else scale
    scores = (stacked @ keys_NGSD.transpose(-1, -2)).float() * factor
    scores_NGRTS = scores.unflatten(2, (-1, length))
    if bias is not None:
        scores_NGRTS = scores_NGRTS + bias
    if sinks_A is None:
        weights_NGRTS = scores_NGRTS.softmax(dim=-1)
    else:
        sinks = sinks_A.float().view(1, groups, -1, 1, 1).expand(*scores_NGRTS.shape[:-1], 1)
        weights_NGRTS = torch.cat((scores_NGRTS, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    mixed = weights_NGRTS.flatten(2, 3).to(values_NGSD.dtype) @ values_NGSD
    return mixed.unflatten(2, (-1, length)).flatten(1, 2)


def refuse_sinks_on_device() -> None:
    """Raise a UserError if Transformer Engine has no fused attention with sinks here, by the filter
    of softmax types in transformer_engine/pytorch/attention/dot_product_attention/utils.py."""
    found: int = torch.backends.cudnn.version() or 0
    if found < _CUDNN:
        raise UserError(
            f"attention sinks: cuDNN here is {found}, and Transformer Engine's fused attention "
            f"with sinks over packed sequences needs {_CUDNN}: install a newer cuDNN, or take a "
            "model without sinks"
        )
