"""What an environment answers, read from what the user's code yields or returns: checked, and as
JSON of bounded size, in which form it leaves the process of that code.

Imports no part of a distributed run, as environment_worker.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

from stable_opd_mcore.data.messages import THOUGHT, read_message
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.user_code import InvalidValueError, as_number, plain_text

if TYPE_CHECKING:
    from stable_opd_mcore.records import GradingFailure

MAX_ANSWER_BYTES = 32 * 2**20  # JSON writes a character in up to 12
_ROLES = ("user", "tool")
_ROLES_OF_A_CONTEXT = ("system", "user", "assistant", "tool")  # a prompt, or a restart
_METRIC = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_EXPECTED = (
    "a text (a message of the user), a list of messages "
    '[{"role": "user" or "tool", "content": text}], {"restart": messages}, or, first, None or '
    '{"messages": messages, "tools": schemas}'
)


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
    reason: str = ""  # why the episode failed, as a text to print

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


def last_answer(returned: object) -> Answer:
    """What an episode returned: its reward, and with it a text, metrics, or both in any order."""
    parts = cast("Sequence[object]", returned if isinstance(returned, tuple | list) else [returned])
    reward = as_number(parts[0]) if parts else None
    texts = [part for part in parts[1:] if isinstance(part, str)]
    tables = [part for part in parts[1:] if isinstance(part, Mapping)]
    known = len(texts) <= 1 and len(tables) <= 1 and len(texts) + len(tables) == len(parts) - 1
    if reward is None or not known:
        raise InvalidValueError(
            f"the episode returned {shown(returned)}; expected its reward, a finite number, or "
            "(reward, text), (reward, {name: number}) or all three: end it with `return reward`, "
            "or in an async def, where Python takes no `return` of a value, with `yield reward`"
        )
    metrics: dict[str, float] = {}
    for name, value in cast("Mapping[Any, object]", tables[0] if tables else {}).items():
        number = as_number(value)
        if number is None or not (isinstance(name, str) and _METRIC.fullmatch(name)):
            raise InvalidValueError(
                f"the episode returned the metric {shown(name)}: {shown(value)}; expected a name "
                "of letters, digits, `_`, `-` and `.`, and a finite number"
            )
        metrics[name] = number
    feedback = plain_text(texts[0]) if texts else None
    return Answer(reward=reward, metrics=metrics, feedback=feedback)


def yielded_answer(yielded: object, is_first: bool) -> Answer:
    """The answer in a value that an episode yielded, checked."""
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
        raise InvalidValueError(f"the episode yielded {shown(yielded)}; expected {_EXPECTED}")
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


def async_answer(yielded: object, is_first: bool) -> Answer:
    """The answer in a value that an asynchronous episode yielded. It cannot return its reward, so
    it yields it, in the forms of `last_answer`."""
    parts = cast("Sequence[object]", yielded if isinstance(yielded, tuple | list) else [yielded])
    if parts and as_number(parts[0]) is not None:
        return last_answer(yielded)
    return yielded_answer(yielded, is_first)


def _tools(given: object) -> list[dict[str, Any]] | None:
    if given is None:
        return None
    tools = cast("Sequence[object]", given if isinstance(given, list | tuple) else [None])
    try:
        return [dict(json.loads(json.dumps(cast("Any", tool)))) for tool in tools]
    except (TypeError, ValueError) as error:
        raise InvalidValueError(
            f"the episode yielded the tools {shown(given)}; expected a list of schemas in "
            "OpenAI's form"
        ) from error


def _message(given: object, roles: Sequence[str]) -> dict[str, Any]:
    try:
        if isinstance(given, Mapping) and not given.keys() & {"content", "tool_calls"}:
            raise ValueError("it has no content")
        ((found,), unread) = read_message(given, "the message")
        if THOUGHT in found or unread:
            raise ValueError(f"{', '.join(sorted(unread)) or THOUGHT} is not read")
        calls = {key: json.loads(json.dumps(found[key])) for key in found if key == "tool_calls"}
    except (DataError, TypeError, ValueError) as error:
        raise InvalidValueError(
            f"the episode yielded the message {shown(given)}; expected "
            '{"role": ..., "content": text or parts of text}, in which a tool message may have '
            f"name and tool_call_id, and an assistant's tool_calls: {error!s:.300}"
        ) from error
    if found["role"] not in roles:
        raise InvalidValueError(
            f"the episode yielded a message with the role {shown(found['role'])}; expected "
            f"{' or '.join(roles)}"
        )
    texts = {k: each and plain_text(each) for k, each in found.items() if k != "tool_calls"}
    return texts | calls


def shown(value: object) -> str:
    """A value of the user's, for a message."""
    return "None" if value is None else f"{value!r:.100} ({type(value).__name__})"
