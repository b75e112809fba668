"""Ends a run that hangs: no step for N minutes, and every rank writes its stacks and exits.

    with Watchdog(minutes, run_directory / STACKS, rank) as watchdog:
        for each step:
            ...
            watchdog.step_done()

The clock is faulthandler's, a thread in C: it also fires while a collective or a kernel holds the
interpreter. A stack file is empty until then and removed at the end, so one with text in it means a
hang; a stopped or lost process writes none, and the rank whose file is empty is the one to look at.
Not here: the time-outs of the collectives, and what happens next (slurm/common.sh).
"""

from __future__ import annotations

import faulthandler
from pathlib import Path
from types import TracebackType
from typing import TextIO

STACKS = "stacks"


class Watchdog:
    """Armed while the block lasts.

    Args:
        minutes: longest time between two calls of `step_done`; None never fires. directory: stacks
        go to `directory`/rank_00003.txt, those of an earlier attempt are replaced.
    """

    def __init__(self, minutes: float | None, directory: Path, rank: int):
        self._seconds = None if minutes is None else 60.0 * minutes
        self._path = directory / f"rank_{rank:05d}.txt"
        self._file: TextIO | None = None

    def __enter__(self) -> Watchdog:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w")
        self.step_done()
        return self

    def step_done(self) -> None:
        """Start the clock anew: after each step, and after other long work between steps."""
        if self._seconds is not None:
            assert self._file is not None, "used outside its with block"
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()
            self._path.unlink()
