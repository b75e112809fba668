"""The loss on whole distributions, by hand on one or two rows over three tokens."""

import math
from dataclasses import replace

import pytest
import torch

from stable_opd_mcore.losses.stop_tokens import NEVER
from stable_opd_mcore.losses.token_losses import Terms, divergence_from_teacher, from_teacher, opd
from stable_opd_mcore.records import Scores
from tests.losses.cases import make_case, make_config
from tests.losses.definitions import (
    defined_loss,
    divergence,
    merge_ids,
    target_logprob,
)

close = torch.testing.assert_close
P, Q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])
BATCH = make_case(make_config(), 2, 3).batch


def settings_of(**changes):
    return make_config(objective=changes).objective


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_a_stop_target_has_the_probability_of_all_stop_ids():
    found = target_logprob(P.log().expand(2, -1), torch.tensor([2, 1]), (0, 2)).exp()
    close(found, torch.tensor([0.7, 0.3]))
    close(target_logprob(P.log(), torch.tensor([2]), ()).exp(), torch.tensor([0.2]))


def test_merged_ids_leave_their_sum_under_the_first():
    merged = merge_ids(P.log(), (0, 2))
    close(merged.exp(), torch.tensor([[0.7, 0.3, 0.0]]))
    assert merged[0, 2] == NEVER
    assert merge_ids(P, ()) is P


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("reverse", kl([0.5, 0.3, 0.2], [0.2, 0.2, 0.6])),
        ("forward", kl([0.2, 0.2, 0.6], [0.5, 0.3, 0.2])),
        (
            "jsd",  # the mixture is 1/4 teacher and 3/4 student
            0.25 * kl([0.2, 0.2, 0.6], [0.425, 0.275, 0.3])
            + 0.75 * kl([0.5, 0.3, 0.2], [0.425, 0.275, 0.3]),
        ),
        ("student_support", kl([5 / 8, 3 / 8], [1 / 2, 1 / 2])),
        ("teacher_support", kl([2 / 7, 5 / 7], [3 / 4, 1 / 4])),
    ],
)
def test_divergences(kind, expected):
    served = Scores(None, topk_ids_NK=torch.tensor([[2, 0]]), topk_logprobs_NK=Q[:, [2, 0]].log())
    terms = Terms(divergence=kind, settings=settings_of(jsd_beta=0.25, top_k=2))
    found = divergence(terms, replace(BATCH, teacher=served), P.log(), Q.log())
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_returns_are_over_the_trained_tokens_that_follow_in_the_same_sample():
    """The third of sample 0's three tokens is masked; the last row is of sample 1."""
    batch = replace(
        make_case(make_config(), 4, 3).batch,
        targets_N=torch.zeros(4, dtype=torch.int64),
        sample_index_N=torch.tensor([0, 0, 0, 1]),
        token_index_N=torch.tensor([0, 1, 2, 0]),
        pg_weight_N=torch.tensor([1.0, 1.0, 0.0, 1.0]),
        teacher=Scores(Q.log()[0, [0, 0, 0, 0]]),
    )
    terms = Terms(opd, from_teacher, settings=settings_of(discount=0.5))
    found = defined_loss(terms, batch, P.log().expand(4, -1)).advantage_N
    close(found, math.log(0.2 / 0.5) * torch.tensor([1.5, 1.0, 0.0, 1.0]))


def test_each_part_has_its_temperature():
    """The first token is of a rollout, the second golden. P^2, renormalised, is P at 1/2."""
    batch = replace(
        BATCH,
        targets_N=torch.tensor([0, 1]),
        golden_N=torch.tensor([False, True]),
        pg_weight_N=torch.tensor([2.0, 0.0]),
        kl_weight_N=torch.tensor([3.0, 0.0]),
        sft_weight_N=torch.tensor([0.0, 5.0]),
    )
    terms = Terms(divergence_from_teacher, divergence="reverse", reference="exact", temperature=0.5)
    at_half = [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]
    others = (Q.log().expand(2, -1) * 0.5, Q.log().expand(2, -1) * 0.5)
    found = defined_loss(terms, batch, P.log().expand(2, -1), *others)
    expected = kl(at_half, [0.2, 0.2, 0.6])
    assert found.pg.item() == pytest.approx(2 * expected, rel=1e-5)
    assert found.kl.item() == pytest.approx(3 * expected, rel=1e-5)
    assert found.sft.item() == pytest.approx(-5 * math.log(0.3), rel=1e-5)
    close(found.token_logprob_N, torch.tensor([math.log(at_half[0]), math.log(0.3)]))
    close(found.teacher_entropy_N, -(Q * Q.log()).sum(1).expand(2))
