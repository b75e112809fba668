"""What stands between two turns of the student, as the chat template writes it.

What the student sampled is never decoded and encoded again. The text after it is cut from a
rendering of the new messages after a turn whose text is a mark. It is encoded on its own, which
changes no token: it begins with an added token, and a tokenizer always splits there. Where the
template ends a turn with another token than the student (gpt-oss's does), the turns after it read
the template's. So `append`
keeps all that the student said, even what the template would delete from earlier turns (thoughts,
in R1 and Qwen3). `render` renders the whole history again, as a server does, and says whether the
result extends what the student has read and sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix
from typing import Any, NamedTuple

from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.messages import Message
from stable_opd_mcore.data.shortening import shortened
from stable_opd_mcore.data.tool_schemas import Tool
from stable_opd_mcore.data.written_turns import ASKED, MARK, SAID, WrittenTurns
from stable_opd_mcore.errors import DataError

_CUT = "\n[...]\n"  # in the middle of a message that is too long
_NEW = "text-of-the-new-message"
_SYSTEM: Message = {"role": "system", "content": "Add."}
_READ = ("user", "tool")  # roles of what an environment yields
_REMEDIES = {"user": "save another chat template there", "tool": "make it a user message"}
_BEFORE_MARK = ("", "<think>\n1\n</think>\n\n", "Hm. ")  # templates parse an assistant's text


class Kept(NamedTuple):
    """What remains of a turn that is cut after it was sampled."""

    num_tokens: int  # the first ones
    text: str


@dataclass(frozen=True)
class Observed:
    """What the student reads before its next turn."""

    token_ids: tuple[int, ...] = ()
    text: str = ""  # token_ids, decoded; in `append` it begins with the end of the turn before
    restarts: bool = False  # token_ids are a whole context that does not extend the one before
    messages: tuple[Message, ...] = ()  # what token_ids say; (): the row's prompt stands
    # With environment.history=template: the messages that the context renders now
    conversation: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()  # that its contexts name from now on
    replaces_end: bool = False  # token_ids begin with the end of the turn, in place of another one
    context: int | None = None  # which of its contexts they continue; None: that of the last turn
    kept: Kept | None = None  # of the turn before; None: all of it
    max_new_tokens: int | None = None  # of the next turn; None: what the settings allow

    def after(self, context_ids: Sequence[int]) -> Observed:
        """What follows `context_ids`: a new context where another token ends its last turn."""
        if not self.replaces_end:
            return self
        return replace(self, token_ids=(*context_ids[:-1], *self.token_ids), restarts=True)


class Bridge:
    """Puts messages between the turns of a student with this tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.turns = WrittenTurns(tokenizer)
        self._refusals: dict[str, str | None] = {}
        self._after_calls = False  # tool messages follow only a turn that calls them
        self._written: set[tuple[str, ...]] = set()  # roles of conversations that lose no message

    def append(
        self,
        messages: Sequence[Message],
        last_token: int,
        tools: Sequence[Tool] = (),
        said: Message = SAID,
    ) -> Observed:
        """The end of a turn whose last token is `last_token`, the messages after it, and the
        generation prompt. If the student sampled the turn's end itself, it is not repeated.

        tools: of the prompt, which some templates write again before the last message (Mistral's).
        said: the turn, of which only the calls count: templates may write them again in a reply.

        Raises:
            DataError: a role that `refusal` names, or a template that fails on these messages.
        """
        for message in messages:
            if reason := self.refusal(message["role"]):
                raise DataError(reason)
        cleaned, _ = self.neutralised(messages)
        calls = self._calls(cleaned, said.get("tool_calls"))
        text = self._continued(cleaned, tools, calls, names_known=bool(said.get("tool_calls")))
        ids = tuple(self._tokenizer.encode(text))
        end = next(place for place, token in enumerate(ids) if token in self._tokenizer.added_ids)
        # The template keeps the end of a call.
        if last_token in (ids[end], self.turns.end_of_calls):
            return Observed(ids[end + 1 :], text)
        return Observed(ids, text, replaces_end=last_token in self._tokenizer.stop_token_ids)

    def _continued(
        self,
        new: Sequence[Message],
        tools: Sequence[Tool],
        calls: Mapping[str, Any],
        names_known: bool,
    ) -> str:
        """`_after_turn`, checked. Where the template writes one call a message, each reply is
        written after its own call."""
        given: Sequence[Mapping[str, Any]] = calls.get("tool_calls", ())
        replies = [message["role"] for message in new[: len(given)]]
        writes_one = self._tokenizer.form.writes_one_call
        if len(given) < 2 or replies != ["tool"] * len(given) or not writes_one:
            if calls and not names_known:
                self._require_names(new, calls)
            self._require_written([ASKED, {**SAID, **calls}, *new])
            return self._after_turn([ASKED], new, tools, calls)
        own = [new[place : place + 1] for place in range(len(given) - 1)]
        texts = [
            self._continued(messages, tools, {"tool_calls": [call]}, names_known)
            for messages, call in zip([*own, new[len(own) :]], given, strict=True)
        ]
        end = next(name for name in self.turns.ends if texts[0].startswith(name))
        opening = self._opening
        bodies = [text.removeprefix(end).removesuffix(opening) for text in texts]
        return end + "".join(bodies) + opening

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
        new: list[Message] = [{"role": role, "content": "..."}]
        return self._after_turn([ASKED], new, calls=self._calls(new))

    @property
    def turn_end(self) -> int:
        """The token that the template writes at the end of a turn that the user answers."""
        ids = self._tokenizer.encode(self.between("user"))
        return next(token for token in ids if token in self._tokenizer.added_ids)

    def difference(self, of_teacher: Bridge, role: str) -> tuple[str, str] | None:
        """What this template and the teacher's write for a message of this role; None: the same."""
        refusal = None if self.refusal(role) else of_teacher.refusal(role)
        own, other = repr(self.between(role)), refusal or repr(of_teacher.between(role))
        return None if own == other else (own, other)

    def refusal(self, role: str) -> str | None:
        """Why messages of this role cannot follow a turn of the student; None if they can."""
        if role not in self._refusals:
            self._refusals[role] = self._find_refusal(role)
        return self._refusals[role]

    def _find_refusal(self, role: str) -> str | None:
        if (reason := self._problem(role)) is None:
            return None
        user_follows = role != "user" and self.refusal("user") is None
        return (
            f"{self._tokenizer.path}: a {role} message cannot follow a turn of the assistant: "
            f"{reason}; {_REMEDIES['tool' if user_follows else 'user']}"
        )

    def _problem(self, role: str) -> str | None:
        """Why such a message cannot follow a turn. Where one of a tool cannot follow a text, it is
        tried after a turn that calls it."""
        if role not in _READ:
            return "only user and tool messages can"
        if not self._tokenizer.has_template:
            return "there is no chat template"
        try:
            reason = self._problem_after_turns(role)
        except DataError as error:
            reason = str(error)
        if reason is None or role != "tool":
            return reason
        self._after_calls = True
        with suppress(DataError):
            if self._problem_after_turns(role) is None:
                return None
        self._after_calls = False
        return reason

    def _problem_after_turns(self, role: str) -> str | None:
        """Compare what the template writes around a message after several histories and turns."""
        new: Message = {"role": role, "content": _NEW}
        calls = self._calls([new])
        said: Message = {**SAID, "content": None, **calls} if calls else SAID
        histories = [[ASKED], [ASKED, said, new], [ASKED, said, new, SAID, ASKED]]
        with suppress(DataError):  # many templates take no system message
            self._tokenizer.render([_SYSTEM, ASKED])
            histories.append([_SYSTEM, ASKED])
        texts = {
            self._after_turn(history, [new], calls=calls, said=before + MARK)
            for history in histories
            for before in _BEFORE_MARK
            if not (calls and history[-1]["role"] == "tool")
        }
        if len(texts) > 1:
            return "what the chat template writes for it depends on the turns before it"
        (text,) = texts
        if _NEW not in text or not text.endswith(self._opening):
            return "the chat template does not write it with a generation prompt after it"
        # White space before the end of a turn is the student's to sample (Nemotron-Nano-v2).
        first = self._tokenizer.encode(text.partition(_NEW)[0].lstrip())[:1]
        if self._tokenizer.added_ids.isdisjoint(first):
            return f"no token of its own begins what the chat template writes, {text!r:.40}"
        return None

    @cached_property
    def _opening(self) -> str:
        """The generation prompt."""
        prompt = self._tokenizer.render([ASKED], generation_prompt=True)
        # Some templates write EOS in place of a generation prompt (Phi-4-mini).
        shared = commonprefix((prompt, self._tokenizer.render([ASKED])))  # noqa: RUF071
        return prompt[len(shared) :]

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

    def _calls(
        self, new: Sequence[Message], given: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """`tool_calls` of the turn before these messages, where the template needs them: those
        given, or one for each reply."""
        replies = [message for message in new if message["role"] == "tool"]
        if not self._after_calls or not replies:
            return {}
        made: list[dict[str, Any]] = []
        for reply in replies:
            named = {"id": reply["tool_call_id"]} if "tool_call_id" in reply else {}
            function: dict[str, Any] = {"name": reply.get("name", "f"), "arguments": {}}
            made.append({**named, "function": function})
        return {"tool_calls": list(given or made)}

    def _require_names(self, new: Sequence[Message], calls: Mapping[str, Any]) -> None:
        """Refuse replies without the name of their function where the template writes it."""
        if all("name" in each for each in new if each["role"] == "tool"):
            return
        others = [{**c, "function": {**c["function"], "name": "g"}} for c in calls["tool_calls"]]
        texts = [self._after_turn([ASKED], new, calls=c) for c in ({"tool_calls": others}, calls)]
        if texts[0] != texts[1]:
            raise DataError(
                f"{self._tokenizer.path}: its chat template writes the function's name before a "
                "tool's reply; give the tool message its name, or make it a user message"
            )

    def _after_turn(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool] = (),
        calls: Mapping[str, Any] | None = None,
        said: str = MARK,
    ) -> str:
        """What the template writes after a turn: `after_mark`, or what follows the end of its
        last call, whose arguments are a mark."""
        if not calls:
            return self.turns.after_mark(history, new, said=said, tools=tools)
        *others, last = calls["tool_calls"]
        marked = {**last, "function": {**last["function"], "arguments": {"x": MARK}}}
        turn = {"role": "assistant", "content": None, "tool_calls": [*others, marked]}
        text = self._tokenizer.render([*history, turn, *new], generation_prompt=True, tools=tools)
        after = text.partition(MARK)[2]
        if (end := self.turns.first_end(after)) is None:
            raise DataError(
                f"{self._tokenizer.path}: its chat template does not write the end of a tool call"
            )
        return after[end:]

    def neutralised(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """The messages without control tokens in foreign text, and how many were there."""
        cleaned: list[Message] = []
        total = 0
        for message in messages:
            if message["role"] != "assistant":
                for key in ("content", "name", "tool_call_id"):
                    if key in message:
                        text, number = self._tokenizer.neutralised(message[key])
                        message, total = {**message, key: text}, total + number
            cleaned.append(message)
        return cleaned, total

    def shortened(self, messages: Sequence[Message], max_tokens: int) -> tuple[list[Message], int]:
        """The messages with at most `max_tokens` tokens of text, and the number of those left out.

        The longest ones are cut to equal lengths, and a mark replaces the middle of each.
        """
        mark, _ = self._tokenizer.neutralised(_CUT)
        return shortened(messages, max_tokens, mark, self._tokenizer)
