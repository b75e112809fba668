"""Rollouts and golden solutions as samples, and the token masks."""

import pytest

from stable_opd_mcore.config.schema import TokenMasksConfig
from stable_opd_mcore.data.golden import golden_samples, rollout_samples
from stable_opd_mcore.records import Prompt, Rollout

PROMPTS = [
    Prompt("s:1", "a", (1, 2), answer="1", golden_token_ids=(7, 8, 9)),
    Prompt("s:2", "b", (3,), answer="2", golden_token_ids=(6, 9)),
]


def rollout(prompt, ids, reason="stop", index=0):
    return Rollout(prompt, index, ids, tuple(-0.5 for _ in ids), reason, 3, reward=1.0)


ROLLOUTS = [
    rollout(PROMPTS[1], (5, 4, 5, 9)),
    rollout(PROMPTS[1], (4, 5, 4, 5, 4, 5, 4), "length", index=1),
    rollout(PROMPTS[0], (5, 9)),
    rollout(PROMPTS[0], (9,), index=1),
]


def test_rollouts_and_golden_solutions_become_samples():
    samples = rollout_samples(ROLLOUTS) + golden_samples(PROMPTS)
    assert [s.source for s in samples] == ["rollout"] * 4 + ["golden"] * 2
    assert [s.prompt_id for s in samples[4:]] == ["s:1", "s:2"]
    golden = samples[4]
    assert golden.prompt_token_ids == (1, 2)
    assert golden.response_token_ids == (7, 8, 9)
    assert golden.trained == (True,) * 3
    assert golden.rollout_logprobs is None
    assert golden.repetitive is None
    first = samples[0]
    assert first.rollout_logprobs == (-0.5,) * 4
    assert first.reward == 1.0
    assert [s.truncated for s in samples] == [False, True, False, False, False, False]


def test_the_repetitive_tail_is_always_marked_and_masked_by_setting():
    plain, masked = (
        rollout_samples(ROLLOUTS, TokenMasksConfig(repetitive_tail=flag)) for flag in (False, True)
    )
    assert plain[1].repetitive == masked[1].repetitive == (True,) * 7
    assert plain[1].trained == (True,) * 7
    assert masked[1].trained == (False,) * 7
    assert masked[0].trained == (True,) * 4


def test_special_tokens_are_masked_at_their_first_occurrence_only():
    samples = rollout_samples(ROLLOUTS, TokenMasksConfig(special_token_ids=(5, 9)))
    assert samples[0].trained == (False, True, True, False)
    assert samples[1].trained == (True, False, True, True, True, True, True)
    assert golden_samples(PROMPTS)[0].trained == (True,) * 3


def test_truncated_rollouts_are_masked_whole():
    samples = rollout_samples(ROLLOUTS, TokenMasksConfig(truncated_rollouts=True))
    assert [any(s.trained) for s in samples] == [True, False, True, True]


def test_a_prompt_without_golden_solution_is_named():
    with pytest.raises(ValueError, match=r"s:5: no golden solution"):
        golden_samples([Prompt("s:5", "c", (1,))])
