"""Serves the report of running runs, which its page asks for again as they grow.

    stable-opd report --follow runs/opd runs/stable_opd

The page is report.py's. The server listens on 127.0.0.1 and answers requests that name this machine
only, so that a page of another site cannot read it through a name of its own. No part of a request
becomes part of a path.
"""

import hashlib
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from stable_opd_mcore.commands.report.chosen_runs import RESULT_FILES, ReportRun, named_runs
from stable_opd_mcore.commands.report.report import growing_page
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.run_directory import RunDirectory

HOST = "127.0.0.1"
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class ReportServer(ThreadingHTTPServer):
    """Serves the page at `url`; `port` 0 takes any free one.

    The runs are directories, which need not exist yet, or folders of them.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[str | Path | ReportRun], port: int):
        self._given = runs
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise UserError(
                f"port {port} of {HOST}: {error.strerror}; choose another one with --port"
            ) from error
        self.url = f"http://{HOST}:{self.server_port}/"
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}
        self._page: tuple[str, bytes] = ("", b"")  # the version of the files, and the page of it
        self._lock = Lock()

    def page(self) -> tuple[str, bytes]:
        """The version of the runs' files and the page as they are now, which names wrong ones."""
        with self._lock:
            runs = named_runs(self._given)
            version = _version(runs)
            if self._page[0] != version:
                self._page = (version, growing_page(runs, version))
            return self._page


def follow(runs: Sequence[Path], port: int, print_line: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C."""
    with ReportServer(runs, port) as server:
        print_line(f"following {', '.join(str(run) for run in runs)} at {server.url}")
        print_line(
            "Ctrl-C ends it. From another machine: "
            f"ssh -L {server.server_port}:{HOST}:{server.server_port} THIS_MACHINE"
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print_line("")


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version = "stable-opd"
    sys_version = ""
    timeout = 60  # seconds that a silent connection keeps its thread

    def do_GET(self) -> None:
        """Answer with the page, or with 304 where the browser has this version."""
        if self.headers.get("Host") not in self.server.hosts:
            self._send(HTTPStatus.MISDIRECTED_REQUEST, b"this server answers to itself")
        elif self.path != "/":
            self._send(HTTPStatus.NOT_FOUND, b"no such page")
        else:
            version, page = self.server.page()
            if self.headers.get("If-None-Match") == version:
                self._send(HTTPStatus.NOT_MODIFIED, b"", version)
            else:
                self._send(HTTPStatus.OK, page, version)

    def log_message(self, *unused: Any) -> None:
        """Requests are not logged."""

    def _send(self, status: HTTPStatus, data: bytes, version: str = "") -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if version:
            self.send_header("ETag", version)
        self.send_header("Content-Type", f"text/{'html' if version else 'plain'}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _version(runs: Sequence[ReportRun]) -> str:
    """A text that changes whenever a file that the page shows changes, as an ETag."""
    stamps: list[tuple[Path, tuple[int, int] | None]] = []
    for run in runs:
        files = RunDirectory(run.directory)
        folders = (files.rollouts(0).parent, files.tokens(0).parent)  # files there are replaced
        results = sorted(run.directory.glob(RESULT_FILES))
        stamps += [(each, _stamp(each)) for each in (files.metrics, files.resolved, *folders)]
        stamps += [(each, _stamp(each)) for each in results]
    return f'"{hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]}"'


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
