"""Coefficients of single tokens, and the refusal of missing or non-finite scores by name."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from stable_opd_mcore.config.schema import AdvantageConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses.coefficients import (
    K3_BOUND,
    Terms,
    clipped_surrogate,
    given_with_sample,
    needed_heads,
    old_logprob,
    sampled_kl,
    surrogate,
    teacher_over_student,
    weighted,
)
from stable_opd_mcore.losses.fused import require_finite_scores
from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.losses.stop_tokens import TargetLogprobs
from stable_opd_mcore.losses.token_weights import return_to_go
from stable_opd_mcore.records import LossOutput, Scores
from tests.losses.cases import make_case, make_config
from tests.parallel.launch import run_ranks

BATCH = make_case(make_config(), rows=4).batch
HEAD = Head(torch.zeros(31, 8), 0, 31)
HIDDEN = torch.zeros(4, 8)


def of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def target_of(outcome: torch.Tensor, token: torch.Tensor) -> TargetLogprobs:
    columns = BATCH.targets_N[:, None]
    return TargetLogprobs(columns, outcome, token, torch.ones_like(columns))


@pytest.mark.parametrize(
    ("terms", "changes", "message"),
    [
        (Terms(), {"targets_N": torch.zeros(3)}, "4 hidden states for 3 scored rows: select them "),
        (Terms(divergence="forward"), {}, "the loss needs the teacher's hidden states and output "),
        (Terms(divergence="student_support"), {"teacher": None}, "the loss needs the teacher's h"),
        (Terms(reference="exact"), {}, "the loss needs the reference's hidden states and output "),
        (Terms(reference="k3"), {"reference": None}, "kl.estimator=k3 needs the reference's log-"),
        (Terms(reference="k3+"), {"reference": Scores(None)}, "kl.estimator=k3+ needs the ref"),
        (Terms(divergence="teacher_support"), {"teacher": None}, "the loss needs the teacher's t"),
    ],
)
def test_missing_scores_are_named(terms, changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        needed_heads(HIDDEN, replace(BATCH, **changes), terms, HEAD, None, None)


def test_heads_are_those_that_the_terms_need():
    other, none = Head(torch.zeros(31, 6), 0, 31), replace(BATCH, teacher=None, reference=None)
    assert needed_heads(HIDDEN, none, Terms(), HEAD, None, None) == {"student": HEAD}
    both = needed_heads(
        HIDDEN, BATCH, Terms(divergence="forward", reference="exact"), HEAD, other, HEAD
    )
    assert both == {"student": HEAD, "teacher": other, "reference": HEAD}
    with pytest.raises(ValueError, match="of 30 for the reference: "):
        needed_heads(
            HIDDEN,
            BATCH,
            Terms(reference="exact"),
            HEAD,
            None,
            Head(torch.zeros(30, 5), 0, 30),
        )
    whole = (
        "4 hidden states for 3 scored rows: select them with "
        "hidden_TH.index_select(0, microbatch.rows_N)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(whole)}$"):
        needed_heads(HIDDEN, replace(BATCH, targets_N=torch.zeros(3)), Terms(), HEAD, None, None)


def output_of(**changes: torch.Tensor) -> LossOutput:
    rows = {name: torch.zeros(4) for name in LossOutput.__dataclass_fields__}
    return LossOutput(**rows | changes)


BAD = torch.tensor([0.0, 0.0, math.inf, math.nan])


@pytest.mark.parametrize(
    ("name", "batch", "rows", "count"),
    [
        ("the teacher's log-probabilities", {}, {"teacher_logprob_N": BAD}, "2 of 4"),
        (
            "the teacher's top-k log-probabilities",
            {
                "teacher": Scores(
                    None, topk_logprobs_NK=torch.stack([BAD, 0 * BATCH.pg_weight_N], 1)
                )
            },
            {},
            "2 of 8",
        ),
        ("the teacher's entropies", {}, {"teacher_entropy_N": BAD}, "2 of 4"),
        ("the reference's log-probabilities", {}, {"reference_logprob_N": BAD}, "2 of 4"),
        ("the old log-probabilities", {"old_logprob_N": BAD}, {}, "2 of 4"),
        ("the old log-probabilities of tokens", {"old_token_logprob_N": BAD}, {}, "2 of 4"),
        ("the given advantages", {"given_advantage_N": BAD}, {}, "2 of 4"),
    ],
)
def test_the_message_of_non_finite_scores(name, batch, rows, count):
    expected = (
        f"{name}: {count} values are not finite, the first in scored row 2: no weight was moved. "
        "Check that model's checkpoint, its precision and its server"
    )
    require_finite_scores(BATCH, output_of())
    with pytest.raises(UserError, match=f"^{re.escape(expected)}$"):
        require_finite_scores(replace(BATCH, **batch), output_of(**rows))


def test_a_token_keeps_its_share_of_the_stop_class_in_the_old_policy():
    target = target_of(of(-1.0, -2.0, -1.0, -2.0), of(-1.5, -2.0, -1.0, -4.0))
    plain = replace(BATCH, old_logprob_N=None, old_token_logprob_N=None)
    assert old_logprob(plain, target) is None
    tokens = replace(plain, old_token_logprob_N=of(-3.0, -3.0, -3.0, -3.0))
    assert old_logprob(tokens, target).tolist() == [-2.5, -3, -3, -1]
    classes = replace(tokens, old_logprob_N=of(-1.0, -1.0, -1.0, -1.0))
    assert old_logprob(classes, target).tolist() == [-1] * 4


def test_the_surrogate_is_zero_where_the_weight_is():
    target = target_of(of(0.0, 0.0, 0.0, 0.0), of(0.0, 0.0, 0.0, 0.0))
    batch = replace(
        BATCH,
        pg_weight_N=of(2.0, 0.0, 0.5, 1.0),
        old_logprob_N=of(-1.0, -1.0, 0.0, 1.0),
    )
    part = surrogate(batch, target, of(1.0, 1.0, -3.0, -1.0), 0.25)
    assert part.value_C.tolist() == [-2.5, 0, 1.5, 0.75]
    assert part.logprob_gradient_C.tolist() == [0, 0, 1.5, 0]
    assert part.advantage_C.tolist() == [1, 0, -3, -1]
    assert part.clipped_C.tolist() == [True, False, False, True]
    assert weighted(of(0.0, 2.0), of(math.nan, 3.0)).tolist() == [0, 6]


def test_a_ratio_at_the_bound_is_not_clipped():
    loss, derivative, clipped = clipped_surrogate(
        of(0.5, 2.0, 0.5).log(), of(1.0, 1.0, 1.0).log(), of(-1.0, 1.0, 1.0), 0.5
    )
    assert loss.tolist() == [0.5, -1.5, -0.5]
    assert derivative.tolist() == [0.5, 0, -0.5]
    assert clipped.tolist() == [False, True, False]
    loss, derivative, clipped = clipped_surrogate(of(0.5), None, of(3.0), 0.5)
    assert (loss.item(), derivative.item(), clipped.item()) == (-3, -3, False)
    assert clipped.dtype == torch.bool


@pytest.mark.parametrize("estimator", ["k3", "k3+"])
def test_sampled_kls_are_linear_beyond_their_bound(estimator):
    reference, student = of(-1.0, -2.0, -3.0, -1.0), of(-1.0, -1.0, -1.0, -41.0)
    batch = replace(BATCH, kl_weight_N=of(1.0, 2.0, 0.0, 1.0), old_token_logprob_N=None)
    kl = sampled_kl(estimator, batch, student, reference)
    ratio = math.exp(K3_BOUND)
    exact = [0, math.exp(-1), math.exp(-2) + 1, ratio - K3_BOUND - 1 + (ratio - 1) * 30]
    torch.testing.assert_close(kl.kl_C, of(*exact))
    torch.testing.assert_close(kl.value_C, of(0, 2 * exact[1], 0, exact[3]))
    slope = [0, 1 - math.exp(-1), 0, 1 - ratio] if estimator == "k3" else [0, 1, 0, -40]
    torch.testing.assert_close(kl.logprob_gradient_C, of(slope[0], 2 * slope[1], 0, slope[3]))
    stale = sampled_kl(
        estimator, replace(batch, old_token_logprob_N=student - 1.0), student, reference
    )
    torch.testing.assert_close(stale.value_C, math.e * kl.value_C)
    torch.testing.assert_close(stale.kl_C, kl.kl_C)


def test_advantages_that_are_missing_are_named():
    plain = AdvantageConfig()
    expected = "this objective needs teacher scores: attach them to the micro-batch first"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        teacher_over_student(of(-1.0), None, None, plain)
    expected = "this objective needs MicroBatch.given_advantage_N: pack with its token_weights"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        given_with_sample(of(-1.0), None, None, plain)


def test_advantages_are_clamped_to_both_sides():
    clamp = AdvantageConfig(clamp=0.5)
    old, teacher = of(-1.0, -1.0, -1.0), of(-3.0, -1.25, 0.0)
    assert teacher_over_student(old, teacher, None, clamp).tolist() == [-0.5, -0.25, 0.5]
    assert given_with_sample(old, None, teacher, clamp).tolist() == [-0.5, -0.5, 0.0]
    assert given_with_sample(old, None, teacher, AdvantageConfig()) is teacher
    power = teacher_over_student(old, teacher, None, AdvantageConfig(power=2.0))
    torch.testing.assert_close(power, (2 * teacher).exp() - (2 * old).exp())


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_returns_are_discounted_sums_in_any_order(discount, length):
    draw = torch.Generator().manual_seed(length)
    order = torch.randperm(2 * length, generator=draw)
    sample, token = (order // length) * 3 + 1, order % length
    values = torch.randn(2 * length, generator=draw, dtype=torch.float64)
    found = return_to_go(values, sample, token, discount)
    expected = [
        sum(
            float(values[j]) * discount ** int(token[j] - token[i])
            for j in range(2 * length)
            if sample[j] == sample[i] and token[j] >= token[i]
        )
        for i in range(2 * length)
    ]
    torch.testing.assert_close(found, of(*expected))
    assert return_to_go(values[:0], sample[:0], token[:0], discount).shape == (0,)


def test_sampled_kls_are_finite_for_extreme_log_ratios():
    log_ratio = torch.tensor([-1e4, -1.0, 0.0, 9.0, 11.0, 1e4])
    batch = replace(BATCH, kl_weight_N=torch.ones(6))
    for estimator in ("k3", "k3+"):
        out = sampled_kl(estimator, batch, torch.zeros(6), log_ratio)
        assert out.value_C.isfinite().all()
        assert out.logprob_gradient_C.isfinite().all()
        assert (out.logprob_gradient_C.sign() == -log_ratio.sign()).all()
        torch.testing.assert_close(out.value_C[1:4], log_ratio[1:4].expm1() - log_ratio[1:4])


@pytest.mark.parametrize(
    ("terms", "compared", "teacher_logits"),
    [
        (Terms(advantage=teacher_over_student), (), False),
        (Terms(settings=AdvantageConfig(control_variate=True)), ("teacher",), True),
        (Terms(divergence="jsd", reference="exact"), ("reference", "teacher"), True),
        (Terms(divergence="teacher_support", reference="k3"), (), False),
        (Terms(divergence="student_support"), (), True),
    ],
)
def test_models_whose_logits_the_terms_need(terms, compared, teacher_logits):
    assert terms.compared_models == compared
    assert terms.teacher_logits == teacher_logits


def check_returns(rank: int, world_size: int) -> None:
    values, sample, token = of(4, 16, 1, 8, 2), [3, 7, 3, 7, 3], [2, 3, 0, 0, 1]
    mine = (slice(0, 3), slice(3, 3), slice(3, 5))[rank]
    sample_N, token_N = torch.tensor(sample)[mine], torch.tensor(token)[mine]
    found = return_to_go(values[mine], sample_N, token_N, 0.5, dist.group.WORLD)
    torch.testing.assert_close(found, of(4, 16, 1 + 1 + 1, 8 + 2, 2 + 2)[mine])


def test_returns_of_samples_that_ranks_share():
    """Ranks 0 and 2 hold rows of the same samples, rank 1 holds none."""
    run_ranks(3, check_returns)
