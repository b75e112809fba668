"""The numbers of an arm whose outcome is written by hand, as a table."""

from rich.console import Console

from stable_opd_mcore.commands.demo.summary import ArmSummary, summary_table
from stable_opd_mcore.commands.report.outcomes import Outcome


def test_the_table_has_a_row_for_each_run_and_fits_a_terminal(capsys):
    outcome = Outcome(*(number / 100 for number in range(10)))  # no two numbers are equal
    arms = [ArmSummary("opd", 0, outcome), ArmSummary("stable_opd_stop_class", 1, outcome)]
    Console(width=80).print(summary_table(arms))
    lines = capsys.readouterr().out.splitlines()
    headings = "arm seed start peak low end greedy max end max end"
    assert lines[1].split() == headings.split()
    numbers = "0.00 0.01 0.02 0.03 0.09 0.04 0.05 0.06 0.07"
    assert lines[-2].split() == ["opd", "0", *numbers.split()]
    assert lines[-1].split() == ["stable_opd_stop_class", "1", *numbers.split()]
    assert (arms[1].record()["seed"], arms[1].record()["final_accuracy"]) == (1, 0.03)
