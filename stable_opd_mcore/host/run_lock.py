"""The lock of a run directory: one run at a time trains in it.

    with RunLock(run_directory):     # rank 0 only
        ...

The lock is a file that names its holder: host, process id, process start and Slurm job. It is made
by a hard link, which is atomic on NFS too, and its modification time is the holder's heartbeat. A
holder that was killed leaves the file behind; the next run takes it over when the holder is gone:

    same machine          at once, when no process has that id and start time
    same Slurm job        at once: Slurm ends an attempt before it starts the next
    another machine       when the heartbeat is STALE_SECONDS old

Not here: the REQUEUE marker (train/oversight/signals.py), and files that readers need no lock for.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from stable_opd_mcore.errors import UserError

LOCK_FILE = "LOCK"
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0


class RunLock:
    """Held while the block lasts.

    Raises:
        UserError: another run holds the lock; the message names it.
    """

    def __init__(
        self,
        run_directory: Path,
        *,
        stale_seconds: float = STALE_SECONDS,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ):
        self._path = run_directory / LOCK_FILE
        self._stale_seconds = stale_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._holder = this_process()
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> RunLock:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while not self._create():
            holder = read_holder(self._path)
            if holder is not None and not self._is_gone(holder):
                raise in_use(self._path.parent, holder)
            if holder is not None:
                self._remove(holder)
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._heart.join()
        if read_holder(self._path) == self._holder:
            self._path.unlink()

    def _create(self) -> bool:
        """Whether the lock is ours now; False where one exists."""
        own = self._path.with_name(f".{LOCK_FILE}.{self._holder['token']}")
        own.write_text(json.dumps(self._holder))
        try:
            os.link(own, self._path)
        except FileExistsError:
            return False
        finally:
            own.unlink()
        return True

    def _is_gone(self, holder: dict[str, Any]) -> bool:
        """Whether the holder has ended; waits for a heartbeat where only that can tell."""
        ended = has_ended(holder)
        if ended is not None:
            return ended
        beat = heartbeat(self._path)
        while beat is not None and self._age(beat) < self._stale_seconds:
            time.sleep(min(1.0, self._stale_seconds / 10))
            if (newest := heartbeat(self._path)) != beat and newest is not None:
                return False
        return True

    def _age(self, beat: float) -> float:
        """Seconds since `beat` by the file system's clock, which all hosts share."""
        probe = self._path.with_name(f".{LOCK_FILE}.{self._holder['token']}")
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now - beat

    def _remove(self, holder: dict[str, Any]) -> None:
        """Remove the lock of a holder that is gone; another run may do the same now."""
        taken = self._path.with_name(f".{LOCK_FILE}.{self._holder['token']}.old")
        try:
            self._path.rename(taken)
        except FileNotFoundError:
            return
        if read_holder(taken) != holder:  # another run was faster: this is its lock
            taken.rename(self._path)
            return
        print(f"taking over {self._path.parent} from {describe(holder)}", file=sys.stderr)
        taken.unlink()

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat_seconds):
            holder = read_holder(self._path)
            if holder == self._holder:
                os.utime(self._path)
            elif holder is not None:  # this process stood still so long that it lost the lock
                print(
                    f"{self._path.parent} was taken over by {describe(holder)}; this run ends",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)


def has_ended(holder: dict[str, Any]) -> bool | None:
    """Whether the holder of a lock has ended; None where only its heartbeat can tell."""
    if holder["machine"] == machine():
        return process_start(holder["pid"]) != holder["process_start"]
    job = os.environ.get("SLURM_JOB_ID")
    return True if job is not None and job == holder["slurm_job"] else None


def in_use(run_directory: Path, holder: dict[str, Any]) -> UserError:
    """The refusal of a directory that another run, evaluation or preparation holds."""
    return UserError(
        f"{run_directory}: another run is at work here: {describe(holder)}. Stop it, or choose "
        "another run.name (of `prepare`: --directory). If it does not exist any more, delete "
        f"{run_directory / LOCK_FILE}"
    )


def this_process() -> dict[str, Any]:
    """What a lock says of its holder."""
    return {
        "token": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": process_start(os.getpid()),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "machine": machine(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }


def machine() -> str:
    """The same for two processes exactly where they see each other's process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    if not boot.exists():  # no Linux
        return f"{socket.gethostname()} {uuid.getnode():x}"
    return f"{boot.read_text().strip()} {namespace.readlink()}"


def process_start(pid: int) -> str | None:
    """When a process started, in clock ticks since the boot; None where none runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def read_holder(path: Path) -> dict[str, Any] | None:
    """The holder that a lock names; None where there is no lock.

    Raises:
        UserError: the file is no lock of ours.
    """
    try:
        holder = json.loads(path.read_text())
        missing = [key for key in this_process() if key not in holder]
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        missing = ["JSON"]
    if missing:
        raise UserError(f"{path}: not a lock file ({', '.join(missing)} is missing); delete it")
    return holder


def heartbeat(path: Path) -> float | None:
    """The modification time of a lock; None where there is none. Opened first: NFS then asks its
    server.
    """
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def describe(holder: dict[str, Any]) -> str:
    job = f", Slurm job {holder['slurm_job']}" if holder["slurm_job"] else ""
    return f"process {holder['pid']} on {holder['host']}, running since {holder['started']}{job}"
