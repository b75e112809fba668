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

from stable_opd_mcore.train.oversight.watchdog import SILENT, Watchdog

PROGRAM = """
import sys, time
from pathlib import Path
from stable_opd_mcore.train.oversight.watchdog import Watchdog

def collective_that_never_returns():
    time.sleep(60)

directory, rank, seconds, said, times, pause, end = sys.argv[1:]
with Watchdog(float(seconds) / 60, Path(directory), int(rank), world_size=4) as watchdog:
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


def start(directory: Path, *ranks: int, seconds: float) -> list[subprocess.Popen]:
    """Processes that hang once their watchdogs are armed."""
    processes = [process(directory, rank, seconds) for rank in ranks]
    await_armed(directory, *ranks)
    return processes


def await_armed(directory: Path, *ranks: int) -> None:
    deadline = time.monotonic() + 60
    while not all((directory / f"rank_{rank:05d}.txt").exists() for rank in ranks):
        assert time.monotonic() < deadline, "the ranks do not start"
        time.sleep(0.05)


def test_stopped_rank_is_recorded_and_stays_recorded_when_it_continues(tmp_path):
    stopped, *others = start(tmp_path, 1, 0, 2, seconds=4)
    os.kill(stopped.pid, signal.SIGSTOP)
    assert [other.wait(timeout=60) for other in others] == [1, 1]
    assert (tmp_path / SILENT).read_text() == "rank_00001\n"
    os.kill(stopped.pid, signal.SIGCONT)  # as Slurm does to end it; it then writes its stack too
    assert stopped.wait(timeout=60) == 1
    assert (tmp_path / "rank_00001.txt").read_text()
    assert (tmp_path / SILENT).read_text() == "rank_00001\n"


@pytest.mark.parametrize(("end", "code"), [("work", 0), ("hang", 1)])
def test_waiting_ranks_are_not_ended_while_one_makes_progress(end, code, tmp_path):
    """Also when one cannot give signs of life."""
    ranks = [
        process(tmp_path, rank, 2.0, said, 25, 0.2, end)
        for rank, said in enumerate(["progress", ""])
    ]
    await_armed(tmp_path, 1)
    (tmp_path / "rank_00001.txt").unlink()
    assert [rank.wait(timeout=60) for rank in ranks] == [code, code]


def test_progress_that_cannot_be_written_ends_nothing(tmp_path, caplog):
    Watchdog(1.0, tmp_path / "absent", 0, world_size=1).progress()
    assert "a sign of life is missed: [Errno 2]" in caplog.text


def test_no_rank_is_recorded_if_all_hang(tmp_path):
    earlier = tmp_path / "rank_00004.txt"  # of a larger attempt that was killed
    earlier.touch()
    os.utime(earlier, (1, 1))
    ranks = start(tmp_path, 0, 1, seconds=2)
    assert [rank.wait(timeout=60) for rank in ranks] == [1, 1]
    assert (tmp_path / SILENT).read_text() == ""
