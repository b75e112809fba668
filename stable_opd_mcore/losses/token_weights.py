"""Per-token weights with the global normaliser inside, so that the loss is a plain sum
(docs/method.md §1-3, 6), and their correction for the engine's probabilities.

`token_weights` works on the global list of samples, the same on every rank. Every component has its
own denominator:

    pg    sequence_mean   1 / (sequences * trained tokens of this one)
          token_mean      1 / trained tokens of all
          constant        1 / (sequences * max_new_tokens), as in Dr. GRPO
    kl    beta / visited rollout prefixes; a token mask removes advantages, not prefixes
    sft   lambda / (golden sequences * trained tokens of this one)

"Sequences" are those with at least one trained token. Sums of w_t f_t over ranks and micro-batches
are exactly the global mean, so no count has to travel with a gradient. `return_to_go` sums
advantages over the later tokens of a response. Not here: which tokens are trained.
"""

# torch types `tolist`, `unique` and `all_gather` only in part; the results in use are cast.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.metrics import Mean, Metrics
from stable_opd_mcore.records import MicroBatch, Sample, TokenWeights

Aggregation = Literal["sequence_mean", "token_mean", "constant"]
Correction = Literal["none", "truncated", "masked"]
STD_EPSILON = 1e-6


def token_weights(
    samples: Sequence[Sample],
    *,
    policy: Sequence[bool],
    aggregation: Aggregation,
    max_new_tokens: int,
    beta: float,
    sft_weight: float,
    advantages: Sequence[float] | None = None,
) -> list[TokenWeights]:
    """Weights of every sample, in order.

    Args:
        samples: all samples of the step, of every data-parallel rank.
        policy: per sample, whether it carries the policy term.
        max_new_tokens: the denominator of `constant`.
        beta: weight of the mean KL over rollout prefixes.
        sft_weight: weight of the mean negative log-likelihood over golden solutions.
        advantages: per sample, the same for all its tokens; None where they come from scores.
    """
    trained = [sum(sample.trained) for sample in samples]
    golden = [sample.source == "golden" for sample in samples]
    policy_sequences = sum(1 for n, on in zip(trained, policy, strict=True) if on and n)
    policy_tokens = sum(n for n, on in zip(trained, policy, strict=True) if on)
    golden_sequences = sum(1 for n, on in zip(trained, golden, strict=True) if on and n)
    prefixes = sum(len(s.response_token_ids) for s in samples if s.source == "rollout")

    weights: list[TokenWeights] = []
    for index, sample in enumerate(samples):
        length, count = len(sample.response_token_ids), trained[index]
        pg = sft = 0.0
        if policy[index] and count:
            denominator = {
                "sequence_mean": policy_sequences * count,
                "token_mean": policy_tokens,
                "constant": policy_sequences * max_new_tokens,
            }[aggregation]
            pg = 1.0 / denominator
        if golden[index] and count:
            sft = sft_weight / (golden_sequences * count)
        kl = beta / prefixes if beta and not golden[index] else 0.0
        advantage = None if advantages is None else tuple(repeat(advantages[index], length))
        weights.append(
            TokenWeights(
                pg=_on_trained(pg, sample),
                kl=tuple(repeat(kl, length)),
                sft=_on_trained(sft, sample),
                advantage=advantage,
            )
        )
    return weights


def group_advantages(samples: Sequence[Sample], std_normalise: bool) -> list[float]:
    """Per sample: reward minus the mean reward of its prompt's rollouts (GRPO).

    std_normalise: divide by the rewards' sample standard deviation. Golden samples and groups of
    equal rewards get 0.

    Raises:
        UserError: a rollout without a reward.
    """
    groups: dict[str, list[float]] = {}
    for sample in samples:
        if sample.source == "golden":
            continue
        if sample.reward is None:
            raise UserError(
                f"prompt {sample.prompt_id}: a rollout has no reward, which grpo needs: "
                "grade the rollouts (the data source must give answers)"
            )
        groups.setdefault(sample.prompt_id, []).append(sample.reward)
    centre = {prompt: statistics.fmean(rewards) for prompt, rewards in groups.items()}
    spread = dict.fromkeys(groups, 1.0)
    if std_normalise:
        spread = {
            prompt: (statistics.stdev(rewards) if len(rewards) > 1 else 0.0) + STD_EPSILON
            for prompt, rewards in groups.items()
        }
    return [
        0.0
        if sample.source == "golden" or sample.reward is None
        else (sample.reward - centre[sample.prompt_id]) / spread[sample.prompt_id]
        for sample in samples
    ]


def _on_trained(weight: float, sample: Sample) -> tuple[float, ...]:
    return tuple(weight if on else 0.0 for on in sample.trained)


