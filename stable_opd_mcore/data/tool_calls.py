"""What a turn of the student says to an agent: its thought, its text, and its tool calls.

    calls = ToolCalls(tokenizer)
    calls.parse("Let me look.\n<tool_call>...</tool_call>", tools, was_cut=False)    # -> Parsed

transformers reads calls by a declarative response template: the tokenizer's own, else one of
TEMPLATES. The first that reads what the chat template itself writes for a call is taken. A call
that is damaged or cut is no call: the whole answer is text then, so that the student reads its
mistake. No character of an answer is lost, and parsing never changes tokens.
"""

# Not strict: Transformers' types are incomplete.
# pyright: basic

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.chat_api import ToolCall
from stable_opd_mcore.data.messages import THOUGHT, THOUGHT_KEYS
from stable_opd_mcore.data.thoughts import CHANNEL, SplitResponse, split_thought
from stable_opd_mcore.data.tool_schemas import Tool
from stable_opd_mcore.data.written_turns import WrittenTurns
from stable_opd_mcore.errors import DataError

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import (
        ResponseTemplate,
        ResponseTemplateField,
    )

_CALLS = "tool_calls"
_AS_JSON = {"repeats": True, "content": "json", "transform": {"function": "{content}"}}
_NAMED = {"repeats": True, "transform": {"function": {"name": "{name}", "arguments": "{content}"}}}
_CHANNEL = r"<\|channel\|>(?:commentary|analysis)"  # where a gpt-oss calls
_TO = r"to=functions\.(?P<name>[\w.-]++)"
# Calls of each family. Every pattern takes a time in proportion to the text, also for a student
# that repeats a mark for ever; so none begins with white space, which is stripped here instead.
TEMPLATES: Mapping[str, Mapping[str, Any]] = {
    "qwen": {_CALLS: {"open": "<tool_call>", "close": "</tool_call>", **_AS_JSON}},
    "qwen3_5": {
        _CALLS: {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {  # only the template's own line breaks are no part of a value
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?"
                r"(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>"
            },
            **_NAMED,
        }
    },
    "glm": {
        _CALLS: {
            "open_pattern": r"<tool_call>(?P<name>[^\s<{]+)",
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*"
                r"<arg_value>(?P<value>(?:(?!<arg_key>).)*?)</arg_value>"
            },
            **_NAMED,
        }
    },
    "llama": {  # the model writes several calls as {...}; {...}, its template only one
        _CALLS: {
            "open_pattern": r'\G\s*(?:<\|python_tag\|>\s*)?(?=\{\s*"name")',
            "close_pattern": r'(?<=\})\s*+;?\s*+(?=(?:<\|python_tag\|>\s*)?\{\s*"name")|\Z',
            **_AS_JSON,
        }
    },
    "mistral": {
        _CALLS: {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\s\[{]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])|\Z",
            "content": "json",
            **_NAMED,
        }
    },
    "mistral_list": {
        _CALLS: {
            "open": "[TOOL_CALLS]",
            "repeats": True,
            "content": "json",
            "transform_each": True,
            "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
        }
    },
    "gpt_oss": {
        _CALLS: {
            "open_pattern": r"(?:<\|start\|>assistant)?"
            rf"(?: ?{_TO} ?{_CHANNEL}|{_CHANNEL} {_TO})"
            r"[^<]*(?:<\|constrain\|>\w+)?<\|message\|>",
            "close_pattern": r"<\|call\|>|<\|end\|>|\Z",
            "content": "json",
            **_NAMED,
        },
        "said": {  # to the user: the answer, or a text before a call
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?!analysis)\w+<\|message\|>",
            "close_pattern": r"<\|end\|>|\Z",
        },
        THOUGHT: {
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
            "close_pattern": r"<\|end\|>|\Z",
        },
    },
}
_PROBE = ToolCall("abcdefghi", "probe", {"first": "one two", "second": "three"})
_ARGUMENTS = {"arguments", "parameters"}
_LISTED = {"name", "arguments", "id"}


@dataclass(frozen=True)
class Parsed:
    """A turn, as an agent reads it."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    is_damaged: bool = False  # it has a call that could not be read, and none that could


class ToolCalls:
    """Reads the turns of a student with this tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._path = tokenizer.path
        self._template = _chosen_template(tokenizer)

    def refusal(self) -> str | None:
        """Why an agent cannot give the student tools; None if it can."""
        if self._template is not None:
            return None
        return (
            f"{self._path}: its chat template writes tool calls in a form that is not known here "
            f"({', '.join(TEMPLATES)}), or writes none; save a response_template in its "
            "tokenizer_config.json, or describe the tools in a message and read the calls yourself"
        )

    def parse(
        self,
        text: str,
        tools: Sequence[Tool],
        was_cut: bool,
        in_thought: bool = False,
        seed: str = "",
    ) -> Parsed:
        """A turn's text in its parts.

        Args:
            text: decoded, without its stop token.
            tools: of the request; without any, there are no calls.
            was_cut: the turn reached its most tokens, so that its last call may lack something.
            in_thought: what the student read before it opened a thought.
            seed: what makes the ids of calls other than those of an equal turn.
        """
        has_channels = CHANNEL in text and bool(tools)  # their template also reads thoughts
        said = SplitResponse("", text, 0) if has_channels else split_thought(text, in_thought)
        answer, reasoning = said.answer or "", said.thought
        content = answer.lstrip("\n") if reasoning else answer
        if not tools or self._template is None:
            return Parsed(content, reasoning)
        try:
            parts = _parts(self._template, answer, tools)
            calls = tuple(_call(each, f"{seed}\n{text}\n{n}") for n, each in enumerate(parts.calls))
        except Exception:  # a response template is foreign, and a student writes anything
            return Parsed(content, reasoning, is_damaged=True)
        if calls and was_cut:
            return Parsed(content, reasoning, is_damaged=True)
        if calls or has_channels:
            content = parts.content
        return Parsed(content, "\n".join(t for t in (reasoning, parts.thought) if t), calls)


