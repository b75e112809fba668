"""The expected gradient of each estimator, by enumeration, through the fused path.

Every outcome is one sequence of the micro-batch, weighted by its probability, so the gradient of
the summed loss is the expectation. The policies are tables: hidden states are one-hot and the head
holds the logits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.losses.objectives import Objective, build_objective
from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.losses.token_weights import correct_importance, use_rollout_policy
from stable_opd_mcore.records import MicroBatch, Scores
from tests.losses.cases import make_config, teacher_scores
from tests.losses.definitions import kl_divergence, merge_ids

VOCAB = 5


def table(states: int, seed: int) -> Tensor:
    """Logits of every state, float64 [states, VOCAB]."""
    rng = torch.Generator().manual_seed(seed)
    return 1.3 * torch.randn(states, VOCAB, generator=rng, dtype=torch.float64)


@dataclass(frozen=True)
class Policies:
    """Two policies on all sequences of `length` tokens; a token's state is the tokens before it."""

    student: Tensor
    teacher: Tensor
    sequences: list[tuple[int, ...]]

    @classmethod
    def of(cls, length: int, seed: int = 0) -> Policies:
        states = sum(VOCAB**t for t in range(length))
        sequences = list(itertools.product(range(VOCAB), repeat=length))
        return cls(table(states, seed), table(states, seed + 100), sequences)

    def state(self, prefix: tuple[int, ...]) -> int:
        number = 0
        for token in prefix:
            number = number * VOCAB + token + 1
        return number

    def microbatch(
        self, objective: Objective, weights: Tensor | None = None, observed: int | None = None
    ) -> MicroBatch:
        """Every sequence once; `weights`, or the student's probability, weigh all its tokens.

        observed: the place of a token that the student did not sample.
        """
        log_p, log_q = self.student.log_softmax(1), self.teacher.log_softmax(1)
        sampled = [t for t in range(len(self.sequences[0])) if t != observed]
        rows = [
            (index, number, self.state(sequence[:t]), sequence[t])
            for index, sequence in enumerate(self.sequences)
            for number, t in enumerate(sampled)
        ]
        sample, token, state, target = (torch.tensor(column) for column in zip(*rows, strict=True))
        logprob = log_p[state, target]
        total = torch.zeros(len(self.sequences), dtype=torch.float64).index_add_(0, sample, logprob)
        weight = (total.exp() if weights is None else weights)[sample]
        hidden = torch.eye(len(log_q), dtype=torch.float64)[state]
        zero = torch.zeros_like(weight)
        return MicroBatch(
            tokens_T=target,
            positions_T=token,
            cu_seqlens=torch.tensor([0, len(rows)], dtype=torch.int32),
            max_seqlen=len(rows),
            rows_N=state,
            targets_N=target,
            sample_index_N=sample,
            token_index_N=token,
            turn_N=torch.zeros_like(token),
            index_in_turn_N=token,
            golden_N=zero.bool(),
            pg_weight_N=weight,
            kl_weight_N=zero,
            sft_weight_N=zero,
            rollout_logprob_N=logprob,
            repetitive_N=zero.bool(),
            truncated_N=zero.bool(),
            golden_rows_G=zero.nonzero()[:, 0],
            teacher=teacher_scores(objective, log_q[state], target, hidden),
        )

    def gradient(
        self,
        config: Config,
        weights: Tensor | None = None,
        stops: tuple[tuple[int, ...], tuple[int, ...]] = ((0,), (0,)),
    ) -> Tensor:
        """d loss / d logits [states, VOCAB] over all sequences."""
        objective = build_objective(config, *stops)
        return self.differentiate(objective, self.microbatch(objective, weights))

    def differentiate(self, objective: Objective, batch: MicroBatch) -> Tensor:
        """d loss / d logits [states, VOCAB] of a micro-batch."""
        logits = self.student.T.clone().requires_grad_()  # the head: [VOCAB, states]
        hidden = torch.eye(len(self.student), dtype=torch.float64)[batch.rows_N]
        teacher_head = Head(self.teacher.T, 0, VOCAB)
        out = objective(hidden, Head(logits, 0, VOCAB), batch, teacher_head=teacher_head)
        return torch.autograd.grad(out.loss, logits)[0].T


