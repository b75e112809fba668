"""The torch attention: packed equals sequence by sequence; recomputation is bit-identical."""

import pytest
import torch
import torch.nn.functional as F

from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden
from stable_opd_mcore.models.layers.attention import Buckets, packed_attention
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
