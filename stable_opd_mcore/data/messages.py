"""One message of a row or of an agent's request, in the forms in which people have it.

Read into OpenAI's present form: ShareGPT's {from, value}, roles and keys by other names, OpenAI's
older `function_call`, blocks of Anthropic, parts of Gemini, calls of LangChain, channels of
gpt-oss. Not here: which messages may follow each other (conversations.py), and what an API has next
to messages (request_parts.py).
"""

import ast
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from stable_opd_mcore.errors import DataError

# role and content; an assistant's may have THOUGHT, and tool_calls: then its content may be None
Message = Mapping[str, Any]
THOUGHT = "reasoning_content"  # the key of a thought here, whichever of these it had
THOUGHT_KEYS = (THOUGHT, "reasoning", "thinking", "thoughts")
ROLES = ("system", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "refusal", None)
_THOUGHT_PARTS = ("thinking", "reasoning")
_CONTENT = ("content", "value", "text", "parts")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_CALL = "function_call"  # OpenAI's older key of a call, and ShareGPT's role of one
_OTHER_ROLES = {
    **dict.fromkeys(("human", "input", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "ai", "output", _CALL), "assistant"),
    **dict.fromkeys(("ipython", "observation", "tool_response", "tool_result", "function"), "tool"),
    **{"function_response": "tool", "developer": "system"},
}
_OTHER_KEYS = {  # the first that a message has counts
    "role": ("from", "type"),
    "content": _CONTENT[1:],
    "name": ("tool_name",),
}
_UNREAD = {"type", "index"}  # of messages and calls: they say nothing


class OtherContent(DataError):
    """Content that is not text, such as an image."""


@dataclass
class Parts:
    """A content in parts."""

    text: str = ""
    thoughts: list[str] = field(default_factory=list[str])
    calls: list[Any] = field(default_factory=list[Any])  # Anthropic's
    replies: list[Any] = field(default_factory=list[Any])  # Anthropic's
    others: list[Any] = field(default_factory=list[Any])  # such as images


def with_system(messages: Sequence[Message], system: str | None) -> Sequence[Message]:
    """The messages with this text as the system message, unless it is None or they have one."""
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def read_message(value: object, place: str) -> tuple[list[dict[str, Any]], set[str]]:
    """Read one message into OpenAI's form, without changing its text. Returns a list, because each
    tool reply in a message becomes a message, and the keys that were not read.

    Raises:
        DataError: no message, another role, content that is not text, calls that cannot be read.
    """
    if not isinstance(value, Mapping):
        raise DataError(f"{place} is {value!r:.60}; write {{role: ..., content: ...}}")
    # Tables of several conversations write keys that a message lacks as null; servers, as "".
    items = cast("Mapping[Any, Any]", value).items()
    present = {
        str(k): v for k, v in items if v not in (None, [], {}, "") or (k in _CONTENT and v == "")
    }
    given = _in_newer_form(present, place)
    role, parts = given.pop("role"), _parts(given.pop("content", None), place)
    unread: set[str] = set()
    message: dict[str, Any] = {"role": role, "content": parts.text}
    if role == "tool":
        own = [key for key in ("tool_call_id", "name") if key in given]
        message |= {key: str(given.pop(key)) for key in own}
    elif role == "assistant":
        if given.pop("channel", None) == "analysis":
            parts.thoughts, message["content"] = [parts.text], ""
        recipient = str(given.pop("recipient", ""))
        if recipient.startswith("functions."):
            call = {"name": recipient.removeprefix("functions."), "arguments": parts.text}
            parts.calls, message["content"] = [call], ""
        thoughts = ["\n".join(filter(None, (text.strip() for text in parts.thoughts)))]
        thoughts += [given.pop(key) for key in THOUGHT_KEYS if key in given]
        message |= _thought(thoughts, place)
        calls = from_text(given.pop("tool_calls", []))
        calls = cast("list[Any]", calls if isinstance(calls, list) else [calls])
        if calls := [*parts.calls, *calls]:
            message["tool_calls"] = [_call(each, place, unread) for each in calls]
            message["content"] = message["content"] if parts.text.strip() else None
    unread |= given.keys() - {"type"}
    replies = [_reply(each, place) for each in parts.replies]
    return ([*replies, message] if parts.text or not replies else replies), unread


