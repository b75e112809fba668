"""Rollouts and golden solutions as samples, and the token masks."""

import pytest

from stable_opd_mcore.config.schema import TokenMasksConfig
from stable_opd_mcore.data.samples import (
    golden_samples,
    mark_off_policy,
    off_policy_slots,
    rollout_samples,
)
from stable_opd_mcore.records import Prompt, Rollout

PROMPTS = [
    Prompt("s:1", "a", (1, 2), answer="1", golden_token_ids=(7, 8, 9)),
    Prompt("s:2", "b", (3,), answer="2", golden_token_ids=(6, 9), slot=7),
]


def rollout(prompt, ids, reason="stop", index=0):
    return Rollout(prompt, index, ids, tuple(-0.5 for _ in ids), reason, 3, reward=1.0)


ROLLOUTS = [
    rollout(PROMPTS[1], (5, 4, 5, 9)),
    rollout(PROMPTS[1], (4, 5) * 16 + (4,), "length", index=1),
    rollout(PROMPTS[0], (5, 9)),
    rollout(PROMPTS[0], (9,), index=1),
]


def test_rollouts_and_golden_solutions_become_samples():
    samples = rollout_samples(ROLLOUTS) + golden_samples(PROMPTS)
    assert [s.kind for s in samples] == ["rollout"] * 4 + ["golden"] * 2
    assert [s.prompt_id for s in samples[4:]] == ["s:1", "s:2"]
    golden = samples[4]
    assert (golden.token_ids.tolist(), golden.num_prompt_tokens) == ([1, 2, 7, 8, 9], 2)
    assert golden.places.tolist() == [2, 3, 4]
    assert golden.trained.tolist() == [True] * 3
    assert golden.rollout_logprobs is None
    assert golden.repetitive is None
    first = samples[0]
    assert first.rollout_logprobs.tolist() == [-0.5] * 4
    assert first.reward == 1.0
    assert [s.truncated for s in samples] == [False, True, False, False, False, False]
    assert [s.episode for s in samples] == [0, 1, 0, 1, 0, 0]


def test_the_repetitive_tail_is_always_marked_and_masked_by_setting():
    plain, masked = (
        rollout_samples(ROLLOUTS, TokenMasksConfig(repetitive_tail=flag)) for flag in (False, True)
    )
    assert plain[1].repetitive.sum() == masked[1].repetitive.sum() == 33
    assert plain[1].trained.tolist() == [True] * 33
    assert masked[1].trained.tolist() == [False] * 33
    assert masked[0].trained.tolist() == [True] * 4


def test_special_tokens_are_masked_at_their_first_occurrence_only():
    samples = rollout_samples(ROLLOUTS, TokenMasksConfig(special_token_ids=(5, 9)))
    assert samples[0].trained.tolist() == [False, True, True, False]
    assert samples[1].trained.tolist() == [True, False] + [True] * 31
    assert golden_samples(PROMPTS)[0].trained.tolist() == [True] * 3


def test_tokens_after_the_first_ones_are_masked():
    samples = rollout_samples(ROLLOUTS, TokenMasksConfig(after_tokens=3))
    assert [s.trained.sum() for s in samples] == [3, 3, 2, 1]
    assert samples[0].trained.tolist() == [True, True, True, False]


def test_truncated_rollouts_are_masked_whole():
    rollouts = [*ROLLOUTS, rollout(PROMPTS[0], (5, 4), "abort", index=2)]
    samples = rollout_samples(rollouts, TokenMasksConfig(truncated_rollouts=True))
    assert [any(s.trained) for s in samples] == [True, False, True, True, False]
    assert [s.truncated for s in samples] == [False, True, False, False, True]


@pytest.mark.parametrize("per_step", [1, 3, 16])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.29, 0.5, 1.0])
def test_the_on_policy_share_is_exact_over_the_run(per_step, fraction):
    """One prompt per step, too, where rounding per step gives 0 for a half."""
    cursor, on_policy = 0, 0
    while cursor < 100:
        off_policy = off_policy_slots(cursor, per_step, fraction, seed=7)
        assert off_policy == off_policy_slots(cursor, per_step, fraction, seed=7)
        assert off_policy <= {*range(cursor, cursor + per_step)}
        cursor, on_policy = cursor + per_step, on_policy + per_step - len(off_policy)
        assert on_policy == round(fraction * 100) * cursor // 100


def test_minibatches_of_a_step_are_mixtures():
    """Prompts are dealt to minibatches in turn, so an alternating choice would sort them."""
    steps = [off_policy_slots(64 * step, 64, 0.5, seed=0) for step in range(4)]
    assert all(4 < sum(slot % 2 for slot in slots) < 28 for slots in steps)
    assert {slot + 64 for slot in steps[0]} != steps[1]


def test_every_sample_carries_the_mark_of_its_prompt():
    marked = mark_off_policy(rollout_samples(ROLLOUTS), {7})
    assert [s.off_policy for s in marked] == [True, True, False, False]
    assert [s.off_policy for s in mark_off_policy(golden_samples(PROMPTS), {7})] == [False, True]
