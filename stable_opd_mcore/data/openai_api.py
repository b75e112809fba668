"""OpenAI's chat completions: a body becomes a ChatRequest, a ChatReply becomes a body or events.

    request, form = read_request(body, template_kwargs={})
    completion(reply, form)    # or chunks(reply, form)

A setting that would change what the student reads or samples is refused with a sentence; one that
cannot is ignored and named in `ChatRequest.ignored`. docs/agents.md has the table.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from stable_opd_mcore.data.chat_api import ChatReply, ChatRequest, RequestError, canonical_json
from stable_opd_mcore.data.messages import THOUGHT
from stable_opd_mcore.data.request_parts import (
    Object,
    positive,
    read_body,
    read_messages,
    read_stop,
    read_tools,
    refused,
)

# The run's sampling holds: another one would be another distribution than the one that is trained.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
_WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "verbosity"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "parallel_tool_calls"),
    *("separate_reasoning", "request_id", "session_id", "priority", "cache_salt"),
)
_READ = (
    *("model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens"),
    *("stop", "stream", "stream_options"),
)
NO_PREFILL = (
    "the student samples whole turns and continues none that was begun for it: end the messages "
    "with one of the user or of a tool"
)
# What is refused unless it has one of these values or is null, and what to do.
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "one turn is sampled at a time: send the request n times"),
    "best_of": ((1,), "one turn is sampled at a time"),
    "logprobs": ((False,), "an agent gets no log-probabilities: leave it out"),
    "top_logprobs": ((0,), "an agent gets no log-probabilities: leave it out"),
    "response_format": (
        ({"type": "text"},),
        "what is sampled is not constrained: describe the format in a message and leave it out",
    ),
    "functions": (([],), "the old form of tools: send tools, and replies with role tool"),
    "function_call": (("auto", "none"), "the old form of tool_choice: send tool_choice"),
    "modalities": ((["text"],), "the student reads and writes only text: leave it out"),
    "audio": ((), "the student reads and writes only text: leave it out"),
    "web_search_options": ((), "no tool runs here: give your own in tools, or leave it out"),
    "moderation": ((), "nothing is moderated here: leave it out"),
    # fields of vLLM and SGLang, which their clients also send with the default
    "add_generation_prompt": ((True,), NO_PREFILL),
    "continue_final_message": ((False,), NO_PREFILL),
    "echo": ((False,), "a reply has only the student's turn: leave it out"),
    "ignore_eos": ((False,), "a turn ends as the run's turns end: leave it out"),
    "min_tokens": ((0,), "a turn ends as the run's turns end: leave it out"),
    "include_stop_str_in_output": ((False,), "a reply ends before the text of stop: leave it out"),
    "include_reasoning": ((True,), "a reply has the student's thought: leave it out"),
    "stream_reasoning": ((True,), "a reply has the student's thought: leave it out"),
    "use_beam_search": ((False,), "turns are sampled: leave it out"),
    "length_penalty": ((1,), "turns are sampled: leave it out"),
}


@dataclass(frozen=True)
class Form:
    """How a client wants its reply."""

    model: str = "student"  # the name that it used
    streams: bool = False
    includes_usage: bool = False  # in a stream


def body_key(fields: Object) -> str:
    """The same for bodies that ask for the same, streamed or not."""
    asked = {key: value for key, value in fields.items() if not key.startswith("stream")}
    return hashlib.sha256(canonical_json(asked).encode()).hexdigest()


def read_request(
    body: bytes, template_kwargs: Object | None = None, is_retry: bool = False
) -> tuple[ChatRequest, Form]:
    """A body of /v1/chat/completions.

    Args:
        template_kwargs: the run's; a client may name the same ones.
        is_retry: its headers say so.

    Raises:
        RequestError: a body that is no such request, or asks for what cannot be given here.
    """
    return read_body(body, lambda fields: _read(fields, template_kwargs or {}, is_retry))


def _read(fields: Object, template_kwargs: Object, is_retry: bool) -> tuple[ChatRequest, Form]:
    ignored = {key for key in fields if key in (*SAMPLING, *_WITHOUT_EFFECT)}
    _refuse_fields(fields.keys() - ignored - set(_READ), fields, template_kwargs)
    found, unread = read_messages(fields.get("messages"))
    if any(each.get("prefix") is True for each in fields["messages"]):
        raise refused(f"prefix of a message: {NO_PREFILL}", "unsupported_parameter")
    tools, unread_of_tools = read_tools(fields.get("tools"))
    choice = fields.get("tool_choice", "auto")
    request = ChatRequest(
        found,
        () if choice == "none" else tools,
        _limit(fields),
        read_stop(fields.get("stop", []), "stop"),
        is_retry,
        body_key(fields),
        forces_call=_forces_call(choice),
        ignored=tuple(sorted({*ignored, *unread, *unread_of_tools})),
    )
    options = fields.get("stream_options")
    usage = isinstance(options, dict) and cast("Object", options).get("include_usage") is True
    return request, Form(model_name(fields), fields.get("stream") is True, usage)


def model_name(fields: Object) -> str:
    """The name that a client gives to the student; any will do."""
    return str(fields.get("model", "student"))


def _refuse_fields(names: set[str], fields: Object, template_kwargs: Object) -> None:
    """Raise a RequestError for a field that asks for what is not given here."""
    for name in sorted(names):
        value = fields[name]
        if name in _REFUSED:
            allowed, remedy = _REFUSED[name]
            if value not in allowed:
                raise refused(f"{name}={value!s:.60}: {remedy}", "unsupported_parameter")
        elif name == "chat_template_kwargs":
            own = cast("Object", value if isinstance(value, dict) else {"": value})
            for key, each in own.items():
                _refuse_other(f"chat_template_kwargs.{key}", key, each, template_kwargs)
        elif name == "reasoning_effort":
            _refuse_other(name, name, value, template_kwargs)
        elif value not in ([], {}):
            raise unknown_field(name, value)


def unknown_field(name: str, value: Any) -> RequestError:
    """For a field of which nothing is known here."""
    return refused(
        f"{name}={value!s:.60}: not known here, and it might change what the student reads or "
        "samples; leave it out (LiteLLM: drop_params, additional_drop_params)",
        "unknown_parameter",
    )


def _refuse_other(name: str, key: str, value: Any, template_kwargs: Object) -> None:
    if key not in template_kwargs or template_kwargs[key] != value:
        raise refused(
            f"{name}={value!s:.60}: the student is trained with the run's "
            f"student.chat_template_kwargs, {json.dumps(dict(template_kwargs))}; set it there, "
            "or leave it out",
            "unsupported_parameter",
        )


def _limit(fields: Object) -> int | None:
    limits = [
        positive(fields[key], key)
        for key in ("max_tokens", "max_completion_tokens")
        if key in fields
    ]
    return min(limits, default=None)


def _forces_call(choice: Any) -> bool:
    """Whether the student is told to call a tool."""
    if choice in ("auto", "none", "required", "any"):  # Mistral's word for required
        return choice in ("required", "any")
    if isinstance(choice, dict) and cast("Object", choice).get("type") == "function":
        return True
    raise refused(
        f"tool_choice={choice!s:.60}: expected auto, none, required or a function; give only the "
        "tools that may be called",
        "unsupported_parameter",
    )


# ---- replies


def completion(reply: ChatReply, form: Form, name: str) -> dict[str, Any]:
    """The body of a reply that is not streamed; `name` is its own."""
    message = {**reply.message, "refusal": None}
    if reply.calls:
        message["tool_calls"] = _written_calls(reply)
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": reply.finish_reason,
    }
    return _body("chat.completion", form, name, [choice], usage=_usage(reply))


def chunks(reply: ChatReply, form: Form, name: str) -> Iterator[dict[str, Any]]:
    """The events of a streamed reply, which is finished: each part comes whole."""

    def chunk(delta: Object, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if form.includes_usage else {}
        return _body("chat.completion.chunk", form, name, [choice], **usage)

    yield chunk({"role": "assistant", "content": ""})
    if reply.reasoning:
        yield chunk({THOUGHT: reply.reasoning})
    if reply.content:
        yield chunk({"content": reply.content})
    for place, call in enumerate(_written_calls(reply)):
        yield chunk({"tool_calls": [{"index": place, **call}]})
    yield chunk({}, reply.finish_reason)
    if form.includes_usage:
        yield _body("chat.completion.chunk", form, name, [], usage=_usage(reply))


def _body(
    kind: str, form: Form, name: str, choices: Sequence[Object], **more: Any
) -> dict[str, Any]:
    frame = {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time())}
    return {**frame, "model": form.model, "choices": choices, **more}


def _usage(reply: ChatReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _written_calls(reply: ChatReply) -> list[dict[str, Any]]:
    return [
        {
            "id": call.call_id,
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
            },
        }
        for call in reply.calls
    ]


def error_body(error: RequestError) -> dict[str, Any]:
    """An error as OpenAI's servers write it."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    message, code = error.message, error.code
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def model_entry(name: str = "student") -> dict[str, Any]:
    """The body of /v1/models/<name>; any name is the student's."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "stable-opd"}


def model_list() -> dict[str, Any]:
    """The body of /v1/models."""
    return {"object": "list", "data": [model_entry()]}
