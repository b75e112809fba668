"""A conversation in OpenAI's form, as a row of a source has it: [{"role": ..., "content": ...}].

The turns up to the last one of the user are the prompt; an assistant's turn after it is the golden
solution.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from stable_opd_mcore.errors import DataError

# role and content; an assistant's may have tool_calls, and then its content may be None
Message = Mapping[str, Any]
_ROLES = ("system", "user", "assistant")


def parse_messages(
    value: object, where: str, text: Callable[[Mapping[str, Any], str], str]
) -> tuple[tuple[Message, ...], str | None]:
    """The turns of the prompt, and the golden solution where the last turn is an assistant's.

    Args:
        where: file, row and column, for errors.
        text: checks the content of a message; (message, where) -> its text.

    Raises:
        DataError: no list of messages, another role or key, a system message that is not the first,
            no turn of the user before the end.
    """
    if not isinstance(value, list) or not value:
        found = cast("object", value)
        raise DataError(
            f"{where} holds {type(found).__name__} {found!r:.60}; expected a list of messages, "
            "[{role: user, content: ...}, ...]: fix or remove the row"
        )
    turns: list[Message] = []
    for number, message in enumerate(cast("list[object]", value)):
        place = f"{where}, message {number}"
        if not isinstance(message, Mapping):
            raise DataError(f"{place} is {message!r:.60}; write {{role: ..., content: ...}}")
        # Tables of several conversations write keys that a message lacks as null.
        given = {str(k): v for k, v in cast("Any", message).items() if v not in (None, [], {})}
        if {"from", "value"} <= given.keys():
            raise DataError(
                f"{place} is in ShareGPT's form, with from and value; rename them to role and "
                "content, human to user, and gpt to assistant"
            )
        if more := given.keys() - {"role", "content"}:
            raise DataError(
                f"{place} has {', '.join(sorted(more))}; only role and content are read, and tool "
                "calls are not trained on: remove the key or the row"
            )
        role = given.get("role")
        if role not in _ROLES or (role == "system" and number):
            raise DataError(
                f"{place}: role {role!r:.60}; write user or assistant, or system in the first"
            )
        turns.append({"role": str(role), "content": text(given, place)})
    solution = turns.pop()["content"] if turns[-1]["role"] == "assistant" else None
    if not turns or turns[-1]["role"] != "user":
        raise DataError(
            f"{where}: no user turn to answer; expected one at the end, or before the last turn "
            "of the assistant: add it or remove the row"
        )
    return tuple(turns), solution
