"""Tables of known runs: outcomes, settings that differ, benchmarks, text made printable."""

from pathlib import Path

from stable_opd_mcore.commands.report.chosen_runs import ReportRun, WrittenRun
from stable_opd_mcore.commands.report.tables import (
    MISSING,
    benchmark_table,
    config_differences,
    described,
    outcome_table,
    seed_table,
    verdict,
)


def written(name="run", rows=(), settings=None, results=None) -> WrittenRun:
    run = ReportRun(Path(name), name.partition("-")[0], name=name)
    return WrittenRun(run, list(rows), [], settings or {}, results or {})


def test_outcomes():
    rows = [
        {"step": step, "rollout/truncation_rate": float(step > 5), "eval/accuracy": accuracy}
        for step, accuracy in enumerate([0.25, None, None, 0.75, None, None, 0.5])
    ]
    table = outcome_table([written(rows=rows, settings={"train.steps": "800"})])
    cells = zip(table.columns, table.rows[0], strict=True)
    assert {name: value for name, value in cells if value != MISSING} == {
        "run": "run",
        "steps": "6 of 800",
        "accuracy at start": "0.250",
        "accuracy at peak": "0.750",
        "accuracy at end": "0.500",
        "truncated at worst": "0.200",
        "truncated at end": "0.200",
    }


def test_a_verdict_is_computed():
    rows = [{"step": step, "rollout/truncation_rate": float(step > 30)} for step in range(40)]
    assert verdict(rows[:20]) == MISSING
    assert verdict(rows[:30]) == "none"
    assert verdict(rows) == "step 31: rollout/truncation_rate"


def test_settings_that_differ_are_listed_by_label():
    settings = [{"kl.beta": beta, "seed": "0", "same": "x"} for beta in ("0.0", "0.5", "0.5")]
    settings[2]["seed"] = "1"
    names = ("opd", "kl-0", "kl-1")
    runs = [written(name, settings=one) for name, one in zip(names, settings, strict=True)]
    table = config_differences(runs)
    assert table.columns == ["setting", "opd", "kl"]
    assert table.rows == [["kl.beta", "0.0", "0.5"], ["seed", "0", "0, 1"]]
    assert config_differences(runs[1:]) is None


def test_benchmarks_of_several_runs_stand_side_by_side():
    values = {"accuracy": 0.25, "accuracy_low": 0.1, "accuracy_high": 0.6}
    values |= {"num_problems": 30.0, "num_samples": 16.0, "response_length_mean": 1234.5}
    results = [{"step_8": {"aime24": values | {"accuracy": number}}} for number in (0.25, 0.5)]
    runs = [written("a", results=results[0]), written("c"), written("b", results=results[1])]
    assert [row[:6] for row in benchmark_table(runs).rows] == [
        ["aime24", "a, step_8", "30", "16", "0.250", "0.100 to 0.600"],
        ["aime24", "b, step_8", "30", "16", "0.500", "0.100 to 0.600"],
    ]
    assert benchmark_table(runs).rows[0][6:] == [MISSING, MISSING, "1,234"]
    assert benchmark_table(runs[1:2]) is None


def test_results_of_an_arm_s_seeds_have_a_mean_with_its_interval_over_seeds():
    accuracies = {"opd-1": 0.2, "opd-2": 0.4, "sft-1": 0.9}
    runs = [
        written(name, results={"step_8": {"amc": {"accuracy": number, "num_problems": 8.0}}})
        for name, number in accuracies.items()
    ]
    assert benchmark_table(runs).rows[3:] == [
        ["amc", "opd, step_8, mean of 2 seeds", "8", MISSING, "0.300", "0.200 to 0.400"]
        + [MISSING] * 3
    ]


def test_a_run_is_described_by_what_it_trains():
    settings = {"objective.name": "opd", "kl.beta": "0.5", "mixture.lambda": "0.0"}
    settings |= {"student.path": "s", "teacher.path": "None", "data.train.path": "d"}
    assert described(settings) == "opd, \u03b2 = 0.5 \u00b7 student s \u00b7 data d"
    assert described({}) == "on-policy distillation"


def test_arms_of_several_seeds_have_means_with_intervals():
    def rows(*accuracies):
        return [{"step": step, "eval/accuracy": a} for step, a in enumerate(accuracies)]

    runs = [written("opd-1", rows(0.2, 0.6)), written("opd-2", rows(0.4, 0.7))]
    assert seed_table([runs[0], written("sft-1", rows(0.1))]) is None
    table = seed_table([*runs, written("sft-1", rows(0.1))])
    ((arm, seeds, start, _, end, greedy, *_),) = table.rows
    assert (arm, seeds, greedy) == ("opd", "2", MISSING)
    assert (start, end) == ("0.300 [0.200, 0.400]", "0.650 [0.600, 0.700]")
