"""What runs on this machine, for tests that look for processes they did not start themselves."""

from collections.abc import Iterator

import psutil


def running() -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """(pid, command line, environment) of every process that lets itself be looked at."""
    for process in psutil.process_iter(["cmdline", "environ"]):
        yield process.pid, process.info["cmdline"] or [], process.info["environ"] or {}
