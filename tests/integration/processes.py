"""The processes of this machine, for tests that look for processes of others."""

from collections.abc import Iterator

import psutil


def running() -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """(pid, command line, environment) of every process that may be read."""
    for process in psutil.process_iter(["cmdline", "environ"]):
        yield process.pid, process.info["cmdline"] or [], process.info["environ"] or {}