def kl_gradient(student: Tensor, teacher: Tensor) -> Tensor:
    """d KL(student || teacher) / d student logits, per state."""
    logits = student.clone().requires_grad_()
    log_p = logits.log_softmax(1)
    (log_p.exp() * (log_p - teacher.log_softmax(1))).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_discount_1_has_the_gradient_of_the_sequence_kl():
    """discount 1: E[sum_t G_t grad log pi_t] = -grad KL of whole sequences; discount 0 omits the
    future."""
    policies = Policies.of(2)
    logits = policies.student.clone().requires_grad_()
    log_p, log_q = logits.log_softmax(1), policies.teacher.log_softmax(1)
    kl = torch.zeros((), dtype=torch.float64)
    for sequence in policies.sequences:
        states = [policies.state(sequence[:t]) for t in range(2)]
        own = log_p[states[0], sequence[0]] + log_p[states[1], sequence[1]]
        other = log_q[states[0], sequence[0]] + log_q[states[1], sequence[1]]
        kl = kl + own.exp() * (own - other)
    kl.backward()
    sequence_level = make_config(objective__discount=1.0)
    torch.testing.assert_close(policies.gradient(sequence_level), logits.grad)
    with_baseline = make_config(objective__discount=1.0, objective__advantage__control_variate=True)
    torch.testing.assert_close(policies.gradient(with_baseline), logits.grad)

    token_level = policies.gradient(make_config())
    p = policies.student.softmax(1)
    visits = torch.cat([torch.ones(1, dtype=torch.float64), p[0]])
    expected = visits[:, None] * kl_gradient(policies.student, policies.teacher)
    torch.testing.assert_close(token_level, expected)
    assert (token_level - logits.grad).abs().max() > 0.05


def test_discount_1_has_the_gradient_of_the_episode_kl_whatever_the_environment_answers():
    """A token of the student, an answer that depends on it, and another token of the student.

    The environment's probabilities are the same under both policies, so they cancel in the KL.
    """
    policies = Policies.of(3)
    answers = table(VOCAB, seed=9).log_softmax(1)
    logits = policies.student.clone().requires_grad_()
    first, answer, second = torch.tensor(policies.sequences).unbind(1)
    after = torch.tensor([policies.state(sequence[:2]) for sequence in policies.sequences])
    own, other = (
        log_p[0, first] + answers[first, answer] + log_p[after, second]
        for log_p in (logits.log_softmax(1), policies.teacher.log_softmax(1))
    )
    torch.testing.assert_close(own.exp().sum().item(), 1.0)
    (own.exp() * (own - other)).sum().backward()
    for changes in ({}, {"objective__advantage__control_variate": True}):
        objective = build_objective(make_config(objective__discount=1.0, **changes), (0,), (0,))
        batch = policies.microbatch(objective, own.detach().exp(), observed=1)
        torch.testing.assert_close(policies.differentiate(objective, batch), logits.grad)


def merged_kl_gradient(policies: Policies, stop_ids: tuple[int, ...]) -> Tensor:
    """d KL(student || teacher) / d student logits, with the stop ids as one outcome."""
    logits = policies.student.clone().requires_grad_()
    log_p, log_q = (merge_ids(x.log_softmax(1), stop_ids) for x in (logits, policies.teacher))
    kl_divergence(log_p, log_q).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("control_variate", [False, True])
def test_any_stop_ids_have_the_gradient_of_the_merged_kl(control_variate):
    """With the control variate this shows that the baseline is unbiased.

    Classes that do not partition the tokens would fail: with each model's own stop ids united with
    the sampled one the error is up to .31.
    """
    policies = Policies.of(1)
    config = make_config(objective__advantage__control_variate=control_variate)
    subsets = [ids for size in range(1, 5) for ids in itertools.combinations(range(4), size)]
    for stops in itertools.product(subsets, subsets):
        found = policies.gradient(config, stops=stops)
        union = tuple(sorted({*stops[0], *stops[1]}))
        torch.testing.assert_close(found, merged_kl_gradient(policies, union), msg=str(stops))


SEGMENTS = [table(6, seed) for seed in (7, 8)]  # the weights that sampled tokens 1 and 2


