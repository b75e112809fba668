"""Numbers of responses by hand: rates, quarters of the budget, quantiles, undefined means."""

import random
from dataclasses import replace

import numpy as np
import pytest

from stable_opd_mcore.data.repetition import TailLoop
from stable_opd_mcore.data.responses import (
    CompressionLimits,
    MeasuredResponse,
    ResponseTotals,
    compression_limits,
    measure,
    rollout_metrics,
    version_metrics,
)
from stable_opd_mcore.data.samples import rollout_samples
from stable_opd_mcore.monitoring.names import require_known
from stable_opd_mcore.records import Prompt, Rollout, Segment, Turn

LIMITS = CompressionLimits(64, 2.0)


@pytest.mark.parametrize(
    ("max_new_tokens", "tail", "ratio"),
    [(8192, 10_000, 10), (1024, 2560, 10), (128, 320, 10), (127, 101, 2), (80, 64, 2), (1, 1, 2)],
)
def test_the_tail_must_be_reachable_within_the_budget(max_new_tokens, tail, ratio):
    limits = compression_limits(max_new_tokens)
    assert (limits.tail_characters, limits.ratio) == (tail, ratio)


@pytest.mark.parametrize(("budget", "loops"), [(48, 1.0), (56, 1.0), (64, 0.0), (2048, 0.0)])
def test_a_loop_is_a_quarter_of_a_small_budget(budget, loops):
    cut = rollout([*range(10, 44), *[1, 2] * 7], "length")
    values = rollout_metrics([cut], budget).values_by_key()
    assert values["rollout/loop_rate"] == loops
    assert rollout_samples([cut], max_new_tokens=budget)[0].repetitive.sum() == 14 * loops


def metrics_of(responses, max_length=None):
    totals = ResponseTotals(max_length)
    for response in responses:
        totals.add(response)
    return totals.metrics("x")


def rollout(ids, finish, reward=None, text="", failure=None) -> Rollout:
    prompt = Prompt("p", "problem", (1,))
    return Rollout(prompt, 0, tuple(ids), (-0.5,) * len(ids), finish, 0, text, reward, failure)


ROLLOUTS = [
    rollout(range(2), "stop", 1.0),
    rollout(range(4), "stop", 0.0, failure="timeout"),
    rollout([*range(30), *[7] * 70], "length", 0.0, "ab" * 100),
    rollout([], "abort"),  # in a file of another program
]


def test_rollout_metrics_of_a_batch_by_hand():
    values = rollout_metrics(ROLLOUTS, 100).values_by_key()
    require_known(values)
    assert values == {
        "rollout/response_length_mean": 106 / 4,
        "rollout/response_length_p50": 3.0,
        "rollout/response_length_p95": pytest.approx(85.6),
        "rollout/response_length_max": 100.0,
        "rollout/truncation_rate": 0.25,
        "rollout/abort_rate": 0.25,
        "rollout/accuracy": pytest.approx(1 / 3),
        "rollout/grading_timeouts": 1.0,
        "rollout/grading_crashes": 0.0,
        "rollout/grading_invalid": 0.0,
        "rollout/repetition_rate": 0.25,
        "rollout/repetition_rate_10k": 0.0,
        "rollout/loop_rate": 0.25,
        "rollout/loop_token_share": 70 / 106,
        "rollout/loop_onset_mean": 30.0,
        "rollout/loop_token_share_q1": 0.0,
        "rollout/loop_token_share_q2": 20 / 25,
        "rollout/loop_token_share_q3": 1.0,
        "rollout/loop_token_share_q4": 1.0,
        "rollout/accuracy_finished": 0.5,
        "rollout/accuracy_truncated": 0.0,
        "rollout/loop_rate_finished": 0.0,
        "rollout/loop_rate_truncated": 1.0,
        "rollout/response_length_mean_finished": 3.0,
        "rollout/response_length_mean_truncated": 100.0,
    }


def test_shares_of_responses_by_the_age_of_their_weights():
    crossed = replace(rollout(range(5), "stop"), segments=(Segment(2, 4), Segment(3, 5)))
    sampled = [replace(crossed, weight_version=4), replace(crossed, weight_version=6, segments=())]
    same = version_metrics([crossed, crossed], trained_version=6, max_staleness=2)
    assert same.values_by_key()["rollout/mixed_groups"] == 0
    metrics = version_metrics(sampled, trained_version=6, max_staleness=2)
    require_known(metrics)
    assert metrics.values_by_key() == {
        "rollout/mixed_groups": 1.0,
        "perf/continued_share": 0.5,
        **{"perf/staleness_0": 0.5, "perf/staleness_1": 0.0, "perf/staleness_2": 0.5},
    }


