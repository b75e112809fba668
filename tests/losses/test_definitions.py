"""The definitions themselves, by hand on one or two rows over two or three tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stable_opd_mcore.losses.definitions import (
    PolicyInputs,
    gkd,
    grpo,
    grpo_opd,
    k3,
    kl_divergence,
    lsm,
    merge_ids,
    objective_loss,
    opd,
    student_topk,
    target_logprob,
)
from stable_opd_mcore.losses.stop_tokens import NEVER
from stable_opd_mcore.records import Scores
from tests.losses.cases import make_case, make_config

close = torch.testing.assert_close
P, Q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])


def inputs(batch: dict[str, Any] | None = None, rows: int = 1, **changes) -> PolicyInputs:
    """Student P and teacher Q, whose target is token 0 in every row."""
    log_p, log_q = P.log().expand(rows, -1), Q.log().expand(rows, -1)
    return PolicyInputs(
        config=make_config(**changes),
        batch=replace(make_case(make_config(), rows, 3).batch, **(batch or {})),
        log_p_NV=log_p,
        log_q_NV=log_q,
        logprob_N=log_p[:, 0],
        token_logprob_N=log_p[:, 0],
        teacher_logprob_N=log_q[:, 0],
    )


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_kl_divergence_of_two_rows():
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    close(kl_divergence(p.log(), q.log()), torch.tensor([kl([0.5, 0.5], [0.25, 0.75]), 0.0]))


def test_k3_continues_as_its_tangent_beyond_a_log_ratio_of_10():
    close(k3(torch.tensor(2.0).log()), torch.tensor(2 - math.log(2) - 1))
    assert k3(torch.zeros(1)).item() == 0
    slope = math.exp(10) - 1
    at_10, at_12 = k3(torch.tensor([10.0, 12.0]).double()).tolist()
    assert at_10 == pytest.approx(math.exp(10) - 11)
    assert at_12 == pytest.approx(at_10 + 2 * slope)


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
    ("name", "changes", "expected"),
    [
        ("reverse", {}, kl([0.5, 0.3, 0.2], [0.2, 0.2, 0.6])),
        ("forward", {}, kl([0.2, 0.2, 0.6], [0.5, 0.3, 0.2])),
        (
            "jsd",
            {"objective__jsd_beta": 0.25},  # the mixture is 1/4 teacher and 3/4 student
            0.25 * kl([0.2, 0.2, 0.6], [0.425, 0.275, 0.3])
            + 0.75 * kl([0.5, 0.3, 0.2], [0.425, 0.275, 0.3]),
        ),
    ],
)
def test_gkd_divergences(name, changes, expected):
    found = gkd(inputs(objective__name="gkd", objective__divergence=name, **changes))
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_support_objectives_renormalise_both_models_on_the_support():
    of_student = student_topk(inputs(objective__name="student_topk", objective__top_k=2))
    assert of_student.item() == pytest.approx(kl([5 / 8, 3 / 8], [1 / 2, 1 / 2]), rel=1e-5)
    served = Scores(None, topk_ids_NK=torch.tensor([[2, 0]]), topk_logprobs_NK=Q[:, [2, 0]].log())
    of_teacher = lsm(inputs({"teacher": served}, objective__name="lsm", objective__top_k=2))
    assert of_teacher.item() == pytest.approx(kl([2 / 7, 5 / 7], [3 / 4, 1 / 4]), rel=1e-5)


@pytest.mark.parametrize(
    ("old", "changes", "expected"),
    [
        (None, {}, -math.log(0.2 / 0.5)),
        (0.25, {}, -2 * math.log(0.2 / 0.25)),  # ratio 2, and A < 0: not clipped
        (0.16, {}, -1.2 * math.log(0.2 / 0.16)),  # ratio 3.125, and A > 0: clipped at 1.2
        (None, {"power": 0.5}, math.sqrt(0.5) - math.sqrt(0.2)),
        (None, {"clamp": 0.5}, 0.5),
        (
            None,
            {"control_variate": True},
            -math.log(0.2 / 0.5) - kl([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]),
        ),
    ],
)
def test_opd_surrogate_of_one_token(old, changes, expected):
    batch = {"old_logprob_N": None if old is None else torch.tensor([old]).log()}
    changes = {f"objective__advantage__{key}": value for key, value in changes.items()}
    found = opd(inputs(batch, **changes))
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_opd_discounts_the_trained_tokens_that_follow_in_the_same_sample():
    """The third of sample 0's three tokens is masked; the last row is of sample 1."""
    batch = {
        "old_logprob_N": None,
        "sample_index_N": torch.tensor([0, 0, 0, 1]),
        "token_index_N": torch.tensor([0, 1, 2, 0]),
        "pg_weight_N": torch.tensor([1.0, 1.0, 0.0, 1.0]),
    }
    advantage = math.log(0.2 / 0.5)
    found = opd(inputs(batch, rows=4, objective__discount=0.5))
    close(found[[0, 1, 3]], -advantage * torch.tensor([1.5, 1.0, 1.0]))


