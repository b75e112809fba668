"""Every objective in plain torch on [N, V] logits: the definitions, to be read beside
docs/method.md §1-4.

Autograd gives the gradients. For reading and for testing the fused path, not for training: memory
grows with N * V, and nothing is sharded. Logits are not divided by the temperature, and padded
columns are cut off.

N scored rows, V common vocabulary, K columns of a support.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.losses.stop_tokens import NEVER
from stable_opd_mcore.records import MicroBatch


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy term is computed from."""

    config: Config
    batch: MicroBatch
    log_p_NV: Tensor  # the student's outcomes at the sampling temperature, differentiable
    log_q_NV: Tensor | None  # the teacher's
    logprob_N: Tensor  # the student's, of the target or its stop class
    token_logprob_N: Tensor  # the student's, of the target itself
    teacher_logprob_N: Tensor | None  # of the target or the teacher's stop class


PolicyTerm = Callable[[PolicyInputs], Tensor]  # per-token loss [N], before weights


@dataclass(frozen=True)
class Components:
    """Weighted sums; their sum is the loss."""

    pg: Tensor
    kl: Tensor
    sft: Tensor

    @property
    def loss(self) -> Tensor:
        return self.pg + self.kl + self.sft


def objective_loss(
    policy_term: PolicyTerm | None,
    config: Config,
    batch: MicroBatch,
    student_logits_NV: Tensor,
    teacher_logits_NV: Tensor | None = None,
    reference_logits_NV: Tensor | None = None,
    stop_ids: Sequence[int] = (),
    merged_ids: Sequence[int] = (),
) -> Components:
    """sum_t pg_t term_t + kl_t KL(student || reference)_t - sft_t log pi(y_t) (docs/method.md §2).

    All at the sampling temperature but the last, the likelihood of golden tokens, which is at 1.
    merged_ids: stop ids that are one outcome in every distribution compared (docs/method.md §4).
    """
    temperature = config.sampling.temperature
    log_p_NV = (student_logits_NV / temperature).log_softmax(-1)
    token_logprob_N = log_p_NV.gather(1, batch.targets_N[:, None])[:, 0]
    inputs = PolicyInputs(
        config=config,
        batch=batch,
        log_p_NV=merge_ids(log_p_NV, merged_ids),
        log_q_NV=_merged_log_softmax(teacher_logits_NV, temperature, merged_ids),
        logprob_N=target_logprob(log_p_NV, batch.targets_N, stop_ids),
        token_logprob_N=token_logprob_N,
        teacher_logprob_N=_teacher_logprob(batch, teacher_logits_NV, temperature, stop_ids),
    )
    pg = kl = log_p_NV.sum() * 0
    if policy_term is not None:
        pg = (batch.pg_weight_N * policy_term(inputs)).sum()
    if config.kl.beta and config.kl.estimator == "exact":
        log_r_NV = _merged_log_softmax(reference_logits_NV, temperature, merged_ids)
        assert log_r_NV is not None
        kl = (batch.kl_weight_N * kl_divergence(inputs.log_p_NV, log_r_NV)).sum()
    elif config.kl.beta:
        kl = (batch.kl_weight_N * _sampled_kl(inputs)).sum()
    likelihood_N = student_logits_NV.log_softmax(-1).gather(1, batch.targets_N[:, None])[:, 0]
    sft = -(batch.sft_weight_N * likelihood_N).sum()
    return Components(pg, kl, sft)


def opd(inputs: PolicyInputs) -> Tensor:
    """Clipped surrogate of A = log pi_T - log pi_old with its options (docs/method.md §1, §3)."""
    settings, batch = inputs.config.objective, inputs.batch
    old_N, teacher_N = _behaviour(inputs), inputs.teacher_logprob_N
    assert teacher_N is not None
    alpha = settings.advantage.power
    reward_N = teacher_N - old_N
    if alpha is not None:
        reward_N = teacher_N.exp() ** alpha - old_N.exp() ** alpha
    if settings.advantage.clamp is not None:
        reward_N = reward_N.clamp(-settings.advantage.clamp, settings.advantage.clamp)
    advantage_N = reward_N
    if settings.discount > 0:
        advantage_N = _discounted(reward_N, batch, settings.discount)
    if settings.advantage.control_variate:
        assert inputs.log_q_NV is not None
        advantage_N = advantage_N + kl_divergence(inputs.log_p_NV, inputs.log_q_NV).detach()
    return _surrogate(inputs, old_N, advantage_N)


