"""Which of its contexts a request of an agent continues.

    histories = Histories(bridge, decode, path, prompt_ids)
    observed = histories.observed(request)      # what the student reads before its turn
    histories.said(reply, token_ids)            # the turn, and all that its context has now

An agent sends its whole history with each request. Messages say which context it means: the one
with the longest history, up to a turn, that equals the request's first messages. Tokens say what
the student reads: those of the context as they were read and sampled, and after them the new
messages. So nothing that was sampled is encoded again, unless no history matches. Not here: HTTP,
the order of requests, limits (sessions.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.data.bridge import Bridge, Observed
from stable_opd_mcore.data.chat_api import ChatReply, ChatRequest, message_key
from stable_opd_mcore.data.messages import THOUGHT, Message, with_system
from stable_opd_mcore.data.tool_schemas import Tool, refuse_unnamed
from stable_opd_mcore.errors import DataError

_Key = tuple[str, str, str]


class _End(NamedTuple):
    """The end of a turn in its context."""

    num_messages: int
    num_tokens: int


@dataclass
class _Context:
    messages: list[Message]  # as the agent knows them, up to its last turn
    keys: list[_Key]  # of the messages
    tools: tuple[Tool, ...]
    ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    ends: list[_End] = field(default_factory=list[_End])  # of its turns


class _Match(NamedTuple):
    number: int  # of the context
    end: _End
    is_last: bool  # of its ends


@dataclass
class _Asked:
    """A request whose turn is sampled."""

    number: int
    context: _Context
    counted: tuple[str, ...]  # once its turn is there


@dataclass
class Histories:
    """The contexts of one episode, by the numbers that they have in `Episode`."""

    bridge: Bridge
    decode: Callable[[Sequence[int]], str]
    path: str  # of the tokenizer, for errors
    prompt_ids: tuple[int, ...]  # the row's own prompt, which a first request may equal
    system_prompt: str | None = None
    appends: bool = True  # environment.history
    roles: frozenset[str] = frozenset()  # of what the last request appended to a turn
    counts: Counter[str] = field(default_factory=Counter[str])
    first_rewritten: str = ""  # what is wrong with the first such request, for people

    def __post_init__(self) -> None:
        self._contexts: list[_Context] = []
        self._asked: _Asked | None = None

    def observed(self, request: ChatRequest) -> Observed:
        """What the student reads before the turn that a request asks for.

        Raises:
            DataError: the chat template cannot write these messages or tools.
        """
        keys = [message_key(message) for message in request.messages]
        match = self._match(keys, request.tools) if self.appends else None
        seen, why, self.roles = None, "edited", frozenset()
        if match is not None:
            roles = frozenset(each["role"] for each in request.messages[match.end.num_messages :])
            try:
                seen, self.roles = self._appended(request, match), roles
            except DataError:
                match, why = None, "edited" if "assistant" in roles else "refused"
        if seen is None:
            seen = self._rendered(request)
        context = _Context([*request.messages], keys, request.tools)
        if seen.context is not None and match is not None:
            context.ends = [*self._contexts[match.number].ends]
        number = len(self._contexts) if seen.context is None else seen.context
        counted = self._counted(request, keys, seen, match, why)
        self._asked = _Asked(number, context, counted)
        return seen

    def length(self, seen: Observed) -> int:
        """The tokens of a context with what is observed."""
        before = 0 if seen.restarts else len(self.prompt_ids)
        if seen.context is not None:
            before = len(self._contexts[seen.context].ids)
        return before + len(seen.token_ids)

    def said(self, reply: ChatReply, token_ids: NDArray[np.int32]) -> None:
        """Note the turn that the last request got, and all ids of its context up to its end."""
        assert self._asked is not None
        number, context = self._asked.number, self._asked.context
        context.messages.append(reply.message)
        context.keys.append(message_key(reply.message))
        context.ids = token_ids
        context.ends.append(_End(len(context.messages), len(token_ids)))
        self._contexts[number : number + 1] = [context]
        self.counts.update(self._asked.counted)

    @property
    def contexts(self) -> list[NDArray[np.int32]]:
        """All token ids of each, up to the end of its last turn."""
        return [context.ids for context in self._contexts]

    # ---- which context

    def _match(self, keys: Sequence[_Key], tools: tuple[Tool, ...] | None) -> _Match | None:
        """The end of a turn after which the request has other messages; of the longest history,
        and of several with the same, if possible the end of its context, and the newest.

        tools: None: those of any context.
        """
        found: list[tuple[int, bool, int, _Match]] = []
        for number, context in enumerate(self._contexts):
            if tools is not None and context.tools != tools:
                continue
            most = min(_num_same(keys, context.keys), len(keys) - 1)
            ends = [end for end in context.ends if end.num_messages <= most]
            if ends:
                is_last = len(ends) == len(context.ends)
                match = _Match(number, ends[-1], is_last)
                found.append((ends[-1].num_messages, is_last, number, match))
        return max(found)[3] if found else None

    def _appended(self, request: ChatRequest, match: _Match) -> Observed:
        """The new messages after a turn. Raises DataError where they cannot follow it."""
        count, ids = match.end.num_messages, self._contexts[match.number].ids
        ids = ids[: match.end.num_tokens]
        said, new = request.messages[count - 1], request.messages[count:]
        seen = self.bridge.append(new, int(ids[-1]), request.tools, said)
        self.counts["neutralised_tokens"] += self.bridge.neutralised(new)[1]
        if match.is_last and not seen.replaces_end:
            text = self.decode(seen.token_ids)
            return Observed(seen.token_ids, text, context=match.number)
        whole = (*(ids[:-1] if seen.replaces_end else ids).tolist(), *seen.token_ids)
        return Observed(whole, self.decode(whole), restarts=True)

    def _rendered(self, request: ChatRequest) -> Observed:
        """All messages as the chat template writes them: the continuation of the context whose ids
        they begin with, or a new one."""
        messages = with_system(request.messages, self.system_prompt)
        ids = self.bridge.render(messages, (), request.tools).token_ids
        text = self.decode(ids)
        refuse_unnamed(request.tools, text, "the agent's request", self.path)
        self.counts["neutralised_tokens"] += self.bridge.neutralised(messages)[1]
        if not self._contexts and ids == self.prompt_ids:
            return Observed()
        extended = [
            (len(context.ids), number)
            for number, context in enumerate(self._contexts)
            if len(context.ids) < len(ids) and np.array_equal(context.ids, ids[: len(context.ids)])
        ]
        if not extended:
            return Observed(ids, text, restarts=True)
        length, number = max(extended)
        return Observed(ids[length:], self.decode(ids[length:]), context=number)

    # ---- the account

    def _counted(
        self,
        request: ChatRequest,
        keys: Sequence[_Key],
        seen: Observed,
        match: _Match | None,
        why: str,
    ) -> tuple[str, ...]:
        """What is counted for a request, of KINDS and LOSSES."""
        if match is not None:
            place = match.end.num_messages - 1
            own = self._contexts[match.number].messages[place]
            drops = bool(own.get(THOUGHT)) and not request.messages[place].get(THOUGHT)
            kind = "continued" if match.is_last else "forked"
            return (kind, "dropped_thoughts") if drops else (kind,)
        if seen.context is not None:
            return ("continued",)
        place = self._first_rewritten(request, keys)
        if place is None:
            return ("begun",)
        with_any, own = self._match(keys, None), self._match(keys, request.tools)
        if with_any and (own is None or with_any.end.num_messages > own.end.num_messages):
            why = "tools"
        self.first_rewritten = self.first_rewritten or (
            f"{_REASONS[why]}: message {place} of {len(keys)}, {request.messages[place]!s:.200}"
        )
        return "rewritten", f"rewritten_{why}"

    def _first_rewritten(self, request: ChatRequest, keys: Sequence[_Key]) -> int | None:
        """The place in a request, which continues no context, of a turn of the student: where the
        context with the longest same beginning has another turn, or the first that equals one."""
        edited: list[int] = []
        for context in self._contexts:
            same = _num_same(keys, context.keys)
            are_turns = [each[same : same + 1] for each in (request.messages, context.messages)]
            if all(each and each[0]["role"] == "assistant" for each in are_turns):
                edited.append(same)
        if edited:
            return max(edited)
        turns = {
            context.keys[end.num_messages - 1] for context in self._contexts for end in context.ends
        }
        return next((place for place, key in enumerate(keys) if key in turns), None)


def _num_same(a: Sequence[_Key], b: Sequence[_Key]) -> int:
    """The number of messages with which both begin."""
    both = enumerate(zip(a, b, strict=False))
    return next((place for place, (one, other) in both if one != other), min(len(a), len(b)))


_REASONS = {
    "edited": "its history is not what the student read and said",
    "tools": "its tools are not those of the history",
    "refused": "the chat template cannot write its new messages after a turn",
}
