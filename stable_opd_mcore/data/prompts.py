"""The prompts of a run: encoded, checked against the model's window, and their order.

The order is a function of (seed, slot), so a checkpoint stores only the number of used slots.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress, takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.config.schema import DataConfig
from stable_opd_mcore.data.bridge import Bridge
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.golden_turns import Golden, encode_golden, golden_turns_of
from stable_opd_mcore.data.messages import THOUGHT, Message
from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.data.teacher_prompt import TeacherPrompt
from stable_opd_mcore.data.thoughts import channel_message, opens_thinking
from stable_opd_mcore.data.tool_schemas import holds_schemas, refuse_unnamed
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.records import Prompt, Use

_USE, _NO_USES = Use(), dict[str, Use]()
_LOG = logging.getLogger(__name__)


class PromptOrder:
    """An endless, seeded order of rows, of which a step takes `per_step`; it holds no position.

    Each epoch is a permutation. A step that crosses into an epoch has no row twice: rows that it
    had in the epoch before come later in the new one.

    Args:
        per_step: slots of a step, at most num_rows.
        step_of: slot -> the first slot of its step, and of the next step; None: every step has
            per_step slots.
    """

    def __init__(
        self,
        num_rows: int,
        seed: int,
        per_step: int = 1,
        step_of: Callable[[int], tuple[int, int]] | None = None,
    ):
        assert 1 <= per_step <= num_rows
        self._step_of = step_of or self._own_step_of
        self.num_rows = num_rows
        self.seed = seed
        self.per_step = per_step
        self._newest: tuple[int, list[int]] = (-1, [])  # the epoch computed last and its rows

    def sources(self, _slots: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The source of each slot's prompt; None: there is one."""
        return None

    def indices(self, cursor: int, count: int) -> list[int]:
        """Rows of slots cursor .. cursor + count - 1, however that range is split into calls."""
        assert cursor >= 0 and count >= 0
        found: list[int] = []
        while len(found) < count:
            epoch, offset = divmod(cursor + len(found), self.num_rows)
            found.extend(self._rows(epoch)[offset : offset + count - len(found)])
        return found

    def _rows(self, epoch: int) -> list[int]:
        """The rows of an epoch, which follow from those of the epochs before."""
        number, rows = self._newest if self._newest[0] <= epoch else (-1, [])
        while number < epoch:
            number += 1
            start, end = self._step_of(number * self.num_rows)
            crossing = number * self.num_rows - start  # slots of that step before `number`
            taken = set(rows[len(rows) - crossing :])
            rows = np.random.default_rng([self.seed, number]).permutation(self.num_rows).tolist()
            if taken:
                first = [row for row in rows if row not in taken][: end - start - crossing]
                later = set(rows).difference(first)
                rows = first + [row for row in rows if row in later]
        self._newest = (number, rows)
        return rows

    def _own_step_of(self, slot: int) -> tuple[int, int]:
        start = slot - slot % self.per_step
        return start, start + self.per_step


class _EncodedRow(NamedTuple):
    """A row and its tokens. Arrays have 4 bytes a token: golden solutions may hold 10^8."""

    row: Row
    prompt: NDArray[np.int32]
    golden: NDArray[np.int32]  # its golden turns and what is observed between them; may be empty
    golden_turns: tuple[int, ...]  # see Prompt.golden_turn_tokens
    teacher_prompt: NDArray[np.int32] | None
    opens_thinking: bool

    @classmethod
    def of(
        cls,
        row: Row,
        text: str,
        prompt: Sequence[int],
        golden: Sequence[Sequence[int]],
        of_teacher: Sequence[int] | None,
    ) -> _EncodedRow:
        return cls(
            row,
            np.array(prompt, np.int32),
            np.array([*chain(*golden)], np.int32),
            tuple(map(len, golden)),
            None if of_teacher is None else np.array(of_teacher, np.int32),
            opens_thinking(text),
        )


