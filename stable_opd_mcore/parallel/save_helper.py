"""The processes beside a rank that write its checkpoints: all of them end when the rank ends.

A helper holds the queue of the writers' results. Megatron starts one with a rank's first checkpoint
and never ends it, so it outlives a rank that is killed; the one started here does not. A writer is
forked for each checkpoint: one that outlived its rank could write into the next attempt's files.
Standard library only, because the helper imports this file.

The helper keeps values as bytes. It would otherwise import torch, which takes seconds, to hold the
writers' results.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from multiprocessing import get_context, parent_process
from multiprocessing.managers import SyncManager
from typing import Any

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent() -> None:
    """Have this child process, and those that it forks, killed when their parent ends.

    Linux only; elsewhere a writer ends when its files are written, and a helper with its rank
    unless that is killed.
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


class BytesQueue:
    """A queue of a helper that sees only bytes; Megatron calls these methods of it."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, value: object) -> None:
        self._queue.put(pickle.dumps(value))

    def get_nowait(self) -> Any:
        """The oldest value; queue.Empty where there is none."""
        return pickle.loads(self._queue.get_nowait())


def start_save_helper() -> BytesQueue:
    """A queue in a new process that ends when this process ends."""
    manager = SyncManager(ctx=get_context("spawn"))
    manager.start(end_with_parent)
    return BytesQueue(manager.Queue())
