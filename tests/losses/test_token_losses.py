"""The loss of single tokens by hand: values, and the gradients that autograd takes of them."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stable_opd_mcore.config.objective_settings import AdvantageConfig, ObjectiveConfig
from stable_opd_mcore.losses.token_losses import (
    K3_BOUND,
    PolicyLoss,
    Rows,
    Terms,
    clipped_surrogate,
    divergence_from_teacher,
    from_reward,
    from_teacher,
    grpo,
    grpo_opd,
    k3,
    opd,
    token_losses,
    weighted,
)
from tests.losses.cases import make_case, make_config

close = torch.testing.assert_close
BATCH = make_case(make_config(), rows=4).batch
ON_POLICY = replace(BATCH, old_logprob_N=None, old_token_logprob_N=None)


def of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rows_of(logprob: Tensor, **changes: Tensor | None) -> Rows:
    """On policy, of tokens whose outcome is the token, but for `changes`."""
    rows = Rows(
        logprob=logprob,
        token_logprob=logprob,
        likelihood=logprob,
        old_logprob=logprob.detach(),
        trained=torch.ones_like(logprob, dtype=torch.bool),
    )
    return replace(rows, **changes)


def settings_of(**changes: object) -> ObjectiveConfig:
    return ObjectiveConfig.model_validate(changes)


def gradient(value: Tensor, leaf: Tensor) -> list[float]:
    return torch.autograd.grad(value.sum(), leaf)[0].tolist()


def test_a_token_keeps_its_share_of_the_stop_class_in_the_old_policy():
    outcome, token = of(-1.0, -2.0, -1.0, -2.0), of(-1.5, -2.0, -1.0, -4.0)
    assert Rows.of(ON_POLICY, outcome, token).old_logprob.tolist() == outcome.tolist()
    tokens = replace(ON_POLICY, old_token_logprob_N=of(-3.0, -3.0, -3.0, -3.0))
    assert Rows.of(tokens, outcome, token).old_logprob.tolist() == [-2.5, -3, -3, -1]
    classes = replace(tokens, old_logprob_N=of(-1.0, -1.0, -1.0, -1.0))
    assert Rows.of(classes, outcome, token).old_logprob.tolist() == [-1] * 4


def test_old_probabilities_are_constants():
    logprob = of(-1.0, -2.0, -3.0, -4.0).requires_grad_()
    for batch in (ON_POLICY, replace(ON_POLICY, old_token_logprob_N=of(0, 0, 0, 0))):
        assert not Rows.of(batch, logprob, 2 * logprob).old_logprob.requires_grad


def test_surrogate_of_tokens_inside_at_and_beyond_the_bounds():
    """The last two are at a bound: their ratio is not clipped."""
    logprob = of(1.0, 0.0, -1.0, math.log(0.5), math.log(1.5)).requires_grad_()
    rows = rows_of(logprob, old_logprob=of(0, 0, 0, 0, 0))
    found = clipped_surrogate(rows, of(1.0, -3.0, -1.0, -1.0, 1.0), 0.5)
    close(found.loss, of(-1.5, 3.0, 0.5, 0.5, -1.5))
    assert found.is_clipped.tolist() == [True, False, True, False, False]
    close(of(*gradient(found.loss, logprob)), of(0, 3.0, 0, 0.5, -1.5))


@pytest.mark.parametrize(
    ("advantage", "trained", "loss"), [(0.0, True, 0.0), (1.0, True, -1.25), (-1.0, False, 0.0)]
)
def test_a_ratio_that_overflows_is_finite_where_the_loss_does_not_grow_with_it(
    advantage, trained, loss
):
    """0 * inf is NaN, in the value or in the gradient."""
    logprob = of(0.0).float().requires_grad_()
    rows = rows_of(logprob, old_logprob=of(-1e4), trained=torch.tensor([trained]))
    found = clipped_surrogate(rows, of(advantage).float(), 0.25)
    assert found.loss.item() == loss
    assert gradient(found.loss, logprob) == [0]


def test_an_advantage_is_a_constant_and_zero_on_masked_tokens():
    logprob = of(-1.0, -1.0).requires_grad_()
    rows = rows_of(logprob, trained=torch.tensor([True, False]))
    found = clipped_surrogate(rows, 2 * logprob, 0.2)
    assert found.advantage.tolist() == [-2, 0]
    assert gradient(found.loss, logprob) == [2, 0]


P, Q = 0.5, 0.2  # the sampled token's, by student and teacher


OF_ONE_TOKEN = [
    (P, {}, -math.log(Q / P)),
    (0.25, {}, -2 * math.log(Q / 0.25)),  # ratio 2, and A < 0: not clipped
    (0.16, {}, -1.2 * math.log(Q / 0.16)),  # ratio 3.125, and A > 0: clipped at 1.2
    (0.25, {"policy": "present"}, -2 * math.log(Q / P)),
    (0.25, {"policy": "present", "power": 0.5}, 2 * (math.sqrt(P) - math.sqrt(Q))),
    (P, {"power": 0.5}, math.sqrt(P) - math.sqrt(Q)),
    (P, {"log": True}, math.log(1 + math.log(P / Q))),
    (P, {"log": True, "clamp": 0.5}, 0.5),
    (P, {"clamp": 0.5}, 0.5),
    (P, {"clamp": 0.5, "control_variate": True}, 0.5 - 0.3),  # added after clamping
]  # old, advantage, expected


def test_opd_of_one_token():
    for old, advantage, expected in OF_ONE_TOKEN:
        rows = rows_of(of(math.log(P)), old_logprob=of(math.log(old)), kl_teacher=of(0.3))
        rows = replace(rows, teacher_logprob=of(math.log(Q)))
        assert opd(rows, settings_of(advantage=advantage)).loss.item() == pytest.approx(expected)
        returned = opd(replace(rows, returns=of(7.0)), settings_of(advantage=advantage)).advantage
        assert returned.item() == pytest.approx(7 + 0.3 * ("control_variate" in advantage))


@pytest.mark.parametrize("policy", ["rollout", "present"])
@pytest.mark.parametrize("alpha", [0.1, 1.0, 3.0])
def test_an_advantage_of_powers_is_at_most_1_whatever_the_stop_classes_were(policy, alpha):
    """The share of a token in its stop class has changed since it was sampled."""
    outcome, token, old = (
        x.flatten() for x in torch.meshgrid(*3 * [of(1e-7, -1.0, -10.0, -300.0)], indexing="ij")
    )
    batch = replace(ON_POLICY, pg_weight_N=torch.ones(64), old_token_logprob_N=old)
    rows = replace(Rows.of(batch, outcome, token), teacher_logprob=outcome.flip(0))
    assert rows.old_logprob.max() > 1
    advantage = from_teacher(rows, AdvantageConfig(power=alpha, policy=policy))
    assert advantage.abs().max() <= 1
    proper = rows.old_logprob <= 0 if policy == "rollout" else outcome <= 0
    own = rows.old_logprob if policy == "rollout" else outcome
    expected = (alpha * rows.teacher_logprob).exp() - (alpha * own).exp()
    close(advantage[proper], expected[proper], atol=1e-6, rtol=0)


def test_rewards_with_and_without_the_teachers_advantage():
    rows = rows_of(of(-1.0), teacher_logprob=of(-3.0), given_advantage=of(-3.0))
    assert grpo(rows, settings_of()).loss.item() == 3
    assert grpo(rows, settings_of(advantage={"clamp": 2})).loss.item() == 2
    both = settings_of(advantage={"teacher_weight": 0.5, "clamp": 1.5})
    assert grpo_opd(rows, both).advantage.item() == -1.5 - 0.5 * 1.5
    stale = replace(rows, old_logprob=of(-1.5))
    for policy, own in (("rollout", -1.5), ("present", -1.0)):
        settings = settings_of(advantage={"policy": policy})
        assert grpo_opd(stale, settings).advantage.item() == -3 + (-3 - own)
    divergence = of(0.5)
    assert divergence_from_teacher(replace(rows, divergence=divergence), both).loss is divergence


def test_advantages_that_are_missing_are_named():
    plain, rows = AdvantageConfig(), rows_of(of(-1.0))
    expected = "this objective needs teacher scores: attach them to the micro-batch first"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        from_teacher(rows, plain)
    expected = "this objective needs MicroBatch.given_advantage_N: pack with its token_weights"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        from_reward(rows, plain)


@pytest.mark.parametrize("keeps_direction", [False, True])
def test_sampled_kls_are_linear_beyond_their_bound(keeps_direction):
    student = of(-1.0, -1.0, -1.0, -41.0).requires_grad_()
    rows = rows_of(student, reference_logprob=of(-1.0, -2.0, -3.0, -1.0))
    value, weight = k3(rows, keeps_direction)
    ratio = math.exp(K3_BOUND)
    top = ratio - K3_BOUND - 1 + (ratio - 1) * 30
    close(value, of(0, math.exp(-1), math.exp(-2) + 1, top))
    slope = [0, 1, 2, -40] if keeps_direction else [0, 1 - 1 / math.e, 1 - math.exp(-2), 1 - ratio]
    close(of(*gradient(value, student)), of(*slope))
    assert weight.tolist() == [1] * 4


def test_the_weight_of_a_sampled_kl_is_bounded_and_constant():
    """pi / pi_old of the token, e^10 at most."""
    student = of(-1.0, -1.0, -1.0).requires_grad_()
    rows = rows_of(student, reference_logprob=of(0, 0, 0), old_token_logprob=of(0, -2, -12))
    _, weight = k3(rows, keeps_direction=False)
    close(weight, of(math.exp(-1), math.e, math.exp(K3_BOUND)))
    assert not weight.requires_grad


def test_sampled_kls_are_finite_for_extreme_log_ratios():
    log_ratio = torch.tensor([-1e4, -1.0, 0.0, 9.0, 11.0, 1e4])
    for keeps_direction in (False, True):
        student = torch.zeros(6, requires_grad=True)
        value, _ = k3(rows_of(student, reference_logprob=log_ratio), keeps_direction)
        slopes = torch.tensor(gradient(value, student))
        assert value.isfinite().all()
        assert slopes.isfinite().all()
        assert (slopes.sign() == -log_ratio.sign()).all()
        close(value[1:4], log_ratio[1:4].expm1() - log_ratio[1:4])


def test_the_loss_is_the_weighted_sum_of_policy_kl_and_golden_terms():
    """Weights of 0 hide what is not finite; the KL's weight on stale rollouts is not reported."""
    batch = replace(
        ON_POLICY,
        pg_weight_N=of(2.0, 0.0, 0.0, 0.0),
        kl_weight_N=of(3.0, 1.0, 0.0, 0.0),
        sft_weight_N=of(0.0, 0.0, 5.0, 0.0),
    )
    rows = rows_of(
        of(-1.0, -1.0, -1.0, -1.0),
        likelihood=of(-4.0, -4.0, -0.5, -math.inf),
        reference_logprob=of(-2.0, -2.0, -2.0, -2.0),
        old_token_logprob=of(-1.0, -2.0, -1.0, -1.0),
        teacher_logprob=of(-3.0, -3.0, -3.0, -3.0),
    )

    def policy(rows: Rows, settings: ObjectiveConfig) -> PolicyLoss:
        return PolicyLoss(of(settings.clip, math.nan, math.inf, 0))

    found = token_losses(Terms(policy, reference="k3"), rows, batch)
    sampled = math.exp(-1)
    assert found.pg.tolist() == [0.4, 0, 0, 0]
    close(found.kl, of(3 * sampled, math.e * sampled, 0, 0))
    assert found.sft.tolist() == [0, 0, 2.5, 0]
    close(found.loss, found.pg + found.kl + found.sft)
    close(found.kl_reference_N, of(*[sampled] * 4))
    assert found.kl_teacher_N.tolist() == [2] * 4
    exact = replace(rows, kl_reference=of(7, 7, 7, 7), kl_teacher=of(8, 8, 8, 8))
    found = token_losses(Terms(reference="exact"), exact, batch)
    assert found.kl.tolist() == [21, 7, 0, 0]
    assert found.kl_teacher_N.tolist() == [8] * 4
    assert not found.pg.any()
    assert weighted(of(0.0, 2.0), of(math.nan, 3.0)).tolist() == [0, 6]