def importance_weights(
    trainer_logprob_N: Tensor, rollout_logprob_N: Tensor, kind: Correction, threshold: float
) -> Tensor:
    """Factor on each token's policy-gradient weight, fp32 [N], with w = p_trainer / p_engine.

    The engine and the trainer round differently, and with rollout.async_steps=1 the engine's
    weights are one version older.

        none        1
        truncated   min(w, threshold)
        masked      w inside [1/threshold, threshold], 0 outside

    Both probabilities are of the full softmax at the sampling temperature. Not the PPO ratio, which
    compares the policy being updated with the one before the update; the two multiply.
    """
    ratio_N = torch.exp((trainer_logprob_N - rollout_logprob_N).float())
    if kind == "none":
        return torch.ones_like(ratio_N)
    if kind == "truncated":
        return ratio_N.clamp(max=threshold)
    inside_N = (ratio_N <= threshold) & (ratio_N >= 1 / threshold)
    return torch.where(inside_N, ratio_N, 0.0)


def correct_importance(
    batches: Sequence[MicroBatch], kind: Correction, threshold: float
) -> tuple[list[MicroBatch], Metrics]:
    """Micro-batches with corrected policy-gradient weights, and metrics of the correction.

    `old_token_logprob_N` must be the trainer's log-probability of the sampled token itself before
    the update, as the engine's is, also where the loss compares stop classes. Micro-batches without
    it (before the last pipeline stage) come back unchanged.
    """
    corrected: list[MicroBatch] = []
    metrics = Metrics()
    for batch in batches:
        trainer_N = batch.old_token_logprob_N
        if kind == "none" or trainer_N is None:
            corrected.append(batch)
            continue
        weight_N = importance_weights(trainer_N, batch.rollout_logprob_N, kind, threshold)
        trained_N = batch.pg_weight_N != 0
        ratio_N = torch.exp((trainer_N - batch.rollout_logprob_N).float())
        count = int(trained_N.sum())
        metrics = metrics | Metrics(
            {
                "importance/weight_mean": Mean(float(weight_N[trained_N].sum()), count),
                "importance/cut_share": Mean(float((weight_N != ratio_N)[trained_N].sum()), count),
            }
        )
        # Golden tokens have no rollout probability; their weight of 0 must stay exactly 0.
        pg_weight_N = torch.where(trained_N, batch.pg_weight_N * weight_N, 0.0)
        corrected.append(replace(batch, pg_weight_N=pg_weight_N))
    return corrected, metrics


def use_rollout_policy(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Micro-batches whose old policy is the engine's: the exact off-policy ratio."""
    return [replace(batch, old_token_logprob_N=batch.rollout_logprob_N) for batch in batches]


def return_to_go(
    values_N: Tensor,
    sample_index_N: Tensor,
    token_index_N: Tensor,
    discount: float,
    context_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Sum over t' >= t of discount^(t'-t) values_t' within each sample (docs/method.md §3).

    Tokens may come in any order; a sample's tokens must all be in this micro-batch, on this rank or
    on the others of `context_group`. Each round doubles the number of tokens summed, so there are
    log2(longest response) rounds. Discount 0 returns the values.
    """
    if discount == 0:
        return values_N
    if context_group is not None:
        rows = (values_N, sample_index_N, token_index_N)
        whole, mine = _gather_rows(
            torch.stack([row.double() for row in rows], dim=1), context_group
        )
        values, sample_index, token_index = whole.unbind(dim=1)
        sums = return_to_go(
            values.to(values_N.dtype), sample_index.long(), token_index.long(), discount
        )
        return sums[mine]
    if values_N.numel() == 0:
        return values_N
    samples, sample_N = cast("tuple[Tensor, Tensor]", sample_index_N.unique(return_inverse=True))
    length = int(token_index_N.max()) + 1
    sums_SL = values_N.new_zeros(len(samples), length)
    sums_SL[sample_N, token_index_N] = values_N
    reach = 1
    while reach < length:
        shifted_SL = torch.zeros_like(sums_SL)
        shifted_SL[:, :-reach] = sums_SL[:, reach:]
        sums_SL = sums_SL + discount**reach * shifted_SL
        reach *= 2
    return sums_SL[sample_N, token_index_N]


def _gather_rows(rows_NK: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, slice]:
    """The rows of all ranks, of which each may hold another number, and this rank's slice."""
    counts = [rows_NK.new_zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(counts, counts[0].new_tensor([len(rows_NK)]), group=group)
    lengths = cast("list[int]", torch.cat(counts).tolist())
    padded = F.pad(rows_NK, (0, 0, 0, max(lengths) - len(rows_NK)))
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    start = sum(lengths[: group.rank()])
    whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
    return whole, slice(start, start + len(rows_NK))
