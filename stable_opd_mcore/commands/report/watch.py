"""The live view: the report's page of running runs, from a server that only this machine reaches.

    stable-opd watch runs/opd runs/stable_opd

The page asks every two seconds whether the runs' files have changed, and is then built again.
The server listens on 127.0.0.1 and answers requests that name this machine only, so that a page of
another site cannot read it through a name of its own. No part of a request becomes part of a path.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from stable_opd_mcore.commands.report.chosen_runs import (
    RESULT_FILES,
    ReportRun,
    named_runs,
    read_settings,
    whole_number,
)
from stable_opd_mcore.commands.report.outcomes import defined
from stable_opd_mcore.commands.report.reader import (
    LENGTH_BUDGET,
    LIVE,
    complete_rollouts,
    detail,
    listed,
    searched,
    stored_steps,
)
from stable_opd_mcore.commands.report.report import live_page
from stable_opd_mcore.data.token_files import read_tokens
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.monitoring.metric_sinks import read_metrics
from stable_opd_mcore.records import Rollout

HOST = "127.0.0.1"
_Listed = list[tuple[Rollout, dict[str, Any]]]
RECENT_ROWS = 20  # whose mean step time gives the time left
MAX_DIGITS = 12  # a number in a request may have
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class WatchServer(ThreadingHTTPServer):
    """Serves the live view at `url`; `port` 0 takes any free one.

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

    @property
    def runs(self) -> list[ReportRun]:
        """The runs that exist now."""
        return named_runs(self._given)

    def page(self) -> bytes:
        """The page as the files are now; it says what is wrong with them."""
        with self._lock:
            version = self.version()
            if self._page[0] != version:
                self._page = (version, live_page(self.runs))
            return self._page[1]

    def version(self) -> str:
        """A text that changes whenever a file that the page shows changes."""
        stamps = [
            (path, _stamp(path))
            for run in self.runs
            for path in (
                RunDirectory(run.directory).metrics,
                RunDirectory(run.directory).resolved,
                *sorted(run.directory.glob(RESULT_FILES)),
            )
        ]
        return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]


def watch(runs: Sequence[Path], port: int, print_line: Callable[[str], None]) -> None:
    """Serve the live view until Ctrl-C."""
    with WatchServer(runs, port) as server:
        print_line(f"watching {', '.join(str(run) for run in runs)} at {server.url}")
        print_line(
            "Ctrl-C ends it. From another machine: "
            f"ssh -L {server.server_port}:{HOST}:{server.server_port} THIS_MACHINE"
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print_line("")


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version = "stable-opd"
    sys_version = ""
    timeout = 60  # seconds that a silent connection keeps its thread

    def do_GET(self) -> None:
        """Answer with the page or with JSON; an error is JSON with "error"."""
        if self.headers.get("Host") not in self.server.hosts:
            self._json(HTTPStatus.MISDIRECTED_REQUEST, {"error": "this server answers to itself"})
            return
        answers = {
            "/version": self._version,
            "/rollouts": self._rollouts,
            "/rollout": self._rollout,
        }
        try:
            parts = urlsplit(self.path)
            fields = parse_qs(parts.query, max_num_fields=8)
        except ValueError as error:
            self._json(HTTPStatus.BAD_REQUEST, {"error": f"not an address of this server: {error}"})
            return
        path, values = parts.path, {name: texts[-1] for name, texts in fields.items()}
        try:
            if path == "/":
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page())
            elif path in answers:
                self._json(HTTPStatus.OK, answers[path](values))
            else:
                self._json(HTTPStatus.NOT_FOUND, {"error": "no such page"})
        except UserError as error:  # a page that this server does not have, or a malformed file
            self._json(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except OSError as error:  # a file that is being replaced
            self._json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)})

    def log_message(self, *unused: Any) -> None:
        """Requests are not logged."""

    def _version(self, _: Mapping[str, str]) -> dict[str, Any]:
        states = [run_state(run) for run in self.server.runs]
        return {"version": self.server.version(), "runs": states}

    def _rollouts(self, values: Mapping[str, str]) -> list[dict[str, Any]]:
        search, (_, _, rollouts) = values.get("search", "").lower(), self._chosen(values)
        return [record for rollout, record in rollouts if search in searched(rollout).lower()]

    def _rollout(self, values: Mapping[str, str]) -> dict[str, Any]:
        directory, step, rollouts = self._chosen(values)
        rollout, record = rollouts[_number(values, "index", len(rollouts))]
        tokens = read_tokens(RunDirectory(directory).tokens(step))
        return detail(rollout, tokens, record["repeats"], LIVE)

    def _chosen(self, values: Mapping[str, str]) -> tuple[Path, int, _Listed]:
        """The directory, the step and the rollouts of a request."""
        runs = self.server.runs
        number = _number(values, "run", len(runs))
        directory, step = runs[number].directory, _number(values, "step", 10**MAX_DIGITS)
        stamp = _stamp(RunDirectory(directory).rollouts(step))
        return directory, step, _read_step(directory, stamp, number, step)

    def _json(self, status: HTTPStatus, found: Any) -> None:
        self._send(status, "application/json", json.dumps(found, allow_nan=False).encode())

    def _send(self, status: HTTPStatus, kind: str, data: bytes) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def run_state(run: ReportRun) -> dict[str, Any]:
    """A run's progress: its steps, seconds since the last one, and seconds that are left.

    `steps` are those with rollouts. A run without a finished step has `step` None. Nothing says
    whether a process still trains it.
    """
    path = RunDirectory(run.directory).metrics
    state = {"label": run.name, "steps": stored_steps(run.directory), "step": None}
    try:
        total = whole_number(read_settings(run.directory), "train.steps")
        rows, age = read_metrics(path), time.time() - path.stat().st_mtime
    except (UserError, OSError):  # not started, or being replaced; the page says what is wrong
        return state
    step, times = rows[-1]["step"], defined(rows[-RECENT_ROWS:], "time/total")
    left = None
    if total is not None and times:
        left = max(0, total - step) * sum(times) / len(times)
    return state | {"step": step, "total": total, "age": max(0.0, age), "left": left}


def _number(values: Mapping[str, str], name: str, end: int) -> int:
    """A number from 0 to end - 1 of a request."""
    text = values.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS and int(text) < end):
        raise UserError(f"{name}: {text!r:.20}; expected a number below {end}")
    return int(text)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=2)  # a step may have hundreds of megabytes, and its reader asks for each rollout
def _read_step(directory: Path, _stamped: tuple[int, int] | None, run: int, step: int) -> _Listed:
    """The rollouts of a step, each with what the list shows of it."""
    budget = whole_number(read_settings(directory), LENGTH_BUDGET)
    rollouts = enumerate(complete_rollouts(RunDirectory(directory).rollouts(step)))
    return [(rollout, listed(rollout, run, step, index, budget)) for index, rollout in rollouts]
