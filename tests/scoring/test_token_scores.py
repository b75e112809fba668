"""Scores computed block by block, and the overlap metrics."""

import pytest
import torch

from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.scoring.token_scores import overlap, score
from tests.losses.cases import make_case, make_config


def test_scores_equal_log_softmax():
    case = make_case(make_config(), 17, 61)
    log_p = (case.hidden_NH @ case.weight_VH.T / 0.7).log_softmax(-1)
    padded = torch.cat([case.weight_VH, torch.full((3, 8), 50.0)])
    for block_rows in (1, 5, 100):
        found = score(
            case.hidden_NH,
            Head(padded, 0, 61),
            case.batch.targets_N,
            temperature=0.7,
            top_k=4,
            block_rows=block_rows,
        )
        sampled = log_p.gather(1, case.batch.targets_N[:, None])[:, 0]
        torch.testing.assert_close(found.logprob_N, sampled)
        torch.testing.assert_close(found.entropy_N, -(log_p.exp() * log_p).sum(1))
        top = log_p.topk(4, dim=1)
        torch.testing.assert_close(found.topk_logprobs_NK, top.values)
        assert torch.equal(found.topk_ids_NK, top.indices)


def test_a_list_longer_than_the_vocabulary_is_refused():
    case = make_case(make_config(), 4, 7)
    head, targets = Head(case.weight_VH, 0, 7), case.batch.targets_N
    with pytest.raises(ValueError, match="top_k=8 exceeds the 7 tokens"):
        score(case.hidden_NH, head, targets, temperature=1.0, top_k=8)


def topk(ids, probabilities) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(ids), torch.tensor(probabilities).log()


def test_overlap_equals_values_computed_by_hand():
    student = topk([[4, 7, 1], [1, 2, 3]], [[0.5, 0.3, 0.1], [0.5, 0.3, 0.1]])
    teacher = topk([[7, 9, 4], [4, 5, 6]], [[0.6, 0.2, 0.1], [0.6, 0.2, 0.1]])
    found = overlap(*student, *teacher)
    torch.testing.assert_close(found.ratio_N, torch.tensor([2 / 3, 0.0]))
    torch.testing.assert_close(found.student_mass_N, torch.tensor([0.8, 0.0]))
    torch.testing.assert_close(found.teacher_mass_N, torch.tensor([0.7, 0.0]))
    p, q = torch.tensor([0.5, 0.3]) / 0.8, torch.tensor([0.1, 0.6]) / 0.7
    expected = (p * (q / p).log()).sum()
    torch.testing.assert_close(found.advantage_N, torch.stack([expected, torch.zeros(())]))
    assert overlap(*student, *student).advantage_N.abs().max() < 1e-6
