"""Scores of a served teacher, as they are read: merged top-K lists, stop classes, two readers."""

import numpy as np
import pytest
import torch

from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.records import Sample, SequenceScores
from stable_opd_mcore.scoring.served import ServedScorer, merge_entries
from stable_opd_mcore.serving.teacher import Wanted
from tests.losses.definitions import merge_ids
from tests.shares import sample_of, weights_of

VOCABULARY, STOPS = 12, (2, 5, 9)


def test_merged_lists_are_those_of_the_merged_distribution():
    """3 of 12 tokens are stop ids; the lists of 6 tokens hold 0, 1, 2 or 3 of them."""
    random = torch.Generator().manual_seed(0)
    log_p_NV = (2 * torch.randn(500, VOCABULARY, generator=random)).log_softmax(1)
    stops = torch.tensor(STOPS)
    listed = log_p_NV.topk(6, dim=1)
    assert torch.isin(listed.indices, stops).sum(1).unique().tolist() == [0, 1, 2, 3]
    ids_NK, logprobs_NK = merge_entries(
        listed.indices, listed.values, stops, log_p_NV[:, stops].logsumexp(1)
    )
    expected = merge_ids(log_p_NV, stops.tolist()).topk(4, dim=1)
    assert torch.equal(ids_NK, expected.indices)
    torch.testing.assert_close(logprobs_NK, expected.values)


def samples_with(wanted: Wanted) -> tuple[list[Sample], list[torch.Tensor]]:
    """Samples with the scores of random distributions, and these [L, V]."""
    random = torch.Generator().manual_seed(1)
    samples, distributions = [], []
    for index in range(4):
        log_p_LV = (2 * torch.randn(3 + 4 * index, VOCABULARY, generator=random)).log_softmax(1)
        response_L = log_p_LV.exp().multinomial(1, generator=random)[:, 0]
        top = log_p_LV.topk(wanted.top_k, dim=1)
        scores = SequenceScores(
            log_p_LV.gather(1, response_L[:, None])[:, 0].numpy(),
            top.indices.numpy(),
            top.values.numpy(),
            log_p_LV[:, list(wanted.extra_ids)].numpy(),
        )
        sample = sample_of(
            kind="rollout",
            prompt_id=f"s:{index}",
            prompt_token_ids=(1,) * (index + 1),
            response_token_ids=response_L.numpy(),
            trained=np.ones(len(response_L), np.bool_),
            teacher_scores=scores,
        )
        samples.append(sample)
        distributions.append(log_p_LV)
    return samples, distributions


@pytest.mark.parametrize("merged_ids", [(), (9, 2)])
def test_two_scorers_read_one_reply(merged_ids):
    """One merges stop ids in its list. The other has other stop ids and a longer list."""
    of_loss = ServedScorer(
        True, vocab_size=VOCABULARY, stop_ids=(2, 9), top_k=3, merged_ids=merged_ids
    )
    before = of_loss.wanted
    assert before == Wanted(3 + bool(merged_ids), (2, 9))
    other = ServedScorer(
        True, vocab_size=VOCABULARY, stop_ids=(9, 7), top_k=5, columns_before=before.extra_ids
    )
    assert other.wanted == Wanted(5, (2, 9, 7))
    samples, distributions = samples_with(other.wanted)
    for batch in pack(samples, weights_of(samples), max_tokens=16):
        log_p_NV = torch.stack(
            [
                distributions[sample][token]
                for sample, token in zip(batch.sample_index_N, batch.token_index_N, strict=True)
            ]
        )
        (scores,), (others,) = of_loss.score([batch]), other.score([batch])
        for read, ids in ((scores, (2, 9)), (others, (7, 9))):
            of_token = log_p_NV.gather(1, batch.targets_N[:, None])[:, 0]
            of_class = log_p_NV[:, list(ids)].logsumexp(1)
            is_stop_N = torch.isin(batch.targets_N, torch.tensor(ids))
            expected = torch.where(is_stop_N, of_class, of_token)
            torch.testing.assert_close(read.logprob_N, expected, atol=1e-6, rtol=0)
        listed = merge_ids(log_p_NV, list(merged_ids)) if merged_ids else log_p_NV
        for read, log_p, top_k in ((scores, listed, 3), (others, log_p_NV, 5)):
            top = log_p.topk(top_k, dim=1)
            near = {"atol": 1e-3, "rtol": 1e-3}  # half precision
            torch.testing.assert_close(read.topk_logprobs_NK, top.values, **near)
            ids_NK = read.topk_ids_NK
            assert ids_NK is not None
            same = log_p.gather(1, ids_NK)  # half precision may round two entries to one value
            torch.testing.assert_close(same, top.values, **near)


def test_other_stages_and_micro_batches_without_samples_have_no_scores():
    scorer = ServedScorer(True, vocab_size=VOCABULARY, stop_ids=(2,), top_k=3)
    (empty,) = pack([], weights_of([]), max_tokens=16)
    (scores,) = scorer.score([empty])
    assert scores.logprob_N is not None
    assert scores.topk_ids_NK is not None
    assert (scores.logprob_N.shape, scores.topk_ids_NK.shape) == ((0,), (0, 3))
    assert ServedScorer(False, vocab_size=VOCABULARY).score([empty]) == []
    with pytest.raises(ValueError, match="top_k=13 exceeds the 12 tokens"):
        ServedScorer(True, vocab_size=VOCABULARY, top_k=13)
