"""A turn of the assistant as its chat template writes it: its text, its thought and its tool calls.

`said` is what the student would sample for such a turn, so that a golden turn can be trained on.
What stands between two turns is in `data/bridge.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.messages import THOUGHT, Message
from stable_opd_mcore.data.thoughts import CHANNEL, MARKS
from stable_opd_mcore.data.tool_schemas import Tool
from stable_opd_mcore.errors import DataError

MARK = "text-of-the-turn"
ASKED: Message = {"role": "user", "content": "1+1?"}
SAID: Message = {"role": "assistant", "content": "2"}


class WrittenTurns:
    """The turns of a student with this tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def said(self, turn: Message) -> str:
        """An assistant's turn as the student would sample it: its thought, its text, and its tool
        calls as the chat template writes them.

        Raises:
            DataError: the template does not write tool calls after a text, or their arguments as
                Python does.
        """
        text, thought, calls = turn["content"] or "", turn.get(THOUGHT), turn.get("tool_calls")
        if self._has_channels and CHANNEL in text:
            return text
        if (thought or self._has_channels) and (whole := self._whole(turn)) is not None:
            self._refuse_python(calls or (), whole)
            return whole
        if thought:
            text = self._tokenizer.form.in_marks(thought, text)
        return self._with_calls(text, calls) if calls else text

    @cached_property
    def no_thought(self) -> str:
        """The empty thought that the template writes between a prompt and an answer without one
        (Qwen3's, GLM-4.5's); "" for others."""
        whole = self._whole({"role": "assistant", "content": MARK})
        before = (whole or "").partition(MARK)[0]
        is_empty = "".join(before.split()) in map("".join, MARKS)
        return before if is_empty else ""

    def _with_calls(self, text: str, calls: Sequence[Mapping[str, Any]]) -> str:
        """A text, and after it the calls as the chat template writes them."""
        end = self.after_mark([ASKED], [ASKED])
        try:
            written = self.after_mark([ASKED], [ASKED], tool_calls=calls)
        except DataError as error:  # some templates write no text with calls (Mistral's, Llama's)
            whole = self._whole({"role": "assistant", "content": None, "tool_calls": calls})
            if whole is None:
                raise
            if text:
                raise DataError(
                    f"{self._tokenizer.path}: its chat template writes no text next to tool calls; "
                    "remove the text of the message, or write the calls into it"
                ) from error
            written = whole + end
        if written == end or not written.endswith(end):
            raise DataError(
                f"{self._tokenizer.path}: its chat template does not write tool calls after a "
                "text; write them into the content of the message"
            )
        self._refuse_python(calls, written)
        written = written.removesuffix(end)
        return text + written if text else written.lstrip("\n")

    def _refuse_python(self, calls: Sequence[Mapping[str, Any]], written: str) -> None:
        """Refuse a template that writes the arguments of these calls as Python does."""
        for given in (call["function"]["arguments"] for call in calls):
            if str(given) in written and str(given) != json.dumps(given, ensure_ascii=False):
                raise DataError(
                    f"{self._tokenizer.path}: its chat template writes the arguments of a tool "
                    f"call as Python does, {given!s:.60}; expected JSON: let the template use "
                    "tojson, or write the calls into the content of the message"
                )

    def stop_of(self, turn: Message) -> Sequence[int]:
        """The token with which the student ends a golden turn: its first stop id, or the one that
        the template writes only after a call (gpt-oss's)."""
        end = self.end_of_calls if turn.get("tool_calls") else None
        return self._tokenizer.stop_token_ids[:1] if end is None else (end,)

    @cached_property
    def end_of_calls(self) -> int | None:
        """The stop id that ends a turn with a call; None where a turn with a text ends alike."""
        calls = [{"function": {"name": "f", "arguments": {"x": MARK}}}]
        ends: list[int | None] = []
        with suppress(DataError):  # `said` refuses what the template does not take
            for turn in (SAID, {"role": "assistant", "content": None, "tool_calls": calls}):
                ids = self._tokenizer.encode(self._tokenizer.render([ASKED, turn]))
                added = (token for token in reversed(ids) if token in self._tokenizer.added_ids)
                ends.append(next(added, None))
        is_other = len(ends) == 2 and ends[0] != ends[1]
        return ends[1] if is_other and ends[1] in self._tokenizer.stop_token_ids else None

    @cached_property
    def _has_channels(self) -> bool:
        """Whether the template names the channel of an answer, as that of gpt-oss does."""
        if not self._tokenizer.has_template:
            return False
        prompt = self._tokenizer.render([ASKED], generation_prompt=True)
        whole = self._tokenizer.render([ASKED, {"role": "assistant", "content": MARK}])
        return whole.startswith(prompt) and CHANNEL in whole[len(prompt) :].partition(MARK)[0]

    def _whole(self, turn: Message) -> str | None:
        """What the template writes for an assistant's turn after a prompt, without its end; None
        where it does not begin with a prompt, or lacks a part of the turn."""
        if not self._tokenizer.has_template:
            return None
        prompt = self._tokenizer.render([ASKED], generation_prompt=True)
        whole = self._tokenizer.render([ASKED, turn])
        said = whole[len(prompt) :]
        said = said[: self.first_end(said)]
        names = (call["function"]["name"] for call in turn.get("tool_calls") or ())
        thought, text = turn.get(THOUGHT) or "", turn["content"] or ""
        kept = text in said.partition(thought)[2] if thought else text in said
        if whole.startswith(prompt) and kept and thought in said and all(n in said for n in names):
            return said
        return None

    def first_end(self, text: str) -> int | None:
        """The place of the first token that ends a response; None without one."""
        return min((place for name in self.ends if (place := text.find(name)) >= 0), default=None)

    @property
    def ends(self) -> list[str]:
        """The names of the tokens that end a response."""
        own = (self._tokenizer.turn_end_id, *self._tokenizer.stop_token_ids)
        names = (self._tokenizer.names_by_id.get(token) for token in own if token is not None)
        return [name for name in names if name]

    def after_mark(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        said: str = MARK,
        tools: Sequence[Tool] = (),
        **more: object,
    ) -> str:
        """What the template writes after an assistant's text: the end of the turn, `new` and a
        generation prompt. `more` are further keys of the assistant's message.
        """
        turn = {"role": "assistant", "content": said, **more}
        text = self._tokenizer.render([*history, turn, *new], generation_prompt=True, tools=tools)
        _, mark, after = text.partition(MARK)
        if not mark:
            raise DataError(
                f"{self._tokenizer.path}: its chat template does not write the assistant's text; "
                "correct the template"
            )
        return after
