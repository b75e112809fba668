"""Rollouts and golden solutions as samples, and the token masks."""

from dataclasses import replace

import numpy as np
import pytest

from stable_opd_mcore.config.objective_settings import TokenMasksConfig
from stable_opd_mcore.data.samples import (
    golden_samples,
    mark_off_policy,
    off_policy_slots,
    rollout_samples,
)
from stable_opd_mcore.losses.objectives import build_objective
from stable_opd_mcore.records import Prompt, Rollout, SequenceScores, Turn
from stable_opd_mcore.train.samples.sharing import gather_facts
from tests.losses.cases import make_config

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
    without = replace(PROMPTS[0], golden_token_ids=None)
    samples = rollout_samples(ROLLOUTS) + golden_samples([*PROMPTS, without])
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


def test_of_several_golden_turns_no_observed_token_is_trained():
    prompt = Prompt(
        "s:1", "a", (1, 2), golden_token_ids=(7, 9, 1, 2, 3, 8, 9), golden_turn_tokens=(2, 3, 2)
    )
    (sample,) = golden_samples([prompt])
    assert sample.token_ids.tolist() == [1, 2, 7, 9, 1, 2, 3, 8, 9]
    assert sample.places.tolist() == [2, 3, 7, 8]
    assert sample.turns.tolist() == [0, 0, 1, 1]
    assert sample.ends_turn.tolist() == [False, True] * 2
    assert sample.trained.tolist() == [True] * 4
    assert sample.num_prompt_tokens == 2


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


@pytest.mark.parametrize(
    ("setting", "masked"),
    [
        (False, {}),
        (True, {"length": 33, "stop": 2, "turns": 2, "window": 2}),
        (["turns"], {"turns": 5}),
        (["window", "turns"], {"window": 5, "turns": 5}),
        (["length", "window"], {"length": 33, "stop": 2, "turns": 2, "window": 5}),
    ],
)
def test_each_ending_is_masked_where_its_setting_says_so(setting, masked):
    """An episode has two turns, and the first one was cut at its most tokens."""
    masks = TokenMasksConfig(truncated_rollouts=setting)
    turns = Turn(2, "length"), Turn(3, "stop", (6,))
    rollouts = [ROLLOUTS[1]] + [
        replace(rollout(PROMPTS[0], (5, 4, 4, 5, 9), ending), turns=turns)
        for ending in ("stop", "turns", "window")
    ]
    samples = rollout_samples(rollouts, masks)
    found = {
        r.finish_reason: int((~s.trained).sum()) for r, s in zip(rollouts, samples, strict=True)
    }
    assert found == dict.fromkeys(found, 0) | masked
    assert [s.truncated for s in samples] == [True, False, False, False]
    assert [s.num_truncated_turns for s in samples] == [1] * 4


@pytest.mark.parametrize("failure", ["crash", "timeout", "invalid"])
def test_an_episode_whose_environment_failed_has_no_loss_and_is_in_no_group(world, failure):
    turns = (Turn(3, "stop"), Turn(2, "length", (6, 7)))
    failed = replace(ROLLOUTS[0], token_ids=(5, 4, 9, 5, 4), rollout_logprobs=(-1,) * 5)
    failed = replace(failed, finish_reason="failed", grading_failure=failure, turns=turns)
    failed = replace(failed, segments=(), reward=0.0)
    others = [replace(ROLLOUTS[0], sample_index=n, reward=n / 2) for n in (1, 2)]
    samples = rollout_samples([failed, *others])
    assert [len(sample.places) for sample in samples] == [0, 4, 4]
    objective = build_objective(make_config(objective__name="grpo"), (9,), (9,))
    facts = gather_facts(world, samples)
    alone = gather_facts(world, samples[1:])
    weights, expected = objective.sample_weights(facts), objective.sample_weights(alone)
    assert weights.advantage_B.tolist() == [0, *expected.advantage_B]
    assert weights.pg_B.tolist() == [0, *expected.pg_B]


TURNS = (
    Turn(3, "stop"),
    Turn(2, "length", (6, 7)),
    Turn(4, "stop", (8, 8, 8), restarts=True),
    Turn(1, "stop", (6,)),
)


