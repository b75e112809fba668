"""What a process of an environment does: it holds the user's generators, one an episode, and asks
them for answers.

Imports only the standard library and the user's file, and no part of a distributed run. What the
user's code gives leaves this process as JSON of bounded size, never pickled. Not here: time limits,
replays, and which process has which episode (environments.py).
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

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
_Generator = Generator[Any, "Said", Any]


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
    """The user's generators in this process, by the keys that the trainer gave their episodes."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._function = function
        self._file = file
        self._running: dict[Hashable, _Generator] = {}

    def open(self, key: Hashable, row: Mapping[str, Any], seed: int) -> Answer:
        """Begin an episode; its first answer."""
        return self._advance(key, lambda: self._begun(key, row, seed), is_first=True)

    def say(self, key: Hashable, text: str, truncated: bool) -> Answer:
        """Give the student's turn to an episode."""
        return self._advance(key, lambda: self._running[key].send(Said(text, truncated)))

    def close(self, key: Hashable) -> Answer:
        """End an episode, by its `finally`."""
        generator = self._running.pop(key, None)
        with suppress(BaseException):  # whatever the user's `finally` raises, nobody waits for it
            if generator is not None:
                generator.close()
        return Answer()

    def close_all(self) -> None:
        for key in list(self._running):
            self.close(key)

    def _begun(self, key: Hashable, row: Mapping[str, Any], seed: int) -> Any:
        generator: object = self._function(dict(row), seed)
        if not isinstance(generator, Generator):
            raise InvalidValueError(
                f"the environment's function returned {_shown(generator)}; expected a generator: "
                "write `said = yield observation` for each turn of the student"
            )
        self._running[key] = cast("_Generator", generator)
        return next(self._running[key])

    def _advance(self, key: Hashable, go_on: Callable[[], Any], is_first: bool = False) -> Answer:
        try:
            try:
                return _answer_of(go_on(), is_first)
            except StopIteration as end:
                return last_answer(end.value)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except InvalidValueError as error:
            failed = Answer(reward=0.0, failure="invalid", reason=str(error))
        except Exception as error:  # the user's code may raise anything
            traceback.print_exc()  # to the log
            failed = Answer(reward=0.0, failure="crash", reason=described(error, self._file))
        except BaseException:
            os._exit(1)
        self.close(key)
        return failed


def described(error: Exception, file: str) -> str:
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
            "(reward, text), (reward, {name: number}) or all three: end it with `return reward`"
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
    this process and its children.

    After twice the time limit of an answer an alarm ends the process, in C code too: the trainer,
    which keeps the limit, must be gone.
    """
    channel = Connection(file)
    function, memory_gib, orphan_seconds, log = cast(
        "tuple[UserFunction, float, float, str]", receive_message(channel)
    )
    loaded = start_user_code({"": function}, memory_gib, log=log)[""]
    cast("TextIOWrapper", sys.stdout).reconfigure(line_buffering=True)
    generators = Generators(loaded, function.path)
    _answer(channel, Answer())  # ready
    while True:
        try:
            kind, *arguments = receive_message(channel)
        except (EOFError, OSError):
            _end(generators)
        signal.setitimer(signal.ITIMER_REAL, orphan_seconds)
        answer = getattr(generators, kind)(*arguments)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(channel, answer)


def _answer(channel: Connection, answer: Answer) -> None:
    with suppress(OSError):  # the trainer has ended; reading says so
        channel.send_bytes(answer.encoded())


def _end(generators: Generators) -> NoReturn:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends the process; the user may have set it
    signal.alarm(_CLOSING_SECONDS)
    generators.close_all()
    os.killpg(0, signal.SIGKILL)
    sys.exit()
