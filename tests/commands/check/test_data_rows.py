"""Rows that train refuses or drops, long golden solutions, repeated problems."""

import json

import pytest

from stable_opd_mcore.commands.check import data_rows
from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.inputs.run_inputs import RunInputs
from tests.commands.check.directories import write_model
from tests.train.runs import ALONE, tiny_config


def rows(count=8, **fields):
    return [
        {"problem": f"1+{n}", "answer": "2", "solution": f"1+{n}=2;[2]", "id": str(n), **fields}
        for n in range(count)
    ]


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"path": str(path)}


def inputs_of(tmp_path, train, held_out=None, **sections):
    settings = {"train": written(tmp_path / "train.jsonl", train)}
    if held_out is not None:
        settings["eval"] = written(tmp_path / "eval.jsonl", held_out)
    settings |= sections.pop("data", {})
    return RunInputs(tiny_config(tmp_path, "run", data=settings, **sections), None)


LONG = {"problem": "1+1" + "+1" * 60, "answer": "2", "solution": "[2]", "id": "long"}
CASES = {  # check, training rows, held-out rows, sections -> words of the title, the values
    "dropped rows": (data_rows.usable_rows, [*rows(), LONG], None, {"data": {"overlong": "drop"}},
     ("1 rows of data.train do not fit the student's window", "9", "128")),
    "long golden solutions": (data_rows.golden_lengths,
     [*rows(7), {**rows()[7], "solution": "1+1=2;" * 5 + "[2]"}], None, {},
     ("1 of 8 golden solutions are longer than a response may be", "34 tokens", "24")),
    "a problem twice": (data_rows.repeated_problems,
     [*rows(), {**rows()[2], "problem": " 1+2\n", "id": "9"}], None, {},
     ("1 problems of data.train occur more than once", "'1+2'", "2")),
    "a held-out problem that is trained on": (data_rows.repeated_problems, rows(),
     [{"problem": "1+3", "answer": "4"}, {"problem": "9-9", "answer": "0"}], {},
     ("1 problems of data.eval are also in data.train", "'1+3'", "2 rows")),
    "a held-out problem twice": (data_rows.repeated_held_out, rows(),
     [{"problem": "9-9", "answer": "0"}] * 3 + [{"problem": "9-9", "answer": "1"}], {},
     ("2 rows of data.eval repeat a problem", "4 rows", "2 problems")),
}  # fmt: skip


def test_the_facts_are_rows_and_lengths_and_what_is_cut(tmp_path):
    train = [*rows(7), {**rows()[7], "solution": "1+1=2;" * 5 + "[2]"}, LONG]
    held_out = [{"problem": "1" + "+1" * n, "answer": "0"} for n in range(40)]
    settings = {"data": {"overlong": "drop"}}
    train_line, held_out_line = data_rows.facts(inputs_of(tmp_path, train, held_out, **settings))
    assert train_line == (
        "data.train  8 rows, 1 dropped; prompts 4 tokens (median), 4 (95 %), 4 (longest); "
        "8 golden solutions, 10 tokens (median), 26 (95 %), 34 (longest), 1 longer than a "
        "response may be"
    )
    assert held_out_line == (
        "data.eval  40 rows; prompts 41 tokens (median), 76 (95 %), 80 (longest)"
    )


@pytest.mark.parametrize("case", CASES)
def test_rows_with_a_mutation_are_found(case, tmp_path):
    check, train, held_out, sections, (title, *values) = CASES[case]
    (finding,) = check(inputs_of(tmp_path, train, held_out, **sections))
    assert finding.severity == ("note" if check is data_rows.repeated_held_out else "warning")
    assert finding.title == title
    assert [value for _, value in finding.values] == values


