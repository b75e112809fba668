"""Anthropic's messages: a body becomes a ChatRequest, a ChatReply becomes a body or events.

    request, form = read_request(body)
    message(reply, form, name)    # or events(reply, form, name)

Blocks become messages of OpenAI's form: a block tool_result is a message of the role tool, and the
text after it one of the user. What is ignored and what is refused follows openai_api.py.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from stable_opd_mcore.data.chat_api import ChatReply, ChatRequest, RequestError
from stable_opd_mcore.data.messages import THOUGHT, Message
from stable_opd_mcore.data.openai_api import SAMPLING, Form, body_key, model_name, unknown_field
from stable_opd_mcore.data.request_parts import (
    Object,
    positive,
    read_body,
    read_stop,
    read_tools,
    refused,
)

_WITHOUT_EFFECT = ("metadata", "service_tier", "thinking", "context_management", "cache_control")
_READ = ("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences")
_FINISHED = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_ERRORS = {404: "not_found_error", 410: "not_found_error", 413: "request_too_large"}
# Claude Code's first block of the system message has a number that changes with every request.
_ACCOUNTING = "x-anthropic-billing-header"


def read_request(
    body: bytes, _template_kwargs: Object | None = None, is_retry: bool = False
) -> tuple[ChatRequest, Form]:
    """A body of /v1/messages; arguments and errors as in openai_api.py."""
    return read_body(body, lambda fields: _read(fields, is_retry))


def _read(given: Object, is_retry: bool) -> tuple[ChatRequest, Form]:
    fields = {**given}
    ignored = {key for key in fields if key in (*SAMPLING, *_WITHOUT_EFFECT)}
    effort = fields.pop("output_config", {})
    if effort != {}:
        if not isinstance(effort, dict) or set(cast("Object", effort)) != {"effort"}:
            raise refused(
                f"output_config={effort!s:.60}: what is sampled is not constrained; describe the "
                "format in a message",
                "unsupported_parameter",
            )
        ignored.add("output_config.effort")
    for name in sorted(fields.keys() - ignored - {*_READ, "stream"}):
        raise unknown_field(name, fields[name])
    tools, unread = read_tools(_as_functions(fields.get("tools", [])))
    choice = fields.get("tool_choice", {"type": "auto"})
    kind = cast("Object", choice).get("type") if isinstance(choice, dict) else choice
    if kind not in ("auto", "any", "tool", "none"):
        raise refused(f"tool_choice={choice!s:.60}: expected the type auto, any, tool or none")
    request = ChatRequest(
        (*_system(fields.get("system", "")), *_messages(fields.get("messages"))),
        () if kind == "none" else tools,
        positive(fields["max_tokens"], "max_tokens") if "max_tokens" in fields else None,
        read_stop(fields.get("stop_sequences", []), "stop_sequences"),
        is_retry,
        body_key(fields),
        forces_call=kind in ("any", "tool"),
        ignored=tuple(sorted({*ignored, *unread})),
    )
    return request, Form(model_name(fields), fields.get("stream") is True)


def _as_functions(value: Any) -> Any:
    """Tools in OpenAI's form; one of another kind stays, and is refused there."""
    if not isinstance(value, list):
        return value
    tools: list[Any] = []
    for given in cast("list[Any]", value):
        fields = cast("Object", given if isinstance(given, dict) else {})
        if "input_schema" in fields and fields.get("type", "custom") == "custom":
            more = {key: fields[key] for key in ("name", "description", "strict") if key in fields}
            given = {"type": "function", "function": {**more, "parameters": fields["input_schema"]}}
        tools.append(given)
    return tools


