"""Anthropic's messages: a body becomes a ChatRequest, a ChatReply becomes a body or events.

    request, form = read_request(body)
    message(reply, form, name)    # or events(reply, form, name)

Blocks become messages of OpenAI's form: a block tool_result is a message of the role tool, and the
text after it one of the user. What is ignored and what is refused follows openai_api.py.
"""

import json
from collections.abc import Iterator
from typing import Any, cast

from stable_opd_mcore.data.chat_api import ChatReply, ChatRequest, RequestError
from stable_opd_mcore.data.messages import Message, split_parts, without_nulls
from stable_opd_mcore.data.openai_api import (
    NO_PREFILL,
    SAMPLING,
    Form,
    body_key,
    model_name,
    unknown_field,
)
from stable_opd_mcore.data.request_parts import (
    Object,
    positive,
    read_body,
    read_messages,
    read_stop,
    read_tools,
    refused,
)

_WITHOUT_EFFECT = (
    *("metadata", "service_tier", "thinking", "context_management", "cache_control"),
    *("speed", "inference_geo", "diagnostics"),
)
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
    config = fields.pop("output_config", {})
    config = without_nulls(config) if isinstance(config, dict) else {"": config}
    if config.pop("format", None) is not None:
        raise refused(
            "output_config.format: what is sampled is not constrained; describe the format in a "
            "message and leave it out",
            "unsupported_parameter",
        )
    ignored |= {f"output_config.{key}" for key in config if key in ("effort", "task_budget")}
    for name in sorted(config.keys() - {"effort", "task_budget"}):
        raise unknown_field(f"output_config.{name}", config[name])
    for name in sorted(fields.keys() - ignored - {*_READ, "stream"}):
        if fields[name] not in ([], {}):
            raise unknown_field(name, fields[name])
    tools, unread = read_tools(fields.get("tools", []))
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


def _system(content: Any) -> list[Message]:
    blocks = cast("list[Any]", content if isinstance(content, list) else [content])
    parts = [split_parts([block]) for block in blocks]
    if any(part.others for part in parts):
        raise refused(
            f"system={content!s:.60}: the student reads only text; send blocks of it",
            "unsupported_content",
        )
    texts = [part.text for part in parts]
    text = "\n".join(each for each in texts if each and not each.startswith(_ACCOUNTING))
    return [{"role": "system", "content": text}] if text else []


def _messages(value: Any) -> tuple[Message, ...]:
    messages, _ = read_messages(value)  # parts of blocks that are not read have no effect
    if messages[-1]["role"] == "assistant":
        raise refused(f"the last message is the assistant's: {NO_PREFILL}", "unsupported_parameter")
    return messages


# ---- replies


def message(reply: ChatReply, form: Form, name: str) -> dict[str, Any]:
    """The body of a reply that is not streamed; `name` is its own."""
    return _frame(form, name) | {
        "content": _content(reply),
        **_stop(reply),
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
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}
    yield _event("message_delta", delta=_stop(reply), usage=usage)
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> tuple[str, Any]:
    return kind, {"type": kind, **fields}


def _frame(form: Form, name: str) -> dict[str, Any]:
    frame = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": form.model}
    return {**frame, "stop_sequence": None}


def _stop(reply: ChatReply) -> dict[str, Any]:
    if reply.stop_text and reply.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_text}
    return {"stop_reason": _FINISHED[reply.finish_reason], "stop_sequence": None}


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
