"""The helper process of checkpoint writers: a queue that ends with the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import sys
import types
from stable_opd_mcore.parallel.save_helper import start_save_helper
if __name__ == "__main__":
    queue = start_save_helper()
    here_alone = types.ModuleType("here_alone")  # the helper can't import it
    exec("class Value:\\n    text = 'a path 7'", here_alone.__dict__)
    sys.modules["here_alone"] = here_alone
    queue.put(here_alone.Value())
    print(queue.get_nowait().text, queue._queue._manager._process.pid, flush=True)
    sys.stdin.read()
"""


def is_running(pid: int) -> bool:
    """A process that ended and was not waited for is not running."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(") ")[2][0] != "Z"


@pytest.mark.parametrize("end", ["killed", "by itself"])
def test_the_queue_passes_values_and_ends_with_its_process(tmp_path, end):
    script = tmp_path / "save.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        *value, pid = process.stdout.readline().split()
        assert value == ["a", "path", "7"]
        assert is_running(int(pid))
        if end == "killed":
            process.send_signal(signal.SIGKILL)
        else:
            process.communicate()
    for _ in range(2000):
        if not is_running(int(pid)):
            return
        time.sleep(0.01)
    os.kill(int(pid), signal.SIGKILL)
    pytest.fail("the helper outlived its process")


ORPHAN = """
import os, signal, sys, time
from multiprocessing import get_context
from pathlib import Path
from stable_opd_mcore.parallel.save_helper import end_with_parent

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
    deadline = time.monotonic() + 60
    while is_running(int(killed.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not (tmp_path / "survived").exists()
