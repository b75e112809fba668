"""Decides for each row whether it is kept, and with which solution.

The rules hold for every recipe, in this order: the values have their types; the problem is in no
benchmark; the row has what its recipe asks for; problem and solution contain no control token; the
solution is more than the bare answer; the shortest solution in the student's tokens is kept, if it
has at most `max_tokens` of them. The training refuses what these rules drop.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from stable_opd_mcore.commands.prepare.openr1 import Candidate, Dropped, read_openr1
from stable_opd_mcore.config.data import ColumnsConfig
from stable_opd_mcore.data.decontamination import BenchmarkIndex
from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.data.sources import SURROGATE, is_bare_answer, parse_row
from stable_opd_mcore.errors import DataError

CONTAMINATED = "stands in "  # then the benchmark and the kind of match
MALFORMED = "malformed"


@dataclass(frozen=True)
class Kept:
    problem: str
    answer: str | None
    solution: str | None
    problem_tokens: int
    solution_tokens: int  # 0 without a solution


@dataclass(frozen=True)
class Rules:
    openr1: bool
    columns: ColumnsConfig
    max_tokens: int
    tokenizer_json: str  # the text of the student's tokenizer.json
    control_tokens: re.Pattern[str] | None
    benchmarks: Mapping[str, Sequence[Row]]

    @cached_property
    def _tokenizer(self) -> RawTokenizer:
        return RawTokenizer.from_str(self.tokenizer_json)

    @cached_property
    def _index(self) -> BenchmarkIndex:
        return BenchmarkIndex(self.benchmarks)

    def apply(self, records: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Kept | Dropped]:
        """The rows as they are written, or why they are dropped.

        A record comes with its file and row. All texts are tokenized together, on all cores.
        """
        found = [self._usable(record, place) for place, record in records]
        candidates = [each for each in found if isinstance(each, Candidate)]
        texts = [text for each in candidates for text in (each.problem, *each.solutions)]
        lengths = map(len, self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return [
            self._shortest(each, lengths) if isinstance(each, Candidate) else each for each in found
        ]

    def _usable(self, record: Mapping[str, Any], place: str) -> Candidate | Dropped:
        """The row with the solutions that may be trained on, or why it is dropped."""
        try:
            problem, candidate = self._read(record, place)
        except DataError as error:
            return Dropped(MALFORMED, str(error))
        match = self._index.find(problem)
        if match is not None:
            reason = f"{CONTAMINATED}{match.benchmark} ({match.kind})"
            return Dropped(reason, f"{match.row_id}: {match.words}")
        return candidate if isinstance(candidate, Dropped) else self._without_faults(candidate)

    def _read(self, record: Mapping[str, Any], place: str) -> tuple[str, Candidate | Dropped]:
        """The problem's text, and the row before the rules."""
        if self.openr1:
            return read_openr1(record, place)
        row = parse_row(record, self.columns, place, place)
        solutions = () if row.solution is None else (row.solution,)
        return row.problem, Candidate(row.problem, row.answer, solutions)

    def _without_faults(self, candidate: Candidate) -> Candidate | Dropped:
        if any(map(SURROGATE.search, (candidate.problem, *candidate.solutions))):
            return Dropped(MALFORMED, "a lone surrogate, half a character")
        token = self._control_token(candidate.problem)
        if token is not None:
            return Dropped("control token in the problem", token)
        solutions = [text for text in candidate.solutions if self._control_token(text) is None]
        if candidate.solutions and not solutions:
            token = self._control_token(candidate.solutions[0])
            return Dropped("control token in every solution", str(token))
        solutions = [text for text in solutions if not is_bare_answer(text, candidate.answer)]
        if candidate.solutions and not solutions:
            return Dropped("every solution is the bare answer")
        return replace(candidate, solutions=tuple(solutions))

    def _shortest(self, candidate: Candidate, lengths: Iterator[int]) -> Kept | Dropped:
        """The row with its shortest solution; takes the lengths of its texts."""
        problem_tokens = next(lengths)
        measured = [(next(lengths), solution) for solution in candidate.solutions]
        length, solution = min(measured, key=itemgetter(0), default=(0, None))
        if length > self.max_tokens:
            return Dropped(f"longer than {self.max_tokens} tokens", f"{length} tokens")
        return Kept(candidate.problem, candidate.answer, solution, problem_tokens, length)

    def _control_token(self, text: str) -> str | None:
        pattern = self.control_tokens
        match = None if pattern is None else pattern.search(text)
        return match.group() if match else None
