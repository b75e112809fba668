"""The prompts of a run: encoded, checked against the model's window, and their order.

`PromptSet` holds rows as prompts. `PromptOrder` is a function of (seed, cursor): each epoch is a
permutation of all rows, and the cursor counts the prompts drawn since the start, so a checkpoint
stores the cursor alone. No step draws a row twice. Not here: reading rows (data/sources.py), the
chat template (data/chat.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np

from stable_opd_mcore.config.schema import DataConfig
from stable_opd_mcore.data.chat import Tokenizer, opens_thinking
from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.data.sources import boxed_solution
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.records import Prompt

_LOG = logging.getLogger(__name__)


class PromptOrder:
    """An endless, seeded order of rows, of which a step takes `per_step`; it holds no position.

    Each epoch is a permutation. A step that crosses into an epoch draws no row twice: rows that it
    drew in the epoch before come later in the new one.

    Args:
        per_step: draws of a step, at most num_rows.
    """

    def __init__(self, num_rows: int, seed: int, per_step: int = 1):
        if num_rows < 1:
            raise ValueError("no rows to draw from")
        assert 1 <= per_step <= num_rows
        self.num_rows = num_rows
        self.seed = seed
        self.per_step = per_step
        self._newest: tuple[int, list[int]] = (-1, [])  # the epoch drawn last and its rows

    def indices(self, cursor: int, count: int) -> list[int]:
        """Rows of draws cursor .. cursor + count - 1, however that range is split into calls."""
        assert cursor >= 0 and count >= 0
        drawn: list[int] = []
        while len(drawn) < count:
            epoch, offset = divmod(cursor + len(drawn), self.num_rows)
            drawn.extend(self._rows(epoch)[offset : offset + count - len(drawn)])
        return drawn

    def _rows(self, epoch: int) -> list[int]:
        """The rows of an epoch, which follow from those of the epochs before."""
        number, rows = self._newest if self._newest[0] <= epoch else (-1, [])
        while number < epoch:
            number += 1
            crossing = number * self.num_rows % self.per_step  # draws of that step before `number`
            drawn = set(rows[len(rows) - crossing :])
            rows = np.random.default_rng([self.seed, number]).permutation(self.num_rows).tolist()
            if drawn:
                first = [row for row in rows if row not in drawn][: self.per_step - crossing]
                later = set(rows).difference(first)
                rows = first + [row for row in rows if row in later]
        self._newest = (number, rows)
        return rows


class PromptSet:
    """Rows as prompts: chat template applied, golden solutions encoded, lengths checked.

    Token ids are stored in flat arrays of 4 bytes a token: golden solutions may hold 10^8 tokens.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        config: DataConfig,
        *,
        window: int,
        max_new_tokens: int,
        golden: Literal["none", "optional", "required"] = "optional",
    ):
        """Encode and check all rows.

        Args:
            window: positions of the model, in tokens.
            max_new_tokens: tokens that every prompt must leave for a rollout; 0 without rollouts.
            golden: whether golden solutions are encoded, and whether every row must have one.

        Raises:
            DataError: a row without the golden solution it needs; no row that fits the window; with
                data.overlong=error, a prompt or golden solution that exceeds the window; a problem
                or golden solution with the text of a control token; a golden solution that is the
                bare answer.
        """
        self._window, self._max_new_tokens = window, max_new_tokens
        texts = [
            tokenizer.render_prompt(row.problem, config.prompt_template, config.system_prompt)
            for row in rows
        ]
        prompts = tokenizer.encode_many(
            [text + row.prefix for text, row in zip(texts, rows, strict=True)]
        )
        goldens = _encode_golden(rows, texts, tokenizer, golden)
        for row in rows:
            _refuse_control_tokens(row, tokenizer, golden)
        kept: list[int] = []
        for index, row in enumerate(rows):
            problem = self._length_problem(len(prompts[index]), goldens[index])
            if problem is None:
                kept.append(index)
            elif config.overlong == "error":
                raise DataError(f"{row.row_id}: {problem}, or set data.overlong=drop")
        self.num_dropped = len(rows) - len(kept)
        if self.num_dropped:
            _LOG.warning(
                "dropped %d of %d rows that exceed the window of %d",
                self.num_dropped,
                len(rows),
                window,
            )
        if not kept:
            raise DataError(f"none of {len(rows)} rows fits the window of {window} tokens")
        self._rows = [rows[index] for index in kept]
        self._opens_thinking = [opens_thinking(texts[index]) for index in kept]
        self._prompts = _Ragged([prompts[index] for index in kept])
        self._goldens = _Ragged([goldens[index] or () for index in kept])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        row = self._rows[index]
        golden = self._goldens[index]
        return Prompt(
            prompt_id=row.row_id,
            text=row.problem,
            token_ids=self._prompts[index],
            answer=row.answer,
            golden_token_ids=golden or None,
            answer_format=row.answer_format,
            opens_thinking=self._opens_thinking[index],
        )

    @property
    def window(self) -> int:
        """Positions of the model."""
        return self._window

    def problems(self) -> list[str]:
        """The problem of every row, as its source writes it."""
        return [row.problem for row in self._rows]

    def prompt_lengths(self) -> list[int]:
        """Tokens of every prompt."""
        return self._prompts.lengths()

    def golden_lengths(self) -> list[int]:
        """Tokens of every golden solution; 0 for a row without one."""
        return self._goldens.lengths()

    def select(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts of these rows, in this order."""
        return [self[index] for index in indices]

    def _length_problem(self, prompt_length: int, golden: Sequence[int] | None) -> str | None:
        if prompt_length + self._max_new_tokens > self._window:
            return (
                f"its prompt has {prompt_length} tokens, and with max_new_tokens="
                f"{self._max_new_tokens} that exceeds the model's window of {self._window}; "
                "lower sampling.max_new_tokens, shorten or drop the row"
            )
        if golden is not None and prompt_length + len(golden) > self._window:
            return (
                f"its golden solution has {len(golden)} tokens, and with the prompt's "
                f"{prompt_length} that exceeds the model's window of "
                f"{self._window}; shorten or drop the row"
            )
        return None


class _Ragged:
    """Lists of token ids of different lengths in one flat array."""

    def __init__(self, lists: Sequence[Sequence[int]]):
        self._ends = np.cumsum([0, *(len(ids) for ids in lists)])
        self._flat = np.empty(int(self._ends[-1]), dtype=np.int32)
        for index, ids in enumerate(lists):
            self._flat[self._ends[index] : self._ends[index + 1]] = ids

    def lengths(self) -> list[int]:
        return np.diff(self._ends).tolist()

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(self._flat[self._ends[index] : self._ends[index + 1]].tolist())


def _encode_golden(
    rows: Sequence[Row], prompt_texts: Sequence[str], tokenizer: Tokenizer, golden: str
) -> list[list[int] | None]:
    """Ids of every golden solution; None for a row without one, and for all rows if "none"."""
    encoded: list[list[int] | None] = [None] * len(rows)
    if golden == "none":
        return encoded
    present = [index for index, row in enumerate(rows) if row.solution]
    if golden == "required" and len(present) < len(rows):
        missing = next(row.row_id for row in rows if not row.solution)
        raise DataError(
            f"{missing}: no golden solution, which sft and mixture.lambda > 0 train on; "
            "set data.train.columns.solution, or mixture.lambda=0"
        )
    for index in present:
        _refuse_bare_answer(rows[index])
    texts = [
        tokenizer.response_text(rows[index].solution or "", prompt_texts[index])
        for index in present
    ]
    for index, ids in zip(present, tokenizer.encode_many(texts), strict=True):
        encoded[index] = [*ids, tokenizer.stop_token_ids[0]] if rows[index].complete else ids
    return encoded


def _refuse_control_tokens(row: Row, tokenizer: Tokenizer, golden: str) -> None:
    """Refuse text that the tokenizer would encode as a control token.

    Such a token in a problem ends the user's turn inside the prompt; in a golden solution it
    teaches the student to stop early. The row is refused and not neutralised: breaking the text up
    would train on other tokens than the row shows, and a data set has few such rows.
    """
    texts = {"problem": row.problem, "solution": row.solution or "" if golden != "none" else ""}
    for role, text in texts.items():
        token = tokenizer.control_token_in(text)
        if token is not None:
            raise DataError(
                f"{row.row_id}: the {role} contains {token!r}, a control token of "
                f"{tokenizer.path}; remove it from the row or drop the row"
            )


def _refuse_bare_answer(row: Row) -> None:
    """Refuse an answer without worked steps as a golden solution."""
    answer = row.answer or ""
    if (row.solution or "").strip() in (answer, boxed_solution(f"#### {answer}")):
        raise DataError(
            f"{row.row_id}: the golden solution is the bare answer {answer!r:.80}; set "
            "data.*.columns.solution to a column of worked solutions, or to null without sft and "
            "with mixture.lambda=0"
        )
