"""The table and the plain values of evaluations whose counts are known."""

import pytest

from stable_opd_mcore.evaluation.evaluate import EvaluationResult, PromptResult
from stable_opd_mcore.evaluation.table import plain_values, results_table


def result_of(*correct: int, tokens: int = 40) -> EvaluationResult:
    """Four samples per prompt, of which one is truncated and two are repetitive."""
    prompts = [PromptResult(str(i), 4, right, 1, 2, tokens) for i, right in enumerate(correct)]
    return EvaluationResult(tuple(prompts), ())


def test_a_table_of_several_evaluations_ends_with_their_mean_accuracy():
    """The mean is of evaluations: the one with more problems has no more weight."""
    table = results_table({"aime24": result_of(4, 2, 0, 2), "amc": result_of(4, tokens=6000)})
    assert table.splitlines() == [
        "         problems    k  accuracy  95 % interval    truncated  repetitive  tokens",
        "aime24          4    4     0.500  0.150 to 0.850        0.250       0.500      10",
        "amc             1    4     1.000  0.207 to 1.000        0.250       0.500    1500",
        "average                    0.750",
    ]


def test_one_evaluation_has_no_average():
    assert len(results_table({"amc": result_of(1)}).splitlines()) == 2


def test_plain_values_are_shares_of_all_responses():
    values = plain_values(result_of(4, 2, 0, 2))
    low, high = values.pop("accuracy_low"), values.pop("accuracy_high")
    assert (low, high) == (pytest.approx(0.150, abs=1e-3), pytest.approx(0.850, abs=1e-3))
    assert values == {
        "accuracy": 0.5,
        "num_prompts": 4,
        "num_samples": 4,
        "truncation_rate": 0.25,
        "repetition_rate": 0.5,
        "response_length_mean": 10.0,
    }