class PromptSet:
    """Rows as prompts: chat template applied, golden solutions encoded, lengths checked."""

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        config: DataConfig,
        *,
        window: int,
        max_new_tokens: int,
        golden: Golden | Mapping[str, Golden] = "none",
        teacher: TeacherPrompt | None = None,
        uses: Mapping[str, Use] = _NO_USES,
    ):
        """Encode and check all rows.

        Args:
            window: positions of the model, in tokens.
            max_new_tokens: tokens that a prompt must leave for a rollout, unless its row says how
                many; 0 without rollouts.
            golden: "none": golden solutions are not encoded. "required": every row must have one.
                "by_source": every row of a source must, unless its `columns.solution` is null. A
                mapping has one of them for each source, by its name. "optional": those of rows
                that have one are encoded.
            teacher: makes the teacher's prompts, of sources whose objective asks it.
            uses: what the run does with the rows of each source, by its name. Not given: they are
                sampled and taught.

        Raises:
            DataError: a row that cannot be rendered, has tools that its prompt does not name, or
                whose golden solution is missing or a bare answer; the text of a control token;
                rows that exceed the window.
        """
        self.window, self._max_new_tokens = window, max_new_tokens
        self._template = config.prompt_template
        self.teacher, self._uses = teacher, uses
        bridge = Bridge(tokenizer)
        rows = [_without_written_tools(row, config.system_prompt) for row in rows]
        texts = [_prompt_text(row, tokenizer, config, bridge) for row in rows]
        prompts = tokenizer.encode_many(texts)
        golden_of: list[Golden] = [
            golden[row.source] if isinstance(golden, Mapping) else golden for row in rows
        ]
        goldens = encode_golden(rows, texts, tokenizer, golden_of, bridge, config)
        is_taught = [teacher is not None and self._use(row).is_taught for row in rows]
        own_ids = iter(teacher.encode([*compress(rows, is_taught)]) if teacher else ())
        own = [next(own_ids) if taught else None for taught in is_taught]
        self._rows: list[_EncodedRow] = []
        columns = zip(rows, texts, prompts, goldens, own, golden_of, strict=True)
        for row, text, prompt, turns, of_teacher, needed in columns:
            _refuse_control_tokens(row, tokenizer, needed)
            if row.tools and row.environment is None:  # which may replace the prompt
                start = _start_text(row, text, tokenizer, config, bridge)
                refuse_unnamed(row.tools, start, row.row_id, tokenizer.path)
            _refuse_empty(row, prompt)
            encoded = _EncodedRow.of(row, text, prompt, turns, of_teacher)
            problem = self._length_problem(encoded)
            if problem is None:
                self._rows.append(encoded)
            elif config.overlong == "error":
                raise DataError(f"{row.row_id}: {problem}, or set data.overlong=drop")
        self.num_dropped = len(rows) - len(self._rows)
        if self.num_dropped:
            numbers = self.num_dropped, len(rows), window
            _LOG.warning("dropped %d of %d rows that exceed the window of %d tokens", *numbers)
        if not self._rows:
            raise DataError(
                f"none of {len(rows)} rows fits the window of {window} tokens; lower "
                "sampling.max_new_tokens or raise student.window"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        row, prompt, golden, turns, of_teacher, opens_thinking = self._rows[index]
        return Prompt(
            prompt_id=row.row_id,
            text=row.problem,
            token_ids=tuple(prompt.tolist()),
            answer=row.answer,
            golden_token_ids=tuple(golden.tolist()) or None,
            answer_format=row.answer_format,
            opens_thinking=opens_thinking,
            columns=row.columns,
            teacher_token_ids=None if of_teacher is None else tuple(of_teacher.tolist()),
            use=self._use(row),
            golden_turn_tokens=turns,
            golden_messages=row.golden_turns,
            environment=row.environment,
            max_new_tokens=row.max_new_tokens,
            messages=_messages(row, self._template),
            tools=row.tools,
        )

    def problems(self) -> list[str]:
        """The problem of every row, as its source writes it."""
        return [each.row.problem for each in self._rows]

    def source_names(self) -> list[str]:
        """The source of every row: its id before the last colon."""
        return [each.row.source for each in self._rows]

    def prompt_lengths(self) -> list[int]:
        """Tokens of every prompt."""
        return [len(each.prompt) for each in self._rows]

    def teacher_prompt_lengths(self) -> list[int]:
        """Tokens of every prompt as the teacher reads it; empty if it reads the student's."""
        own = (each.teacher_prompt for each in self._rows)
        return [len(ids) for ids in own if ids is not None]

    def golden_lengths(self) -> list[int]:
        """Tokens of every row's longest golden turn; 0 for a row without one."""
        return [max(each.golden_turns[::2], default=0) for each in self._rows]

    def golden_transcript(self) -> Prompt | None:
        """The first prompt with several golden turns, or with one that is not a text of its row,
        as one with a thought in its own key; None without one."""
        shown = (
            index
            for index, each in enumerate(self._rows)
            if each.golden_turns and (each.golden_turns[1:] or each.row.golden_turns)
        )
        index = next(shown, None)
        return None if index is None else self[index]

    def first_played(self) -> list[Prompt]:
        """The first prompt of each source whose rows an environment plays."""
        first: dict[str, int] = {}
        for index, each in enumerate(self._rows):
            if each.row.environment is not None:
                first.setdefault(each.row.row_id.rpartition(":")[0], index)
        return [self[index] for index in first.values()]

    def roles_between(self) -> set[str]:
        """Roles of the messages between two golden turns of any row."""
        turns = chain.from_iterable(each.row.golden_turns for each in self._rows)
        return {turn["role"] for turn in turns} - {"assistant"}

    def select(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts of these rows, in this order."""
        return [self[index] for index in indices]

    def _use(self, row: Row) -> Use:
        return self._uses.get(row.source, _USE)

    def _length_problem(self, encoded: _EncodedRow) -> str | None:
        """What is wrong with its numbers of tokens, for the student or for the teacher."""
        row, golden, of_teacher = encoded.row, len(encoded.golden), encoded.teacher_prompt
        problem = self._window_problem(row, len(encoded.prompt), golden, self.window)
        window = self.teacher and self.teacher.window
        if problem is None and of_teacher is not None and window is not None:
            return self._window_problem(row, len(of_teacher), golden, window, "teacher's ")
        return problem

    def _window_problem(
        self, row: Row, prompt: int, golden: int, window: int, whose: str = ""
    ) -> str | None:
        model = whose or "model's "
        limit = self._max_new_tokens if self._use(row).is_sampled else 0
        own = row.max_new_tokens if limit else None
        response = own or limit
        if prompt + response > window:
            section = "environment" if own else "sampling"
            return (
                f"its {whose}prompt has {prompt} tokens, and with max_new_tokens={response} that "
                f"exceeds the {model}window of {window}; lower {section}.max_new_tokens, shorten "
                "or drop the row"
            )
        if prompt + golden > window:
            return (
                f"its golden solution has {golden} tokens, and with the {whose}prompt's {prompt} "
                f"that exceeds the {model}window of {window}; shorten or drop the row"
            )
        return None


def _messages(row: Row, template: str) -> Sequence[Message]:
    """The turns of a row's prompt, without the run's system message."""
    if row.messages:
        return row.messages
    return ({"role": "user", "content": template.replace("{problem}", row.problem)},)


def _prompt_text(row: Row, tokenizer: Tokenizer, config: DataConfig, bridge: Bridge) -> str:
    system = config.system_prompt
    if not row.messages:
        return tokenizer.render_prompt(row.problem, config.prompt_template, system, row.tools)
    try:
        for message in row.messages:
            if "tool_calls" in message:
                bridge.turns.said(message)  # raises for a template that ignores them
        return tokenizer.render_turns(row.messages, system, row.tools)
    except DataError as error:  # many templates refuse some orders of turns
        raise DataError(f"{row.row_id}: {error}") from error


def _refuse_empty(row: Row, prompt: Sequence[int]) -> None:
    if not len(prompt):
        raise DataError(
            f"{row.row_id}: the chat template renders its prompt to no tokens; fix the template or "
            "drop the row"
        )


def _without_written_tools(row: Row, system: str | None) -> Row:
    """The row without tools whose schemas its system message has already."""
    if not row.tools:
        return row
    first = row.messages[0] if row.messages else {"role": "user"}
    text = first["content"] if first["role"] == "system" else system
    return replace(row, tools=()) if holds_schemas(text or "", row.tools) else row


def _start_text(
    row: Row, text: str, tokenizer: Tokenizer, config: DataConfig, bridge: Bridge
) -> str:
    """The row's prompt before the first turn of the assistant; `text` is the whole."""
    first = tuple(takewhile(lambda turn: turn["role"] != "assistant", row.messages))
    if len(first) == len(row.messages):
        return text
    return _prompt_text(replace(row, messages=first), tokenizer, config, bridge)


def _refuse_control_tokens(row: Row, tokenizer: Tokenizer, golden: str) -> None:
    """Refuse text that would be encoded as a control token: in a problem it ends the user's turn
    inside the prompt; in a golden solution it teaches the student to stop early.
    """
    turns = () if golden == "none" else golden_turns_of(row)
    spoken = (channel_message(each["content"] or "") or each for each in turns)
    solution = "\n".join(f"{each.get(THOUGHT, '')}{each['content'] or ''}" for each in spoken)
    system = next((each["content"] for each in row.messages if each["role"] == "system"), "")
    calls = [each["tool_calls"] for each in (*row.messages, *turns) if "tool_calls" in each]
    texts = {"problem": row.problem, "solution": solution, "system message": system}
    if calls:
        texts["tool calls"] = json.dumps(calls, ensure_ascii=False, default=str)
    for role, text in texts.items():
        token = tokenizer.control_token_in(text)
        if token is not None:
            raise DataError(
                f"{row.row_id}: the {role} contains {token!r}, a control token of "
                f"{tokenizer.path}; remove it from the row or drop the row"
            )
