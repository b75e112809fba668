"""What stands between two turns of the student, as the chat template writes it.

What the student sampled is never decoded and encoded again. The text after it is cut from a
rendering of the new messages after a turn whose text is a mark. It is encoded on its own, which
changes no token: it begins with an added token, and a tokenizer always splits there. So `append`
keeps all that the student said, even what the template would delete from earlier turns (thoughts,
in R1 and Qwen3). `render` renders the whole history again, as a server does, and says whether the
result extends what the student has read and sampled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from os.path import commonprefix

from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.messages import Message
from stable_opd_mcore.data.tool_schemas import Tool
from stable_opd_mcore.errors import DataError

_CUT = "\n[...]\n"  # in the middle of a message that is too long
_MARK, _NEW = "text-of-the-turn", "text-of-the-new-message"
_USER: Message = {"role": "user", "content": "1+1?"}
_SAID: Message = {"role": "assistant", "content": "2"}
_SYSTEM: Message = {"role": "system", "content": "Add."}
_READ = ("user", "tool")  # roles of what an environment yields
_REMEDIES = {"user": "save another chat template there", "tool": "make it a user message"}
_BEFORE_MARK = ("", "<think>\n1\n</think>\n\n", "Hm. ")  # templates parse an assistant's text


@dataclass(frozen=True)
class Observed:
    """What the student reads before its next turn."""

    token_ids: tuple[int, ...]
    text: str  # what was encoded; in `append` it begins with the end of the turn before
    restarts: bool = False  # token_ids are a whole context that does not extend the one before


class Bridge:
    """Puts messages between the turns of a student with this tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._refusals: dict[str, str | None] = {}
        self._written: set[tuple[str, ...]] = set()  # roles of conversations that lose no message

    def append(
        self, messages: Sequence[Message], last_token: int, tools: Sequence[Tool] = ()
    ) -> Observed:
        """The end of a turn whose last token is `last_token`, the messages after it, and the
        generation prompt. If the student sampled the turn's end itself, it is not repeated.

        tools: of the prompt, which some templates write again before the last message (Mistral's).

        Raises:
            DataError: a role that `refusal` names, or a template that fails on these messages.
        """
        for message in messages:
            if reason := self.refusal(message["role"]):
                raise DataError(reason)
        cleaned, _ = self.neutralised(messages)
        self._require_written([_USER, _SAID, *cleaned])
        text = self._after_mark([_USER], cleaned, tools=tools)
        ids = tuple(self._tokenizer.encode(text))
        end = next(place for place, token in enumerate(ids) if token in self._tokenizer.added_ids)
        added = ids[end + 1 :] if ids[end] == last_token else ids
        return Observed(added, text)

    def render(
        self,
        messages: Sequence[Message],
        context_ids: Sequence[int],
        tools: Sequence[Tool] = (),
    ) -> Observed:
        """A whole conversation as the chat template writes it, with the tools and the generation
        prompt. If it begins with `context_ids`, only what follows them.

        Raises:
            DataError: a template that fails on these messages, or leaves one of them out.
        """
        cleaned, _ = self.neutralised(messages)
        self._require_written(cleaned)
        text = self._tokenizer.render(cleaned, generation_prompt=True, tools=tools)
        ids, length = tuple(self._tokenizer.encode(text)), len(context_ids)
        extends = ids[:length] == tuple(context_ids)
        added = ids[length:] if extends else ids
        return Observed(added, text, restarts=not extends)

    def between(self, role: str) -> str:
        """What `append` writes for a message of this role whose text is "..."."""
        return self._after_mark([_USER], [{"role": role, "content": "..."}])

    def difference(self, of_teacher: Bridge, role: str) -> tuple[str, str] | None:
        """What this template and the teacher's write for a message of this role; None: the same."""
        refusal = None if self.refusal(role) else of_teacher.refusal(role)
        own, other = repr(self.between(role)), refusal or repr(of_teacher.between(role))
        return None if own == other else (own, other)

    def said(self, turn: Message) -> str:
        """An assistant's text, then its tool calls as the chat template writes them.

        Raises:
            DataError: the template does not write tool calls after a text, or their arguments as
                Python does.
        """
        text, calls = turn["content"] or "", turn.get("tool_calls")
        if not calls:
            return text
        end = self._after_mark([_USER], [_USER])
        written = self._after_mark([_USER], [_USER], tool_calls=calls)
        if written == end or not written.endswith(end):
            raise DataError(
                f"{self._tokenizer.path}: its chat template does not write tool calls after a "
                "text; write them into the content of the message"
            )
        for given in (call["function"]["arguments"] for call in calls):
            if str(given) in written and str(given) != json.dumps(given, ensure_ascii=False):
                raise DataError(
                    f"{self._tokenizer.path}: its chat template writes the arguments of a tool "
                    f"call as Python does, {given!s:.60}; expected JSON: let the template use "
                    "tojson, or write the calls into the content of the message"
                )
        written = written.removesuffix(end)
        return text + written if text else written.lstrip("\n")

    def refusal(self, role: str) -> str | None:
        """Why messages of this role cannot follow a turn of the student; None if they can."""
        if role not in self._refusals:
            self._refusals[role] = self._find_refusal(role)
        return self._refusals[role]

    def _find_refusal(self, role: str) -> str | None:
        try:
            reason = self._problem(role)
        except DataError as error:
            reason = str(error)
        if reason is None:
            return None
        return (
            f"{self._tokenizer.path}: a {role} message cannot follow a turn of the assistant: "
            f"{reason}; {_REMEDIES.get(role, _REMEDIES['tool'])}"
        )

    def _problem(self, role: str) -> str | None:
        """Compare what the template writes around a message after several histories and turns."""
        if role not in _READ:
            return "only user and tool messages can"
        if not self._tokenizer.has_template:
            return "there is no chat template"
        new: Message = {"role": role, "content": _NEW}
        histories = [[_USER], [_USER, _SAID, new], [_USER, _SAID, new, _SAID, _USER]]
        with suppress(DataError):  # many templates take no system message
            self._tokenizer.render([_SYSTEM, _USER])
            histories.append([_SYSTEM, _USER])
        texts = {
            self._after_mark(history, [new], said=said + _MARK)
            for history in histories
            for said in _BEFORE_MARK
        }
        if len(texts) > 1:
            return "what the chat template writes for it depends on the turns before it"
        (text,) = texts
        prompt = self._tokenizer.render([_USER], generation_prompt=True)
        # Some templates write EOS in place of a generation prompt (Phi-4-mini).
        shared = commonprefix((prompt, self._tokenizer.render([_USER])))  # noqa: RUF071
        opening = prompt[len(shared) :]
        if _NEW not in text or not text.endswith(opening):
            return "the chat template does not write it with a generation prompt after it"
        # White space before the end of a turn is the student's to sample (Nemotron-Nano-v2).
        first = self._tokenizer.encode(text.partition(_NEW)[0].lstrip())[:1]
        if self._tokenizer.added_ids.isdisjoint(first):
            return f"no token of its own begins what the chat template writes, {text!r:.40}"
        return None

    def _require_written(self, messages: Sequence[Message]) -> None:
        """Raise a DataError if the template leaves out a message of the user or of a tool."""
        roles = tuple(message["role"] for message in messages)
        if roles in self._written:
            return
        marks = {place: f"{_NEW} {place}." for place, role in enumerate(roles) if role in _READ}
        marked = [*messages]
        for place, mark in marks.items():
            marked[place] = {**messages[place], "content": mark}
        try:
            text = self._tokenizer.render(marked, generation_prompt=True)
        except DataError as error:
            if "tool" not in roles:
                raise
            raise DataError(f"{error}, or make each tool message a user message") from error
        for place, mark in marks.items():
            if mark not in text:
                raise DataError(
                    f"{self._tokenizer.path}: its chat template leaves out a {roles[place]} "
                    f"message of these: {', '.join(roles)}; {_REMEDIES[roles[place]]}"
                )
        self._written.add(roles)

    def _after_mark(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        said: str = _MARK,
        tools: Sequence[Tool] = (),
        **more: object,
    ) -> str:
        """What the template writes after an assistant's text: the end of the turn, `new` and a
        generation prompt. `more` are further keys of the assistant's message.
        """
        turn = {"role": "assistant", "content": said, **more}
        text = self._tokenizer.render([*history, turn, *new], generation_prompt=True, tools=tools)
        _, mark, after = text.partition(_MARK)
        if not mark:
            raise DataError(
                f"{self._tokenizer.path}: its chat template does not write the assistant's text"
            )
        return after

    def neutralised(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """The messages without control tokens in foreign text, and how many were there."""
        cleaned: list[Message] = []
        total = 0
        for message in messages:
            if message["role"] != "assistant":
                text, number = self._tokenizer.neutralised(message["content"])
                message, total = {**message, "content": text}, total + number
            cleaned.append(message)
        return cleaned, total

    def shortened(self, messages: Sequence[Message], max_tokens: int) -> tuple[list[Message], int]:
        """The messages with at most `max_tokens` tokens of text, and the number of those left out.

        The longest ones are cut to equal lengths, and a mark replaces the middle of each.
        """
        ids_of = self._tokenizer.encode_many([message["content"] for message in messages])
        if sum(map(len, ids_of)) <= max_tokens:
            return [*messages], 0
        limit = _equal_limit(list(map(len, ids_of)), max_tokens)
        mark, _ = self._tokenizer.neutralised(_CUT)
        kept = limit - len(self._tokenizer.encode(mark))
        if kept <= 0:  # no room for the mark
            mark, kept = "", limit
        shorter, num_cut = [*messages], 0
        for place, ids in enumerate(ids_of):
            if len(ids) > limit:
                halves = ids[: kept - kept // 2], ids[len(ids) - kept // 2 :]
                # A cut may divide a character.
                head, tail = (self._tokenizer.decode(half).strip("\ufffd") for half in halves)
                shorter[place] = {**messages[place], "content": head + mark + tail}
                num_cut += len(ids) - kept
        return shorter, num_cut


def _equal_limit(lengths: Sequence[int], total: int) -> int:
    """The largest length to cut the longest ones to so that all together have at most `total`."""
    for place, length in enumerate(sorted(lengths)):
        share = total // (len(lengths) - place)
        if length > share:
            return share
        total -= length
    raise AssertionError("nothing has to be cut")
