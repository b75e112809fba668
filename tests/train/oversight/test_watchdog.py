"""The watchdog ends a process that makes no step and writes its stack."""

import subprocess
import sys
from pathlib import Path

import pytest

from stable_opd_mcore.train.oversight.watchdog import Watchdog

PROGRAM = """
import sys, time
from pathlib import Path
from stable_opd_mcore.train.oversight.watchdog import Watchdog

def collective_that_never_returns():
    time.sleep(60)

directory, rank, seconds, said, times, pause, end = sys.argv[1:]
with Watchdog(float(seconds) / 60, Path(directory), int(rank)) as watchdog:
    for _ in range(int(times)):
        time.sleep(float(pause))
        if said:
            getattr(watchdog, said)()
    if end == "hang":
        collective_that_never_returns()
"""


def process(
    directory: Path, rank: int, seconds: float, said="", times=0, pause=0.0, end="hang"
) -> subprocess.Popen:
    """Whose watchdog is told `said`, or nothing, after every pause."""
    settings = (directory, rank, seconds, said, times, pause, end)
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *map(str, settings)])


@pytest.mark.parametrize(("end", "code"), [("hang", 1), ("work", 0)])
def test_watchdog_ends_only_a_hanging_process(end, code, tmp_path):
    assert process(tmp_path, 3, 1.0, "step_done", 2, 0.7, end).wait(timeout=60) == code
    stacks = tmp_path / "rank_00003.txt"
    assert stacks.exists() == (end == "hang")
    assert end == "work" or "collective_that_never_returns" in stacks.read_text()


@pytest.mark.parametrize(("end", "code"), [("work", 0), ("hang", 1)])
def test_waiting_ranks_are_not_ended_while_one_makes_progress(end, code, tmp_path):
    ranks = [
        process(tmp_path, rank, 2.0, said, 25, 0.2, end)
        for rank, said in enumerate(["progress", ""])
    ]
    assert [rank.wait(timeout=60) for rank in ranks] == [code, code]


def test_progress_that_cannot_be_written_ends_nothing(tmp_path, caplog):
    Watchdog(1.0, tmp_path / "absent", 0).progress()
    assert "watchdog misses progress: [Errno 2]" in caplog.text
