"""Counts of right responses, and the sampling settings of an evaluation."""

import pytest

from stable_opd_mcore.evaluation.results import (
    BenchmarkResult,
    benchmark_result,
    evaluation_sampling,
    require_answers,
)
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from tests.config.cases import run_with

PROMPTS = [Prompt(f"s:{i}", f"{i}+1", (i,), answer=str(i + 1)) for i in range(7)]
# Sample j of prompt i is right when i + j is even; the last prompt has no right one.
ROLLOUTS = [
    Rollout(prompt, j, (), (), "stop", 0, "", float(i < 6 and (i + j) % 2 == 0))
    for i, prompt in enumerate(PROMPTS)
    for j in range(2)
]


def test_all_responses_of_all_problems_count_and_over_long_problems_are_wrong():
    sampling = Sampling(1.0, 1.0, 8, 2, (), 0)
    result = benchmark_result(iter(ROLLOUTS), sampling)
    assert result.num_correct == (1, 1, 1, 1, 1, 1, 0)
    assert result.accuracy == result.pass_at(1)[0] == pytest.approx(6 / 14)
    assert result.pass_at(2)[0] == pytest.approx(6 / 7)
    low, high = result.accuracy_interval
    assert low < result.accuracy < high < result.pass_at(2)[1][1] <= 1
    with_long = benchmark_result(iter(ROLLOUTS), sampling, over_long=7)
    assert with_long.accuracy == pytest.approx(6 / 28)
    assert with_long.pass_at(2)[0] == pytest.approx(6 / 14)
    assert (with_long.num_correct, with_long.num_over_long) == ((1,) * 6 + (0,) * 8, 7)
    assert with_long.record()["truncation_rate"] == 0.0


def test_rewards_between_0_and_1_count_in_the_accuracy_as_in_training():
    rollouts = [Rollout(each, 0, (), (), "stop", 0, "", 0.75) for each in PROMPTS]
    result = benchmark_result(iter(rollouts), Sampling(1.0, 1.0, 8, 1, (), 0), over_long=1)
    assert (result.accuracy, result.pass_at(1)[0]) == (pytest.approx(7 * 0.75 / 8), 0.0)


def test_rewards_on_another_scale_have_a_mean_and_no_pass_at_k():
    """Reward 1 is then no verdict, and a problem without a response gets the lowest reward."""
    rollouts = [
        Rollout(each, 0, (), (), "stop", 0, "", reward)
        for each, reward in zip(PROMPTS, (1.0, -3.0, 9.0, 1.0, 1.0, 1.0, 1.0), strict=True)
    ]
    record = benchmark_result(iter(rollouts), Sampling(1.0, 1.0, 8, 1, (), 0), over_long=1).record()
    assert record["accuracy"] == (11 - 3) / 8
    assert (record["pass_at"], record["num_problems"]) == ({}, 8)
    assert "num_correct" not in record


def test_a_record_holds_every_pass_at_k():
    values = BenchmarkResult(4, (4, 2, 0, 2), num_over_long=1).record()
    assert values["accuracy"] == 0.5
    assert (values["accuracy_low"], values["accuracy_high"]) == (0.125, 0.875)
    pass_at = {"1": 0.5, "2": (1 + 5 / 6 + 0 + 5 / 6) / 4, "4": 0.75}
    assert values["pass_at"] == pytest.approx(pass_at)
    assert values["pass_at"].keys() == values["pass_at_interval"].keys()
    assert BenchmarkResult(1, (1, 0)).record()["pass_at"] == {"1": 0.5}
    assert values["num_over_long"] == 1


def test_a_prompt_without_gold_answer_or_no_prompt_at_all_is_refused():
    with pytest.raises(ValueError, match="s:9: no gold answer"):
        require_answers([PROMPTS[0], Prompt("s:9", "x", (1,))])
    with pytest.raises(ValueError, match="no held-out prompts"):
        require_answers([])
    require_answers([Prompt("s:9", "x", (1,), environment="")])  # which returns the reward


def config(**evaluation):
    return run_with(sampling={"max_new_tokens": 50}, train={"seed": 4}, evaluation=evaluation)


def test_sampling_follows_the_evaluation_settings():
    settings = config(temperature=0.6, num_samples=8, top_p=0.95)
    expected = Sampling(0.6, 0.95, 50, 8, (20, 21), 4)
    assert evaluation_sampling(settings, [20, 21]) == expected
    assert evaluation_sampling(settings, [20], greedy=True) == Sampling(0.0, 1.0, 50, 1, (20,), 4)
    zero = config(temperature=0, num_samples=8, max_new_tokens=9)
    assert evaluation_sampling(zero, []) == Sampling(0.0, 1.0, 9, 1, (), 4)
    assert evaluation_sampling(config(), []).num_samples == 1
    assert evaluation_sampling(config(), [], num_samples=32).num_samples == 32  # the benchmark's
    assert evaluation_sampling(config(num_samples=4), [], num_samples=32).num_samples == 4
