"""Samples from rollouts and golden solutions, with the token masks of the objective."""

import math
import random
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.config.objective_settings import TokenMasksConfig
from stable_opd_mcore.data.repetition import min_loop_tokens, tail_loop
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.records import Prompt, Rollout, Sample, Segment, Turn

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
    rollouts: Iterable[Rollout],
    masks: TokenMasksConfig | Sequence[TokenMasksConfig] = _NO_MASKS,
    max_new_tokens: int | None = None,
) -> list[Sample]:
    """One sample per context of each rollout. The longest turn, which is `max_new_tokens` if the
    prompt has none, decides how long a loop must be.

    masks: those of each objective of the run, or of all.
    """

    def of(rollout: Rollout) -> TokenMasksConfig:
        return masks[rollout.prompt.use.objective] if isinstance(masks, Sequence) else masks

    return [
        sample
        for rollout in map(_without_failed_turns, rollouts)
        for sample in context_samples(rollout, *_marks(rollout, of(rollout), max_new_tokens))
    ]


def _without_failed_turns(rollout: Rollout) -> Rollout:
    """The rollout; without tokens if its environment failed, which the student did not cause: it
    then has no loss, and its reward is no part of a group."""
    if rollout.finish_reason != Ending.FAILED:
        return rollout
    nothing = np.empty(0)
    turns, segments = (Turn(0, Ending.FAILED),), (Segment(0, rollout.weight_version),)
    return replace(
        rollout,
        token_ids=nothing,
        rollout_logprobs=nothing,
        turns=turns,
        segments=segments,
        routed_experts=None,
        teacher_scores=None,
    )


def context_samples(
    rollout: Rollout,
    trained: NDArray[np.bool_] | None = None,
    repetitive: NDArray[np.bool_] | None = None,
) -> Iterator[Sample]:
    """One sample per context.

    A prompt of two tokens P and three turns; the student sampled S, and read O between its turns.
    The third turn restarts, so `before` is all that it reads:

        turn        1         2         3
        before              O O     O O O
        sampled     S S S   S S         S

        sample 0    token_ids  P P S S S O O S S    places 2 3 4 7 8    turns 0 0 0 1 1
        sample 1    token_ids  O O O S              places 3            turns 2

    The tokens at `places` have a row in the loss each; `trained`, `rollout_logprobs` and
    `teacher_scores` are theirs, in this order. All other tokens are only read.

    trained, repetitive: [L], of the rollout's tokens; None: all are trained, none is repetitive.
    """
    prompt, experts, scores = rollout.prompt, rollout.routed_experts, rollout.teacher_scores
    count = len(rollout.token_ids)
    trained = np.ones(count, np.bool_) if trained is None else trained
    repetitive = np.zeros(count, np.bool_) if repetitive is None else repetitive
    lengths = [turn.num_tokens for turn in rollout.turns]
    turns_L = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    truncated_L = np.array([turn.finish_reason == Ending.LENGTH for turn in rollout.turns])[turns_L]
    first, first_routed = 0, 0
    for turns in _contexts(rollout.turns):
        beginning = () if turns[0].restarts else prompt.token_ids
        parts, end = [np.array(beginning, np.int32)], first
        for turn in turns:
            sampled = rollout.token_ids[end : end + turn.num_tokens]
            parts += [np.array(turn.before, np.int32), sampled]
            end += turn.num_tokens
        is_sampled = np.repeat([False] + [False, True] * len(turns), [len(part) for part in parts])
        own, routed = slice(first, end), slice(first_routed, first_routed + len(is_sampled) - 1)
        yield Sample(
            "rollout",
            prompt.prompt_id,
            np.concatenate(parts),
            np.flatnonzero(is_sampled).astype(np.int32),
            len(beginning) or len(turns[0].before),
            trained=trained[own],
            rollout_logprobs=rollout.rollout_logprobs[own],
            repetitive=repetitive[own],
            episode=rollout.sample_index,
            reward=rollout.reward,
            routed_experts=None if experts is None else experts[routed],
            teacher_scores=scores and scores.select(own),
            truncated=rollout.finish_reason == Ending.LENGTH,
            turns=turns_L[own],
            turn_truncated=truncated_L[own],
            teacher_prompt_token_ids=_teacher_tokens(prompt),
            slot=prompt.slot,
            objective=prompt.use.objective,
            is_taught=prompt.use.is_taught,
        )
        first, first_routed = end, routed.stop


def _contexts(turns: Sequence[Turn]) -> list[list[Turn]]:
    """The turns of each context: one that restarts begins another."""
    found: list[list[Turn]] = []
    for turn in turns:
        if turn.restarts or not found:
            found.append([])
        found[-1].append(turn)
    return found


def golden_samples(prompts: Iterable[Prompt]) -> list[Sample]:
    """One sample for each prompt with a golden solution.

    Every token of its golden turns is trained. Tokens observed between the turns are not.
    """
    samples: list[Sample] = []
    for prompt in prompts:
        if not prompt.golden_token_ids:
            continue
        lengths = prompt.golden_turn_tokens or (len(prompt.golden_token_ids),)
        part_L = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        written, start = np.flatnonzero(part_L % 2 == 0), len(prompt.token_ids)
        samples.append(
            Sample(
                "golden",
                prompt.prompt_id,
                np.array(prompt.token_ids + prompt.golden_token_ids, np.int32),
                places=(start + written).astype(np.int32),
                num_prompt_tokens=start,
                trained=np.ones(len(written), np.bool_),
                turns=part_L[written] // 2,
                teacher_prompt_token_ids=_teacher_tokens(prompt),
                slot=prompt.slot,
                objective=prompt.use.objective,
                is_taught=prompt.use.is_taught,
            )
        )
    return samples


def _teacher_tokens(prompt: Prompt) -> NDArray[np.int32] | None:
    own = prompt.teacher_token_ids
    return None if own is None else np.array(own, np.int32)


def _marks(
    rollout: Rollout, masks: TokenMasksConfig, max_new_tokens: int | None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """[L] each: whether a token is trained, and whether it is in the loop at the end of its turn.

    Each mask applies to every turn on its own, except for endings that only an episode has.
    """
    least = min_loop_tokens(rollout.prompt.max_new_tokens or max_new_tokens)
    count, end = len(rollout.token_ids), 0
    repetitive, trained = np.zeros(count, np.bool_), np.ones(count, np.bool_)
    for turn in rollout.turns:
        start, end = end, end + turn.num_tokens
        ids, of_turn = rollout.token_ids[start:end], trained[start:end]
        repetitive[end - tail_loop(ids, min_length=least).length : end] = True
        if masks.after_tokens is not None:
            of_turn[masks.after_tokens :] = False
        if turn.finish_reason in masks.truncated_rollouts:
            of_turn[:] = False
        for special in masks.special_token_ids:  # the first of each
            of_turn[np.flatnonzero(ids == special)[:1]] = False
    if masks.repetitive_tail:
        trained &= ~repetitive
    if rollout.finish_reason in masks.truncated_rollouts:
        trained[:] = False
    return trained, repetitive
