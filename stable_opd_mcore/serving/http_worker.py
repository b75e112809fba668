"""The process that talks to servers: it sends, receives, checks and decodes on one event loop. It
hands the requests of agents to its parent.

http_process.py starts it and has the other end of its channel. It imports neither torch nor
Megatron, and ends when its parent does, however that ends. It reads one reply of /generate in each
turn of the loop, so a health probe waits for a few of them, not for hundreds.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import queue
import resource
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from tokenizers import Tokenizer

from stable_opd_mcore.data.chat_api import ChatReply, ChatRequest, RequestError
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.serving.channel import receive_message, send_message
from stable_opd_mcore.serving.exchange import Server, ServerFailure, exchange
from stable_opd_mcore.serving.replies import UNUSABLE, content_of, read_completion, read_scores
from stable_opd_mcore.serving.requests import (
    AgentCall,
    Call,
    Completion,
    Generation,
    HungUp,
    Refused,
    Request,
    Scoring,
)

_MAX_CONNECTING = 128  # connections that are being opened
_OTHER_FILES = 64  # files that this process has open, with the connections of calls and probes
_LEAST_FILES = 512
_WATCH_SECONDS = 1.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def max_open_files() -> int:
    """The files that this process may open, as many as its hard limit allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    number = 2**20 if hard == resource.RLIM_INFINITY else hard
    if number < _LEAST_FILES:
        raise UserError(
            f"requests to servers need at least {_LEAST_FILES} open files, one each, and this "
            f"process has a hard limit of {number} (ulimit -Hn): raise it where the job starts "
            "(limits.conf, LimitNOFILE of a service, --ulimit nofile of a container)"
        )
    return number


