"""A conversation in OpenAI's form, as a row of a source has it: [{"role": ..., "content": ...}].

An assistant's turn at its end is the golden solution, and the turns before it are the prompt. With
`columns.golden: all` every turn of the assistant is golden, and the prompt ends before the first.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from stable_opd_mcore.errors import DataError

# role and content; an assistant's may have tool_calls, and then its content may be None
Message = Mapping[str, Any]
_ANYWHERE = (None, "system", "user", "assistant", "tool")
_BEFORE = {  # roles that may stand before one; None: it is the first
    "system": (None,),
    "user": _ANYWHERE,
    "assistant": _ANYWHERE,
    "tool": ("assistant", "tool"),
}
_MORE_KEYS = {"assistant": {"tool_calls"}, "tool": {"tool_call_id", "name"}}


def with_system(messages: Sequence[Message], system: str | None) -> Sequence[Message]:
    """The messages with this text as the system message, unless it is None or they have one."""
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def parse_messages(
    value: object,
    where: str,
    text: Callable[[Mapping[str, Any], str], str],
    golden: Literal["last", "all"] = "last",
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The turns of the prompt, and those from the first golden turn on: the assistant's and the
    messages between them; () if the last turn is not an assistant's.

    Args:
        where: file, row and column, for errors.
        text: checks the content of a message; (message, where) -> its text.
        golden: `columns.golden`.

    Raises:
        DataError: no list of messages, a role, key or tool call that is not of OpenAI's form, a
            system message that is not the first, a golden turn that answers no user and no tool.
    """
    if not isinstance(value, list) or not value:
        found = cast("object", value)
        raise DataError(
            f"{where} holds {type(found).__name__} {found!r:.60}; expected a list of messages, "
            "[{role: user, content: ...}, ...]: fix or remove the row"
        )
    turns: list[Message] = []
    for number, message in enumerate(cast("list[object]", value)):
        before = turns[-1]["role"] if turns else None
        turns.append(_turn(message, f"{where}, message {number}", text, before))
    _refuse_unordered_replies(turns, where)
    answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    ends_with_answer = len(turns) - 1 in answers
    if golden == "last" or not answers:
        answers = [len(turns) - ends_with_answer]  # the golden solution, or what a rollout adds
    elif not ends_with_answer:
        raise DataError(
            f"{where}: the last turn is of the {turns[-1]['role']}; columns.golden=all expects one "
            "of the assistant: add it, remove the turn, or set columns.golden=last"
        )
    for number in answers:
        if not number or turns[number - 1]["role"] not in ("user", "tool"):
            raise DataError(
                f"{where}: no user turn to answer before message {number}; expected one at the "
                "end, or before the last turn of the assistant, before each one with "
                "columns.golden=all: add it or remove the row"
            )
    return tuple(turns[: answers[0]]), tuple(turns[answers[0] :])


def _refuse_unordered_replies(turns: Sequence[Message], where: str) -> None:
    """Raise a DataError for replies of tools in another order than the calls that they answer: most
    chat templates write no ids, so a model would take one result for another's."""
    asked: list[object] = []
    waiting: list[object] = []
    for number, turn in enumerate(turns):
        if turn["role"] == "assistant":
            asked = waiting = [call.get("id") for call in turn.get("tool_calls", ())]
        reply = turn.get("tool_call_id")
        if reply is None or reply not in asked:
            continue
        if reply not in waiting:
            raise DataError(
                f"{where}, message {number}: its call {reply!r:.40} has a reply already, or stands "
                "before one that has; expected one reply to each call, in the calls' order: sort "
                "them, or remove the row"
            )
        waiting = waiting[waiting.index(reply) + 1 :]


def _turn(
    message: object, place: str, text: Callable[[Mapping[str, Any], str], str], before: str | None
) -> Message:
    """One message, checked; `before` is the role of the one before it."""
    if not isinstance(message, Mapping):
        raise DataError(f"{place} is {message!r:.60}; write {{role: ..., content: ...}}")
    # Tables of several conversations write keys that a message lacks as null.
    given = {str(k): v for k, v in cast("Any", message).items() if v not in (None, [], {})}
    if {"from", "value"} <= given.keys():
        raise DataError(
            f"{place} is in ShareGPT's form, with from and value; rename them to role and "
            "content, human to user, and gpt to assistant"
        )
    role = given.get("role")
    if not isinstance(role, str) or before not in _BEFORE.get(role, ()):
        raise DataError(
            f"{place}: role {role!r:.60}; write user or assistant, or system in the first message, "
            "or tool after an assistant's"
        )
    known = {"role", "content"} | _MORE_KEYS.get(role, set())
    if more := given.keys() - known:
        raise DataError(
            f"{place} has {', '.join(sorted(more))}; of a message of this role, only "
            f"{', '.join(sorted(known))} are read: remove the key or the row"
        )
    if "tool_calls" in given:
        given["tool_calls"] = _calls(given["tool_calls"], place)
        if given.get("content") in (None, ""):  # templates ask whether it is None
            return {**given, "content": None}
    return {**given, "content": text(given, place)}


def _calls(value: object, place: str) -> list[Mapping[str, Any]]:
    """Tool calls with their arguments as an object, which templates expect; OpenAI writes JSON."""
    calls: list[Mapping[str, Any]] = []
    for call in cast("list[Any]", value if isinstance(value, list) else [value]):
        try:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (TypeError, KeyError, ValueError, RecursionError):
            name = arguments = None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise DataError(
                f"{place}: tool call {call!r:.80}; write {{function: {{name: ..., arguments: "
                "...}}, the arguments as an object or its JSON text"
            )
        calls.append(
            {**call, "function": {**call["function"], "arguments": cast("Any", arguments)}}
        )
    return calls
