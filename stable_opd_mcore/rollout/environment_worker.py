"""What a process of an environment does: it holds the user's generators, one an episode, and asks
them for answers: one after another, or, of asynchronous generators, all at once in one event loop.

Imports only the standard library and the user's file, and no part of a distributed run. What the
user's code gives leaves this process as JSON of bounded size, never pickled. Not here: time limits,
replays, and which process has which episode (environments.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Self, cast

from stable_opd_mcore.data.messages import split_parts
from stable_opd_mcore.host.user_code import (
    InvalidValueError,
    UserFunction,
    as_number,
    plain_text,
)
from stable_opd_mcore.host.worker_processes import start_user_code
from stable_opd_mcore.serving.channel import receive_message

if TYPE_CHECKING:
    from io import TextIOWrapper

    from stable_opd_mcore.records import GradingFailure

MAX_ANSWER_BYTES = 32 * 2**20  # JSON writes a character in up to 12
READY = -1  # the number of the answer to the first message
OUT_OF_MEMORY = 3  # exit code
_CLOSING_SECONDS = 5
_ROLES = ("user", "tool")
_ROLES_OF_A_CONTEXT = ("system", "user", "assistant", "tool")  # a prompt, or a restart
_MORE_KEYS = {"tool": {"name", "tool_call_id"}, "assistant": {"tool_calls"}}
_METRIC = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_EXPECTED = (
    "a text (a message of the user), a list of messages "
    '[{"role": "user" or "tool", "content": text}], {"restart": messages}, or, first, None or '
    '{"messages": messages, "tools": schemas}'
)
_Generator = Generator[Any, "Said | None", Any] | AsyncGenerator[Any, "Said | None"]


@dataclass(frozen=True)
class Answer:
    """What an environment answers to the opening of an episode, or to a turn of the student."""

    # What the student reads next, of OpenAI's form; to an opening: in place of the row's own
    # prompt. None: the row's prompt stands, or nothing follows.
    observed: Sequence[Mapping[str, Any]] | None = None
    restarts: bool = False  # `observed` is a whole new context, not the continuation of the old one
    # Schemas of the tools that the prompt or new context names; None: those that there were
    tools: Sequence[Mapping[str, Any]] | None = None
    reward: float | None = None  # of an episode that is over; with a failure 0
    metrics: Mapping[str, float] = field(default_factory=dict)  # returned with the reward
    feedback: str | None = None  # returned with the reward, for the teacher
    failure: GradingFailure | None = None
    reason: str = ""  # of the failure, for people

    @property
    def is_last(self) -> bool:
        """Whether the episode is over."""
        return self.reward is not None

    def encoded(self) -> bytes:
        """As JSON, which the trainer reads and compares with that of a replay."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, content: bytes) -> Self:
        fields: dict[str, Any] = json.loads(content)
        observed = fields.pop("observed")
        return cls(None if observed is None else tuple(observed), **fields)


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
                    is_last = _is_return(yielded)
                    answer = last_answer(yielded) if is_last else _answer_of(yielded, said is None)
                else:
                    answer = _answer_of(generator.send(said), said is None)
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
                f"the environment's function returned {_shown(given)}; expected a generator: "
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
    if code < 0:
        return f"it ended its process, by signal {-code} ({signal.strsignal(-code)})"
    return f"it ended its process, with exit code {code}"


def last_answer(returned: object) -> Answer:
    """What an episode returned: its reward, and with it a text, metrics, or both in any order."""
    parts = cast("Sequence[object]", returned if isinstance(returned, tuple | list) else [returned])
    reward = as_number(parts[0]) if parts else None
    texts = [part for part in parts[1:] if isinstance(part, str)]
    tables = [part for part in parts[1:] if isinstance(part, Mapping)]
    known = len(texts) <= 1 and len(tables) <= 1 and len(texts) + len(tables) == len(parts) - 1
    if reward is None or not known:
        raise InvalidValueError(
            f"the episode returned {_shown(returned)}; expected its reward, a finite number, or "
            "(reward, text), (reward, {name: number}) or all three: end it with `return reward`, "
            "or in an async def, where Python takes no `return` of a value, with `yield reward`"
        )
    metrics: dict[str, float] = {}
    for name, value in cast("Mapping[Any, object]", tables[0] if tables else {}).items():
        number = as_number(value)
        if number is None or not (isinstance(name, str) and _METRIC.fullmatch(name)):
            raise InvalidValueError(
                f"the episode returned the metric {_shown(name)}: {_shown(value)}; expected a name "
                "of letters, digits, `_`, `-` and `.`, and a finite number"
            )
        metrics[name] = number
    feedback = plain_text(texts[0]) if texts else None
    return Answer(reward=reward, metrics=metrics, feedback=feedback)