def stale(policies: Policies, objective: Objective) -> MicroBatch:
    """All sequences of two tokens, with the probability that the weights of each gave them."""
    batch = policies.microbatch(objective)
    log_old_SXV = torch.stack(SEGMENTS).log_softmax(2)
    log_old_N = log_old_SXV[batch.token_index_N, batch.rows_N, batch.targets_N]
    total_B = torch.zeros(len(policies.sequences), dtype=torch.float64)
    total_B.index_add_(0, batch.sample_index_N, log_old_N)
    weight_N = total_B.exp()[batch.sample_index_N]
    return replace(batch, pg_weight_N=weight_N, rollout_logprob_N=log_old_N)


UNCLIPPED = {"rollout__max_staleness": 4, "objective__clip": 1e9}
CORRECTED = {
    "rollout__max_staleness": 4,
    "rollout__importance_correction": "truncated",
    "rollout__importance_threshold": 1e9,
}


@pytest.mark.parametrize(
    ("changes", "stops", "away"),
    [
        (UNCLIPPED, ((0,), (0,)), False),
        (UNCLIPPED, ((0, 3), (1,)), False),
        (UNCLIPPED | {"objective__advantage__control_variate": True}, ((0, 3), (1,)), False),
        (UNCLIPPED | {"objective__advantage__policy": "rollout"}, ((0,), (0,)), True),
        (CORRECTED, ((0, 3), (1,)), False),
    ],
)
def test_rollouts_of_several_weights_have_the_gradient_of_the_present_kl(changes, stops, away):
    """At every prefix that they visit. With `rollout` the gradient also leads away from each
    segment's weights.
    """
    policies = Policies.of(2)
    objective = build_objective(make_config(**changes), *stops)
    batch = stale(policies, objective)
    if changes is CORRECTED:
        log_p = policies.student.log_softmax(1)[batch.rows_N, batch.targets_N]
        batch = replace(batch, old_token_logprob_N=log_p)
        (batch,), _ = correct_importance([batch], "truncated", 1e9, sampled_kl=False)
    else:
        (batch,) = use_rollout_policy([batch])
    first, second = SEGMENTS
    visits = torch.cat([torch.ones(1, dtype=torch.float64), first[0].softmax(0)])
    expected = merged_kl_gradient(policies, tuple({*stops[0], *stops[1]}))
    if away:
        expected = expected - kl_gradient(policies.student, torch.cat([first[:1], second[1:]]))
    found = policies.differentiate(objective, batch)
    torch.testing.assert_close(found, visits[:, None] * expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sampled_from", ["student", "old policy", "old policy, corrected"])
@pytest.mark.parametrize("estimator", ["k3", "k3+"])
def test_sampled_kls_have_the_gradient_of_their_divergence(estimator, sampled_from):
    """k3 has the gradient of KL(ref || pi), k3+ that of KL(pi || ref), on and off policy.

    With a correction pi_old is the student before the update, here the present one.
    """
    policies, reference = Policies.of(1), table(1, seed=7)
    objective = build_objective(make_config(kl__beta=1.0, kl__estimator=estimator), (0,), (0,))
    log_p, log_r, log_old = (
        x.log_softmax(1)[0] for x in (policies.student, reference, policies.teacher)
    )
    log_sampled = log_p if sampled_from == "student" else log_old
    batch = replace(
        policies.microbatch(objective),
        pg_weight_N=torch.zeros(VOCAB, dtype=torch.float64),
        kl_weight_N=log_sampled.exp(),
        old_token_logprob_N=log_old if sampled_from == "old policy" else None,
        reference=Scores(log_r),
    )
    if sampled_from == "old policy, corrected":
        batch = replace(batch, rollout_logprob_N=log_old, old_token_logprob_N=log_p)
        (batch,), _ = correct_importance([batch], "truncated", 1e9, sampled_kl=True)
    logits = policies.student.T.clone().requires_grad_()
    hidden = torch.ones(VOCAB, 1, dtype=torch.float64)
    out = objective(hidden, Head(logits, 0, VOCAB), batch)
    (found,) = torch.autograd.grad(out.loss, logits)
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)  # the correction is fp32
    close(out.kl, kl_divergence(log_p, log_r))
    p, r = log_p.exp(), log_r.exp()
    expected = p - r if estimator == "k3" else p * (log_p - log_r - kl_divergence(log_p, log_r))
    close(found[:, 0], expected)
