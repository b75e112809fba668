"""A conversation in OpenAI's form, as a row of a source has it: [{"role": ..., "content": ...}].
ShareGPT's form, [{"from": "human", "value": ...}], and roles by other names are read into it.

An assistant's turn at its end is the golden solution, and the turns before it are the prompt. With
`columns.golden: all` every turn of the assistant is golden, and the prompt ends before the first.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from stable_opd_mcore.errors import DataError

# role and content; an assistant's may have THOUGHT, and tool_calls: then its content may be None
Message = Mapping[str, Any]
THOUGHT = "reasoning_content"  # the key of a thought here, whichever of these it had
THOUGHT_KEYS = (THOUGHT, "reasoning", "thinking", "thoughts")
_TEXT_PARTS = ("text", "input_text", "output_text")
_THOUGHT_PARTS = ("thinking", "reasoning")
_CALL_PARTS = ("tool_use", "tool_result")  # Anthropic's
_CONTENT = ("content", "value")
_MAY_BE_EMPTY = ("system", "tool")  # an empty file, a command that prints nothing
_ANYWHERE = (None, "system", "user", "assistant", "tool")
_BEFORE = {  # roles that may stand before one; None: it is the first
    "system": (None,),
    "user": _ANYWHERE,
    "assistant": _ANYWHERE,
    "tool": ("assistant", "tool"),
}
_CALL = "function_call"  # OpenAI's older key of a call, and ShareGPT's role of one
_OTHER_NAMES = {
    **dict.fromkeys(("human", "input"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "ai", "output", _CALL), "assistant"),
    **dict.fromkeys(("ipython", "observation", "tool_response", "tool_result", "function"), "tool"),
    "developer": "system",
}
_MORE_KEYS = {"assistant": {"tool_calls", THOUGHT}, "tool": {"tool_call_id", "name"}}


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
    value = _from_json(value)
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
        if number and number < len(turns) and turns[number - 1]["role"] == "assistant":
            raise DataError(
                f"{where}: messages {number - 1} and {number} are two turns of the assistant in a "
                "row; expected one of the user or of a tool before each that is trained on: join "
                "them, or remove the row"
            )
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
    # Tables of several conversations write keys that a message lacks as null; servers, as "".
    items = cast("Mapping[Any, Any]", message).items()
    present = {str(k): v for k, v in items if v not in (None, [], {}, "") or k in _CONTENT}
    given = _in_newer_form(present)
    role = given.get("role")
    _refuse_place(role, before, place)
    content, thoughts = _parts(given.get("content"), place)
    if role == "assistant":
        thoughts += [given.pop(key) for key in THOUGHT_KEYS if key in given]
    given = {**given, "content": content, **_thought(thoughts, place)}
    known = {"role", "content"} | _MORE_KEYS.get(str(role), set[str]())
    if more := given.keys() - known:
        raise DataError(
            f"{place} has {', '.join(sorted(more))}; of a message of this role, only "
            f"{', '.join(sorted(known))} are read: remove the key or the row"
        )
    if "tool_calls" in given:
        given["tool_calls"] = _calls(given["tool_calls"], place)
    if content is None or (isinstance(content, str) and not content.strip()):
        if "tool_calls" in given:  # templates ask whether it is None
            return {**given, "content": None}
        if role in _MAY_BE_EMPTY:
            return {**given, "content": ""}
    return {**given, "content": text(given, place)}


def _in_newer_form(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's present form. It may be in ShareGPT's, or in OpenAI's older one, where
    a call and its reply have no id."""
    newer = dict(given)
    for key, other in (("role", "from"), ("content", "value")):
        if other in newer and key not in newer:
            newer[key] = newer.pop(other)
    role = newer.get("role")
    if role == _CALL:
        newer = {**newer, _CALL: newer.get("content"), "content": None}
    if isinstance(role, str):
        newer["role"] = _OTHER_NAMES.get(role, role)
    if _CALL in newer and "tool_calls" not in newer:
        calls = _from_json(newer.pop(_CALL))
        calls = cast("list[object]", calls if isinstance(calls, list) else [calls])
        newer["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return newer


def _refuse_place(role: object, before: str | None, place: str) -> None:
    """Raise a DataError for a role that is not known, or may not stand after `before`."""
    if not isinstance(role, str) or role not in _BEFORE:
        raise DataError(
            f"{place}: role {role!r:.60}; expected user, assistant, tool, or system in the first "
            "message: write one of these"
        )
    if before in _BEFORE[role]:
        return
    if role == "system":
        raise DataError(
            f"{place}: role 'system' after another message; expected it only as the first: move it "
            "there, or make it a user message"
        )
    raise DataError(
        f"{place}: role 'tool' and no turn of the assistant before it; add the turn that calls the "
        "tool, or make it a user message"
    )


def _parts(content: object, place: str) -> tuple[object, list[object]]:
    """The content with its parts of text as one text, and the parts that are thoughts."""
    if not isinstance(content, list):
        return content, []
    text, thoughts, others = split_parts(cast("list[object]", content))
    if others:
        part = others[0]
        remedy = "write it as text, or remove the row"
        if isinstance(part, Mapping) and cast("Any", part).get("type") in _CALL_PARTS:
            remedy = "write a call as tool_calls of the message, and its reply as a message of tool"
        raise DataError(
            f"{place}: content has a part {part!r:.60}; only parts of text are read, "
            f"{{type: text, text: ...}}: {remedy}"
        )
    return text, thoughts


def split_parts(content: Sequence[object]) -> tuple[str, list[object], list[object]]:
    """A content in parts, in OpenAI's form or as Mistral writes thoughts: its parts of text as one
    text, its thoughts, and the parts that are neither, such as images."""
    texts: list[str] = []
    thoughts: list[object] = []
    others: list[object] = []
    for part in content:
        fields = cast("Mapping[str, Any]", part if isinstance(part, Mapping) else {})
        text, kind = fields.get("text"), fields.get("type")
        said = (fields.get(key) for key in (*_THOUGHT_PARTS, "text"))
        thought = next((each for each in said if each is not None), None)
        if isinstance(part, str):
            texts.append(part)
        elif kind in _TEXT_PARTS and isinstance(text, str):
            texts.append(text)
        elif kind not in _THOUGHT_PARTS or thought is None:
            others.append(cast("object", part))
        elif isinstance(thought, list):
            within = split_parts(cast("list[object]", thought))
            thoughts.append(within[0])
            others += [*within[1], *within[2]]
        else:
            thoughts.append(thought)
    return "".join(texts), thoughts, others


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


def _calls(value: object, place: str) -> list[Mapping[str, Any]]:
    """Tool calls with their arguments as an object, which templates expect; OpenAI writes JSON.

    Null arguments count as absent: a table has the names of all other calls' arguments as null.
    """
    calls: list[Mapping[str, Any]] = []
    value = _from_json(value)
    for call in cast("list[Any]", value if isinstance(value, list) else [value]):
        try:
            read = name_and_arguments(call)
        except RecursionError:
            read = None
        if read is None:
            raise DataError(
                f"{place}: tool call {call!r:.80}; write {{function: {{name: ..., arguments: "
                "...}}, the arguments as an object or its JSON text"
            )
        framed = call if "function" in call else _framed(call)
        own = {key: each for key, each in framed.items() if each is not None}
        function = {**framed["function"], "arguments": without_nulls(read[1])}
        calls.append({**own, "function": function})
    return calls


def _framed(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call {name, arguments} in OpenAI's frame, where its id and other keys are next to it."""
    function = {key: call[key] for key in ("name", "arguments") if key in call}
    others = {key: each for key, each in call.items() if key not in function}
    return {**others, "function": function}


def name_and_arguments(call: Any) -> tuple[str, dict[str, Any]] | None:
    """The name and the arguments, which may be JSON text, of a call in OpenAI's form or without its
    frame {function: ...}; None: it has another form.

    Raises:
        RecursionError: the JSON text is nested too deep.
    """
    name: Any
    arguments: Any
    try:
        function = call.get("function", call)
        name, arguments = function["name"], function.get("arguments") or {}
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (TypeError, KeyError, AttributeError, ValueError):
        return None
    is_read = isinstance(name, str) and isinstance(arguments, dict)
    return (name, cast("dict[str, Any]", arguments)) if is_read else None


def _from_json(value: object) -> object:
    """What a JSON text of a list or an object says; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def without_nulls(value: Any) -> Any:
    """An object without its keys that are null, at every depth; lists keep theirs."""
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {key: without_nulls(each) for key, each in items if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in cast("list[Any]", value)]
    return value
