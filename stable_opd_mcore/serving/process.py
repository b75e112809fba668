"""One SGLang server process: start it, wait until it answers, end it.

    server = SglangServer(options, log=run_directory / "sglang/server_0.log")
    server.start(); server.wait_until_healthy()
    ...
    server.stop()

The server leads a process group of its own, so ending the group ends its workers and nothing else.
The server also ends when its owner dies, even by SIGKILL: launch_server.py watches the owner.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.releases import release_numbers
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.client import RefusedRequest, ServerFailure, SglangClient
from stable_opd_mcore.serving.command import ServerOptions, launch_command, server_environment

RELEASE = (0, 5, 23)  # SGLang's, see requirements/cluster.toml
_CONNECTION_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # first and last
_FIRST_PORT = 10_000
_POLL_SECONDS = 0.3
_LOG_LINES = 15  # quoted in the error of a server that did not start
_log = logging.getLogger("stable_opd_mcore.serving")


class ServerStartError(UserError):
    """A server did not start; the message holds the end of its log."""


class UnsupportedRelease(ServerStartError):
    """The server's SGLang is too old; starting it again cannot help."""


def check_release(release: str, where: str) -> None:
    """Refuse a release of SGLang that is older than RELEASE; warn about a newer one. Three numbers
    count. A build from source may state 0.0.0, which counts as newer."""
    numbers = release_numbers(release)
    tested = ".".join(map(str, RELEASE))
    if numbers == (0, 0, 0) or numbers > RELEASE:
        _log.warning("%s runs SGLang %s, which is not tested; %s is", where, release, tested)
    elif numbers < RELEASE:
        raise UnsupportedRelease(
            f"{where} runs SGLang {release}; {tested} or later is needed: install {tested} where "
            "rollout.sglang.python points"
        )


def refuse_missing_interpreter(python: str) -> None:
    """Raise a ServerStartError where the servers' interpreter is not there."""
    if not os.access(python, os.X_OK):
        raise ServerStartError(
            f"rollout.sglang.python={python}: no such interpreter; `make sglang` builds the "
            "servers' environment for a CPU, docs/servers.md describes a GPU's"
        )


def free_port(host: str) -> int:
    """A free port outside the range from which the kernel gives ports to connections, because it
    could give one away while the server still imports; where fewer than 1,000 ports are outside,
    any."""
    end = int(_CONNECTION_PORTS.read_text().split()[0])
    if end - _FIRST_PORT < 1_000:
        end = 65_536
    ports = range(_FIRST_PORT, end)
    while True:
        port = secrets.choice(ports)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port


def await_answer(
    client: SglangClient,
    give_up: Callable[[], bool],
    is_running: Callable[[], bool] = lambda: True,
    startup_timeout_seconds: float | None = None,
) -> str | None:
    """Block until a server answers. Returns None, or why this waits no longer."""
    began, limit = time.monotonic(), startup_timeout_seconds or timeouts.START
    while not client.is_healthy():
        if not is_running():
            return "ended"
        if give_up():
            return "did not answer yet, and a stop was requested"
        if time.monotonic() - began > limit:
            return f"did not answer in {limit:g} s"
        time.sleep(_POLL_SECONDS)
    return None


class SglangServer:
    """A server this process starts. `start` may be called again after the server has ended."""

    def __init__(self, options: ServerOptions, log: Path) -> None:
        self.options = options
        self.log = log
        # needed on loopback too, where other users of the machine reach the server
        self.api_key = options.api_key or secrets.token_urlsafe(24)
        self.port = options.port or free_port(options.host)
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.options.host == "0.0.0.0" else self.options.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id, which is also the group id; None if not started."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def client(self) -> SglangClient:
        return SglangClient(self.url, api_key=self.api_key)

    def start(self) -> None:
        """Launch the process without waiting for it to answer."""
        assert not self.is_running, "a running server is stopped before it is started again"
        refuse_missing_interpreter(self.options.python)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                launch_command(self.options, self.port, os.getpid()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=server_environment(self.options, self.api_key, os.environ),
                start_new_session=True,
            )
        atexit.register(self.stop)

    def wait_until_healthy(self, give_up: Callable[[], bool] = lambda: False) -> float:
        """Block until the server answers; returns the seconds that it took. If it ended, its time
        to start passed, or `give_up()` is true, stop it and raise ServerStartError."""
        began = time.monotonic()
        with contextlib.closing(self.client()) as client:
            limit = self.options.startup_timeout_seconds
            defect = await_answer(client, give_up, self._can_answer, limit)
            if defect is None:
                try:  # /flush_cache collects garbage: exclude what SGLang's imports created
                    client.call("POST", "/freeze_gc")
                except (ServerFailure, RefusedRequest) as failure:
                    defect = f"ended: {failure}"
        if defect is not None:
            self.stop()
            lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            end = f"the end of {self.log}:\n" + "\n".join(lines)
            raise ServerStartError(f"SGLang server {self.url} {defect}; {end}")
        return time.monotonic() - began

    def stop(self) -> None:
        """End the process and its workers with SIGKILL; a server holds nothing that must be saved.
        Does nothing if none runs."""
        process, self._process = self._process, None
        if process is None:
            return
        atexit.unregister(self.stop)
        with contextlib.suppress(ProcessLookupError):  # all of them have ended already
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _can_answer(self) -> bool:
        """Whether it runs and has its port; without one SGLang serves nothing and does not end."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            has_port = b"error while attempting to bind on address" not in log.read()
        return self.is_running and has_port
