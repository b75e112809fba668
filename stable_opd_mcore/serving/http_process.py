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
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

from stable_opd_mcore.data.chat_api import ChatReply, ChatRequest, RequestError
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.worker_processes import set_future, start_process
from stable_opd_mcore.serving.channel import receive_message, send_message
from stable_opd_mcore.serving.exchange import Server, ServerFailure
from stable_opd_mcore.serving.requests import AgentCall, HungUp, Refused, Request

_JOIN_SECONDS = 10.0
_LISTENING_SECONDS = 60.0
_log = logging.getLogger("stable_opd_mcore.serving")


class Agents(Protocol):
    """Answers the requests of agents, in the thread that reads replies: neither may wait."""

    def call(self, secret: str, request: ChatRequest) -> Future[ChatReply]:
        """The reply, or a RequestError. It is cancelled if its client goes before it is there."""
        ...

    def hung_up(self, secret: str, request: ChatRequest) -> None:
        """The client has gone, and the reply, which was there, was not sent."""
        ...

    def refused(self, secret: str, error: RequestError) -> None:
        """A client has got an error for what is no request."""
        ...


class HttpProcess:
    """Hands requests over and sets their futures, and has the calls of agents answered. Safe to use
    from many threads. The first request raises UserError if the process cannot start."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._channel: Connection | None = None
        self._tokenizer: str | None = None
        self._agents: Agents | None = None
        self._ports: dict[str, tuple[int, Mapping[str, Any]]] = {}  # of addresses for agents
        self._calls: dict[int, Future[ChatReply]] = {}  # of agents
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

    def listen(self, address: str, agents: Agents, template_kwargs: Mapping[str, Any]) -> int:
        """The port at which agents reach this machine's address, from now on and after each new
        start of the process. One `agents` answers all calls.

        template_kwargs: those of the chat template; a request may repeat them.

        Raises:
            UserError: this machine does not have the address.
        """
        with self._lock:
            self._agents = agents
            port, _ = self._ports.get(address, (0, {}))
            asked = None if port else self._listen(address, 0, template_kwargs)
        if asked is not None:
            port = asked.result(_LISTENING_SECONDS)
            with self._lock:
                self._ports[address] = port, template_kwargs
        return port

    def _listen(self, address: str, port: int, template_kwargs: Mapping[str, Any]) -> Future[int]:
        asked, number = Future[int](), next(self._numbers)
        self._post("listen", number, address, port, dict(template_kwargs))
        self._pending[number] = asked
        return asked

    def _called(self, channel: Connection, call: AgentCall) -> None:
        assert self._agents is not None
        reply = self._agents.call(call.secret, call.request)
        with self._lock:
            self._calls[call.number] = reply
        reply.add_done_callback(partial(self._reply, channel, call.number))

    def _hung_up(self, call: AgentCall) -> None:
        assert self._agents is not None
        with self._lock:
            waiting = self._calls.get(call.number)
        if waiting is None or not waiting.cancel():
            self._agents.hung_up(call.secret, call.request)

    def _reply(self, channel: Connection, number: int, reply: Future[ChatReply]) -> None:
        with self._lock:
            self._calls.pop(number, None)
            if reply.cancelled() or self._channel is not channel:
                return
            result = reply.exception() or reply.result()
            self._post("reply", number, result)

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
        for address, (port, template_kwargs) in self._ports.items():
            asked = self._listen(address, port, template_kwargs)
            asked.add_done_callback(_log_failure)
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
            self._take(channel, number, result)
        with self._lock:
            lost, self._pending, self._channel = self._pending, {}, None
            calls, self._calls = self._calls, {}
        code = process.wait()
        if self._is_over:
            return
        detail = f"the process that talks to servers ended with code {code}"
        _log.warning("%s; the next request starts another", detail)
        for call in calls.values():
            call.cancel()
        for reply in lost.values():
            set_future(reply, ServerFailure("this machine", "unreachable", detail, transient=True))
        with self._lock:
            if self._ports and self._channel is None:  # clients try again, at the same port
                self._start()

    def _take(self, channel: Connection, number: int | None, result: Any) -> None:
        if isinstance(result, AgentCall):
            self._called(channel, result)
        elif isinstance(result, HungUp):
            self._hung_up(result.call)
        elif isinstance(result, Refused):
            assert self._agents is not None
            self._agents.refused(*result)
        elif number is not None:
            with self._lock:
                reply = self._pending.pop(number, None)
            if reply is not None:
                set_future(reply, result)


def _log_failure(asked: Future[Any]) -> None:
    if not asked.cancelled() and (error := asked.exception()) is not None:
        _log.error("agents do not reach the student any more: %s", error)


HTTP = HttpProcess()
atexit.register(HTTP.end)
