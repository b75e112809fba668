"""Samples from rollouts and golden solutions, with the token masks of the objective.

The mixture (docs/method.md §2) trains on one golden solution for each prompt of the batch beside
its rollouts. Not here: the weights of tokens, which the objective computes from samples.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

from stable_opd_mcore.config.schema import TokenMasksConfig
from stable_opd_mcore.data.repetition import repetitive_mask
from stable_opd_mcore.records import Prompt, Rollout, Sample

_NO_MASKS = TokenMasksConfig()


def off_policy_draws(cursor: int, count: int, on_policy_fraction: float, seed: int) -> list[bool]:
    """Which prompts of the draws cursor .. cursor+count-1 are trained on golden solutions (gkd).

    At the end of every step, floor(n * on_policy_fraction) of the run's n draws are on-policy. A
    function of its arguments alone: the same on every rank and after a resume.
    Which draws of a step they are is random, so that every minibatch is a mixture.
    """
    fraction = Fraction(str(on_policy_fraction))
    num_on_policy = math.floor((cursor + count) * fraction) - math.floor(cursor * fraction)
    off_policy = [index >= num_on_policy for index in range(count)]
    random.Random(f"{seed}/{cursor}").shuffle(off_policy)
    return off_policy


def mark_off_policy(samples: Sequence[Sample], off_policy: Sequence[bool]) -> list[Sample]:
    """Samples of one source with their prompts' marks; every prompt has the same number of them."""
    each = len(samples) // len(off_policy)
    return [replace(s, off_policy=off_policy[i // each]) for i, s in enumerate(samples)]


def rollout_samples(
    rollouts: Sequence[Rollout], masks: TokenMasksConfig = _NO_MASKS
) -> list[Sample]:
    """One sample per rollout; masked tokens have trained=False."""
    samples: list[Sample] = []
    for rollout in rollouts:
        repetitive = repetitive_mask(rollout.token_ids)
        samples.append(
            Sample(
                source="rollout",
                prompt_id=rollout.prompt.prompt_id,
                prompt_token_ids=rollout.prompt.token_ids,
                response_token_ids=rollout.token_ids,
                trained=_trained(rollout, repetitive, masks),
                rollout_logprobs=rollout.rollout_logprobs,
                repetitive=repetitive,
                reward=rollout.reward,
                truncated=rollout.finish_reason != "stop",
            )
        )
    return samples


def golden_samples(prompts: Iterable[Prompt]) -> list[Sample]:
    """One sample per prompt, every token trained: token masks apply to rollouts only.

    Raises:
        ValueError: a prompt without a golden solution, which PromptSet refuses beforehand.
    """
    samples: list[Sample] = []
    for prompt in prompts:
        if not prompt.golden_token_ids:
            raise ValueError(f"{prompt.prompt_id}: no golden solution")
        samples.append(
            Sample(
                source="golden",
                prompt_id=prompt.prompt_id,
                prompt_token_ids=prompt.token_ids,
                response_token_ids=prompt.golden_token_ids,
                trained=(True,) * len(prompt.golden_token_ids),
            )
        )
    return samples


def _trained(
    rollout: Rollout, repetitive: tuple[bool, ...], masks: TokenMasksConfig
) -> tuple[bool, ...]:
    if masks.truncated_rollouts and rollout.finish_reason != "stop":
        return (False,) * len(rollout.token_ids)
    trained = [not (masks.repetitive_tail and tail) for tail in repetitive]
    for special in masks.special_token_ids:
        if special in rollout.token_ids:
            trained[rollout.token_ids.index(special)] = False
    return tuple(trained)
