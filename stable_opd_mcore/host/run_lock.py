"""The lock of a run directory, which rank 0 holds: one run at a time trains in it.

The file LOCK names the holder's host and process, and its time stamp is the holder's heartbeat
(filelock.SoftFileLease). A holder that was killed leaves the file behind. The next run on the same
machine or of the same Slurm job takes it over at once; a run on another machine does so when it has
seen no heartbeat for STALE_SECONDS, by its own clock. Works on NFS, whose servers create a file
exclusively.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from filelock import LeaseCompromise, OwnerRecord, SoftFileLease, Timeout

from stable_opd_mcore.errors import UserError

LOCK_FILE = "LOCK"
STALE_SECONDS = 60.0


class RunLock:
    """Held while the block lasts.

    Raises:
        UserError: another run holds the lock; the message names it.
    """

    def __init__(self, run_directory: Path, *, stale_seconds: float = STALE_SECONDS):
        self.path = run_directory / LOCK_FILE
        self._job = run_directory / f".{LOCK_FILE}.slurm_job"
        self._stale_seconds = stale_seconds
        self._lease = SoftFileLease(
            self.path,
            lease_duration=stale_seconds,
            heartbeat_interval=stale_seconds / 20,
            on_compromise=self._lost,
        )

    def __enter__(self) -> RunLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        earlier, beat = self._lease.owner, heartbeat(self.path)
        job = os.environ.get("SLURM_JOB_ID", "")
        of_this_job = bool(job) and self._job.is_file() and self._job.read_text() == job
        if earlier is not None and of_this_job and not is_here(earlier):
            self._lease.force_break()  # Slurm ends an attempt of a job before it starts the next
        try:
            self._lease.acquire(
                timeout=1.5 * self._stale_seconds,
                poll_interval=self._stale_seconds / 100,
                cancel_check=lambda: heartbeat(self.path) not in (beat, None),
            )
        except Timeout:
            raise in_use(self.path.parent, self._lease.owner) from None
        if earlier is not None:
            print(f"taking over {self.path.parent} from {describe(earlier)}", file=sys.stderr)
        if job:
            self._job.write_text(job)
        else:
            self._job.unlink(missing_ok=True)  # left by a killed job
        return self

    def __exit__(self, *_: object) -> None:
        self._job.unlink(missing_ok=True)
        self._lease.release()

    def holder(self) -> OwnerRecord | None:
        """Who holds the lock, as far as this machine can tell without waiting; None: nobody."""
        if not self.path.exists():
            return None
        with suppress(Timeout), self._lease.acquire(blocking=False):
            return None
        return self._lease.owner

    def _lost(self, loss: LeaseCompromise) -> None:
        """End a run that was suspended so long that another has taken its directory."""
        end = loss.reason == "owner-changed"
        what = f"taken over by {describe(self._lease.owner)}; this run ends" if end else loss.reason
        print(f"{self.path}: this run has lost its lock: {what}", file=sys.stderr, flush=True)
        if end:
            os._exit(1)


def in_use(run_directory: Path, holder: OwnerRecord | None) -> UserError:
    """The refusal of a directory that another run or evaluation holds."""
    return UserError(
        f"{run_directory}: another run uses it: {describe(holder)}. Stop it, or choose "
        f"another run.name. If that process has ended, delete {run_directory / LOCK_FILE}"
    )


def is_here(holder: OwnerRecord) -> bool:
    return holder.hostname.partition("?")[0] == socket.gethostname()  # "?": a container's number


def heartbeat(path: Path) -> float | None:
    """The modification time of a lock; None where there is none."""
    try:  # a file that is opened first makes NFS ask its server
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def describe(holder: OwnerRecord | None) -> str:
    if holder is None:
        return "a process that has not written its name yet"
    return f"process {holder.pid} on {holder.hostname.partition('?')[0]}"
