"""The torch attention: packed equals sequence by sequence; recomputation is bit-identical."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stable_opd_mcore.data.shared_prefixes import paths
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.models.layers.attention import Buckets, OtherKeys, packed_attention
from stable_opd_mcore.models.layers.path_attention import MASK, PathSequences, follow_paths
from stable_opd_mcore.parallel.world import World
from tests.models import tiny


@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [1, 90, 3, 64, 2, 65, 1], [4, 0, 6], [1, 1]])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_packed_equals_each_sequence_alone(lengths: list[int], groups: int) -> None:
    torch.manual_seed(0)
    total = sum(lengths)
    query, key, value = (
        torch.randn(total, 1, heads, 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, groups, groups)
    )
    out_weight = torch.randn(total, 1, 32, dtype=torch.float64)
    buckets = Buckets.of(lengths, torch.device("cpu"))
    found = packed_attention(query, key, value, buckets)
    found_grads = torch.autograd.grad((found * out_weight).sum(), (query, key, value))

    separate = []
    for q, k, v in zip(*(x.squeeze(1).split(lengths) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(4 // groups, dim=1) for x in (k, v))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        hidden = torch.ones(q.shape[1], q.shape[1]).triu(1).bool()
        scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(hidden, -torch.inf)
        separate.append((F.softmax(scores, dim=-1) @ v).transpose(0, 1).flatten(1))
    expected = torch.cat(separate).unsqueeze(1)
    expected_grads = torch.autograd.grad((expected * out_weight).sum(), (query, key, value))
    torch.testing.assert_close(found, expected)
    for found_grad, expected_grad in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(found_grad, expected_grad)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("in_torch", [True, False])
def test_each_sequence_attends_to_the_tokens_that_it_shares(in_torch, window) -> None:
    torch.manual_seed(0)
    tokens_S, shared_S = np.array([9, 7, 12, 8, 1, 5, 5]), np.array([0, 5, 4, 7, 0, 0, 4])
    own_S = tokens_S - shared_S
    places = paths(np.cumsum(own_S) - own_S, tokens_S, shared_S)
    batch = tiny.microbatch(own_S.tolist())
    batch = replace(
        batch,
        positions_T=torch.cat(
            [torch.arange(*pair) for pair in zip(shared_S, tokens_S, strict=True)]
        ),
        key_places_K=torch.from_numpy(np.concatenate(places)),
        cu_seqlens_keys=torch.tensor([0, *np.cumsum(tokens_S)]),
    )
    heads = [
        torch.randn(own_S.sum(), 1, number, 8, dtype=torch.float64, requires_grad=True)
        for number in (4, 2, 2)
    ]
    out_weight = torch.randn(own_S.sum(), 1, 32, dtype=torch.float64)
    if in_torch:
        buckets, keys = OtherKeys.shared(
            batch.cu_seqlens, batch.positions_T, batch.key_places_K, batch.cu_seqlens_keys
        )
        found = packed_attention(*heads, buckets, keys, window=window)
    else:
        kernel = AlignedAtTheirEnds(window)
        follow_paths(kernel)
        packed = PathSequences.of(batch, cu_seqlens_q=batch.cu_seqlens)
        assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, own_S.sum()]
        found = kernel(*(h.squeeze(1) for h in heads), packed_seq_params=packed).unsqueeze(1)
        assert kernel.attention_type == "self"
    whole = [h[batch.key_places_K] for h in heads]
    expected = packed_attention(
        *whole, Buckets.of(tokens_S.tolist(), torch.device("cpu")), window=window
    )
    ends = np.cumsum(tokens_S)
    is_own = [np.arange(e - n, e) for e, n in zip(ends, own_S, strict=True)]
    expected = expected[np.concatenate(is_own)]
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad((x * out_weight).sum(), heads) for x in (found, expected)]
    for found_grad, expected_grad in zip(*grads, strict=True):
        torch.testing.assert_close(found_grad, expected_grad)


class AlignedAtTheirEnds(torch.nn.Module):
    """What Transformer Engine's attention does with this mask."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window, self.attention_type = window, "self"

    def forward(self, query, key, value, *, packed_seq_params, attn_mask_type):
        assert (attn_mask_type.name, self.attention_type) == (MASK, "cross")
        ends = packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_kv
        outputs = []
        for (q0, q1), (k0, k1) in zip(*(pairwise(e.tolist()) for e in ends), strict=True):
            q, k, v = (x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
            k, v = (x.repeat_interleave(2, dim=0) for x in (k, v))
            at = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None]
            behind = at - torch.arange(k1 - k0)
            hidden = (behind < 0) | (behind >= (self.window or k1))
            scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(hidden, -torch.inf)
            outputs.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        return torch.cat(outputs)


def test_less_than_a_quarter_of_the_buckets_is_padding() -> None:
    lengths = [20 + 7 * i % 400 for i in range(64)]
    cells = sum(sequences * longest for sequences, longest in Buckets.of(lengths, "cpu").shapes)
    assert sum(lengths) <= cells < sum(lengths) / 0.75


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_is_bit_identical(recompute, world: World) -> None:
    architecture = tiny.architecture("qwen3")
    batch = tiny.microbatch([9, 4, 1, 12])
    results = []
    for how in ("none", recompute):
        (chunk,) = build_model(architecture, world, recompute=how)
        assert chunk.decoder.layers[0].recompute_mlp == (how == "selective")
        hidden_TH = forward_hidden(chunk, batch)
        (hidden_TH * torch.linspace(-1, 1, 32)).sum().backward()
        grads = [p.grad for p in chunk.decoder.parameters()]
        results.append([hidden_TH, *grads, chunk.embedding.word_embeddings.weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
