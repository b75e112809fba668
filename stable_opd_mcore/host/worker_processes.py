"""Worker processes that end when the process that started them has ended."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """End this process once its parent has ended, even by a signal that cannot be caught.

    For processes that `multiprocessing` started; nothing happens in others. Nothing is cleaned up:
    the process ends as by SIGKILL, with exit code 1.
    """
    if multiprocessing.parent_process() is not None:
        threading.Thread(target=_wait_and_end, daemon=True).start()


def _wait_and_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
