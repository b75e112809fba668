"""The processes of this machine, for tests that look for processes they did not start."""

from collections.abc import Iterator

import psutil


def running() -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """Yield (pid, command line, environment) of every readable process."""
    for process in psutil.process_iter(["cmdline", "environ"]):
        yield process.pid, process.info["cmdline"] or [], process.info["environ"] or {}
