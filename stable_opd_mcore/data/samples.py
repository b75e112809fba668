"""Samples from rollouts and golden solutions, with the token masks of the objective."""

import math
import random
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.config.schema import TokenMasksConfig
from stable_opd_mcore.data.repetition import min_loop_tokens, tail_loop
from stable_opd_mcore.records import Prompt, Rollout, Sample

_NO_MASKS = TokenMasksConfig()


def off_policy_slots(cursor: int, count: int, on_policy_fraction: float, seed: int) -> set[int]:
    """The slots of cursor .. cursor + count - 1 that are trained on golden solutions (gkd).

    At the end of every step, floor(n * on_policy_fraction) of the run's n slots are on-policy. The
    choice within a step is random, so that every minibatch is a mixture.
    """
    fraction = Fraction(str(on_policy_fraction))
    num_on_policy = math.floor((cursor + count) * fraction) - math.floor(cursor * fraction)
    off_policy = [index >= num_on_policy for index in range(count)]
    random.Random(f"{seed}/{cursor}").shuffle(off_policy)
    return {cursor + index for index, marked in enumerate(off_policy) if marked}


def mark_off_policy(samples: Sequence[Sample], slots: Container[int]) -> list[Sample]:
    """The samples, those of prompts in `slots` marked as off-policy."""
    return [replace(sample, off_policy=sample.slot in slots) for sample in samples]


def rollout_samples(
    rollouts: Sequence[Rollout],
    masks: TokenMasksConfig = _NO_MASKS,
    max_new_tokens: int | None = None,
) -> list[Sample]:
    """One sample per rollout; `max_new_tokens` says how long a loop must be."""
    least = min_loop_tokens(max_new_tokens)
    samples: list[Sample] = []
    for rollout in rollouts:
        length = len(rollout.token_ids)
        loop = tail_loop(rollout.token_ids, min_length=least)
        repetitive = np.arange(length) >= length - loop.length
        samples.append(
            Sample.of_response(
                "rollout",
                rollout.prompt.prompt_id,
                np.array(rollout.prompt.token_ids, np.int32),
                rollout.token_ids,
                trained=_trained(rollout, repetitive, masks),
                rollout_logprobs=rollout.rollout_logprobs,
                repetitive=repetitive,
                episode=rollout.sample_index,
                reward=rollout.reward,
                routed_experts=rollout.routed_experts,
                teacher_scores=rollout.teacher_scores,
                truncated=rollout.finish_reason != "stop",
                teacher_prompt_token_ids=_teacher_tokens(rollout.prompt),
                slot=rollout.prompt.slot,
            )
        )
    return samples


def golden_samples(prompts: Iterable[Prompt]) -> list[Sample]:
    """One sample per prompt, every token trained; a ValueError without a golden solution."""
    samples: list[Sample] = []
    for prompt in prompts:
        if not prompt.golden_token_ids:
            raise ValueError(f"{prompt.prompt_id}: no golden solution")
        samples.append(
            Sample.of_response(
                "golden",
                prompt.prompt_id,
                np.array(prompt.token_ids, np.int32),
                np.array(prompt.golden_token_ids, np.int32),
                teacher_prompt_token_ids=_teacher_tokens(prompt),
                slot=prompt.slot,
            )
        )
    return samples


def _teacher_tokens(prompt: Prompt) -> NDArray[np.int32] | None:
    own = prompt.teacher_token_ids
    return None if own is None else np.array(own, np.int32)


def _trained(
    rollout: Rollout, repetitive: NDArray[np.bool_], masks: TokenMasksConfig
) -> NDArray[np.bool_]:
    if masks.truncated_rollouts and rollout.finish_reason != "stop":
        return np.zeros_like(repetitive)
    trained = ~repetitive if masks.repetitive_tail else np.ones_like(repetitive)
    if masks.after_tokens is not None:
        trained[masks.after_tokens :] = False
    for special in masks.special_token_ids:  # the first of each
        trained[np.flatnonzero(rollout.token_ids == special)[:1]] = False
    return trained