def _or_end_process(work: Callable[..., object], *arguments: Any) -> None:
    """Do it; an error ends this process, which the parent notices. It would wait for ever for the
    answer to a request that is lost."""
    try:
        work(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


class Worker:
    """Answers each message of the parent by one of its own: (number of the request, result)."""

    def __init__(self, channel: Connection, num_files: int) -> None:
        self._channel = channel
        self._answers: queue.SimpleQueue[tuple[int | None, Any]] = queue.SimpleQueue()
        # the client and the task of each request, by its number
        self._tasks: dict[int, tuple[int, asyncio.Task[Any]]] = {}
        self._closed: set[int] = set()  # clients
        self._connections = asyncio.Semaphore(num_files - _OTHER_FILES)
        self._connecting = asyncio.Semaphore(_MAX_CONNECTING)
        self._reading = asyncio.Lock()
        self._tokenizer: Tokenizer | None = None
        self._call_numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[ChatReply]] = {}  # of agents
        self._listening: set[asyncio.Task[None]] = set()

    async def run(self, parent: int) -> None:
        """Serve the parent until it has ended."""
        loop = asyncio.get_running_loop()
        for work, arguments in ((self._receive, (loop,)), (self._send, ())):
            threading.Thread(target=_or_end_process, args=(work, *arguments), daemon=True).start()
        self._answers.put((None, None))  # ready
        while os.getppid() == parent:  # a fork of the parent may hold its end of the channel
            await asyncio.sleep(_WATCH_SECONDS)
        os._exit(0)

    # ---- in threads of their own: the channel blocks

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                kind, *arguments = receive_message(self._channel)
            except (EOFError, OSError):
                os._exit(0)  # the parent has ended
            loop.call_soon_threadsafe(_or_end_process, getattr(self, kind), *arguments)

    def _send(self) -> None:
        while True:
            answer = self._answers.get()
            try:
                send_message(self._channel, answer)
            except OSError:
                os._exit(0)

    # ---- messages of the parent, on the loop

    def send(
        self,
        number: int,
        client: int,
        server: Server,
        request: Request[Any],
        timeout_seconds: float,
        delay_seconds: float,
    ) -> None:
        """Fulfil a request after a delay."""
        work = self._fulfil(server, request, timeout_seconds, delay_seconds)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[number] = client, task
        task.add_done_callback(partial(_or_end_process, self._answer, number, server.url))
        if client in self._closed:
            task.cancel()

    def cancel(self, number: int) -> None:
        """Nobody waits for this request any more."""
        if number in self._tasks:
            self._tasks[number][1].cancel()

    def close(self, client: int) -> None:
        """Fail the client's requests, and those that come later, as unreachable."""
        self._closed.add(client)
        for owner, task in self._tasks.values():
            if owner == client:
                task.cancel()

    def use_tokenizer(self, content: str) -> None:
        """Decode the responses that end from now on by this tokenizer.json."""
        self._tokenizer = Tokenizer.from_str(content)

    def listen(
        self, number: int, address: str, port: int, template_kwargs: Mapping[str, Any]
    ) -> None:
        """Take requests of agents at an address and a port, 0 for any, which is the answer."""
        # Only a run with agents needs it.
        from stable_opd_mcore.serving import endpoint

        try:
            listening = endpoint.listen(address, port)
        except UserError as error:
            self._answers.put((number, error))
            return
        application = endpoint.app(self._ask, self._undelivered, self._refused, template_kwargs)
        work = endpoint.serve(application, listening)
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(partial(_or_end_process, asyncio.Task[None].result))
        self._listening.add(task)
        self._answers.put((number, listening.getsockname()[1]))

    def reply(self, number: int, result: ChatReply | Exception) -> None:
        """Answer the call of an agent."""
        waiting = self._calls.get(number)
        if waiting is None or waiting.done():
            return
        if isinstance(result, Exception):
            waiting.set_exception(result)
        else:
            waiting.set_result(result)

    # ---- one request

    async def _ask(self, secret: str, request: ChatRequest) -> ChatReply:
        """The parent's reply to an agent."""
        call = AgentCall(next(self._call_numbers), secret, request)
        waiting = self._calls[call.number] = asyncio.get_running_loop().create_future()
        self._answers.put((None, call))
        try:
            return await waiting
        except asyncio.CancelledError:
            self._answers.put((None, HungUp(call)))
            raise
        finally:
            del self._calls[call.number]

    def _undelivered(self, secret: str, request: ChatRequest) -> None:
        self._answers.put((None, HungUp(AgentCall(next(self._call_numbers), secret, request))))

    def _refused(self, secret: str, error: RequestError) -> None:
        self._answers.put((None, Refused(secret, error)))

    def _answer(self, number: int, url: str, task: asyncio.Task[Any]) -> None:
        del self._tasks[number]
        if task.cancelled():
            result = ServerFailure(url, "unreachable", "the client is closed")
        elif (error := task.exception()) is None:
            result = task.result()
        elif isinstance(error, ServerFailure | UserError):
            result = error.with_traceback(None)
            result.__cause__ = result.__context__ = None
        else:  # a defect of this project
            text = "".join(traceback.format_exception(error))
            result = RuntimeError(f"in the process that talks to servers:\n{text}")
        self._answers.put((number, result))

    async def _fulfil(
        self, server: Server, request: Request[Any], timeout_seconds: float, delay_seconds: float
    ) -> Any:
        await asyncio.sleep(delay_seconds)
        if isinstance(request, Call):  # health probes do not queue behind responses
            reply = await exchange(server, request, timeout_seconds)
            return content_of(server.url, request.path, *reply)
        async with self._connections:
            reply = await exchange(server, request, timeout_seconds, self._connecting)
        async with self._reading:
            await asyncio.sleep(0)  # whoever waits for the loop has a turn now
            content = content_of(server.url, request.path, *reply)
            try:
                if isinstance(request, Scoring):
                    return read_scores(content, request)
                assert isinstance(request, Generation)
                return self._with_text(read_completion(content, request), request)
            except UNUSABLE as error:
                detail = f"{type(error).__name__}: {error}"
                raise ServerFailure(server.url, "garbage", detail, transient=True) from error

    def _with_text(self, completion: Completion, request: Generation) -> Completion:
        if self._tokenizer is None or completion.finish_reason == Ending.OPEN:
            return completion
        num_prompt_tokens = len(request.token_ids) - request.num_sampled
        begun = map(int, request.token_ids[num_prompt_tokens:])
        ids = [*begun, *completion.token_ids.tolist()]
        if completion.finish_reason == Ending.STOP:
            ids.pop()
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return replace(completion, text=text)


def main(file: int) -> None:
    for name in _IGNORED:  # they are for the trainer, whose end ends this process
        signal.signal(name, signal.SIG_IGN)
    gc.set_threshold(200_000)  # a reply has that many lists, and no cycles
    channel = Connection(file)
    try:
        num_files = max_open_files()
    except UserError as error:
        send_message(channel, (None, error))
        return
    asyncio.run(Worker(channel, num_files).run(os.getppid()))
