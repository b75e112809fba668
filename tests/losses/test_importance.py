"""The correction of the train/inference mismatch, token by token."""

import math
from dataclasses import replace

import pytest
import torch

from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.losses.objectives import build_objective
from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.losses.token_weights import (
    correct_importance,
    importance_weights,
    use_rollout_policy,
)
from stable_opd_mcore.scoring.token_scores import score
from tests.losses.cases import (
    Case,
    assert_close,
    make_case,
    make_config,
    run_definition,
    run_fused,
    teacher_scores,
)
from tests.shares import sample_of, weights_of

RATIOS = torch.tensor([1.0, 1.5, 4.0, 0.6, 0.1, 2.0, 0.5])  # the last two: at the bounds


def logs(ratios: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ratios.log(), torch.zeros(len(ratios))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("truncated", [1.0, 1.5, 2.0, 0.6, 0.1, 2.0, 0.5]),
        ("masked", [1.0, 1.5, 0.0, 0.6, 0.0, 2.0, 0.5]),
    ],
)
def test_importance_weights_of_each_kind(kind, expected):
    weights = importance_weights(*logs(RATIOS), kind, 2.0)
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def batch():
    trained = (True, True, False)
    rollout = sample_of("rollout", "p:0", (1, 2), (3, 4, 5), trained, (-1.0, -2.0, -0.5))
    golden = sample_of("golden", "p:0", (1, 2), (6, 7), (True,) * 2, off_policy=True)
    samples = [rollout, golden]
    (packed,) = pack(samples, weights_of(samples, pg=(0.5, 0), sft=(0, 1)), max_tokens=64)
    return packed


def test_only_trained_rollout_tokens_are_corrected_and_counted():
    packed = batch()
    trained = packed.pg_weight_N != 0
    old = torch.where(trained, packed.rollout_logprob_N + math.log(3.0), -1e4)
    (corrected,), metrics = correct_importance(
        [replace(packed, old_token_logprob_N=old)], "truncated", 2.0, sampled_kl=False
    )
    assert torch.equal(corrected.pg_weight_N, packed.pg_weight_N * 2.0)
    assert torch.equal(corrected.sft_weight_N, packed.sft_weight_N)
    values = metrics.values_by_key()
    assert values == {"importance/weight_mean": 2.0, "importance/cut_share": 1.0}


def test_off_policy_golden_tokens_keep_their_weights():
    """gkd's policy term may be on golden tokens, which no engine sampled."""
    packed = replace(batch(), pg_weight_N=torch.tensor([0.5, 0.5, 0, 2, 2]))
    packed = replace(packed, kl_weight_N=torch.tensor([1.0, 1, 1, 0, 0]))
    old = packed.rollout_logprob_N + torch.tensor([3.0, 0.25, 0.5, 1e4, 0.25]).log()
    packed = replace(packed, old_token_logprob_N=old)
    for sampled_kl, kl_weights in ((False, [1, 1, 1, 0, 0]), (True, [2, 0.25, 0.5, 0, 0])):
        (found,), metrics = correct_importance([packed], "truncated", 2.0, sampled_kl=sampled_kl)
        torch.testing.assert_close(found.pg_weight_N, torch.tensor([1, 0.125, 0, 2, 2]))
        torch.testing.assert_close(found.kl_weight_N, torch.tensor(kl_weights).float())
        assert metrics.values_by_key()["importance/cut_share"] == 0.5


# ---- a student with several stop ids, whose probabilities the loss sums (docs/method.md §4)


def several_stops(**changes) -> Case:
    """A case whose rollout log-probabilities are the student's log-probabilities of the tokens."""
    case = make_case(make_config(**changes), rows=40, stop_ids=((1, 4, 9), (2,)))
    log_p = (case.hidden_NH @ case.weight_VH.T).log_softmax(-1)
    sampled = log_p.gather(1, case.batch.targets_N[:, None])[:, 0]
    return replace(case, batch=replace(case.batch, rollout_logprob_N=sampled))