def test_good_rows_give_no_finding(tmp_path):
    good = inputs_of(tmp_path, rows(), [{"problem": "9-9", "answer": "0"}])
    for check, *_ in CASES.values():
        assert list(check(good)) == []


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (rows(7), "rollout.prompts_per_step=8 exceeds the 7 usable rows"),
        ([*rows(), LONG], "its prompt has 124 tokens"),
        ([*rows(), {**LONG, "problem": "1$+1"}], "the problem contains '\\$', a control token of"),
        ([*rows(), {**LONG, "problem": "1+1", "solution": None}], "no golden solution"),
    ],
)
def test_rows_that_train_refuses_are_refused_in_its_words(train, words, tmp_path):
    with pytest.raises((DataError, UserError), match=words):
        list(data_rows.usable_rows(inputs_of(tmp_path, train)))
    if len(train) == 7:
        few = inputs_of(tmp_path, train, rollout={"prompts_per_step": 7})
        assert list(data_rows.usable_rows(few)) == []


def test_a_guard_that_may_raise_lambda_asks_for_golden_solutions(tmp_path):
    sections = {"mixture": {"lambda": 0.0}, "checkpoint": {"every": 10}}
    train = [*rows(), {**rows()[0], "problem": "1+1", "solution": None}]
    assert list(data_rows.usable_rows(inputs_of(tmp_path, train, **sections))) == []
    acts = inputs_of(tmp_path, train, guard={"policy": "act"}, **sections)
    with pytest.raises(DataError, match="no golden solution"):
        list(data_rows.usable_rows(acts))


def test_golden_solutions_count_only_with_rollouts_and_up_to_the_limit(tmp_path):
    exact = [{**rows()[n], "solution": "1+1=2;" * 3 + "[2]+1"} for n in range(8)]  # 24 tokens
    assert list(data_rows.golden_lengths(inputs_of(tmp_path, exact))) == []
    long = [{**rows()[n], "solution": "1+1=2;" * 5 + "[2]"} for n in range(8)]
    for name in ("sft", "grpo"):
        other = inputs_of(tmp_path, long, objective={"name": name}, **ALONE)
        assert list(data_rows.golden_lengths(other)) == []
    (tmp_path / "game.py").write_text("def episode(row, seed):\n    yield None\n")
    game = {"function": f"{tmp_path}/game.py:episode", "max_turns": 2, "max_new_tokens": 17}
    assert list(data_rows.golden_lengths(inputs_of(tmp_path, long, environment=game))) == []
    game["max_turns"] = 1
    (found,) = data_rows.golden_lengths(inputs_of(tmp_path, long, environment=game))
    assert dict(found.values)["most tokens of a response"] == "17"


PROBLEM = "Find the number of ordered pairs of positive integers with sum ten and an even product."


def with_benchmarks(tmp_path, problems, benchmarks=("aime24",)):
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
    (finding,) = data_rows.benchmark_problems(with_benchmarks(tmp_path, problems))
    assert finding.severity == "warning"
    assert finding.title == "2 of 4 training problems are problems of a benchmark"
    assert finding.values[0] == ("benchmarks", "aime24 2")
    assert finding.values[1][0] == "first of them (aime24.jsonl:1, exact)"


def test_other_problems_are_no_finding(tmp_path):
    assert not list(
        data_rows.benchmark_problems(with_benchmarks(tmp_path, ["What is 1+1?", "What is 2+2?"]))
    )


def test_benchmarks_that_are_not_at_hand_are_said(tmp_path):
    without = with_benchmarks(tmp_path, ["What is 1+1?", "What is 2+2?"], benchmarks=())
    with pytest.raises(DataError, match=r"neither aime24\.jsonl nor aime24\.parquet"):
        list(data_rows.benchmark_problems(without))
    (tmp_path / "b").rmdir()
    (finding,) = data_rows.benchmark_problems(without)
    assert finding.severity == "note"


def test_nothing_is_compared_without_benchmarks_or_with_generated_problems(tmp_path):
    directory = {"benchmark_directory": str(tmp_path / "none")}
    for evaluation in ({"benchmarks": ["aime24"]}, directory):
        config = tiny_config(tmp_path, "run", evaluation=evaluation)
        assert not list(data_rows.benchmark_problems(RunInputs(config, None)))
    generated = tiny_config(tmp_path, "run", evaluation={"benchmarks": ["aime24"], **directory})
    assert not list(data_rows.benchmark_problems(RunInputs(generated, None)))
