"""Cached attention against plain causal attention over each row by itself."""

import pytest
import torch

from stable_opd_mcore.rollout.kv_cache import KVCache

NUM_HEADS, NUM_GROUPS, HEAD_SIZE = 4, 2, 8
ANGLES_PD = torch.outer(torch.arange(300.0), 1e4 ** -(torch.arange(4.0) / 4))


def rotated(x_LND):
    angles_L1D = ANGLES_PD[: len(x_LND)].repeat(1, 2)[:, None]
    first, second = x_LND.chunk(2, dim=-1)
    return x_LND * angles_L1D.cos() + torch.cat((-second, first), -1) * angles_L1D.sin()


def plain_attention(q_LQD, k_LGD, v_LGD):
    """Causal attention of one row without padding: [L, Q*D]."""
    repeats = NUM_HEADS // NUM_GROUPS
    keys = rotated(k_LGD).repeat_interleave(repeats, dim=1)
    scores_QLL = torch.einsum("lqd,mqd->qlm", rotated(q_LQD), keys) / HEAD_SIZE**0.5
    future = torch.ones(len(q_LQD), len(q_LQD), dtype=torch.bool).triu(1)
    weights_QLL = scores_QLL.masked_fill(future, float("-inf")).softmax(-1)
    values = v_LGD.repeat_interleave(repeats, dim=1)
    return torch.einsum("qlm,mqd->lqd", weights_QLL, values).flatten(1)


@pytest.mark.parametrize("prompt_lengths", [[5, 5], [3, 7]])
def test_attention_is_that_of_each_row_alone_as_the_cache_grows_and_rows_leave(prompt_lengths):
    generator = torch.Generator().manual_seed(0)
    longest, new = max(prompt_lengths), 140  # more than one block of cells
    heads = (NUM_HEADS, NUM_GROUPS, NUM_GROUPS)
    qkv = [torch.randn(longest + new, 2, count, HEAD_SIZE, generator=generator) for count in heads]
    cache = KVCache(prompt_lengths, [ANGLES_PD], torch.float32)
    rows, outputs = [0, 1], {0: [], 1: []}
    steps = [(0, longest), *((slot, slot + 1) for slot in range(longest, longest + new))]
    for start, stop in steps:
        if stop == longest + new // 2:  # the row with the longer prompt leaves
            rows = [0]
            cache.select(torch.tensor(rows))
        cache.begin(stop - start)
        queries, keys, values = (x[start:stop, rows] for x in qkv)
        heads = torch.cat((queries.unflatten(2, (NUM_GROUPS, -1)), keys.unsqueeze(3)), dim=3)
        out = cache.attend(0, heads, values, scale=None)
        cache.end()
        for place, row in enumerate(rows):
            outputs[row].append(out[:, place])
    for row, parts in outputs.items():
        padding = longest - prompt_lengths[row]
        got = torch.cat(parts)[padding:]
        expected = plain_attention(*(x[padding : padding + len(got), row] for x in qkv))
        assert torch.allclose(got, expected, atol=1e-5)
