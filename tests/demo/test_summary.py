"""The numbers of arms whose outcomes are written by hand, as tables."""

from dataclasses import replace

from rich.console import Console

from stable_opd_mcore.demo.summary import ArmSummary, ablation_markdown, summary_table
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
    return ArmSummary("ablation", arm, seed, replace(OUTCOME, **changed))


ARMS = [
    summary("opd"),
    summary("opd", seed=1, initial_accuracy=0.5, final_accuracy=0.75),
    summary("student_topk", greedy_final_accuracy=0.25, max_truncation_rate=0.25),
]


def test_gains_are_of_the_same_seed():
    """Each seed of opd gains .25, so that interval has no width although the ends differ."""
    opd, topk = (line.split(" | ") for line in ablation_markdown(ARMS).splitlines()[2:])
    assert opd[0] == "| `opd`"
    assert opd[1].startswith("0.62 [0.50, 0.75]")
    assert opd[2:4] == ["+0.25 [+0.25, +0.25]", "0.75 [0.75, 0.75]"]
    assert opd[5:] == ["2 of 2", "0.50 |"]
    assert topk[4:] == ["-0.25 [-0.25, -0.25]", "0 of 1", "0.25 |"]  # greedy is below
    assert len(opd) == len(topk) == 7


def test_the_table_of_an_act_has_a_row_for_each_run_and_fits_a_terminal(capsys):
    Console(width=80).print(summary_table("ablation", ARMS))
    lines = capsys.readouterr().out.splitlines()
    numbers = ["0.25", "0.75", "0.00", "0.50", "0.25", "0.25", "0.00", "0.00", "0.12"]
    assert lines[-1].split() == ["student_topk", "0", *numbers]
    assert (ARMS[1].record()["seed"], ARMS[1].record()["final_accuracy"]) == (1, 0.75)