class _Parts(NamedTuple):
    content: str
    thought: str
    calls: list[Mapping[str, Any]]  # {"function": {"name": ..., "arguments": ...}}


def _parts(template: ResponseTemplate, answer: str, tools: Sequence[Tool]) -> _Parts:
    """An answer by a response template; the last call may lack its end.

    Raises:
        ValueError: a call without its end, or with something in it that is not read.
    """
    from transformers.utils.chat_parsing import ResponseParser

    parser = ResponseParser(template, prefix="", tools=[dict(each) for each in tools])
    events = parser.feed(f"{answer}\n")  # a mark at the end may be known by what follows it
    _refuse_open(template.fields[_CALLS], events)
    events += parser.finalize()[1]
    content, thought, body = "", "", ""
    calls: list[Mapping[str, Any]] = []
    for event in events:
        kind, field = event["type"], event["field"]
        if kind == "region_open":
            body = ""
        elif kind == "region_chunk" and field == _CALLS:
            body += event["text"]
        elif kind == "region_chunk" and field in THOUGHT_KEYS:
            thought += event["text"]
        elif kind == "region_chunk":
            content += event["text"]
        elif field == _CALLS:
            _refuse_unread(template.fields[_CALLS], body)
            value = event["value"]
            calls += value if isinstance(value, list) else [value]
    return _Parts(content.strip(), thought.strip(), calls)


def _refuse_open(field: ResponseTemplateField, events: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ValueError for a call whose end is missing."""
    of_calls = [event["type"] for event in events if event["field"] == _CALLS]
    is_open = of_calls[-1:] not in ([], ["region_close"])
    if is_open and field.close_re is not None and not field.close_re.search(""):
        raise ValueError("a call has no end")


def _refuse_unread(field: ResponseTemplateField, body: str) -> None:
    """Raise a ValueError for a call with text that its arguments do not have."""
    if field.content == "json" and not field.content_args:
        found = json.loads(body, object_pairs_hook=_distinct)
        if isinstance(found, list) and any(each.keys() - _LISTED for each in found):
            raise ValueError("a call in a list has more than its name, its arguments and an id")
    if (pattern := field.content_args.get("tag_pattern")) is not None:
        _distinct([(tag["key"], None) for tag in re.finditer(pattern, body, flags=re.DOTALL)])
        if re.sub(pattern, "", body, flags=re.DOTALL).strip():
            raise ValueError("a call has text between its arguments")


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a call has one argument twice")
    return found


def _call(found: Mapping[str, Any], identity: str) -> ToolCall:
    """One call, checked.

    Raises:
        ValueError: no name, arguments that are no object or no JSON, keys that are not known.
    """
    function = found["function"]
    name, more = function["name"], function.keys() - {"name", "id", "type"}
    arguments = function[more.pop()] if more and more <= _ARGUMENTS else {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or more:
        raise ValueError("a call has no name, arguments that are no object, or more than these")
    json.dumps(arguments, allow_nan=False)
    return ToolCall(
        hashlib.sha256(identity.encode(errors="replace")).hexdigest()[:9], name, arguments
    )


def _chosen_template(tokenizer: Tokenizer) -> ResponseTemplate | None:
    """The response template that reads what the chat template writes for a call."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    if not tokenizer.has_template:
        return None
    call = {"name": _PROBE.name, "arguments": dict(_PROBE.arguments)}
    calls = [{"id": _PROBE.call_id, "type": "function", "function": call}]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    try:
        text = WrittenTurns(tokenizer).said(turn)
    except DataError:
        return None
    for specification in _specifications(tokenizer):
        template = load_response_template(specification)
        with suppress(Exception):  # of another family, or foreign
            parts = _parts(template, text, ())
            found = [_call(each, "") for each in parts.calls]
            if not parts.content and [(c.name, c.arguments) for c in found] == [
                (_PROBE.name, _PROBE.arguments)
            ]:
                return template
    return None


def _specifications(tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    if tokenizer.response_template is not None:
        yield tokenizer.response_template
    for fields in TEMPLATES.values():
        # Nothing before an answer is read, so no text is the anchor.
        yield {"start_anchor": "assistant", "fields": {**fields, "content": {"content": "text"}}}
