"""One run at a time in a run directory; the lock of a killed process is replaced."""

import json
import os
import subprocess
import sys
import time

import pytest

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.run_lock import LOCK_FILE, RunLock, this_process

HOLD = """
import sys, time
from pathlib import Path
from stable_opd_mcore.host.run_lock import RunLock

with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def write_lock(directory, age_seconds=0.0, **fields):
    """Write a lock of a process that has ended or runs on another machine."""
    path = directory / LOCK_FILE
    path.write_text(json.dumps({**this_process(), "token": "other", **fields}))
    os.utime(path, (time.time() - age_seconds,) * 2)
    return path


def test_second_run_is_refused_and_the_lock_of_a_killed_run_is_replaced(tmp_path, capfd):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match=f"process {holder.pid} on ") as caught, RunLock(tmp_path):
        pass
    assert "choose another run.name" in str(caught.value)
    holder.kill()
    holder.wait()
    with RunLock(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert f"taking over {tmp_path} from process {holder.pid}" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_lock_of_a_reused_process_id_is_replaced(tmp_path):
    write_lock(tmp_path, process_start="1")
    with RunLock(tmp_path):
        pass


def test_lock_of_another_machine_is_replaced_once_its_heartbeat_is_stale(tmp_path):
    path = write_lock(tmp_path, age_seconds=30, machine="another", slurm_job="7")
    with RunLock(tmp_path, stale_seconds=20):
        pass
    path = write_lock(tmp_path, machine="another")
    heartbeat = subprocess.Popen(["sh", "-c", f"sleep 0.3; touch {path}"])
    with pytest.raises(UserError, match="another run is at work here"), RunLock(tmp_path):
        pass
    heartbeat.wait()
    started = time.monotonic()
    with RunLock(tmp_path, stale_seconds=0.5):  # waits until the heartbeat is that old
        assert time.monotonic() - started < 3


def test_same_slurm_job_replaces_the_lock_of_another_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    write_lock(tmp_path, machine="another", slurm_job="7")
    with RunLock(tmp_path):
        pass


def test_process_that_lost_its_lock_exits(tmp_path):
    lose = (
        "import sys, time; from pathlib import Path\n"
        "from stable_opd_mcore.host.run_lock import RunLock, this_process\n"
        "import json; home = Path(sys.argv[1])\n"
        "with RunLock(home, heartbeat_seconds=0.1):\n"
        "    (home / 'LOCK').write_text(json.dumps({**this_process(), 'pid': 99}))\n"
        "    time.sleep(30)\n"
    )
    command = [sys.executable, "-c", lose, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 1
    assert "was taken over by process 99" in result.stderr


def test_file_that_is_not_a_lock_is_refused(tmp_path):
    (tmp_path / LOCK_FILE).write_text("not ours")
    with pytest.raises(UserError, match="LOCK: not a lock file"), RunLock(tmp_path):
        pass
