"""Responses while they are sampled: rollouts with the finish reason "abort" until they end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.records import FinishReason, Prompt, Rollout, Segment


def not_begun(prompt: Prompt, sample_index: int, weight_version: int) -> Rollout:
    no_tokens, no_logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
    return Rollout(prompt, sample_index, no_tokens, no_logprobs, "abort", weight_version)


def is_finished(rollout: Rollout) -> bool:
    return rollout.finish_reason != "abort"


def extended(
    rollout: Rollout,
    token_ids_L: NDArray[np.int32],
    logprobs_L: NDArray[np.float32],
    finish_reason: FinishReason,
    weight_version: int,
    **fields: Any,
) -> Rollout:
    """The rollout with L more tokens, and other `fields` of `Rollout` that change."""
    *before, last = rollout.segments
    if last.num_tokens and last.weight_version != weight_version:
        before, last = [*before, last], Segment(0, weight_version)
    segments = (*before, Segment(last.num_tokens + len(token_ids_L), weight_version))
    return replace(
        rollout,
        token_ids=np.concatenate([rollout.token_ids, token_ids_L]),
        rollout_logprobs=np.concatenate([rollout.rollout_logprobs, logprobs_L]),
        finish_reason=finish_reason,
        weight_version=segments[0].weight_version,
        segments=segments,
        turns=(),
        **fields,
    )
