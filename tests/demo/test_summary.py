"""The numbers of arms whose outcomes are written by hand, as a table."""

from dataclasses import replace

from rich.console import Console

from stable_opd_mcore.demo.summary import ArmSummary, summary_table
from stable_opd_mcore.monitoring.outcomes import Outcome

OUTCOME = Outcome(
    initial_accuracy=0.25,
    peak_accuracy=0.75,
    lowest_accuracy_after_peak=0.0,
    final_accuracy=0.5,
    max_truncation_rate=0.5,
    final_truncation_rate=0.0,
    max_repetition_rate=0.0,
    final_repetition_rate=0.125,
    greedy_initial_accuracy=0.5,
    greedy_final_accuracy=0.75,
)


def summary(arm: str, seed: int = 0, **changed: float) -> ArmSummary:
    return ArmSummary(arm, seed, replace(OUTCOME, **changed))


ARMS = [
    summary("opd"),
    summary("opd", seed=1, initial_accuracy=0.5, final_accuracy=0.75),
    summary("stable_opd_stop_class", greedy_final_accuracy=0.25, max_truncation_rate=0.25),
]


def test_the_table_has_a_row_for_each_run_and_fits_a_terminal(capsys):
    Console(width=80).print(summary_table(ARMS))
    lines = capsys.readouterr().out.splitlines()
    numbers = ["0.25", "0.75", "0.00", "0.50", "0.25", "0.25", "0.00", "0.00", "0.12"]
    assert lines[-1].split() == ["stable_opd_stop_class", "0", *numbers]
    assert lines[1].split() == [
        "arm",
        "seed",
        "start",
        "peak",
        "low",
        "end",
        "greedy",
        *["max", "end"] * 2,
    ]
    assert (ARMS[1].record()["seed"], ARMS[1].record()["final_accuracy"]) == (1, 0.75)