def _is_return(yielded: object) -> bool:
    """Whether an asynchronous generator, which cannot return a value, yields what others return."""
    parts = cast("Sequence[object]", yielded if isinstance(yielded, tuple | list) else [yielded])
    return bool(parts) and as_number(parts[0]) is not None


def _answer_of(yielded: object, is_first: bool) -> Answer:
    """What an episode yielded."""
    if yielded is None and is_first:
        return Answer()
    given, tools, restarts = yielded, None, False
    if isinstance(yielded, Mapping):
        parts = cast("Mapping[Any, object]", yielded)
        restarts = "restart" in parts
        key = "restart" if restarts else "messages"
        if key in parts and parts.keys() <= {key, "tools"} and (restarts or is_first):
            given, tools = parts[key], _tools(parts.get("tools"))
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list | tuple):
        raise InvalidValueError(f"the episode yielded {_shown(yielded)}; expected {_EXPECTED}")
    if not given:
        raise InvalidValueError("the episode yielded no messages; expected at least one")
    roles = _ROLES_OF_A_CONTEXT if restarts or is_first else _ROLES
    messages = [_message(each, roles) for each in cast("Sequence[object]", given)]
    if any(each["role"] == "system" for each in messages[1:]):
        raise InvalidValueError("the episode yielded a system message after another; put it first")
    size = len(json.dumps(messages)) + len(json.dumps(tools))
    if size > MAX_ANSWER_BYTES:
        raise InvalidValueError(
            f"the episode yielded {len(messages)} messages with {size} characters of JSON at once; "
            f"expected at most {MAX_ANSWER_BYTES}"
        )
    return Answer(messages, restarts, tools)


def _tools(given: object) -> list[dict[str, Any]] | None:
    if given is None:
        return None
    tools = cast("Sequence[object]", given if isinstance(given, list | tuple) else [None])
    try:
        return [dict(json.loads(json.dumps(cast("Any", tool)))) for tool in tools]
    except (TypeError, ValueError) as error:
        raise InvalidValueError(
            f"the episode yielded the tools {_shown(given)}; expected a list of schemas in "
            "OpenAI's form"
        ) from error


def _message(given: object, roles: Sequence[str]) -> dict[str, Any]:
    message = cast("Mapping[Any, Any]", given if isinstance(given, Mapping) else {})
    role, content = message.get("role"), message.get("content")
    more = _MORE_KEYS.get(role, set()) if isinstance(role, str) else set[str]()
    if isinstance(content, list | tuple):
        text, thoughts, others = split_parts(cast("Sequence[object]", content))
        content = None if thoughts or others else text
    calls = message.get("tool_calls")
    if content is None and calls:
        content = ""
    if not message.keys() <= {"role", "content"} | more or not isinstance(content, str):
        raise InvalidValueError(
            f"the episode yielded the message {_shown(given)}; expected "
            '{"role": ..., "content": text or parts of text}, in which a tool message may have '
            "name and tool_call_id, and an assistant's tool_calls"
        )
    if role not in roles:
        raise InvalidValueError(
            f"the episode yielded a message with the role {_shown(role)}; expected "
            f"{' or '.join(roles)}"
        )
    found: dict[str, Any] = {"role": str(role), "content": plain_text(content)}
    if calls and not content:
        found["content"] = None  # templates ask whether there is a text
    found |= {k: plain_text(str(message[k])) for k in ("name", "tool_call_id") if k in message}
    if calls:
        try:
            found["tool_calls"] = [_call(json.loads(json.dumps(call))) for call in calls]
        except (TypeError, ValueError, LookupError) as error:
            raise InvalidValueError(
                f"the episode yielded the tool_calls {_shown(calls)}; expected OpenAI's form"
            ) from error
    return found


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object, as templates expect; OpenAI writes their JSON."""
    function = call["function"]
    if isinstance(function["arguments"], str):
        function["arguments"] = json.loads(function["arguments"])
    return call


def _shown(value: object) -> str:
    return "None" if value is None else f"{value!r:.100} ({type(value).__name__})"


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
    with suppress(OSError):  # the trainer has ended; reading says so
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
