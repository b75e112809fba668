"""One run at a time in a run directory; the lock of a killed process is replaced."""

import os
import subprocess
import sys
import time

import pytest

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.run_lock import LOCK_FILE, RunLock

HOLD = """
import os, sys, time
from pathlib import Path
from stable_opd_mcore.host.run_lock import RunLock

home = Path(sys.argv[1])
with RunLock(home, stale_seconds=2):
    print("held", flush=True)
    if sys.argv[2:] == ["lose"]:
        taken = (home / "LOCK").read_text().replace(f"pid={os.getpid()}", "pid=99")
        (home / "new").write_text(taken)
        (home / "new").replace(home / "LOCK")
    time.sleep(30)
"""


ANOTHER = "filelock/2\npid=7\nhost=another\nmode=lease\ntoken=x\nduration={}\n"


def hold(directory, *options):
    command = [sys.executable, "-c", HOLD, str(directory), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_second_run_is_refused_and_the_lock_of_a_killed_run_is_replaced(tmp_path, capfd):
    holder = hold(tmp_path)
    with (
        pytest.raises(UserError, match=f"process {holder.pid} on ") as caught,
        RunLock(tmp_path, stale_seconds=2),
    ):
        pass
    assert "choose another run.name" in str(caught.value)
    holder.kill()
    holder.wait()
    with RunLock(tmp_path):
        assert f"pid={os.getpid()}\n" in (tmp_path / LOCK_FILE).read_text()
    assert f"taking over {tmp_path} from process {holder.pid}" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_lock_of_another_machine_is_replaced_once_its_heartbeat_is_stale(tmp_path):
    path = tmp_path / LOCK_FILE
    path.write_text(ANOTHER.format(2.0))
    heart = subprocess.Popen(["sh", "-c", f"while sleep 0.1; do touch -c {path}; done"])
    with pytest.raises(UserError, match="process 7 on another"), RunLock(tmp_path, stale_seconds=2):
        pass
    heart.kill()
    heart.wait()
    path.write_text(ANOTHER.format(0.5))
    os.utime(path, (1.0, 1.0))  # another machine's clock: it says nothing
    started = time.monotonic()
    with RunLock(tmp_path, stale_seconds=0.5):
        assert 0.5 <= time.monotonic() - started < 5


def test_the_next_attempt_of_a_slurm_job_replaces_the_lock_of_another_machine(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with RunLock(tmp_path):
        job = {path: path.read_text() for path in tmp_path.glob(".LOCK.*")}
    (tmp_path / LOCK_FILE).write_text(ANOTHER.format(60.0))
    for path, text in job.items():
        path.write_text(text)
    with RunLock(tmp_path):
        assert f"pid={os.getpid()}\n" in (tmp_path / LOCK_FILE).read_text()
    assert list(tmp_path.iterdir()) == []


def test_process_that_lost_its_lock_exits(tmp_path):
    holder = hold(tmp_path, "lose")
    _, errors = holder.communicate(timeout=30)
    assert holder.returncode == 1
    assert "taken over by process 99" in errors
