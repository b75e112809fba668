"""What a process of an environment does: it holds the user's generators, one an episode, and asks
them for answers: one after another, or, of asynchronous generators, all at once in one event loop.

Imports only the standard library and the user's file, and no part of a distributed run. What the
user's code gives leaves this process as JSON of bounded size, never pickled. Not here: time limits,
replays, and which process has which episode (environments.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, cast

from stable_opd_mcore.host.user_code import InvalidValueError, UserFunction
from stable_opd_mcore.host.worker_processes import LOADING_SECONDS, start_user_code
from stable_opd_mcore.rollout.environment_answers import (
    Answer,
    async_answer,
    last_answer,
    shown,
    yielded_answer,
)
from stable_opd_mcore.serving.channel import receive_message

if TYPE_CHECKING:
    from io import TextIOWrapper

READY = -1  # the number of the answer to the first message
OUT_OF_MEMORY = 3  # exit code
_CLOSING_SECONDS = 5
_Generator = Generator[Any, "Said | None", Any] | AsyncGenerator[Any, "Said | None"]


class Said(str):
    """A turn of the student, as the environment gets it: its text without the stop token."""

    truncated: bool  # the turn ended at its budget of tokens, not with a stop token

    def __new__(cls, text: str, truncated: bool) -> Said:
        said = super().__new__(cls, text)
        said.truncated = truncated
        return said


class Generators:
    """The user's generators in this process, by the numbers that the trainer gave their episodes.

    Its methods wait only for asynchronous generators, which need an event loop; see `_at_once`.
    """

    def __init__(
        self, load: Callable[..., Any], function: UserFunction, timeout_seconds: float
    ) -> None:
        self._function, self._is_async, self._file = load, function.is_async, function.path
        self._timeout_seconds = timeout_seconds  # of an asynchronous answer
        self._running: dict[int, _Generator] = {}

    async def open(self, number: int, row: Mapping[str, Any], seed: int) -> Answer:
        """Begin an episode; its first answer."""
        return await self._advance(number, None, lambda: self._function(dict(row), seed))

    async def say(self, number: int, text: str, truncated: bool) -> Answer:
        """Give the student's turn to an episode."""
        return await self._advance(number, Said(text, truncated))

    async def close(self, number: int) -> Answer:
        """End an episode, by its `finally`."""
        generator = self._running.pop(number, None)
        with suppress(BaseException):  # whatever the user's `finally` raises, nobody waits for it
            if isinstance(generator, AsyncGenerator):
                async with asyncio.timeout(self._timeout_seconds):
                    await generator.aclose()
            elif generator is not None:
                generator.close()
        return Answer()

    async def close_all(self) -> None:
        for number in list(self._running):
            await self.close(number)

    async def _advance(
        self, number: int, said: Said | None, begin: Callable[[], object] | None = None
    ) -> Answer:
        try:
            if begin is not None:
                self._running[number] = self._generator(begin())
            generator = self._running[number]
            try:
                if isinstance(generator, AsyncGenerator):
                    yielded = await self._yielded(generator, said)
                    answer = async_answer(yielded, said is None)
                else:
                    answer = yielded_answer(generator.send(said), said is None)
            except (StopIteration, StopAsyncIteration) as end:
                answer = last_answer(getattr(end, "value", None))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except InvalidValueError as error:
            answer = Answer(reward=0.0, failure="invalid", reason=str(error))
        except _TooLateError:
            reason = took_too_long(self._timeout_seconds)
            answer = Answer(reward=0.0, failure="timeout", reason=reason)
        except (Exception, asyncio.CancelledError) as error:  # the user's code may raise anything
            traceback.print_exc()  # to the log
            answer = Answer(reward=0.0, failure="crash", reason=described(error, self._file))
        except BaseException:
            os._exit(1)
        if answer.is_last:
            await self.close(number)
        return answer

    def _generator(self, given: object) -> _Generator:
        if not isinstance(given, AsyncGenerator if self._is_async else Generator):
            raise InvalidValueError(
                f"the environment's function returned {shown(given)}; expected a generator: "
                "write `said = yield observation` for each turn of the student"
            )
        return cast("_Generator", given)

    async def _yielded(self, generator: AsyncGenerator[Any, Said | None], said: Said | None) -> Any:
        limit = asyncio.timeout(self._timeout_seconds)
        try:
            async with limit:
                return await generator.asend(said)
        except TimeoutError as error:
            if limit.expired():  # and the user's code has raised none
                raise _TooLateError from error
            raise


