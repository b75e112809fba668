"""The URL that an agent calls: HTTP around the forms of an API, as a bare ASGI application.

    await serve(app(answer), listen("127.0.0.1"))    # base_url: http://.../<secret>/v1

`answer` gets the secret of the path and the request, and returns the student's turn when it is
sampled. Until then the client must hear something: after ten seconds, and every ten seconds, a
stream gets a comment and another reply a space, which JSON allows before it. A client that hangs up
cancels `answer`; if the turn was there by then, `undelivered` is called. Not here: which episode a
secret belongs to, and what a request continues.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import uvicorn

from stable_opd_mcore.data import anthropic_api, openai_api
from stable_opd_mcore.data.chat_api import ChatReply, ChatRequest, RequestError
from stable_opd_mcore.errors import UserError

Answer = Callable[[str, ChatRequest], Awaitable[ChatReply]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 32 * 2**20  # a text of a million tokens has about 4 MiB
# Of a larger body, this many times MAX_BODY_BYTES are read before the connection is closed.
_DISCARDED = 16
# Steps of the event loop from the end of a connection, which it has to read, to that of `receive`
_STEPS_UNTIL_GONE = 4
KEEP_ALIVE_SECONDS = 10.0  # a first space breaks strict parsers, so there is none in most replies
_IDLE_SECONDS = 600  # until the server closes a connection, where the next request would fail
_BACKLOG = 4096  # connections that wait to be accepted, when an agent sends many requests at once
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Api:
    """One way to ask for a turn."""

    read: Callable[[bytes, Mapping[str, Any], bool], tuple[ChatRequest, openai_api.Form]]
    body: Callable[[ChatReply, openai_api.Form, str], Mapping[str, Any]]
    events: Callable[[ChatReply, openai_api.Form, str], Iterable[tuple[str, Any]]]
    error: Callable[[RequestError], Mapping[str, Any]]
    waiting: bytes  # an event without meaning


def _openai_events(reply: ChatReply, form: openai_api.Form, name: str) -> Iterator[tuple[str, Any]]:
    for chunk in openai_api.chunks(reply, form, name):
        yield "", chunk
    yield "", "[DONE]"


_CHAT = Api(
    openai_api.read_request,
    openai_api.completion,
    _openai_events,
    openai_api.error_body,
    b": the student is still sampling\n\n",
)
_MESSAGES = Api(
    anthropic_api.read_request,
    anthropic_api.message,
    anthropic_api.events,
    anthropic_api.error_body,
    b'event: ping\ndata: {"type": "ping"}\n\n',
)
APIS = {"chat/completions": _CHAT, "messages": _MESSAGES}
_REMEDIES = {
    "messages/count_tokens": "tokens are not counted here; the usage of each reply is exact",
    "responses": (
        "the Responses API is not served here; use chat completions: "
        "set_default_openai_api('chat_completions') of the OpenAI Agents SDK, "
        "use_responses_api=False of LangChain, openai.chat(...) of the AI SDK, "
        'wire_api = "chat" of Codex'
    ),
    "completions": "texts without turns are not served here; send messages to chat/completions",
}


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's own; uvicorn would take them."""
        yield


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that clients may connect to from now on; 0: any free port.

    Raises:
        UserError: this machine does not have the address, or the port is taken.
    """
    try:
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UserError(
            f"agents cannot be served at {host}, port {port}: {error.strerror}; set "
            "environment.address to an address of this machine"
        ) from error


async def serve(application: Application, listening: socket.socket) -> None:
    """Serve requests until cancelled."""
    config = uvicorn.Config(
        application,
        interface="asgi3",
        http="h11",
        ws="none",
        lifespan="off",
        backlog=_BACKLOG,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=0,
        log_config=None,
        log_level=logging.CRITICAL,  # a reply that is broken off is no error here
        access_log=False,
    )
    await _Server(config).serve([listening])


def app(
    answer: Answer,
    undelivered: Callable[[str, ChatRequest], object] = lambda *_: None,
    refused: Callable[[str, RequestError], object] = lambda *_: None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
) -> Application:
    """An ASGI application.

    Args:
        answer: raises RequestError for a request that gets an error. It is cancelled if the client
            hangs up.
        undelivered: called if the client has hung up when its turn is there.
        refused: called with the error of a request that is none that `answer` could get.
        template_kwargs: student.chat_template_kwargs, which a request may repeat.
    """

    async def application(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        connection = _Connection(receive, send)
        secret, name = _parts(scope["path"])
        api = _MESSAGES if name.startswith("messages") else _CHAT
        try:
            if name.startswith("models") and scope["method"] == "GET":
                model = name.removeprefix("models").removeprefix("/")
                entry = openai_api.model_entry(model) if model else openai_api.model_list()
                return await connection.end(200, entry)
            _refuse_path(name, scope)
            body = await connection.body(max_body_bytes)
            if body is None:
                return None
            request, form = api.read(body, template_kwargs or {}, _is_retry(scope))
        except RequestError as error:
            refused(secret, error)
            return await connection.end(error.status, api.error(error))
        work = asyncio.ensure_future(answer(secret, request))
        if not await connection.reply(work, api, form, keep_alive_seconds):
            undelivered(secret, request)

    return application


def _parts(path: str) -> tuple[str, str]:
    """Of /<secret>/v1/chat/completions the secret and the API; clients add one /v1 or none."""
    _, secret, *rest = [*path.split("/"), "", ""]
    return secret, "/".join(part for part in rest if part not in ("", "v1"))


def _refuse_path(name: str, scope: Mapping[str, Any]) -> None:
    if name not in APIS:
        kind = "unknown_url"
        remedy = _REMEDIES.get(name, "use base_url as it was given, and chat/completions")
        raise RequestError(404, kind, f"{scope['method']} /.../{name:.60}: {remedy}")
    if scope["method"] != "POST":
        raise RequestError(405, "unknown_method", f"{scope['method']}: this URL takes only POST")


def _header(scope: Mapping[str, Any], name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _is_retry(scope: Mapping[str, Any]) -> bool:
    """Whether the client says that it sent this request before (SDKs of OpenAI and Anthropic)."""
    return _header(scope, b"x-stainless-retry-count") not in (b"", b"0")


class _Connection:
    """One request and its response."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send

    async def body(self, max_bytes: int) -> bytes | None:
        """The request's body; None if the client hung up.

        Raises:
            RequestError: it is too large. It was read, as clients read nothing while they send.
        """
        body, size, is_whole = bytearray(), 0, False
        while not is_whole and size <= _DISCARDED * max_bytes:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size, is_whole = size + len(part), not message.get("more_body")
            if size <= max_bytes:
                body += part
        if size <= max_bytes:
            return bytes(body)
        raise RequestError(
            413,
            "request_too_large",
            f"the body has {size} bytes or more, and at most {max_bytes} are read; send fewer or "
            "shorter messages",
        )

    async def reply(
        self, work: asyncio.Future[ChatReply], api: Api, form: openai_api.Form, seconds: float
    ) -> bool:
        """Write what `work` returns, or its error, and keep the connection alive until then. False:
        its turn was there, but the client had gone."""
        gone = asyncio.ensure_future(self._hung_up())
        is_started = False
        try:
            while not work.done() and not gone.done():
                await asyncio.wait((work, gone), timeout=seconds, return_when="FIRST_COMPLETED")
                if work.done() or gone.done():
                    break
                if not is_started:
                    await self._start(200, _EVENTS if form.streams else _JSON)
                is_started = True
                await self._write(api.waiting if form.streams else b" ")
            for _ in range(_STEPS_UNTIL_GONE):
                await asyncio.sleep(0)
            if gone.done():
                return not work.done() or work.exception() is not None
            await self._finish(work, api, form, is_started)
            return True
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                with suppress(asyncio.CancelledError, RequestError):
                    await work

    async def _finish(
        self, work: asyncio.Future[ChatReply], api: Api, form: openai_api.Form, is_started: bool
    ) -> None:
        try:
            reply = work.result()
        except RequestError as error:
            problem = error
        except Exception as error:
            _log.exception("a request of an agent failed")
            text = f"a defect of the trainer: {type(error).__name__}: {error}"
            problem = RequestError(500, "defect", text)
        else:
            name = secrets.token_hex(12)
            if not form.streams:
                return await self.end(200, api.body(reply, form, name), is_started)
            if not is_started:
                await self._start(200, _EVENTS)
            events = b"".join(_event(*event) for event in api.events(reply, form, name))
            return await self._write(events, is_last=True)
        if not is_started:
            return await self.end(problem.status, api.error(problem))
        if form.streams:
            return await self._write(_event("error", api.error(problem)), is_last=True)
        # The status was sent; the client asks again and gets the error at once.
        raise ConnectionAbortedError(str(problem))

    async def end(self, status: int, content: Mapping[str, Any], is_started: bool = False) -> None:
        """Send a whole response, or the rest of one."""
        if not is_started:
            await self._start(status, _JSON)
        await self._write(_json(content), is_last=True)

    async def _start(self, status: int, kind: tuple[bytes, bytes]) -> None:
        headers = [kind, (b"cache-control", b"no-store")]
        if status == 413:
            headers.append((b"connection", b"close"))  # or the rest would be read
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, data: bytes, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _hung_up(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _json(content: Any) -> bytes:
    """As ASCII: half an emoji, which a student may sample, has no UTF-8."""
    return json.dumps(content).encode()


def _event(name: str, content: Any) -> bytes:
    data = content.encode() if isinstance(content, str) else _json(content)
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"
