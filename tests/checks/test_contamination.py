"""Benchmark problems among training problems are found where the benchmarks are at hand."""

import json

import pytest

from stable_opd_mcore.checks.contamination import benchmark_problems
from stable_opd_mcore.checks.lazy_inputs import RunInputs
from stable_opd_mcore.errors import DataError
from tests.checks.directories import write_model
from tests.train.runs import tiny_config

PROBLEM = "Find the number of ordered pairs of positive integers with sum ten and an even product."


def inputs_of(tmp_path, problems, benchmarks=("aime24",)):
    rows = [{"problem": text, "answer": "1", "solution": "It is 1."} for text in problems]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b").mkdir()
    for name in benchmarks:
        row = {"problem": PROBLEM, "answer": "7"}
        (tmp_path / "b" / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    config = tiny_config(
        tmp_path,
        "run",
        student={"path": write_model(tmp_path / "model"), "architecture": None},
        teacher=None,
        objective={"name": "grpo"},
        tokenizer={"path": None},
        rollout={"prompts_per_step": 2},
        data={"train": {"path": str(tmp_path / "train.jsonl")}},
        evaluation={"benchmarks": ["aime24"], "benchmark_directory": str(tmp_path / "b")},
    )
    return RunInputs(config, None)


def test_a_training_problem_of_a_benchmark_is_found(tmp_path):
    problems = [PROBLEM.upper(), "What is 1+1?", "Prove it. " + PROBLEM[:-9], "What is 2+2?"]
    (finding,) = benchmark_problems(inputs_of(tmp_path, problems))
    assert finding.severity == "warning"
    assert finding.title == "2 of 4 training problems are problems of a benchmark"
    assert finding.values[0] == ("benchmarks", "aime24 2")
    assert finding.values[1][0] == "first of them (aime24.jsonl:1, exact)"


def test_other_problems_are_no_finding(tmp_path):
    assert not list(benchmark_problems(inputs_of(tmp_path, ["What is 1+1?", "What is 2+2?"])))


def test_benchmarks_that_are_not_at_hand_are_said(tmp_path):
    without = inputs_of(tmp_path, ["What is 1+1?", "What is 2+2?"], benchmarks=())
    with pytest.raises(DataError, match=r"neither aime24\.jsonl nor aime24\.parquet"):
        list(benchmark_problems(without))
    (tmp_path / "b").rmdir()
    (finding,) = benchmark_problems(without)
    assert finding.severity == "note"


def test_nothing_is_compared_without_benchmarks_or_with_generated_problems(tmp_path):
    directory = {"benchmark_directory": str(tmp_path / "none")}
    for evaluation in ({"benchmarks": ["aime24"]}, directory):
        config = tiny_config(tmp_path, "run", evaluation=evaluation)
        assert not list(benchmark_problems(RunInputs(config, None)))
    generated = tiny_config(tmp_path, "run", evaluation={"benchmarks": ["aime24"], **directory})
    assert not list(benchmark_problems(RunInputs(generated, None)))
    rows = {"train": {"path": str(tmp_path / "absent.jsonl")}}
    for evaluation in ({"benchmarks": ["aime24"]}, directory):
        config = tiny_config(tmp_path, "run", data=rows, evaluation=evaluation)
        assert not list(benchmark_problems(RunInputs(config, None)))
