"""The trainer's side of the process that talks to servers (http_worker.py).

Every request of this process goes through it. It starts with the first one, and again if it was
killed; the requests that it had then fail as transient. Use it through SglangClient:

    reply = client.submit(request)  # a Future, which does not block
    reply.add_done_callback(...)  # called in the only thread that reads replies: it may submit, and
                                  # must not wait for another reply; if cancelled, called at once
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import subprocess
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.worker_processes import set_future, start_process
from stable_opd_mcore.serving.channel import receive_message, send_message
from stable_opd_mcore.serving.exchange import Server, ServerFailure
from stable_opd_mcore.serving.requests import Request

_JOIN_SECONDS = 10.0
_log = logging.getLogger("stable_opd_mcore.serving")


class HttpProcess:
    """Hands requests over and sets their futures. Safe to use from many threads. The first request
    raises UserError if the process cannot start."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._channel: Connection | None = None
        self._tokenizer: str | None = None
        self._reader: threading.Thread | None = None
        self._is_over = False  # this process ends
        self._process: subprocess.Popen[bytes] | None = None
        self._owner: int | None = None  # process id of the one that started it

    @property
    def pid(self) -> int | None:
        """None while none runs."""
        return None if self._channel is None or self._process is None else self._process.pid

    def end(self) -> None:
        """End the process as this one ends, and the thread, which could not wake up later. A fork
        of this process does not."""
        with self._lock:
            self._is_over = True
        if self._process is not None and self._reader is not None and self._owner == os.getpid():
            self._process.kill()
            self._reader.join(_JOIN_SECONDS)

    def submit(
        self,
        client: int,
        server: Server,
        request: Request[Any],
        timeout_seconds: float,
        delay_seconds: float = 0.0,
    ) -> Future[Any]:
        """See `SglangClient.submit`; `client` is the number that `close_client` takes."""
        reply: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            message = (number, client, server, request, timeout_seconds, delay_seconds)
            self._post("send", *message)
            self._pending[number] = reply
        reply.add_done_callback(lambda _: self._forget(number))
        return reply

    def close_client(self, client: int) -> None:
        """Fail what the client has sent and will send."""
        with self._lock:
            if self._channel is not None:
                self._post("close", client)

    def use_tokenizer(self, content: str) -> None:
        """Decode the responses that end from now on by this tokenizer.json."""
        with self._lock:
            self._tokenizer = content
            if self._channel is not None:
                self._post("use_tokenizer", content)

    def _post(self, *message: Any) -> None:
        """Send a message: a method of `Worker` and its arguments."""
        channel = self._channel or self._start()
        with contextlib.suppress(OSError):  # it was killed: the thread that reads replies notices
            send_message(channel, message)

    def _forget(self, number: int) -> None:
        with self._lock:
            is_cancelled = self._pending.pop(number, None) is not None
            if is_cancelled and self._channel is not None:
                self._post("cancel", number)

    def _start(self) -> Connection:
        if self._is_over:
            raise ServerFailure("this machine", "unreachable", "this process ends")
        process, channel = start_process("stable_opd_mcore.serving.http_worker", {})
        try:
            _, error = receive_message(channel)
        except (EOFError, OSError):
            error = UserError(
                f"the process that talks to servers ended with code {process.wait()} as it "
                "started; fix what its output above shows"
            )
        if error is not None:
            raise error
        self._process, self._channel, self._owner = process, channel, os.getpid()
        arguments = (channel, process)
        self._reader = threading.Thread(target=self._read, args=arguments, name="http", daemon=True)
        self._reader.start()
        if self._tokenizer is not None:  # after the thread has started, which notices its end
            self._post("use_tokenizer", self._tokenizer)
        return channel

    def _read(self, channel: Connection, process: subprocess.Popen[bytes]) -> None:
        """Set the futures, until the process ends; then fail those that are left."""
        while True:
            try:
                number, result = receive_message(channel)
            except (EOFError, OSError):
                break
            except Exception:  # whose reply it is, is not known
                _log.exception("the process that talks to servers sent an unreadable reply")
                process.kill()
                break
            with self._lock:
                reply = self._pending.pop(number, None)
            if reply is not None:
                set_future(reply, result)
        with self._lock:
            lost, self._pending, self._channel = self._pending, {}, None
        code = process.wait()
        if self._is_over:
            return
        detail = f"the process that talks to servers ended with code {code}"
        _log.warning("%s; the next request starts another", detail)
        for reply in lost.values():
            set_future(reply, ServerFailure("this machine", "unreachable", detail, transient=True))


HTTP = HttpProcess()
atexit.register(HTTP.end)