def test_no_responses_leave_everything_undefined():
    values = rollout_metrics([], 10, area="eval_greedy").values_by_key()
    require_known(values)
    assert set(values.values()) == {None}


def test_what_is_not_known_is_not_counted():
    unknown = measure("abc", None, LIMITS, finish_reason=None, reward=None)
    assert unknown.length == 3
    values = metrics_of([unknown]).values_by_key()
    undefined = {key.removeprefix("x/") for key, value in values.items() if value is None}
    assert undefined >= {"accuracy", "truncation_rate", "abort_rate", "loop_token_share_q1"}
    assert values["x/loop_rate"] == values["x/repetition_rate"] == 0.0
    assert "x/grading_timeouts" not in values


def test_without_token_ids_characters_are_measured():
    text = "é" * 20 + "ab" * 40
    limits = CompressionLimits(80, 5.0)
    response = measure(text, None, limits, finish_reason="length", reward=None)
    assert response.length == 100
    assert response.loop == TailLoop(80, 2)
    assert (response.repetitive, response.repetitive_10k) == (True, None)
    paper = CompressionLimits(10_000, 10.0)
    long = measure("ab" * 5001, None, paper, finish_reason="length", reward=None)
    assert (long.repetitive, long.repetitive_10k) == (True, True)


def test_tokens_after_the_budget_belong_to_its_last_quarter():
    looping = MeasuredResponse(12, "length", None, None, TailLoop(9, 1), False, False)
    values = metrics_of([looping], 6).values_by_key()
    shares = [values[f"x/loop_token_share_q{quarter}"] for quarter in (1, 2, 3, 4)]
    # 1.5 tokens a quarter: tokens 0-1, 2, 3-4 and 5-11; the loop begins at token 3
    assert shares == [0.0, 0.0, 1.0, 1.0]


def test_quarters_hold_every_token_once():
    rng = random.Random(0)
    for _ in range(200):
        length, budget = rng.randint(1, 40), rng.randint(1, 40)
        loop = TailLoop(rng.randint(0, length), 1)
        response = MeasuredResponse(length, "stop", None, None, loop, False, False)
        metrics = metrics_of([response], budget)
        quarters = [metrics[f"x/loop_token_share_q{q}"] for q in (1, 2, 3, 4)]
        assert sum(q.total for q in quarters) == loop.length
        assert sum(q.count for q in quarters) == length


def test_quantiles_are_those_of_numpy():
    rng = random.Random(0)
    for size in (1, 2, 3, 20, 101):
        lengths = [rng.randint(0, 30) for _ in range(size)]
        plain = MeasuredResponse(0, "stop", None, None, TailLoop(), False, False)
        values = metrics_of(replace(plain, length=length) for length in lengths).values_by_key()
        assert values["x/response_length_p50"] == pytest.approx(np.percentile(lengths, 50))
        assert values["x/response_length_p95"] == pytest.approx(np.percentile(lengths, 95))


def episode(*turns: Turn, finish="stop", **fields) -> Rollout:
    """Every token is 7."""
    ids = (7,) * sum(turn.num_tokens for turn in turns)
    prompt = Prompt("p", "", (1,), environment="")
    return replace(rollout(ids, finish, **fields), turns=turns, prompt=prompt)


EPISODES = [
    episode(
        Turn(2, "stop", text="<think>one</think> north"),
        Turn(8, "length", (5,), text="south"),
        Turn(2, "stop", (5, 6), text="north"),
        reward=1.0,
    ),
    episode(Turn(4, "length", text="<think>a"), finish="turns", reward=0.0),
]


