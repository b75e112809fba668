"""`stable-opd score`: grade and measure files of generations, with the code of a run.

One pass: rows stream through grading workers, and one verdict per row is written, in the order of
the rows. Both files of the output appear when the pass ends. Memory does not grow with the rows.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import tee
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import track

from stable_opd_mcore.commands.score.grading_rows import (
    Columns,
    ResponseRow,
    RowError,
    find_columns,
    parse_row,
    read_lines,
)
from stable_opd_mcore.commands.score.grading_summary import summarise
from stable_opd_mcore.data.repetition import PAPER_TAIL_CHARACTERS
from stable_opd_mcore.data.responses import CompressionLimits, compression_limits, measure
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.evaluation.grading import Grader, GradingItem
from stable_opd_mcore.host.atomic_files import atomic_file, naming_disk_errors

STANDARD_INPUT = Path("-")
_NO_GOLD = GradingItem("", "", "bracket")  # no worker grades it, and its verdict is not used
_Record = dict[str, Any]


@dataclass(frozen=True)
class FileGradingSettings:
    columns: Columns = field(default_factory=Columns)  # None: look for the usual names
    tokenizer: str | None = None  # model directory; makes the token ids of rows that have none
    max_length: int | None = None  # length budget, in tokens, or in characters without tokens
    tail_characters: int | None = None  # None: as in a run with this budget, at most 10,000
    ratio: float | None = None  # None: as in a run with this budget, 10 without one
    timeout_seconds: float = 10.0
    workers: int | None = None  # None: one for each core

    def __post_init__(self) -> None:
        if self.ratio is not None and not 1 < self.ratio < math.inf:
            raise UserError(f"--ratio {self.ratio}: expected a number above 1; 10 is the paper's")

    @property
    def unit(self) -> str:
        has_tokens = self.columns.tokens is not None or self.tokenizer is not None
        return "tokens" if has_tokens else "characters"

    @property
    def limits(self) -> CompressionLimits:
        """The detectors' limits: those of a run whose budget, in tokens, is `max_length`."""
        budget = self.max_length if self.unit == "tokens" else None
        limits = compression_limits(PAPER_TAIL_CHARACTERS if budget is None else budget)
        return replace(
            limits,
            tail_characters=self.tail_characters or limits.tail_characters,
            ratio=self.ratio or limits.ratio,
        )

    def plain(self) -> _Record:
        """What decides the verdicts and numbers, for summary.json."""
        return {
            **{f"column_{role}": name for role, name in asdict(self.columns).items()},
            **asdict(self.limits),
            "unit": self.unit,
            "max_length": self.max_length,
            "tokenizer": self.tokenizer,
            "timeout_seconds": self.timeout_seconds,
        }


def default_output(paths: Sequence[Path]) -> Path:
    """`FILE.score`, or stdin.score; a UserError for several files."""
    if len(paths) > 1:
        raise UserError(f"{len(paths)} files and no --output; give the directory of their verdicts")
    name = "stdin" if paths[0] == STANDARD_INPUT else paths[0].name
    return paths[0].parent / f"{name}.score"


def grade_files(paths: Sequence[Path], output: Path, settings: FileGradingSettings) -> _Record:
    """Grade the rows of `paths`; write `output`/verdicts.jsonl and `output`/summary.json.

    Both replace earlier ones when all rows are graded. The files have the same columns;
    STANDARD_INPUT may be one of them. Each of several files is a group, unless the settings name a
    column of groups. Returns what summary.json holds: `settings`, and the numbers of `summarise`.

    Raises:
        UserError: no such file, no column for the response, no room in `output`.
    """
    verdicts = output / "verdicts.jsonl"
    for number, path in enumerate(paths):
        _require_file(path, verdicts)
        if path.resolve() in map(Path.resolve, paths[:number]):
            raise DataError(f"{path} is given twice, and its rows would count twice; drop one")
    names = ["standard input" if path == STANDARD_INPUT else str(path) for path in paths]
    columns, first = _columns_and_lines(paths[0], names[0], settings.columns)
    settings = replace(settings, columns=columns)
    sources = list(zip(names, [first, *map(_lines, paths[1:])], strict=True))
    workers = settings.workers or len(os.sched_getaffinity(0))
    with (
        naming_disk_errors(output, setting="--output"),
        atomic_file(verdicts) as file,
        atomic_file(output / "summary.json") as summary_file,
        Grader(settings.timeout_seconds, workers) as grader,
    ):
        records = _write_verdicts(file, grader, _measured_rows(sources, settings))
        console = Console(stderr=True)
        shown = track(records, "rows", console=console, disable=not console.is_terminal)
        found = summarise(shown, settings.unit, settings.max_length)
        summary = {"settings": {"files": names, **settings.plain()}, **found}
        summary_file.write((json.dumps(summary, indent=1) + "\n").encode())
    return summary


