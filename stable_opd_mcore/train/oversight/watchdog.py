"""End a run that hangs: after N minutes without a step, every rank writes its stacks and exits.

The timer is faulthandler's, a thread in C, so it also fires while a collective or a kernel holds
the interpreter lock. A stack file is empty until the timer fires and is removed at the end, so a
stack file with text means a hang.
A wait for rollouts is not a hang while responses arrive: `progress`, called on any rank, restarts
the timers of all ranks through the time stamp of the file PROGRESS.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

PROGRESS = "progress"  # file next to the stacks; its time stamp is that of the newest response
logger = logging.getLogger(__name__)
_BEATS = 20  # looks at PROGRESS within the time limit of a step


class Watchdog:
    """Armed inside the block.

    Args:
        minutes: longest time between two calls of `step_done`; None never fires.
        directory: holds the stack files rank_00003.txt; an earlier attempt's are replaced.
    """

    def __init__(self, minutes: float | None, directory: Path, rank: int):
        self._seconds = None if minutes is None else 60.0 * minutes
        self._path = directory / f"rank_{rank:05d}.txt"
        self._file: TextIO | None = None
        self._progress = directory / PROGRESS
        self._last_progress = 0.0
        self._lock = threading.Lock()  # guards the timer
        self._ended = threading.Event()
        self._heart: threading.Thread | None = None
        self._warned = False

    def __enter__(self) -> Watchdog:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w")
        self.step_done()
        if self._seconds is not None:
            self._heart = threading.Thread(target=self._beat, args=(self._seconds,), daemon=True)
            self._heart.start()
        return self

    def step_done(self) -> None:
        """Restart the timer: after each step, and after other long work between steps."""
        if self._seconds is not None:
            assert self._file is not None, "used outside its with block"
            with self._lock:
                faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)

    def progress(self) -> None:
        """Restart the timers of all ranks, within a few beats; may be called from any thread."""
        now = time.monotonic()
        if self._seconds is not None and now - self._last_progress > self._seconds / _BEATS:
            self._last_progress = now
            with self._logging_errors():
                self._progress.touch()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._heart is not None:
            self._heart.join()
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)

    @contextmanager
    def _logging_errors(self) -> Iterator[None]:
        """Log the first error of the file system."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                logger.warning("watchdog misses progress: %s; later errors are not logged", error)
            self._warned = True

    def _beat(self, seconds: float) -> None:
        newest = 0.0
        with self._logging_errors():
            newest = self._progress_time()
        while not self._ended.wait(seconds / _BEATS):
            with self._logging_errors():
                if newest != (newest := self._progress_time()):
                    self.step_done()

    def _progress_time(self) -> float:
        return self._progress.stat().st_mtime if self._progress.exists() else 0.0
