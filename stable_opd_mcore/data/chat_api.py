"""What an agent asks of the student and what it gets, whichever API it speaks.

    request = ChatRequest(messages=..., tools=...)
    reply = ChatReply(content="4", ...)    # or a RequestError, which the agent reads

Messages have OpenAI's form (messages.py), with the arguments of calls as objects. Not here: the
bodies of one API, HTTP, and tokens (data/bridge.py).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from stable_opd_mcore.data.messages import THOUGHT, Message
from stable_opd_mcore.data.tool_schemas import Tool

FinishReason = Literal["stop", "tool_calls", "length"]
_SORTED = json.JSONEncoder(sort_keys=True)


class RequestError(Exception):
    """A request that gets an error in place of a reply. It can be pickled.

    code: OpenAI's, such as "context_length_exceeded"; clients compare it.
    """

    def __init__(self, status: int, code: str, message: str):
        super().__init__(status, code, message)
        self.status, self.code, self.message = status, code, message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the student."""

    call_id: str  # nine letters and digits, as the strictest chat templates expect
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ChatRequest:
    """One request, checked."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()  # without those that the agent forbids (tool_choice: none)
    max_tokens: int | None = None  # None: the run's
    stop: tuple[str, ...] = ()
    is_retry: bool = False  # the client says that it sent the same request before
    body_key: str = ""  # equal for equal bodies
    forces_call: bool = False  # it demanded a tool call; nothing here can demand one
    ignored: tuple[str, ...] = ()  # names of its settings that have no effect here


@dataclass(frozen=True)
class ChatReply:
    """One turn of the student, as an agent reads it."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = "stop"
    prompt_tokens: int = 0  # that the student read
    completion_tokens: int = 0  # that it sampled
    stop_text: str = ""  # which text of the request's `stop` ended it; "": none

    @property
    def message(self) -> Message:
        """The turn as a message of the history, such as the agent sends with its next request."""
        said: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            said[THOUGHT] = self.reasoning
        if self.calls:
            said["content"] = self.content or None
            said["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in self.calls
            ]
        return said


def unknown_episode() -> RequestError:
    """For a path whose secret belongs to no episode of this run."""
    return RequestError(
        404,
        "unknown_episode",
        "no episode has this URL; use the base_url that this episode's function was given, whole",
    )


def episode_over() -> RequestError:
    """For a request after the end of its episode."""
    return RequestError(
        410,
        "episode_over",
        "this episode is over: its function returned, or it reached a limit of `environment`; "
        "make no request after that",
    )


def context_full(num_tokens: int, window: int) -> RequestError:
    """For messages that leave no room for a token; the episode continues.

    Clients know it by its code, and by its first words (LiteLLM).
    """
    return RequestError(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {window} tokens. However, your messages have "
        f"{num_tokens} tokens, which leaves no room for a reply; send fewer or shorter messages",
    )


def same_message(a: Message, b: Message) -> bool:
    """Whether two messages say the same: role, text without white space around it, and names and
    arguments of calls. Ids, the order of keys and thoughts do not count."""
    return message_key(a) == message_key(b)


def message_key(message: Message) -> tuple[str, str, str]:
    """What `same_message` compares."""
    calls = cast("Sequence[Mapping[str, Any]]", message.get("tool_calls") or ())
    named = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    said = (message.get("content") or "").strip()
    return message["role"], said, canonical_json(named) if named else ""


def canonical_json(value: Any) -> str:
    """One text for all spellings of a JSON value; JavaScript writes 1.0 as 1."""
    return _SORTED.encode(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return {str(key): _plain(each) for key, each in pairs}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast("Sequence[Any]", value)]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
