"""A program that imports SGLang, which takes a core twelve seconds, and forks servers from then on.

    python -P prepared_servers.py REQUESTS

It runs in the servers' environment. A line of the pipe REQUESTS holds the id of a process whose
command line is that of a server (serving/command.py) but whose program is the shell script INSTEAD.
A fork of this program becomes that server, with the process's environment and log. The process and
its server are one to whoever signals the process: both are stopped, continued and ended together.

Not for tests of how a real server's processes end: those start SGLang itself.
"""

import contextlib
import gc
import importlib.util
import os
import random
import select
import signal
import sys
from pathlib import Path
from types import ModuleType

LAUNCHER = Path(__file__).parents[2] / "stable_opd_mcore/serving/launch_server.py"
INSTEAD = "#!/bin/sh\necho $$ > '{requests}'\nsleep infinity\n"
_POLL_SECONDS = 0.05


class Server:
    """A forked server and the process that it follows."""

    def __init__(self, leader: int, launcher: ModuleType) -> None:
        self.leader, self.state = leader, "S"
        self.owner = _status(leader)[1]
        self.pid = os.fork()
        if self.pid == 0:
            _serve(leader, launcher)
            os._exit(0)

    def follow(self) -> bool:
        """Do as the leader does; returns whether both still run."""
        state, parent = _status(self.leader)
        ended = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        if ended or state in "XZ" or parent != self.owner:
            self.end()
            if not ended:
                os.waitpid(self.pid, 0)
            return False
        if (state == "T") != (self.state == "T"):
            _signal_group(self.pid, signal.SIGSTOP if state == "T" else signal.SIGCONT)
        self.state = state
        return True

    def end(self) -> None:
        for process in (self.leader, self.pid):
            _signal_group(process, signal.SIGKILL)


def _status(pid: int) -> tuple[str, int]:
    """A process's state, "X" if there is none, and its parent."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except FileNotFoundError:
        return "X", 0
    return state, int(parent)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, or has not made its group yet
        os.killpg(pid, number)


def _serve(leader: int, launcher: ModuleType) -> None:
    os.setsid()
    process = Path(f"/proc/{leader}")
    entries = os.fsdecode((process / "environ").read_bytes()).split("\0")
    command = os.fsdecode((process / "cmdline").read_bytes()).split("\0")[:-1]
    os.environ.update(entry.split("=", 1) for entry in entries if "=" in entry)
    log = os.open(process / "fd/2", os.O_WRONLY | os.O_APPEND)  # 1 may still be the pipe
    os.dup2(log, 1)
    os.dup2(log, 2)
    random.seed()  # ports and sampling seeds are drawn from it
    arguments = command[command.index("--owner-pid") + 2 :]
    launcher.main(["--owner-pid", str(os.getppid()), *arguments])


def _launcher() -> ModuleType:
    """launch_server.py with all of its imports."""
    sys.argv = [str(LAUNCHER), "--device", "cpu"]
    spec = importlib.util.spec_from_file_location("launch_server", LAUNCHER)
    assert spec is not None
    assert spec.loader is not None
    launcher = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = launcher  # its classes are pickled by name
    spec.loader.exec_module(launcher)
    importlib.import_module("sglang.srt.entrypoints.http_server")
    gc.freeze()
    return launcher


def main(requests: str) -> None:
    owner, servers, launcher = os.getppid(), [], _launcher()
    pipe = os.open(requests, os.O_RDWR | os.O_NONBLOCK)  # never at its end: a writer is open
    while os.getppid() == owner:
        if select.select([pipe], [], [], _POLL_SECONDS)[0]:
            leaders = os.read(pipe, select.PIPE_BUF).split()
            servers += [Server(int(leader), launcher) for leader in leaders]
        servers = [server for server in servers if server.follow()]
    for server in servers:
        server.end()


if __name__ == "__main__":
    main(sys.argv[1])
