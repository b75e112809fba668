"""The process that a rank forks to write its part of a checkpoint: its result, and its end.

A writer that outlived its rank could write into the next attempt's files. Not here: what it writes
(models/directory_save.py).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import queue
import signal
import sys
from multiprocessing import parent_process
from typing import Any

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_RESULT_BYTES = 2**28  # at most; memory is taken as it is written


def end_with_parent() -> None:
    """Have this forked process, and those that it forks, killed when their parent ends.

    Linux only; elsewhere a writer ends when its files are written.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = parent_process()
    assert parent is not None and parent.pid is not None, "called in a child"
    _kill_with(parent.pid)
    own_id = os.getpid()
    os.register_at_fork(after_in_child=lambda: _kill_with(own_id))


def _kill_with(parent_id: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_id:  # it ended before the call
        os._exit(1)


class WriterResult:
    """One value that a forked writer process gives to its rank, in shared memory.

    Megatron calls these methods of it, in place of a queue in a process of its own: that process
    would outlive a killed rank. A pipe would block a writer until its rank reads.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _RESULT_BYTES)

    def put(self, value: object) -> None:
        pickle.dump(value, self._memory)

    def get_nowait(self) -> Any:
        """The value; queue.Empty where the writer has left none."""
        if not self._memory[0]:  # a pickle begins with another byte
            raise queue.Empty
        self._memory.seek(0)
        return pickle.load(self._memory)
