"""Correction for rollouts drawn from other probabilities than the trainer's.

The engine that draws and the trainer that learns round differently, and with
rollout.async_steps=1 the weights are one version apart. A rollout token's policy-gradient weight
is multiplied by w = p_trainer / p_engine:

    truncated   min(w, threshold)
    masked      w inside [1/threshold, threshold], 0 outside

Both probabilities are of the full softmax at the sampling temperature. Not the PPO ratio, which
compares the policy being updated with the one before the update (losses/objectives.py); the two
multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from stable_opd_mcore.metrics import Mean, Metrics
from stable_opd_mcore.records import MicroBatch

Correction = Literal["none", "truncated", "masked"]


def importance_weights(
    trainer_logprob_N: Tensor, rollout_logprob_N: Tensor, kind: Correction, threshold: float
) -> Tensor:
    """Per token what its weight is multiplied by, fp32 [N]; ones for "none"."""
    ratio_N = torch.exp((trainer_logprob_N - rollout_logprob_N).float())
    if kind == "none":
        return torch.ones_like(ratio_N)
    if kind == "truncated":
        return ratio_N.clamp(max=threshold)
    inside_N = (ratio_N <= threshold) & (ratio_N >= 1 / threshold)
    return torch.where(inside_N, ratio_N, 0.0)


def correct(
    batches: Sequence[MicroBatch], kind: Correction, threshold: float
) -> tuple[list[MicroBatch], Metrics]:
    """The micro-batches with corrected policy-gradient weights, and what was done to them.

    `old_token_logprob_N` must be the trainer's view of the rollouts before the update: of the drawn
    token itself, as the engine's is, also where the loss compares stop classes. Micro-batches
    without it (off the last pipeline stage) come back as they are.
    """
    corrected, metrics = [], Metrics()
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
        # golden tokens carry no rollout probability, and their weight is 0: keep it exactly so
        pg_weight_N = torch.where(trained_N, batch.pg_weight_N * weight_N, 0.0)
        corrected.append(replace(batch, pg_weight_N=pg_weight_N))
    return corrected, metrics


def use_rollout_policy(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Let the rollouts' own log-probabilities stand for the old policy: the exact off-policy
    ratio.
    """
    return [replace(batch, old_token_logprob_N=batch.rollout_logprob_N) for batch in batches]