def test_a_sample_has_the_turns_of_one_context():
    """Later turns read what was observed; a turn that restarts begins another sample."""
    ids, numbers = (5, 4, 9, 5, 9, 1, 2, 3, 9, 9), np.arange(10)
    scores = SequenceScores(-numbers, *np.zeros((2, 10, 0)), np.zeros((10, 0)))
    experts = np.arange(9 - 1 + 9 - 1)[:, None, None]
    episode = Rollout(PROMPTS[0], 3, ids, -numbers, "stop", 0, turns=TURNS)
    episode = replace(episode, routed_experts=experts, teacher_scores=scores)
    masks = TokenMasksConfig(special_token_ids=(9,), after_tokens=3)
    first, second = rollout_samples([episode], masks)
    assert first.token_ids.tolist() == [1, 2, 5, 4, 9, 6, 7, 5, 9]
    assert first.places.tolist() == [2, 3, 4, 7, 8]
    assert first.trained.tolist() == [True, True, False, True, False]
    assert second.token_ids.tolist() == [8, 8, 8, 1, 2, 3, 9, 6, 9]
    assert second.places.tolist() == [3, 4, 5, 6, 8]
    assert second.trained.tolist() == [True, True, True, False, False]
    assert first.turns.tolist() == [0, 0, 0, 1, 1]
    assert first.turn_truncated.tolist() == [False, False, False, True, True]
    assert second.turns.tolist() == [2, 2, 2, 2, 3]
    assert not second.turn_truncated.any()
    for sample, own, prompt in ((first, numbers[:5], 2), (second, numbers[5:], 3)):
        assert (sample.num_prompt_tokens, sample.episode, sample.truncated) == (prompt, 3, False)
        assert (-sample.rollout_logprobs).tolist() == own.tolist()
        assert (-sample.teacher_scores.logprobs_L).tolist() == own.tolist()
    assert first.routed_experts.ravel().tolist() == [*range(8)]
    assert second.routed_experts.ravel().tolist() == [*range(8, 16)]


def test_a_loop_ends_with_its_turn():
    turns = (Turn(33, "length"), Turn(20, "length", (6,)), Turn(20, "stop", (6,)))
    (sample,) = rollout_samples([replace(rollout(PROMPTS[0], (4,) * 73), turns=turns)])
    assert sample.repetitive.tolist() == [True] * 33 + [False] * 40
    own = replace(PROMPTS[0], max_new_tokens=40)  # tokens of a turn, so a shorter loop counts
    (sample,) = rollout_samples([replace(rollout(own, (4,) * 73), turns=turns)])
    assert sample.repetitive.all()


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
def test_restarts_change_no_weight(world, aggregation):
    """Random episodes; some are truncated, masked as a whole, or have no token."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        episodes: list[list[Rollout]] = [[], []]
        for number in range(12):
            lengths = rng.integers(0, 4, rng.integers(1, 5)).tolist()
            reason = "length" if number % 3 else "stop"
            restarts = rng.random(len(lengths)) < 0.5
            for plain, restarted in zip(episodes, ([False] * 5, restarts.tolist()), strict=True):
                turns = [
                    Turn(length, reason, (7, 7), restarts=restart and n > 0)
                    for n, (length, restart) in enumerate(zip(lengths, restarted, strict=False))
                ]
                whole = rollout(PROMPTS[number % 2], (5,) * sum(lengths), reason, number // 2)
                plain.append(replace(whole, reward=float(number % 5 == 0), turns=tuple(turns)))
        settings = {"objective__name": "grpo", "kl__beta": 0.9, "sampling__max_new_tokens": 10}
        objective = build_objective(make_config(aggregation=aggregation, **settings), (1,), (1,))
        found = []
        for rollouts in episodes:
            samples = rollout_samples(rollouts, TokenMasksConfig(truncated_rollouts=True))
            facts = gather_facts(world, samples)
            weights, held = objective.sample_weights(facts), [samples[i] for i in facts.index_B]
            values = (weights.pg_B, weights.kl_B, weights.advantage_B)
            found.append([np.repeat(each, [len(s.places) for s in held]) for each in values])
            found[-1].append(np.concatenate([sample.trained for sample in held]))
        assert len(found[0][0]) == sum(len(one.token_ids) for one in episodes[0])
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("per_step", [1, 3, 16])
def test_the_on_policy_share_is_exact_over_the_run(per_step):
    """One prompt per step, too, where rounding per step gives 0 for a half."""
    for fraction in (0.0, 0.1, 0.29, 0.5, 1.0):
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