class _TooLateError(Exception):
    """An asynchronous answer took longer than the limit."""


def took_too_long(timeout_seconds: float) -> str:
    return f"an answer took longer than environment.timeout_seconds={timeout_seconds:g}"


def described(error: BaseException, file: str) -> str:
    """The error, and the last line of the user's file that led to it."""
    text = f"{type(error).__name__}: {error!s:.300}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return f"{text} ({file}, line {lines[-1]})" if lines else text


def how_it_ended(code: int, memory_gib: float) -> str:
    """Why a process with the user's code has ended, from its exit code as Python gives it."""
    if code == OUT_OF_MEMORY:
        return f"it needed more memory than environment.memory_gib={memory_gib:g}"
    if code == -signal.SIGALRM:
        return f"the import of its file took more than {LOADING_SECONDS} s"
    if code < 0:
        return f"it ended its process, by signal {-code} ({signal.strsignal(-code)})"
    return f"it ended its process, with exit code {code}"


def main(file: int) -> None:
    """Answer the trainer's messages until its end of the channel closes; then end the generators,
    this process and its children. A message is the number of an episode and what to do with it.

    After twice the time limit of an answer an alarm ends the process, in C code too: the trainer,
    which keeps the limit, must be gone.
    """
    channel = Connection(file)
    function, memory_gib, timeout_seconds, log = cast(
        "tuple[UserFunction, float, float, str]", receive_message(channel)
    )
    loaded = start_user_code({"": function}, memory_gib, log=log)[""]
    cast("TextIOWrapper", sys.stdout).reconfigure(line_buffering=True)
    generators = Generators(loaded, function, timeout_seconds)
    send_answer(channel, READY, Answer())
    orphan_seconds = 2 * timeout_seconds + 10
    if function.is_async:
        asyncio.run(_serve(channel, generators, orphan_seconds))
    else:
        with suppress(EOFError, OSError):
            while True:
                message = receive_message(channel)
                signal.setitimer(signal.ITIMER_REAL, orphan_seconds)
                _at_once(_reply(channel, generators, *message))
                signal.setitimer(signal.ITIMER_REAL, 0)
        _limit_the_end()
        _at_once(generators.close_all())
    os.killpg(0, signal.SIGKILL)


async def _serve(channel: Connection, generators: Generators, orphan_seconds: float) -> None:
    """What `main` does with asynchronous generators, whose answers it awaits together."""
    loop, is_over, replies = asyncio.get_running_loop(), asyncio.Event(), set[asyncio.Task[None]]()

    def read() -> None:
        try:
            message = receive_message(channel)
        except (EOFError, OSError):
            loop.remove_reader(channel.fileno())
            is_over.set()
            return
        reply = loop.create_task(_reply(channel, generators, *message))
        replies.add(reply)
        reply.add_done_callback(replies.discard)
        reply.add_done_callback(watch)
        watch()

    def watch(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, orphan_seconds if replies else 0)

    loop.add_reader(channel.fileno(), read)
    await is_over.wait()
    _limit_the_end()
    for reply in replies:
        reply.cancel()
    await asyncio.gather(*replies, return_exceptions=True)
    await generators.close_all()


async def _reply(
    channel: Connection, generators: Generators, number: int, kind: str, *arguments: Any
) -> None:
    answer = await getattr(generators, kind)(number, *arguments)
    with suppress(OSError):  # the trainer has ended: the next read fails, too
        send_answer(channel, number, answer)


def send_answer(channel: Connection, number: int, answer: Answer) -> None:
    """Send the answer to the message with this number. Raises OSError if the trainer has ended."""
    channel.send_bytes(b"%d %s" % (number, answer.encoded()))


def _at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that waits for nothing. No event loop runs meanwhile: the user's code may
    have one of its own."""
    with suppress(StopIteration):
        coroutine.send(None)
        raise AssertionError("it waits")


def _limit_the_end() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends the process; the user may have set it
    signal.alarm(_CLOSING_SECONDS)
