"""The form in which a chat template takes the messages of a conversation.

    form = MessageForm(render, template, names, path)
    form.rendered(messages, ...)

Conversations come in the form of OpenAI's servers. Templates differ in the key of a thought, in the
ids of calls, and in whether arguments are an object or a text. Each is tried; no text is changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from stable_opd_mcore.data.messages import THOUGHT, THOUGHT_KEYS, Message
from stable_opd_mcore.data.thoughts import CHANNEL, MARKS, channel_message
from stable_opd_mcore.errors import DataError

_PROBE = "text-of-the-thought"
_ID_CHARACTERS = 9  # of a call in Mistral's templates: letters and digits
_ASK: Message = {"role": "user", "content": "1+1?"}
Render = Callable[[Sequence[Message]], str]


class MessageForm:
    """What one chat template takes.

    Args:
        render: messages by this template; raises where it fails.
        template: its text; None without one.
        names: the texts of the tokenizer's added tokens.
        path: of the tokenizer, for errors.
    """

    def __init__(self, render: Render, template: str | None, names: Iterable[str], path: str):
        self._render, self._template = render, template or ""
        self._names, self._path = frozenset(names), path

    @cached_property
    def thought_key(self) -> str | None:
        """The key whose text the template writes as a thought; None without one."""
        for key in THOUGHT_KEYS:
            if key not in self._template:
                continue
            said = {"role": "assistant", "content": "2", key: _PROBE}
            with suppress(Exception):  # a template is foreign code, which may raise anything
                if _PROBE in self._render([_ASK, said]):
                    return key
        return None

    @cached_property
    def marks(self) -> tuple[str, str] | None:
        """The marks around a thought that the tokenizer or the template has; None without any."""
        for mark, close in MARKS:
            if close in self._names or close in self._template:
                return mark, close
        return None

    @property
    def has_thoughts(self) -> bool:
        return self.thought_key is not None or self.marks is not None

    @cached_property
    def writes_one_call(self) -> bool:
        """Whether the template writes a call of a message, and fails on or drops a second one."""
        return self._writes_calls(1) and not self._writes_calls(2)

    def _writes_calls(self, number: int) -> bool:
        marks = [f"{_PROBE}-{place}" for place in range(number)]
        calls = [{"function": {"name": "f", "arguments": {"x": mark}}} for mark in marks]
        said = {"role": "assistant", "content": None, "tool_calls": calls}
        for form in ([_ASK, said], *other_forms([_ASK, said])):
            with suppress(Exception):
                text = self._render(form)
                return all(mark in text for mark in marks)
        return False

    def taken(self, message: Message) -> Message:
        """An assistant's message with its thought where the template reads it: in its key, or
        between marks before the content. What a gpt-oss sampled is taken apart by its channels.

        Raises:
            DataError: a thought, and neither a key nor marks; or calls of which one is written.
        """
        if message["role"] != "assistant":
            return message
        if len(message.get("tool_calls") or ()) > 1 and self.writes_one_call:
            raise DataError(
                f"{self._path}: its chat template writes one tool call a message (gpt-oss's, "
                "Llama's); write each call and its reply as messages of their own, one after the "
                "other"
            )
        content = message.get("content")
        if self.thought_key is not None and isinstance(content, str) and CHANNEL in content:
            message = {**message, **(channel_message(content) or {})}
        thought = message.get(THOUGHT)
        if thought is None:
            return message
        rest = {key: value for key, value in message.items() if key != THOUGHT}
        if self.thought_key is not None:
            return {**rest, self.thought_key: thought}
        return {**rest, "content": self.in_marks(thought, message["content"] or "")}

    def in_marks(self, thought: str, content: str) -> str:
        """A thought between marks, and the content after it."""
        if self.marks is None:
            raise DataError(
                f"{self._path}: an assistant's message has {THOUGHT}, and neither the chat "
                "template nor the tokenizer has marks of thoughts; write the thoughts into the "
                "content in marks of your choice, as <think>...</think> before the answer, or "
                "remove the key"
            )
        mark, close = self.marks
        if mark.startswith("<"):
            return f"{mark}\n{thought}\n{close}\n\n{content}"
        return f"{mark}{thought}{close}{content}"


def other_forms(messages: Sequence[Message]) -> list[list[Message]]:
    """The same conversation in forms that a template may take in place of one that it refuses:
    short ids of calls, arguments as text, and both, and all three with an empty text in place of
    none, which transformers leaves out (DeepSeek-V3's fails). [] without calls and replies."""
    if not any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
        return []
    short = _with_short_ids(messages)
    forms = [short, _with_text_arguments(messages), _with_text_arguments(short)]
    return forms + [
        [{**m, "content": ""} if m["content"] is None else m for m in form] for form in forms
    ]


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """An id of nine letters and digits for each call, a function of its own id, and the same for
    its reply. A reply that names no call of its turn answers the next one."""
    found: list[Message] = []
    asked: dict[object, str] = {}
    waiting: list[str] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            ids = [_short_id(call.get("id"), place) for place, call in enumerate(calls)]
            asked = {call.get("id"): own for call, own in zip(calls, ids, strict=True)}
            waiting = [*ids]
            numbered = [{"type": "function", **c, "id": i} for c, i in zip(calls, ids, strict=True)]
            message = {**message, "tool_calls": numbered}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            default = waiting[0] if waiting else _short_id(given, len(asked))
            own = default if given is None else asked.get(given, default)
            waiting = [each for each in waiting if each != own]
            message = {**message, "tool_call_id": own}
        else:
            asked, waiting = {}, []
        found.append(message)
    return found


def _short_id(given: object, place: int) -> str:
    if isinstance(given, str) and len(given) == _ID_CHARACTERS and given.isalnum():
        return given
    text = f"place {place}" if given is None else f"id {given}"
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_CHARACTERS]


def _with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}