def test_grpo_takes_the_given_advantage():
    batch = {"given_advantage_N": torch.tensor([-3.0]), "old_logprob_N": None}
    assert grpo(inputs(batch, objective__name="grpo")).item() == 3
    clamped = inputs(batch, objective__name="grpo", objective__advantage__clamp=2.0)
    assert grpo(clamped).item() == 2


def test_grpo_opd_adds_the_teachers_advantage_to_that_of_the_reward():
    batch = {"given_advantage_N": torch.tensor([-3.0]), "old_logprob_N": None}
    settings = {"objective__name": "grpo_opd", "objective__advantage__teacher_weight": 2.0}
    teachers = -opd(inputs(batch)).item()
    assert abs(teachers) > 0.5
    assert grpo_opd(inputs(batch, **settings)).item() == pytest.approx(3 - 2 * teachers)
    clamped = inputs(batch, **settings, objective__advantage__clamp=0.5)
    sign = 1 if teachers > 0 else -1
    assert grpo_opd(clamped).item() == pytest.approx(0.5 - 2 * 0.5 * sign)


def by_hand(policy_term, temperature: float, **changes: Any) -> dict[str, Tensor]:
    """The parts of the loss of two rows, of which the second is golden; P is at temperature 1."""
    case = make_case(make_config(), 2, 3)
    batch = replace(
        case.batch,
        targets_N=torch.tensor([0, 1]),
        pg_weight_N=torch.tensor([2.0, 0.0]),
        kl_weight_N=torch.tensor([3.0, 0.0]),
        sft_weight_N=torch.tensor([0.0, 5.0]),
        reference=Scores(Q.log()[0, [0, 1]]),
    )
    config = make_config(kl__beta=0.1, sampling__temperature=temperature, **changes)
    logits = P.log().expand(2, -1)
    reference = Q.log().expand(2, -1) * temperature
    parts = objective_loss(policy_term, config, batch, logits, None, reference)
    close(parts.loss, parts.pg + parts.kl + parts.sft)
    return vars(parts)


def test_the_loss_is_the_weighted_sum_of_policy_kl_and_golden_terms():
    parts = by_hand(lambda found: found.logprob_N, temperature=0.5)
    at_half = [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]  # P^2, renormalised
    assert parts["pg"].item() == pytest.approx(2 * math.log(at_half[0]), rel=1e-5)
    assert parts["kl"].item() == pytest.approx(3 * kl(at_half, [0.2, 0.2, 0.6]), rel=1e-5)
    assert parts["sft"].item() == pytest.approx(-5 * math.log(0.3), rel=1e-5)


def test_sampled_kl_is_that_of_the_target_alone():
    parts = by_hand(None, temperature=1.0, kl__estimator="k3")
    assert parts["pg"].item() == 0
    assert parts["kl"].item() == pytest.approx(3 * (0.4 - math.log(0.4) - 1), rel=1e-5)
