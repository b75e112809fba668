"""Processes that a killed one leaves behind."""

import time

import psutil


def wait_until_ended(*pids: int) -> None:
    """A zombie counts as ended: without an init that reaps orphans it stays in the process list."""
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if _is_running(pid)]:
        assert time.monotonic() < deadline, f"outlived the killed process: {left}"
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
