"""The helper process of a rank's checkpoint writers: it holds the queue of their results.

Megatron starts one with a rank's first checkpoint and never ends it, so it outlives a rank that is
killed. The one started here ends with its rank. Standard library only, because the new process
imports this file.
"""

from __future__ import annotations

import os
import threading
from multiprocessing import connection, get_context, parent_process
from multiprocessing.managers import SyncManager
from typing import Any


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
