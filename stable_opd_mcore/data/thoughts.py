"""What of a response is thought, and what is answer; for every family of models.

    split_thought("<think>Hm.</think>2").answer    # "2"

A thought stands between marks, or in the `analysis` channel of a gpt-oss. The prompt may have
opened it. Not here: how a chat template takes a thought (message_form.py).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
CHANNEL = "<|channel|>"
_THOUGHTS, _FINAL = "analysis", "final"
_OPENED = (*(mark for mark, _ in MARKS), f"{CHANNEL}{_THOUGHTS}<|message|>")
_SECTION = re.compile(
    r"(?:<\|start\|>assistant)?(?P<to>[^<>|]*)<\|channel\|>\s?(?P<name>\w+)"
    r"(?P<more>[^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_END = re.compile(r"<\|(?:end|return|call|start|channel)\|>")
_FUNCTION = re.compile(r"to=functions\.([\w.-]+)")


@dataclass(frozen=True)
class SplitResponse:
    """A response in two parts."""

    thought: str  # without marks; "" without one
    answer: str | None  # None: the thought has no end
    start: int  # the character of the response with which the answer begins


def opens_thinking(prompt_text: str) -> bool:
    """Whether a prompt ends inside a thought, which the response must then close."""
    return prompt_text.rstrip().endswith(_OPENED)


def split_thought(response: str, in_thought: bool = False) -> SplitResponse:
    """What of a response is thought and what is answer; `in_thought`: its prompt opened a thought.

    The answer begins after the last thought: after </think>, or with the message of the channel
    `final`. A response without marks and channels is an answer.
    """
    if CHANNEL in response:
        return _of_channels(response, in_thought)
    opening = next((mark for mark, _ in MARKS if response.lstrip().startswith(mark)), "")
    ends = ((response.rfind(close), len(close)) for _, close in MARKS)
    end, length = max(ends)
    if end >= 0:
        thought = response[:end].strip().removeprefix(opening).strip()
        return SplitResponse(thought, response[end + length :], end + length)
    if in_thought or opening:
        thought = response.strip().removeprefix(opening).strip()
        return SplitResponse(thought, None, len(response))
    return SplitResponse("", response, 0)


def _of_channels(response: str, in_thought: bool) -> SplitResponse:
    """The answer is the last message of the channel `final`. Without one it is what follows the
    last thought, such as a call of a function, which may stand in the channel of thoughts."""
    sections = list(_SECTION.finditer(response))
    places = [place for place, each in enumerate(sections) if _is_thought(each)]
    texts = [_text(response, sections[place]) for place in places]
    opened = [_END.split(response, maxsplit=1)[0]] if in_thought else []
    thought = "\n".join(filter(None, [*opened, *texts]))
    finals = [section for section in sections if section["name"] == _FINAL]
    if finals:
        return SplitResponse(thought, _text(response, finals[-1]), finals[-1].end())
    said = sections[places[-1] + 1 :] if places else sections
    if not said:
        return SplitResponse(thought, None, len(response))
    return SplitResponse(thought, response[said[0].start() :], said[0].start())


def _is_thought(section: re.Match[str]) -> bool:
    is_call = _FUNCTION.search(section["to"] + section["more"])
    return section["name"] == _THOUGHTS and not is_call


def _text(response: str, section: re.Match[str]) -> str:
    end = _END.search(response, section.end())
    return response[section.end() : end.start() if end else len(response)]


def channel_message(response: str) -> Mapping[str, Any] | None:
    """A response in channels as a message of OpenAI's form, with `reasoning_content` and
    `tool_calls` where it has them; None for one without channels."""
    if CHANNEL not in response:
        return None
    said, calls = split_thought(response), list[dict[str, Any]]()
    content = said.answer or ""
    for section in _SECTION.finditer(response, said.start):
        function = _FUNCTION.search(section["to"] + section["more"])
        if function and (arguments := _object(_text(response, section))) is not None:
            calls.append({"function": {"name": function[1], "arguments": arguments}})
    if calls:
        content = ""
    elif CHANNEL in content:  # no call, or one that cannot be read
        content = "\n".join(_text(content, each) for each in _SECTION.finditer(content))
    thought = {"reasoning_content": said.thought} if said.thought else {}
    return {"role": "assistant", "content": content, **thought} | (
        {"tool_calls": calls} if calls else {}
    )


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def golden_response(solution: str, prompt_text: str) -> str:
    """A golden solution as the response to a prompt, which may have opened a thought already.

    Without the end of a thought it then begins with it, or the model would learn to leave the
    thought open.
    """
    opened = next((pair for pair in MARKS if prompt_text.rstrip().endswith(pair[0])), None)
    if opened is None:
        return solution
    mark, close = opened
    if close not in solution:
        return f"\n{close}\n\n{solution}"
    opening = solution.lstrip()
    return opening.removeprefix(mark).lstrip("\n") if opening.startswith(mark) else solution
