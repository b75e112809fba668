"""The watchdog ends a process that makes no step, with the stack it hangs in, and no other."""

import subprocess
import sys

import pytest

HANG_IN_STEP_TWO = """
import sys, time
from pathlib import Path
from stable_opd_mcore.train.watchdog import Watchdog

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


@pytest.mark.parametrize("behaviour", ["hang", "work"])
def test_watchdog(behaviour, tmp_path):
    answer = subprocess.run(
        [sys.executable, "-c", HANG_IN_STEP_TWO, str(tmp_path), behaviour], timeout=60
    )
    stacks = tmp_path / "rank_00003.txt"
    if behaviour == "hang":
        assert answer.returncode == 1
        assert "collective_that_never_returns" in stacks.read_text()
    else:
        assert answer.returncode == 0
        assert not stacks.exists()