def _blocks(content: Any, place: str) -> list[Object]:
    """A content as blocks; a text is one."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    blocks = cast("list[Any]", content if isinstance(content, list) else [content])
    for block in blocks:
        if not isinstance(block, dict):
            raise refused(f"{place} has a block {block!s:.60}; expected {{type: ..., ...}}")
    return cast("list[Object]", blocks)


def _text(block: Object, place: str) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise refused(
            f"{place} has a block {block.get('type')!s:.60}: the student reads only text; send "
            "blocks {type: text, text: ...}, and no images, documents or files",
            "unsupported_content",
        )
    return block["text"]


def _system(content: Any) -> list[Message]:
    texts = [_text(block, "system") for block in _blocks(content, "system")]
    text = "\n".join(each for each in texts if each and not each.startswith(_ACCOUNTING))
    return [{"role": "system", "content": text}] if text else []


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise refused(f"messages={value!s:.60}: expected a list of at least one message")
    found: list[Message] = []
    for number, given in enumerate(cast("list[Any]", value)):
        place = f"messages[{number}]"
        fields = cast("Object", given if isinstance(given, dict) else {})
        role, blocks = fields.get("role"), _blocks(fields.get("content", ""), f"{place}.content")
        if role == "assistant":
            found.append(_assistant(blocks, place))
        elif role == "user":
            found += _user(blocks, place)
        else:
            raise refused(
                f"{place}: role {role!s:.60}; expected user or assistant, and the system message "
                "in the field system"
            )
    return found


def _user(blocks: list[Object], place: str) -> list[Message]:
    """A message of the user for texts in a row, one of a tool for each result."""
    found: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            parts = _blocks(block.get("content", ""), place)
            content = "".join(_text(part, f"{place}, a tool_result,") for part in parts)
            call_id = str(block.get("tool_use_id"))
            found.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif found and found[-1]["role"] == "user":
            found[-1]["content"] += _text(block, place)
        else:
            found.append({"role": "user", "content": _text(block, place)})
    return [*found] or [{"role": "user", "content": ""}]


def _assistant(blocks: list[Object], place: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Mapping[str, Any]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            name, arguments = block.get("name"), block.get("input")
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise refused(f"{place}: {block!s:.80}; expected tool_use with name and input")
            function = {"name": name, "arguments": cast("Object", arguments)}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")).strip())
        elif kind != "redacted_thinking":
            texts.append(_text(block, place))
    content = "".join(texts)
    said: dict[str, Any] = {"role": "assistant", "content": content}
    if thought := "\n".join(each for each in thoughts if each):
        said[THOUGHT] = thought
    if calls:
        said |= {"content": content if content.strip() else None, "tool_calls": calls}
    return said


# ---- replies


def message(reply: ChatReply, form: Form, name: str) -> dict[str, Any]:
    """The body of a reply that is not streamed; `name` is its own."""
    return _frame(form, name) | {
        "content": _content(reply),
        "stop_reason": _FINISHED[reply.finish_reason],
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
    }


def events(reply: ChatReply, form: Form, name: str) -> Iterator[tuple[str, Any]]:
    """The events of a streamed reply, which is finished: each block comes whole."""
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
    empty: Object = {"content": (), "stop_reason": None, "usage": usage}
    yield _event("message_start", message={**_frame(form, name), **empty})
    for place, block in enumerate(_content(reply)):
        begun, deltas = _in_deltas(block)
        yield _event("content_block_start", index=place, content_block=begun)
        for delta in deltas:
            yield _event("content_block_delta", index=place, delta=delta)
        yield _event("content_block_stop", index=place)
    delta = {"stop_reason": _FINISHED[reply.finish_reason], "stop_sequence": None}
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}
    yield _event("message_delta", delta=delta, usage=usage)
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> tuple[str, Any]:
    return kind, {"type": kind, **fields}


def _frame(form: Form, name: str) -> dict[str, Any]:
    frame = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": form.model}
    return {**frame, "stop_sequence": None}


def _content(reply: ChatReply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content or not reply.calls:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.calls:
        own = {"id": call.call_id, "name": call.name, "input": dict(call.arguments)}
        blocks.append({"type": "tool_use", **own})
    return blocks


def _in_deltas(block: Object) -> tuple[Object, list[Object]]:
    """A block as a stream begins it, and what is added to it."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": ""}, [thought, {"type": "signature_delta", "signature": ""}]
    text = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]


def error_body(error: RequestError) -> dict[str, Any]:
    """An error as Anthropic's servers write it."""
    kind = (
        "api_error" if error.status >= 500 else _ERRORS.get(error.status, "invalid_request_error")
    )
    text = error.message
    if error.code == "context_length_exceeded":  # Claude Code knows it by these words
        text = f"prompt is too long: {text}"
    return {"type": "error", "error": {"type": kind, "message": text}}