def grpo(inputs: PolicyInputs) -> Tensor:
    """Clipped surrogate of the group-normalised reward of the sample (docs/method.md §3)."""
    assert inputs.batch.given_advantage_N is not None
    clamp = inputs.config.objective.advantage.clamp
    advantage_N = inputs.batch.given_advantage_N
    if clamp is not None:
        advantage_N = advantage_N.clamp(-clamp, clamp)
    return _surrogate(inputs, _behaviour(inputs), advantage_N)


def lsm(inputs: PolicyInputs) -> Tensor:
    """KL(p || q), both renormalised on the teacher's top K (docs/method.md §3)."""
    assert inputs.batch.teacher is not None
    ids_NK, logprobs_NK = inputs.batch.teacher.topk_ids_NK, inputs.batch.teacher.topk_logprobs_NK
    assert ids_NK is not None and logprobs_NK is not None
    return _support_kl(inputs.log_p_NV.gather(1, ids_NK), logprobs_NK)


def student_topk(inputs: PolicyInputs) -> Tensor:
    """KL(p || q), both renormalised on the student's top K (docs/method.md §3)."""
    assert inputs.log_q_NV is not None
    ids_NK = inputs.log_p_NV.topk(inputs.config.objective.top_k, dim=1).indices
    return _support_kl(inputs.log_p_NV.gather(1, ids_NK), inputs.log_q_NV.gather(1, ids_NK))


def gkd(inputs: PolicyInputs) -> Tensor:
    """Full-vocabulary reverse KL, forward KL or JSD(b) to the teacher (docs/method.md §3)."""
    assert inputs.log_q_NV is not None
    log_p, log_q, settings = inputs.log_p_NV, inputs.log_q_NV, inputs.config.objective
    if settings.divergence == "reverse":
        return kl_divergence(log_p, log_q)
    if settings.divergence == "forward":
        return kl_divergence(log_q, log_p)
    b = settings.jsd_beta
    log_m = torch.logaddexp(log_q + math.log(b), log_p + math.log(1 - b))
    return b * kl_divergence(log_q, log_m) + (1 - b) * kl_divergence(log_p, log_m)


