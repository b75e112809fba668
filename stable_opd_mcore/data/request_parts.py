"""The parts of an agent's request: messages (messages.py reads one), tools, numbers, all checked.

What is wrong with a part is a RequestError with a sentence, which the agent's client shows. Not
here: which settings an API has (openai_api.py).
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from stable_opd_mcore.data.chat_api import RequestError, canonical_json
from stable_opd_mcore.data.messages import Message, OtherContent, read_message
from stable_opd_mcore.data.tool_schemas import Tool, parse_tools
from stable_opd_mcore.errors import DataError

Object = Mapping[str, Any]
# Keys of a tool that tell a server how to sample or stream a call. A model does not read them.
_OF_THE_SERVER = ("strict", "defer_loading", "eager_input_streaming", "allowed_callers")
T = TypeVar("T")


def read_body(body: bytes, read: Callable[[Object], T]) -> T:
    """What `read` makes of the JSON object in a body, without its keys that are null.

    Raises:
        RequestError: no such object, or one that is nested too deep; or `read` raises it.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise refused(f"the body is not valid JSON: {error}; send one object") from None
    if not isinstance(value, dict):
        raise refused(f"the body is a JSON {type(value).__name__}; send one object")
    fields = {key: each for key, each in cast("Object", value).items() if each is not None}
    try:
        return read(fields)
    except RecursionError:
        raise refused("the body is nested too deep; send flatter arguments and schemas") from None


def refused(message: str, code: str = "invalid_value") -> RequestError:
    """A request that is wrong in itself; sending it again does not help."""
    return RequestError(400, code, message)


def positive(value: Any, name: str) -> int:
    """A number of tokens."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refused(f"{name}={value!s:.60}: expected a whole number from 1 up")
    return value


def read_stop(value: Any, name: str) -> tuple[str, ...]:
    """The texts that end a turn."""
    given = cast("list[Any]", value if isinstance(value, list) else [value])
    if not all(isinstance(text, str) and text for text in given):
        raise refused(f"{name}={value!s:.60}: expected a text or a list of texts, none empty")
    return tuple(given)


def read_tools(value: Any) -> tuple[tuple[Tool, ...], set[str]]:
    """Tools in OpenAI's form, and the names of what has no effect in them.

    Raises:
        RequestError: another form.
    """
    tools: list[Tool] = []
    ignored: set[str] = set()
    if not isinstance(value, list | None):
        raise refused(f"tools={value!s:.60}: expected a list of functions")
    for place, given in enumerate(cast("list[Any]", value or [])):
        fields = cast("Object", given if isinstance(given, dict) else {})
        kind = fields.get("type")
        found = (
            parse_tools(fields, keeps_nulls=True) if kind in ("function", "custom", None) else ()
        )
        if len(found) != 1 or not found[0]["function"]["name"]:
            raise refused(
                f"tools[{place}]={given!s:.60}: expected {{type: function, function: {{name: ..., "
                "parameters: ...}}; no tool runs here, so give each as a function that you run"
            )
        function = dict(found[0]["function"])
        ignored |= {f"tools.{key}" for key in _OF_THE_SERVER if function.pop(key, False)}
        tools.append({"type": "function", "function": function})
    return tuple(tools), ignored


def read_messages(value: Any) -> tuple[tuple[Message, ...], set[str]]:
    """Messages with text and calls only, and the names of what is not read of them.

    Raises:
        RequestError: no messages, another role, content that is not text, calls that cannot be
            read.
    """
    if not isinstance(value, list) or not value:
        raise refused(f"messages={value!s:.60}: expected a list of at least one message")
    found: list[Message] = []
    ignored: set[str] = set()
    for number, given in enumerate(cast("list[Any]", value)):
        try:
            messages, unread = read_message(given, f"messages[{number}]")
        except OtherContent as error:
            raise refused(str(error), "unsupported_content") from None
        except DataError as error:
            raise refused(str(error)) from None
        for call in (call for each in messages for call in each.get("tool_calls", ())):
            canonical_json(call)  # refuses arguments that are nested too deep
        found += messages
        ignored |= {f"messages.{key}" for key in unread}
    return tuple(found), ignored
