"""From rollouts and golden solutions to samples, with the token masks of the objective.

The mixture (METHOD §2) trains on one golden solution for each distinct prompt of the batch, beside
its rollouts. Nothing is weighted here: an objective turns samples into weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stable_opd_mcore.config.schema import TokenMasksConfig
from stable_opd_mcore.data.repetition import repetitive_mask
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.records import Prompt, Rollout, Sample

_NO_MASKS = TokenMasksConfig()


def rollout_samples(
    rollouts: Sequence[Rollout], masks: TokenMasksConfig = _NO_MASKS
) -> list[Sample]:
    """Samples of the student's own responses; masked tokens have trained=False."""
    samples = []
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
    """One sample per prompt, every token trained: the masks are for what the student made up.

    Raises:
        DataError: a prompt without a golden solution.
    """
    return [_golden(prompt) for prompt in prompts]


def _golden(prompt: Prompt) -> Sample:
    if not prompt.golden_token_ids:
        raise DataError(
            f"{prompt.prompt_id}: no golden solution, which sft and mixture.lambda > 0 train on; "
            "set data.train.columns.solution, or mixture.lambda=0"
        )
    return Sample(
        source="golden",
        prompt_id=prompt.prompt_id,
        prompt_token_ids=prompt.token_ids,
        response_token_ids=prompt.golden_token_ids,
        trained=(True,) * len(prompt.golden_token_ids),
    )


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
