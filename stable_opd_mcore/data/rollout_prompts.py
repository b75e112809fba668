"""The teacher's prompt of a single rollout, which the user's function makes after the rollout has
ended: `teacher.prompt.function` (docs/teacher_prompt.md).

The function reads texts and rewards of the rollout and of the others of its prompt in the same
step. It runs in the trainer's process, on one rank of a replica, which must give the result to the
others. Not here: a template over the columns of a row, which needs no rollout (teacher_prompt.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.messages import Message
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.user_code import InvalidValueError, UserFunction, plain_text
from stable_opd_mcore.metrics import Mean, Metrics, Sum
from stable_opd_mcore.records import Prompt, Rollout

_LOG = logging.getLogger(__name__)
_EXAMPLES = (("A wrong attempt.", 0.0, "What is wrong."), ("A right attempt.", 1.0, None))
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Told:
    """A rollout as the user's function gets it."""

    messages: list[dict[str, Any]]  # the prompt, and then all turns and what came between them
    num_prompt_messages: int  # messages[:num_prompt_messages] is what the student read first
    text: str  # the student's last turn
    reward: float | None  # None: not graded
    feedback: str | None  # what environment or reward function said; None: nothing
    metrics: Mapping[str, float]  # what its environment returned
    ending: str  # "stop", "length", "turns" or "window"

    @classmethod
    def of(cls, rollout: Rollout) -> Told:
        """A rollout in words."""
        first = rollout.turns[0]
        opening = [dict(each) for each in (first.messages or rollout.prompt.messages)]
        messages = list(opening)
        for number, turn in enumerate(rollout.turns):
            messages += [] if number == 0 else map(dict, turn.messages)
            messages.append({"role": "assistant", "content": turn.text})
        return cls(
            messages,
            len(opening),
            rollout.text,
            rollout.reward,
            rollout.feedback,
            dict(rollout.metrics),
            str(rollout.finish_reason),
        )


class RolloutPrompt(NamedTuple):
    """What was made for a rollout."""

    token_ids: tuple[int, ...] | None  # None: no teacher scores it
    failure: str | None = None  # why the function has failed, for people


class RolloutPrompts:
    """Calls the user's function and encodes what it returns.

    Args:
        tokenizer: the teacher's, with its own arguments of the chat template.
        system: data.system_prompt.
        window: positions of the teacher; None: not known here.
    """

    def __init__(
        self, function: UserFunction, tokenizer: Tokenizer, system: str | None, window: int | None
    ) -> None:
        self._function, self._name = function.load(), f"{function.path}:{function.name}"
        self._tokenizer, self._system, self._window = tokenizer, system, window
        self._counts: Counter[str] = Counter()
        self._has_warned = False

    def of(self, rollouts: Sequence[Rollout]) -> list[RolloutPrompt | None]:
        """The teacher's prompt of each rollout; None for one that no teacher would score anyway.

        rollouts: all those of each of their prompts.
        """
        groups: dict[tuple[int, str], list[int]] = {}
        for place, rollout in enumerate(rollouts):
            if rollout.prompt.use.is_taught and rollout.finish_reason != Ending.FAILED:
                key = rollout.prompt.slot, rollout.prompt.prompt_id
                groups.setdefault(key, []).append(place)
        found: list[RolloutPrompt | None] = [None] * len(rollouts)
        for places in groups.values():
            told = [Told.of(rollouts[place]) for place in places]
            for number, place in enumerate(places):
                others = told[:number] + told[number + 1 :]
                found[place] = self._made(rollouts[place], told[number], others)
        return found

    def example(self, prompt: Prompt) -> str | None:
        """The prompt of a wrong rollout with feedback and a right sibling, special tokens included,
        or why the function fails on it; None if it makes none."""
        ids, logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
        wrong, right = (
            Rollout(prompt, number, ids, logprobs, Ending.STOP, 0, text, reward, feedback=feedback)
            for number, (text, reward, feedback) in enumerate(_EXAMPLES)
        )
        made = self._made(wrong, Told.of(wrong), [Told.of(right)])
        self._counts.clear()
        if made.token_ids is None:
            return made.failure and f"teacher.prompt.function fails on an example: {made.failure}"
        return "".join(self._tokenizer.pieces(made.token_ids))

    def take_metrics(self) -> Metrics:
        """`teacher_prompt/*` of the rollouts since the last call, of this process."""
        counts, self._counts = self._counts, Counter[str]()
        asked = counts["asked"]
        shares = {f"{key}_share": Mean(counts[key], asked) for key in ("given", "failed", "long")}
        return Metrics(
            {
                **{f"teacher_prompt/{key}": mean for key, mean in shares.items()},
                "teacher_prompt/tokens_mean": Mean(counts["tokens"], counts["given"]),
                "teacher_prompt/neutralised_tokens": Sum(counts["neutralised"]),
            }
        )

    def _made(self, rollout: Rollout, told: Told, others: Sequence[Told]) -> RolloutPrompt:
        prompt = rollout.prompt
        self._counts["asked"] += 1
        try:
            returned: object = self._function(dict(prompt.columns or {}), told, list(others))
            if returned is None:
                return RolloutPrompt(None)
            ids = self._encoded(_messages(returned), prompt)
        except Exception as error:  # the user's code may raise anything
            self._counts["failed"] += 1
            reason = (
                f"{self._name} on row {prompt.prompt_id}: {type(error).__name__}: {error!s:.300}"
            )
            if not self._has_warned:
                self._has_warned = True
                _LOG.warning("no teacher scores a rollout whose teacher.prompt failed: %s", reason)
            return RolloutPrompt(None, reason)
        if self._window is not None and len(ids) + _num_tokens_after_prompt(rollout) > self._window:
            self._counts["long"] += 1
            return RolloutPrompt(None)
        self._counts["given"] += 1
        self._counts["tokens"] += len(ids)
        return RolloutPrompt(ids)

    def _encoded(self, messages: Sequence[Message], prompt: Prompt) -> tuple[int, ...]:
        cleaned: list[Message] = []
        for message in messages:
            text, number = self._tokenizer.neutralised(message["content"])
            self._counts["neutralised"] += number
            cleaned.append({**message, "content": text})
        text = self._tokenizer.render_turns(cleaned, self._system, tuple(prompt.tools))
        ids = tuple(self._tokenizer.encode(text))
        if not ids:
            raise DataError("the chat template renders its messages to no tokens")
        return ids


def _messages(returned: object) -> list[Message]:
    """What the function returned: a text of the user, or messages."""
    if isinstance(returned, str):
        returned = [{"role": "user", "content": returned}]
    given = cast("list[Any]", returned if isinstance(returned, list | tuple) else [None])
    messages: list[Message] = []
    for each in given:
        message = cast("Mapping[Any, Any]", each if isinstance(each, Mapping) else {})
        role, content = message.get("role"), message.get("content")
        is_plain = {*message} == {"role", "content"} and isinstance(content, str)
        if not is_plain or role not in _ROLES:
            raise InvalidValueError(
                f"it returned {returned!r:.200}; expected None, a text, or a list of messages "
                '[{"role": "user", "content": text}, ...]'
            )
        messages.append({"role": role, "content": plain_text(str(content))})
    if not messages:
        raise InvalidValueError("it returned no messages; expected at least one, or None")
    return messages


def _num_tokens_after_prompt(rollout: Rollout) -> int:
    """Tokens of its one context that follow what the teacher's prompt replaces."""
    first, *turns = rollout.turns
    observed = sum(len(turn.before) for turn in turns)
    return len(rollout.token_ids) + observed + (0 if first.restarts else len(first.before))
