"""Ends a run that hangs: no step for N minutes, and every rank writes its stacks and exits.

    with Watchdog(minutes, run_directory / STACKS, rank) as watchdog:
        for each step:
            ...
            watchdog.step_done()

The clock is faulthandler's, a thread in C: it also fires while a collective or a kernel holds the
interpreter. A stack file is empty until then and removed at the end, so one with text in it means a
hang. Its time is the rank's last sign of life: where all but one wait for that one, each stack is
the same, and who stands still (stopped, or its node frozen) is told by that alone. The others look
before the clock fires, for ending the step lets a stopped process go on.
Not here: the time-outs of the collectives, and what happens next (slurm/common.sh).
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO

from stable_opd_mcore.atomic_files import write_atomically

STACKS = "stacks"
SILENT = "silent"  # beside the stacks: the ranks that stood still when a hang came near, one a line
_BEATS = 20  # signs of life in the time that a step may take
_LOOK = 0.8  # of that time without a step: who is silent?
_SILENCE = 0.5  # of that time without a sign of life


class Watchdog:
    """Armed while the block lasts.

    Args:
        minutes: longest time between two calls of `step_done`; None never fires.
        directory: stacks go to `directory`/rank_00003.txt; those of an earlier attempt are
            replaced.
    """

    def __init__(self, minutes: float | None, directory: Path, rank: int):
        self._seconds = None if minutes is None else 60.0 * minutes
        self._path = directory / f"rank_{rank:05d}.txt"
        self._silent = directory / SILENT
        self._file: TextIO | None = None
        self._last_step = 0.0
        self._ended = threading.Event()
        self._heart: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._silent.unlink(missing_ok=True)
        self._file = self._path.open("w")
        self.step_done()
        if self._seconds is not None:
            self._heart = threading.Thread(target=self._beat, args=(self._seconds,), daemon=True)
            self._heart.start()
        return self

    def step_done(self) -> None:
        """Start the clock anew: after each step, and after other long work between steps."""
        if self._seconds is not None:
            assert self._file is not None, "used outside its with block"
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)
            self._last_step = time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._ended.set()
        if self._heart is not None:
            self._heart.join()
        if self._file is not None:
            self._file.close()
            self._path.unlink()

    def _beat(self, seconds: float) -> None:
        """A sign of life every now and then; once a step takes too long, a look at the others'."""
        told, last_beat = [], time.monotonic()
        while not self._ended.wait(seconds / _BEATS):
            os.utime(self._path)
            stood_still = time.monotonic() - last_beat > _SILENCE * seconds
            last_beat = time.monotonic()
            if stood_still or last_beat - self._last_step < _LOOK * seconds:
                continue  # who stood still itself cannot tell how the others are
            silent = self._silent_ranks(_SILENCE * seconds)
            write_atomically(self._silent, "".join(f"{name}\n" for name in silent).encode())
            if silent and silent != told:
                minutes = _SILENCE * seconds / 60
                print(f"no sign of life for {minutes:.2g} minutes: {' '.join(silent)}", flush=True)
                told = silent

    def _silent_ranks(self, seconds: float) -> list[str]:
        """Ranks without a sign of life for that long, by the file system's clock; not those whose
        clock fired already.
        """
        now = self._path.stat().st_mtime
        found = [(file.stem, file.stat()) for file in sorted(self._path.parent.glob("rank_*.txt"))]
        return [name for name, s in found if now - s.st_mtime > seconds and not s.st_size]
