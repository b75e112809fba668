"""The processes beside a rank that write its checkpoints: all of them end when the rank ends.

A helper holds the queue of the writers' results. Megatron starts one with a rank's first checkpoint
and never ends it, so it outlives a rank that is killed; the one started here does not. A writer is
forked for each checkpoint: one that outlived its rank could write into the next attempt's files.
Standard library only, because the helper imports this file.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from multiprocessing import connection, get_context, parent_process
from multiprocessing.managers import SyncManager
from typing import Any

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent() -> None:
    """Have this forked process, and those that it forks, killed when their parent ends.

    Linux only; elsewhere a writer ends when its files are written.
    """
    if not sys.platform.startswith("linux"):
        return
    _kill_with(os.getppid())
    own_id = os.getpid()
    os.register_at_fork(after_in_child=lambda: _kill_with(own_id))


def _kill_with(parent_id: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_id:  # it ended before the call
        os._exit(1)


def start_save_helper() -> Any:
    """A queue in a new process that ends when this process ends."""
    manager = SyncManager(ctx=get_context("spawn"))
    manager.start(_end_with_parent)
    return manager.Queue()


def _end_with_parent() -> None:
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    assert parent is not None, "called in a child"
    connection.wait([parent.sentinel])
    os._exit(1)