@pytest.mark.parametrize("ending", ["stop", "turns", "window", "failed"])
def test_each_ending_of_an_episode_has_a_metric_of_its_own(ending):
    """In the middle of its first turn, and before it had one."""
    failure = "crash" if ending == "failed" else None
    cut = episode(Turn(8, "length"), finish=ending, reward=0.25, failure=failure)
    whole = episode(Turn(4, "stop", text="a"), finish=ending, reward=0.25, failure=failure)
    none = episode(finish=ending, reward=0.25, failure=failure)
    rollouts = [cut, whole, none] if ending == "failed" else [cut, whole]
    values = rollout_metrics(rollouts, 8, max_turns={"": 1}).values_by_key()
    require_known(values)
    shares = {key: value for key, value in values.items() if "/ending_" in key}
    assert {key.rpartition("_")[2] for key, value in shares.items() if value} == {ending}
    assert sum(shares.values()) == 1
    assert values["rollout/episode_truncation_rate"] == (ending in ("turns", "window"))
    parts = [values[f"rollout/accuracy{part}"] for part in ("", "_finished", "_truncated")]
    stopped, was_cut = ending == "stop", ending in ("turns", "window")
    assert parts == [0.25, 0.25 if stopped else None, 0.25 if was_cut else None]
    # The turns that there were; an episode that failed before its first one has none.
    assert values["rollout/truncation_rate"] == 0.5
    assert values["rollout/response_length_mean"] == 6
    assert values["rollout/grading_crashes"] == (3 if ending == "failed" else 0)


def test_each_turn_is_a_response_and_the_reward_is_the_episodes():
    values = rollout_metrics(EPISODES, 8, max_turns={"": 4}).values_by_key()
    require_known(values)
    expected = {
        "response_length_mean": 16 / 4,
        "response_length_max": 8.0,
        "truncation_rate": 0.5,
        "accuracy": 0.5,
        "accuracy_finished": 1.0,
        "accuracy_truncated": 0.0,
        "loop_rate": 0.25,
        "loop_rate_truncated": 0.5,
        "loop_onset_mean": 0.0,
        # A turn is a quarter of the budget of 32 tokens; the second one fills its quarter.
        "loop_token_share_q1": 0.0,
        "loop_token_share_q2": 1.0,
        "loop_token_share_q3": 0.0,
        "loop_token_share_q4": None,
        "turns_mean": 2.0,
        "turns_max": 3.0,
        "episode_tokens_mean": 8.0,
        "episode_truncation_rate": 0.5,
        "repeated_turn_rate": 0.25,
        "response_length_mean_turn_1": 3.0,
        "response_length_mean_turn_2": 8.0,
        "response_length_mean_turn_3_4": 2.0,
        "truncation_rate_turn_1": 0.5,
        "truncation_rate_turn_2": 1.0,
        "truncation_rate_turn_3_4": 0.0,
    }
    assert {key: values[f"rollout/{key}"] for key in expected} == expected
    assert not any("turn_5" in key for key in values)


def test_rollouts_of_sources_without_an_environment_have_no_part_in_the_numbers_of_turns():
    plain = rollout([7] * 8, "length", 1.0)
    values = rollout_metrics([*EPISODES, plain], 8, max_turns={"": 4}).values_by_key()
    assert values["rollout/response_length_mean"] == 24 / 5
    assert values["rollout/turns_mean"] == 2.0
    assert values["rollout/response_length_mean_turn_1"] == 3.0
    # Its own budget is 8 tokens, so a quarter has two.
    shares = [values[f"rollout/loop_token_share_q{n}"] for n in (1, 2, 3, 4)]
    assert shares == [2 / 8, 10 / 10, 2 / 4, 1.0]


def test_numbers_that_environments_return_are_averaged_over_the_episodes_that_have_them():
    metrics = ({"steps": 3.0}, {"steps": 5.0, "won": 1.0}, {})
    rollouts = [replace(EPISODES[0], metrics=each) for each in metrics]
    values = rollout_metrics(rollouts, 8, max_turns={"": 4}).values_by_key()
    require_known(values)
    assert (values["rollout/own_steps"], values["rollout/own_won"]) == (4.0, 1.0)


def test_turns_have_the_budget_of_their_environment():
    expected = rollout_metrics(EPISODES, 8, max_turns={"": 4})
    own = [replace(one, prompt=replace(one.prompt, max_new_tokens=8)) for one in EPISODES]
    assert rollout_metrics(own, 400, max_turns={"": 4}) == expected
    assert rollout_metrics(EPISODES, 400, max_turns={"": 4}) != expected


def test_one_turn_has_no_numbers_of_turns():
    values = rollout_metrics([EPISODES[1]], 8).values_by_key()
    assert values.keys() == rollout_metrics(ROLLOUTS, 100).values_by_key().keys()
