"""The watchdog ends a process that makes no step and writes its stack.

The other ranks of the run record a rank whose process is stopped.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stable_opd_mcore.train.oversight.watchdog import SILENT

HANG_IN_STEP_TWO = """
import sys, time
from pathlib import Path
from stable_opd_mcore.train.oversight.watchdog import Watchdog

def collective_that_never_returns():
    time.sleep(60)

with Watchdog(minutes=1.0 / 60, directory=Path(sys.argv[1]), rank=3) as watchdog:
    time.sleep(0.7)
    watchdog.step_done()
    time.sleep(0.7)
    watchdog.step_done()
    if sys.argv[2] == "hang":
        collective_that_never_returns()
"""

HANG = """
import sys, time
from pathlib import Path
from stable_opd_mcore.train.oversight.watchdog import Watchdog

with Watchdog(minutes=float(sys.argv[3]) / 60, directory=Path(sys.argv[1]), rank=int(sys.argv[2])):
    time.sleep(60)
"""


@pytest.mark.parametrize("behaviour", ["hang", "work"])
def test_watchdog_ends_only_a_hanging_process(behaviour, tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", HANG_IN_STEP_TWO, str(tmp_path), behaviour], timeout=60
    )
    stacks = tmp_path / "rank_00003.txt"
    if behaviour == "hang":
        assert result.returncode == 1
        assert "collective_that_never_returns" in stacks.read_text()
    else:
        assert result.returncode == 0
        assert not stacks.exists()


def start(directory: Path, *ranks: int, seconds: float) -> list[subprocess.Popen]:
    """Processes that hang once their watchdogs are armed."""
    command = [sys.executable, "-c", HANG, str(directory)]
    processes = [subprocess.Popen([*command, str(rank), str(seconds)]) for rank in ranks]
    deadline = time.monotonic() + 60
    while not all((directory / f"rank_{rank:05d}.txt").exists() for rank in ranks):
        assert time.monotonic() < deadline, "the ranks do not start"
        time.sleep(0.05)
    return processes


def test_stopped_rank_is_recorded_and_stays_recorded_when_it_continues(tmp_path):
    stopped, *others = start(tmp_path, 1, 0, 2, seconds=4)
    os.kill(stopped.pid, signal.SIGSTOP)
    assert [other.wait(timeout=60) for other in others] == [1, 1]
    assert (tmp_path / SILENT).read_text() == "rank_00001\n"
    os.kill(stopped.pid, signal.SIGCONT)  # as Slurm does to end it; it then writes its stack too
    assert stopped.wait(timeout=60) == 1
    assert (tmp_path / "rank_00001.txt").read_text()
    assert (tmp_path / SILENT).read_text() == "rank_00001\n"


WAIT = """
import sys, time
from pathlib import Path
from stable_opd_mcore.train.oversight.watchdog import Watchdog

rank = int(sys.argv[2])
with Watchdog(minutes=2.0 / 60, directory=Path(sys.argv[1]), rank=rank) as watchdog:
    for _ in range(25):
        time.sleep(0.2)
        if rank == 0:
            watchdog.progress()
    if sys.argv[3] == "hang":
        time.sleep(60)
"""


@pytest.mark.parametrize(("behaviour", "code"), [("end", 0), ("hang", 1)])
def test_waiting_ranks_are_not_ended_while_one_makes_progress(behaviour, code, tmp_path):
    command = [sys.executable, "-c", WAIT, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank), behaviour]) for rank in range(2)]
    assert [rank.wait(timeout=60) for rank in ranks] == [code, code]


def test_no_rank_is_recorded_if_all_hang(tmp_path):
    ranks = start(tmp_path, 0, 1, seconds=2)
    assert [rank.wait(timeout=60) for rank in ranks] == [1, 1]
    assert (tmp_path / SILENT).read_text() == ""