def test_equal_engine_and_trainer_logprobs_are_not_corrected():
    case = several_stops()
    scored = score(
        case.hidden_NH,
        Head(case.weight_VH, 0, len(case.weight_VH)),
        case.batch.targets_N,
        temperature=1.0,
        stop_ids=case.objective.stop_ids,
    )
    assert (scored.logprob_N - scored.token_logprob_N).max() > 0.1  # classes of several tokens
    scored_batch = replace(
        case.batch, old_logprob_N=scored.logprob_N, old_token_logprob_N=scored.token_logprob_N
    )
    (corrected,), metrics = correct_importance([scored_batch], "masked", 1.00001, sampled_kl=True)
    torch.testing.assert_close(corrected.pg_weight_N, scored_batch.pg_weight_N, rtol=1e-5, atol=0)
    assert metrics.values_by_key()["importance/cut_share"] == 0
    assert_same_loss(replace(case, batch=corrected), case)


def assert_same_loss(found: Case, expected: Case) -> None:
    assert_close(run_fused(found), run_fused(expected), 1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"objective__discount": 1.0, "objective__advantage__policy": "rollout"},
        {"objective__advantage__power": 0.5, "kl__beta": 0.1, "kl__estimator": "k3+"},
        {"objective__advantage__control_variate": True, "kl__beta": 0.1, "kl__estimator": "k3"},
    ],
)
def test_stale_rollouts_equal_the_definition(changes):
    """With other old weights for each token, as segments have. Where those weights are the present
    ones, it is the loss on policy.
    """
    case = several_stops(rollout__max_staleness=4, **changes)
    (same,) = use_rollout_policy([case.batch])
    assert_same_loss(replace(case, batch=same), case)
    moved = case.batch.rollout_logprob_N + 0.3 * torch.linspace(-1, 1, 40).double()
    (batch_off,) = use_rollout_policy([replace(case.batch, rollout_logprob_N=moved)])
    off = replace(case, batch=batch_off)
    assert_close(run_fused(off), run_definition(off), 1e-10)


def test_off_policy_gradient_is_exact_with_several_stop_ids():
    """The mean over samples of mu is -sum_o pi(o) [log q(o) - log mu(o)] grad log pi(o).

    The outcomes o are the single tokens and the stop class E. mu distributes the mass of E over its
    tokens in the same proportions as pi does.
    """
    stops = torch.tensor([1.0, 1.0, 0, 0, 0]).double()  # E = tokens 0 and 1
    student = torch.tensor([0.3, -0.5, 0.9, -0.2, 0.4]).double()
    teacher = torch.tensor([-1.0, 0.2, 0.5, 0.1, -0.3]).double()
    mu = (student - 0.8 * stops + torch.tensor([0, 0, 0.1, -0.4, 0.3]).double()).log_softmax(0)
    objective = build_objective(
        make_config(objective__clip=100.0, train__minibatches=2), (0, 1), (0, 1)
    )
    rows = torch.arange(5)
    log_q = teacher.log_softmax(0)
    sampled = replace(
        make_case(make_config(), rows=5, vocab=5).batch,
        targets_N=rows,
        pg_weight_N=mu.exp(),
        sft_weight_N=torch.zeros(5).double(),
        rollout_logprob_N=mu,
        teacher=teacher_scores(objective, log_q.expand(5, -1), rows, torch.zeros(5, 1)),
    )
    head = student[:, None].clone().requires_grad_()
    out = objective(torch.ones(5, 1).double(), Head(head, 0, 5), *use_rollout_policy([sampled]))
    (found,) = torch.autograd.grad(out.loss, head)

    logits = student.clone().requires_grad_()
    pi, mu_o, q_o = (outcomes(x) for x in (logits.log_softmax(0), mu, log_q))
    (expected,) = torch.autograd.grad(-(pi.exp() * (q_o - mu_o)).detach() @ pi, logits)
    torch.testing.assert_close(found[:, 0], expected)


def outcomes(log_p_V: torch.Tensor) -> torch.Tensor:
    return torch.cat([log_p_V[:2].logsumexp(0, keepdim=True), log_p_V[2:]])