def kl_divergence(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """KL(p || q) per row, exact."""
    return (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1)


def k3(log_ratio_N: Tensor) -> Tensor:
    """r - log r - 1 with r = pi_ref / pi of the sampled token: estimates KL(pi || ref), >= 0.

    Beyond log r = 10 it continues as its tangent, so it is finite wherever log r is.
    """
    bounded_N = log_ratio_N.clamp(max=10)
    return bounded_N.exp() - bounded_N - 1 + (math.exp(10) - 1) * (log_ratio_N - bounded_N)


def target_logprob(log_p_NV: Tensor, targets_N: Tensor, stop_ids: Sequence[int]) -> Tensor:
    """log p of the target, or of all stop ids together where it is one (docs/method.md §4)."""
    token_N = log_p_NV.gather(1, targets_N[:, None])[:, 0]
    if not stop_ids:
        return token_N
    is_stop_N = torch.isin(targets_N, targets_N.new_tensor(stop_ids))
    return torch.where(is_stop_N, log_p_NV[:, list(stop_ids)].logsumexp(-1), token_N)


def merge_ids(log_p_NV: Tensor, ids: Sequence[int]) -> Tensor:
    """log p with the ids as one outcome: their sum under the first, probability 0 under the rest.

    Probability 0 is e^NEVER, whose logarithm is finite, so that 0 log 0 is 0.
    """
    if not ids:
        return log_p_NV
    column_V = torch.arange(log_p_NV.shape[1], device=log_p_NV.device)
    member_V, first_V = torch.isin(column_V, column_V[list(ids)]), column_V == ids[0]
    merged_N1 = log_p_NV[:, list(ids)].logsumexp(-1, keepdim=True)
    return torch.where(first_V, merged_N1, log_p_NV.masked_fill(member_V, NEVER))


def _merged_log_softmax(
    logits_NV: Tensor | None, temperature: float, ids: Sequence[int]
) -> Tensor | None:
    return None if logits_NV is None else merge_ids((logits_NV / temperature).log_softmax(-1), ids)


def _teacher_logprob(
    batch: MicroBatch, logits_NV: Tensor | None, temperature: float, stop_ids: Sequence[int]
) -> Tensor | None:
    """As given; from the teacher's logits where only its hidden states are given."""
    if batch.teacher is None or batch.teacher.logprob_N is not None:
        return None if batch.teacher is None else batch.teacher.logprob_N
    assert logits_NV is not None
    return target_logprob((logits_NV / temperature).log_softmax(-1), batch.targets_N, stop_ids)


def _sampled_kl(inputs: PolicyInputs) -> Tensor:
    """k3, or with "k3+" its value and the gradient of (log r)^2 / 2, times pi / pi_old where pi_old
    is given (docs/method.md §2).
    """
    batch, logprob_N = inputs.batch, inputs.token_logprob_N
    assert batch.reference is not None and batch.reference.logprob_N is not None
    log_ratio_N = batch.reference.logprob_N - logprob_N
    value_N = k3(log_ratio_N)
    if inputs.config.kl.estimator == "k3+":
        k2_N = log_ratio_N.square() / 2
        value_N = value_N.detach() + k2_N - k2_N.detach()
    if batch.old_token_logprob_N is None:
        return value_N
    return (logprob_N.detach() - batch.old_token_logprob_N).clamp(max=10).exp() * value_N


def _behaviour(inputs: PolicyInputs) -> Tensor:
    """log pi_old: as given, the rollouts' own, or the present policy as a constant.

    Where pi_old's probability of a stop class is unknown, the token's share of its class is taken
    from the present policy.
    """
    batch = inputs.batch
    if batch.old_logprob_N is not None:
        return batch.old_logprob_N
    if batch.old_token_logprob_N is None:
        return inputs.logprob_N.detach()
    return batch.old_token_logprob_N + (inputs.logprob_N - inputs.token_logprob_N).detach()


def _surrogate(inputs: PolicyInputs, old_N: Tensor, advantage_N: Tensor) -> Tensor:
    clip = inputs.config.objective.clip
    ratio_N = (inputs.logprob_N - old_N).exp()
    bounded_N = ratio_N.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio_N * advantage_N, bounded_N * advantage_N)


def _discounted(reward_N: Tensor, batch: MicroBatch, discount: float) -> Tensor:
    """G_t = sum over t' >= t of discount^(t'-t) r_t' in the sample; masked tokens add nothing."""
    samples = cast("list[int]", batch.sample_index_N.tolist())  # pyright: ignore[reportUnknownMemberType]
    tokens = cast("list[int]", batch.token_index_N.tolist())  # pyright: ignore[reportUnknownMemberType]
    place = list(zip(samples, tokens, strict=True))
    returns: list[Tensor] = []
    for sample, token in place:
        total = reward_N.new_zeros(())
        for row, (other_sample, later) in enumerate(place):
            if other_sample == sample and later >= token and batch.pg_weight_N[row] != 0:
                total = total + discount ** (later - token) * reward_N[row]
        returns.append(total)
    return torch.stack(returns) if returns else reward_N


def _support_kl(student_NK: Tensor, teacher_NK: Tensor) -> Tensor:
    return kl_divergence(student_NK.log_softmax(-1), teacher_NK.log_softmax(-1))
