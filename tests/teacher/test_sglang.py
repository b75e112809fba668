"""What a served teacher's lists become; real servers answer in tests/integration."""

from __future__ import annotations

import torch

from stable_opd_mcore.losses.reference import merge_ids
from stable_opd_mcore.teacher.sglang import merge_entries


def test_merged_lists_are_those_of_the_merged_distribution():
    """Of 12 tokens, 3 are stop ids: lists with none, some and all of them among their 6."""
    draw = torch.Generator().manual_seed(0)
    log_p_NV = (2 * torch.randn(500, 12, generator=draw)).log_softmax(1)
    stops = torch.tensor([2, 5, 9])
    listed = log_p_NV.topk(6, dim=1)
    assert torch.isin(listed.indices, stops).sum(1).unique().tolist() == [0, 1, 2, 3]
    ids_NK, logprobs_NK = merge_entries(
        listed.indices, listed.values, stops, log_p_NV[:, stops].logsumexp(1)
    )
    expected = merge_ids(log_p_NV, stops.tolist()).topk(4, dim=1)
    assert torch.equal(ids_NK, expected.indices)
    torch.testing.assert_close(logprobs_NK, expected.values)