def _require_file(path: Path, verdicts: Path) -> None:
    if path.resolve() == verdicts.resolve():
        raise DataError(f"{path} would be replaced by its own verdicts; give another --output")
    if path == STANDARD_INPUT or (path.is_file() and path.stat().st_size):
        return
    found = "a directory" if path.is_dir() else "empty" if path.exists() else "no such file"
    raise DataError(f"{path}: {found}; give a file of JSON Lines, or - for standard input")


def _columns_and_lines(
    path: Path, name: str, given: Columns
) -> tuple[Columns, Iterator[bytes | None]]:
    if path != STANDARD_INPUT:
        return find_columns(_lines(path), name, given), _lines(path)
    head, lines = tee(_lines(path))
    return find_columns(head, name, given), lines


def _lines(path: Path) -> Iterator[bytes | None]:
    if path == STANDARD_INPUT:
        yield from read_lines(sys.stdin.buffer)
    else:
        with path.open("rb") as file:
            yield from read_lines(file)


def _write_verdicts(
    file: BinaryIO, grader: Grader, rows: Iterator[tuple[_Record, GradingItem | None]]
) -> Iterator[_Record]:
    """The record of each row with its verdict, written, in the order of the rows."""
    rows, for_grader = tee(rows)
    verdicts = grader.grade(item or _NO_GOLD for _, item in for_grader)
    for verdict, (record, item) in zip(verdicts, rows, strict=True):
        if item is not None:
            truncated_loop = (
                record["finish_reason"] == Ending.LENGTH and record["loop"]["length"] > 0
            )
            record["reward"], record["grading_failure"] = float(verdict.is_right), verdict.failure
            record["right_in_loop"] = verdict.is_right and truncated_loop
        text = json.dumps(record, ensure_ascii=False)  # half an emoji in an id is "?"
        file.write(text.encode(errors="replace") + b"\n")
        yield record


def _measured_rows(
    sources: Sequence[tuple[str, Iterator[bytes | None]]], settings: FileGradingSettings
) -> Iterator[tuple[_Record, GradingItem | None]]:
    """The record of each row without a verdict, and what to grade in it, if anything."""
    limits, encode, several = settings.limits, None, len(sources) > 1
    if settings.tokenizer is not None:
        from stable_opd_mcore.data.chat import Tokenizer

        encode = Tokenizer.load(settings.tokenizer).encode
    for name, lines in sources:
        for number, line in enumerate(lines, start=1):
            record: _Record = {"file": name, "row": number} if several else {"row": number}
            try:
                row = parse_row(line, settings.columns, may_lack_tokens=encode is not None)
            except RowError as error:
                yield record | {"refused": str(error)}, None
                continue
            except DataError as error:
                raise DataError(f"{name}:{number}: {error}") from None
            record |= _measured(row, settings.max_length, limits, encode)
            if several and settings.columns.group is None:
                record["group"] = name
            yield record, row.item(stopped=record["finish_reason"] in (Ending.STOP, None))


def _measured(
    row: ResponseRow,
    max_length: int | None,
    limits: CompressionLimits,
    encode: Callable[[str], list[int]] | None,
) -> _Record:
    """The part of a row's record that does not need its verdict."""
    token_ids, finish = row.tokens, row.finish
    if token_ids is None and encode is not None:
        # A lone surrogate, half a character, becomes a "?": no tokenizer takes it.
        token_ids = encode(row.response.encode("utf-8", "replace").decode())
    length = len(row.response if token_ids is None else token_ids)
    if finish is None and max_length is not None:
        finish = Ending.LENGTH if length >= max_length else Ending.STOP
    response = measure(
        row.response,
        token_ids,
        limits,
        finish_reason=finish,
        reward=row.reward,
        grading_failure=row.grading_failure,
    )
    about = {"id": row.id, "group": row.group, "is_episode": row.reward is not None}
    return about | {"right_in_loop": False} | asdict(response)
