"""The process through which the writers of Megatron's checkpoints report, ended with its rank.

Megatron starts one with a rank's first checkpoint and keeps it, but a rank that is killed leaves
it behind for ever. This one is started the same way and looks after its parent. Standard library
only, for the process imports this file.
"""

from __future__ import annotations

import os
import threading
from multiprocessing import connection, get_context, parent_process
from multiprocessing.managers import SyncManager
from typing import Any


def start_save_helper() -> Any:
    """A queue in a new process that lives no longer than this one."""
    manager = SyncManager(ctx=get_context("spawn"))
    manager.start(_end_with_parent)
    return manager.Queue()


def _end_with_parent() -> None:
    threading.Thread(target=_wait_for_its_end, daemon=True).start()


def _wait_for_its_end() -> None:
    parent = parent_process()
    assert parent is not None, "called in a child"
    connection.wait([parent.sentinel])
    os._exit(1)
