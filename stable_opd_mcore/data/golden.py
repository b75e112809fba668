"""Samples from rollouts and golden solutions, with the token masks of the objective.

The mixture (docs/method.md §2) trains on one golden solution for each prompt of the batch beside
its rollouts. Not here: the weights of tokens, which the objective computes from samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stable_opd_mcore.config.schema import TokenMasksConfig
from stable_opd_mcore.data.repetition import repetitive_mask
from stable_opd_mcore.records import Prompt, Rollout, Sample

_NO_MASKS = TokenMasksConfig()


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
