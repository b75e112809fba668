"""Evaluation with a scripted engine: counts, order over data-parallel ranks, settings."""

import pytest

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.evaluation.evaluate import (
    BenchmarkResult,
    count_correct,
    draw_all,
    evaluation_sampling,
    require_answers,
)
from stable_opd_mcore.evaluation.grading import Grader
from stable_opd_mcore.records import Prompt, Rollout
from stable_opd_mcore.rollout.engine import Sampling

PROMPTS = [
    Prompt(f"s:{i}", f"{i}+1", (i,), answer=str(i + 1), answer_format="bracket") for i in range(7)
]


class ScriptedEngine:
    """Sample j of prompt i is right when (i + j) is even; the last prompt never ends."""

    weight_version = 0

    def __init__(self):
        self.calls = []

    def generate(self, prompts, sampling, *, step):
        self.calls.append((len(prompts), step))
        return [self.answer(p, j) for p in prompts for j in range(sampling.num_samples)]

    def answer(self, prompt, j):
        i = prompt.token_ids[0]
        is_last = i == 6
        text = "w" * 20 if is_last else f"[{i + 1 + (i + j) % 2}]"
        reason = "length" if is_last else "stop"
        return Rollout(prompt, j, (1,) * len(text), (0.0,) * len(text), reason, 0, text=text)

    def publish(self, weight_version):
        self.weight_version = weight_version


def run(engine=None, prompts=PROMPTS, **changes):
    engine = engine or ScriptedEngine()
    sampling = Sampling(num_samples=2)
    with Grader() as grader:

        def draw(batch):
            return grader.grade_rollouts(engine.generate(batch, sampling, step=5))

        return draw_all(draw, prompts, **changes)


def test_all_responses_of_all_problems_count():
    engine = ScriptedEngine()
    rollouts = run(engine, prompts_per_batch=3)
    assert engine.calls == [(3, 5), (3, 5), (1, 5)]
    assert [r.prompt.prompt_id for r in rollouts[:4]] == ["s:0", "s:0", "s:1", "s:1"]
    result = count_correct(rollouts, 2)
    assert result.num_correct == (1, 1, 1, 1, 1, 1, 0)
    assert result.accuracy == result.pass_at(1) == pytest.approx(6 / 14)
    assert result.pass_at(2) == pytest.approx(6 / 7)
    low, high = result.accuracy_interval
    assert low < result.accuracy < high < result.pass_interval(2)[1] <= 1


def test_over_long_problems_are_wrong_and_not_left_out():
    result = count_correct(run(), 2, num_over_long=7)
    assert result.accuracy == pytest.approx(6 / 28)
    assert result.pass_at(2) == pytest.approx(6 / 14)
    assert result == BenchmarkResult(2, (1,) * 6 + (0,) * 8, 7)


def test_a_prompt_without_gold_answer_or_no_prompt_at_all_is_refused():
    with pytest.raises(ValueError, match="s:9: no gold answer"):
        run(prompts=[PROMPTS[0], Prompt("s:9", "x", (1,))])
    with pytest.raises(ValueError, match="no held-out prompts"):
        require_answers([])


def config(**evaluation):
    return parse_config(
        {
            "run": {"name": "x"},
            "student": {"path": "m"},
            "data": {"train": {"path": "synthetic:arithmetic"}},
            "sampling": {"max_new_tokens": 50},
            "train": {"seed": 4},
            "evaluation": evaluation,
        },
        "test",
    )


def test_sampling_follows_the_evaluation_settings():
    settings = config(temperature=0.6, num_samples=8, top_p=0.95)
    expected = Sampling(0.6, 0.95, 50, 8, (20, 21), 4)
    assert evaluation_sampling(settings, [20, 21]) == expected
    assert evaluation_sampling(settings, [20], greedy=True) == Sampling(0.0, 1.0, 50, 1, (20,), 4)
    zero = config(temperature=0, num_samples=8, max_new_tokens=9)
    assert evaluation_sampling(zero, []) == Sampling(0.0, 1.0, 9, 1, (), 4)


def test_the_number_of_samples_is_that_of_the_benchmark_unless_set():
    assert evaluation_sampling(config(), []).num_samples == 1
    assert evaluation_sampling(config(), [], num_samples=32).num_samples == 32
    assert evaluation_sampling(config(num_samples=4), [], num_samples=32).num_samples == 4
