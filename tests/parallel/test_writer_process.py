"""A checkpoint's writer: its result reaches the rank, and it does not outlive the rank."""

import queue
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from stable_opd_mcore.parallel.writer_process import WriterResult
from tests.processes import wait_until_ended

REPOSITORY = Path(__file__).parents[2]


def test_a_result_of_any_size_reaches_the_process_that_forked_the_writer():
    """More than a pipe holds: the writer ends before it is read."""
    result, value = WriterResult(), {"files": ["x" * 100] * 10_000}
    with pytest.raises(queue.Empty):
        result.get_nowait()
    writer = get_context("fork").Process(target=result.put, args=(value,))
    writer.start()
    writer.join()
    assert result.get_nowait() == value


ORPHAN = """
import os, signal, sys, time
from multiprocessing import get_context
from pathlib import Path
from stable_opd_mcore.parallel.writer_process import end_with_parent

def outlive(parent_id):
    while os.getppid() == parent_id:
        time.sleep(0.01)
    end_with_parent()
    Path(sys.argv[1]).touch()

writer = get_context("fork").Process(target=outlive, args=(os.getpid(),))
writer.start()
print(writer.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses prctl")
def test_a_writer_ends_whose_parent_has_ended_before_it_asks(tmp_path):
    command = [sys.executable, "-c", ORPHAN, str(tmp_path / "survived")]
    killed = subprocess.run(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=False, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    wait_until_ended(int(killed.stdout))
    assert not (tmp_path / "survived").exists()
