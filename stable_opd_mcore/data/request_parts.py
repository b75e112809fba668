"""The parts of an agent's request: messages with text and calls, tools, numbers; each is checked.

What is wrong with a part is a RequestError with a sentence, which the agent's client shows. Not
here: which settings an API has (openai_api.py).
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from stable_opd_mcore.data.chat_api import RequestError, canonical_json
from stable_opd_mcore.data.messages import THOUGHT, THOUGHT_KEYS, Message, name_and_arguments
from stable_opd_mcore.data.tool_schemas import Tool, parse_tools

Object = Mapping[str, Any]
T = TypeVar("T")
_TEXT_PARTS = ("text", "input_text", "output_text")
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_KEYS = {"assistant": {"tool_calls", *THOUGHT_KEYS}, "tool": {"tool_call_id", "name"}}


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
        found = parse_tools(fields) if kind in ("function", None) else ()
        if len(found) != 1 or not found[0]["function"]["name"]:
            raise refused(
                f"tools[{place}]={given!s:.60}: expected {{type: function, function: {{name: ..., "
                "parameters: ...}}; no tool runs here, so give each as a function that you run"
            )
        function = dict(found[0]["function"])
        if function.pop("strict", False):  # it would constrain what is sampled
            ignored.add("tools.strict")
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
    ignored: set[str] = set()
    given = cast("list[Any]", value)
    found = [_message(each, f"messages[{n}]", ignored) for n, each in enumerate(given)]
    return tuple(found), ignored


def _message(value: Any, place: str, ignored: set[str]) -> Message:
    if not isinstance(value, dict):
        raise refused(f"{place}={value!s:.60}: expected {{role: ..., content: ...}}")
    given = {k: v for k, v in cast("Object", value).items() if v not in (None, [], {}, "")}
    role = _ROLES.get(str(given.get("role")))
    if role is None or "function_call" in given:
        raise refused(
            f"{place}: role {given.get('role')!s:.60}{' with function_call' if role else ''}; "
            f"expected one of {', '.join(_ROLES)}, with tool_calls for calls and role tool for "
            "their results"
        )
    content, thoughts = read_parts(given.get("content", ""), f"{place}.content")
    message: dict[str, Any] = {"role": role, "content": content}
    own = _KEYS.get(role, set[str]())
    ignored |= {f"messages.{key}" for key in given.keys() - own - {"role", "content"}}
    if role == "tool":
        message |= {key: str(given[key]) for key in own if key in given}
    if role != "assistant":
        return message
    thoughts += [str(given[key]) for key in THOUGHT_KEYS if key in given]
    if thoughts := [text.strip() for text in thoughts if text.strip()]:
        message[THOUGHT] = thoughts[0]
    if "tool_calls" in given:
        message["tool_calls"] = _calls(given["tool_calls"], f"{place}.tool_calls")
        message["content"] = content if content.strip() else None  # templates ask for None
    return message


def read_parts(content: Any, place: str) -> tuple[str, list[str]]:
    """The text of a content, and the thoughts in it."""
    if isinstance(content, str):
        return content, []
    texts: list[str] = []
    thoughts: list[str] = []
    for part in cast("list[Any]", content if isinstance(content, list) else [content]):
        fields = cast("Object", part if isinstance(part, dict) else {})
        kind = fields.get("type")
        if kind in _TEXT_PARTS and isinstance(fields.get("text"), str):
            texts.append(fields["text"])
        elif kind in ("refusal", "thinking") and isinstance(fields.get(str(kind)), str):
            (texts if kind == "refusal" else thoughts).append(fields[str(kind)])
        else:
            raise refused(
                f"{place} has a part {kind or part!s:.60}: the student reads only text; send "
                "parts {type: text, text: ...}, or one text, and no images, audio or files",
                "unsupported_content",
            )
    return "".join(texts), thoughts


def _calls(value: Any, place: str) -> list[Mapping[str, Any]]:
    """Calls in the history, with their arguments as objects."""
    calls: list[Mapping[str, Any]] = []
    for given in cast("list[Any]", value if isinstance(value, list) else [value]):
        read = name_and_arguments(given)
        if read is None:
            raise refused(
                f"{place}: {given!s:.80}; expected {{id: ..., type: function, function: {{name: "
                "..., arguments: ...}}, the arguments as the JSON text of an object"
            )
        name, arguments = read
        canonical_json(arguments)  # nested too deep for a comparison: refused here
        call_id = {"id": str(given["id"])} if given.get("id") else {}
        function: dict[str, Any] = {"name": name, "arguments": arguments}
        calls.append({**call_id, "type": "function", "function": function})
    return calls