def _in_newer_form(given: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A message with OpenAI's present names of keys and roles, and its calls in `tool_calls`."""
    newer = dict(given)
    for key, others in _OTHER_KEYS.items():
        other = next((each for each in others if each in newer), None)
        if other is not None and key not in newer:
            newer[key] = newer.pop(other)
    role = str(newer.get("role")).lower()
    if role == _CALL:
        newer = {**newer, _CALL: newer.get("content"), "content": None}
    newer["role"] = _OTHER_ROLES.get(role, role)
    if newer["role"] not in ROLES:
        raise DataError(
            f"{place}: role {given.get('role')!r:.60}; expected one of {', '.join(ROLES)}: write "
            "one of these"
        )
    if _CALL in newer and "tool_calls" not in newer:
        newer["tool_calls"] = newer.pop(_CALL)
    return newer


def _parts(content: object, place: str) -> Parts:
    """The content in its parts, all of them known."""
    if isinstance(content, bool):
        raise DataError(f"{place}: content holds bool, not text; write it as one text")
    if isinstance(content, str | int | float | None):
        return Parts("" if content is None else str(content))
    parts = split_parts(cast("list[object]", content if isinstance(content, list) else [content]))
    if parts.others:
        part = parts.others[0]
        remedy = "write it as one text"
        if isinstance(part, Mapping) and any("unction" in str(key) for key in cast("Any", part)):
            remedy = "write a call as tool_calls of the message, and its reply as a message of tool"
        raise OtherContent(
            f"{place}: content has a part {part!r:.60}; only parts of text are read, "
            f"{{type: text, text: ...}}, and no images, audio or files: {remedy}"
        )
    return parts


def split_parts(content: Sequence[object]) -> Parts:
    """A content in parts, in OpenAI's, Anthropic's or Gemini's form, or as Mistral writes thoughts.
    Its parts of text become one text."""
    found = Parts()
    for part in content:
        fields = cast("Mapping[str, Any]", part if isinstance(part, Mapping) else {})
        kind = fields.get("type")
        own = (fields.get(key) for key in (str(kind), "text", "summary"))
        text = next((each for each in own if each is not None), None)
        if isinstance(part, str):
            found.text += part
        elif kind in _TEXT_PARTS and isinstance(text, str):
            found.text += text
        elif kind in _THOUGHT_PARTS and isinstance(text, str | list):
            within = split_parts([text] if isinstance(text, str) else cast("list[Any]", text))
            found.thoughts.append(within.text)
            found.others += [*within.thoughts, *within.others]
        elif kind == "tool_use":
            found.calls.append(fields)
        elif kind == "tool_result":
            found.replies.append(fields)
        elif kind != "redacted_thinking":  # nobody can read it
            found.others.append(cast("object", part))
    return found


def _thought(given: Sequence[object], place: str) -> dict[str, str]:
    """A message's thought under the key THOUGHT; {} if all given ones are empty."""
    texts: list[str] = []
    for each in given:
        if not isinstance(each, str):
            raise DataError(
                f"{place}: its thoughts are {type(each).__name__} {each!r:.60}, not text; write "
                "them as one text, or remove the key or the row"
            )
        if each.strip() and each.strip() not in texts:
            texts.append(each.strip())
    if len(texts) > 1:
        raise DataError(
            f"{place} has two different thoughts, {texts[0]!r:.40} and {texts[1]!r:.40}; keep one "
            f"of {', '.join(THOUGHT_KEYS)}"
        )
    return {THOUGHT: texts[0]} if texts else {}


def _reply(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    asked = block.get("tool_use_id")
    call_id = {} if asked is None else {"tool_call_id": str(asked)}
    return {"role": "tool", **call_id, "content": _parts(block.get("content"), place).text}


def _call(given: Any, place: str, unread: set[str]) -> dict[str, Any]:
    """A tool call in OpenAI's form, but with its arguments as an object, which templates expect.
    It may lack the frame {function: ...}."""
    frame = cast("Mapping[str, Any]", given if isinstance(given, Mapping) else {})
    function = cast("Mapping[str, Any]", frame.get("function", frame))
    name: Any = None
    arguments: Any = None
    with suppress(AttributeError, RecursionError):
        name = function.get("name")
        key = next((k for k in _ARGUMENTS if function.get(k) not in (None, "", [])), "")
        arguments = function.get(key, {})
        for _ in range(2):  # some servers write the text of a text
            arguments = from_text(arguments)
        own = {"function", "id", "name", key, *_UNREAD}
        more = {**frame, **function}
        unread |= {f"tool_calls.{k}" for k in more.keys() - own if more[k]}
    arguments = {} if arguments == "null" else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise DataError(
            f"{place}: tool call {given!r:.80}; write {{function: {{name: ..., arguments: ...}}}}, "
            "the arguments as an object or its JSON text, which is not nested too deep"
        )
    call_id = next((each["id"] for each in (frame, function) if each.get("id")), None)
    return {
        **({} if call_id is None else {"id": str(call_id)}),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def from_text(value: object) -> object:
    """What a text of a list, an object or another text says in JSON or Python; any other value as
    it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{", '"')):
        return value
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(value.strip())
    return value


def without_nulls(value: Any) -> Any:
    """An object without its keys that are null, at every depth; lists keep theirs."""
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {key: without_nulls(each) for key, each in items if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in cast("list[Any]", value)]
    return value
