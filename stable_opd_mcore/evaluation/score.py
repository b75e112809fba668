"""`stable-opd score`: grade and measure files of generations, with the code of a run.

Rows stream through grading workers; one verdict per row is appended to a file, in the order of the
rows. The summary is computed from that file alone, so a run that was killed and started again gives
what an uninterrupted one gives. Memory does not grow with the files. Not here: reading rows
(score_rows.py), the numbers (data/responses.py).
"""

import fcntl
import json
import math
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import xxhash
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from stable_opd_mcore.config.evaluation import MonitoringConfig
from stable_opd_mcore.data.repetition import PAPER_TAIL_CHARACTERS
from stable_opd_mcore.data.responses import CompressionLimits, compression_limits, measure
from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.evaluation.grading import Grader, GradingItem
from stable_opd_mcore.evaluation.score_rows import (
    Columns,
    RowError,
    ScoreRow,
    find_columns,
    parse_row,
    read_lines,
)
from stable_opd_mcore.evaluation.score_summary import summarise
from stable_opd_mcore.evaluation.store import require_same
from stable_opd_mcore.host.atomic_files import naming_disk_errors, write_atomically
from stable_opd_mcore.host.json_files import read_json_object

MAX_GROUPS = 1000
STANDARD_INPUT = Path("-")
_FIRST_BYTES = 2**20  # of a source, whose hash tells another file
_NO_GOLD = GradingItem("", "", "bracket")  # no worker grades it, and its verdict is not used
_Record = dict[str, Any]


@dataclass(frozen=True)
class ScoreSettings:
    """How to score files."""

    columns: Columns = field(default_factory=Columns)  # None where the usual names are looked for
    tokenizer: str | None = None  # model directory; makes the token ids of rows that have none
    max_length: int | None = None  # length budget, in tokens, or in characters without tokens
    tail_characters: int | None = None  # None: as in a run with this budget, at most 10,000
    ratio: float = 10.0
    timeout_seconds: float = 10.0
    workers: int | None = None  # None: one for each core

    def __post_init__(self) -> None:
        if not 1 < self.ratio < math.inf:
            raise UserError(f"--ratio {self.ratio}: expected a number above 1; 10 is the paper's")

    @property
    def unit(self) -> str:
        """Of lengths."""
        has_tokens = self.columns.tokens is not None or self.tokenizer is not None
        return "tokens" if has_tokens else "characters"

    @property
    def limits(self) -> CompressionLimits:
        """A budget in characters says nothing about the tail of a run with that budget."""
        config = MonitoringConfig(
            repetition_tail_characters=self.tail_characters, repetition_ratio=self.ratio
        )
        budget = self.max_length if self.unit == "tokens" else None
        return compression_limits(config, PAPER_TAIL_CHARACTERS if budget is None else budget)


def default_output(paths: Sequence[Path]) -> Path:
    """`FILE.score`, or stdin.score.

    Raises:
        UserError: several files, or no such file.
    """
    if len(paths) > 1:
        raise UserError(f"{len(paths)} files: say with --output DIR where their verdicts go")
    _require_file(paths[0])
    name = "stdin" if paths[0] == STANDARD_INPUT else paths[0].name
    return paths[0].with_name(f"{name}.score")


def score_files(
    paths: Sequence[Path],
    output: Path,
    settings: ScoreSettings,
    progress: Callable[[int, float], None] = lambda *_: None,
) -> _Record:
    """Score the rows of `paths`; write `output`/verdicts.jsonl and `output`/summary.json.

    Continues where an earlier call was interrupted. Of several files each is a group, unless the
    settings name a column of groups.

    Args:
        paths: files of JSON Lines with the same columns; STANDARD_INPUT reads that.
        progress: called with the number of rows read and the share of the bytes.

    Raises:
        UserError: no such file, no column for the response, more than 1,000 groups, an `output`
            of other files, of other settings, or in use, or no room there.

    Returns:
        What summary.json holds: `settings`, and the numbers of `summarise`.
    """
    verdicts, numbers = output / "verdicts.jsonl", output / "summary.json"
    with naming_disk_errors(output, setting="--output"), ExitStack() as stack:
        sources = [_open(path, stack) for path in paths]
        columns = find_columns(sources[0].file, sources[0].name, settings.columns)
        settings = replace(settings, columns=columns)
        output.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context(verdicts.open("a+b"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{verdicts}: another score command is writing it; wait for its end"
            ) from None
        identity = _identity(sources, settings)
        done = _resume(file, verdicts, numbers, identity)
        workers = settings.workers or len(os.sched_getaffinity(0))
        grader = stack.enter_context(Grader(settings.timeout_seconds, workers))
        _append_verdicts(file, grader, _measured_rows(sources, settings, done, progress))
        file.seek(0)
        try:
            found = summarise(map(json.loads, file), settings.unit, settings.max_length)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{verdicts}: holds a row that this command did not write ({error!r}); remove the "
                "file and score again"
            ) from error
        summary = {"settings": identity, **found}
        _write_summary(numbers, summary)
    return summary


@contextmanager
def shown_progress() -> Iterator[Callable[[int, float], None]]:
    """A bar on a terminal's standard error, for `score_files`."""
    columns = BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("0 rows", total=1.0)
        yield lambda rows, share: bar.update(task, completed=share, description=f"{rows:,} rows")


@dataclass(frozen=True)
class _Source:
    name: str
    file: BinaryIO
    num_bytes: int


def _require_file(path: Path) -> None:
    if path != STANDARD_INPUT and not path.is_file():
        found = "a directory" if path.is_dir() else "no such file"
        raise DataError(f"{path}: {found}; give a file of JSON Lines, or - for standard input")


def _open(path: Path, stack: ExitStack) -> _Source:
    """The file; standard input is copied to a temporary one, which the settings' hash needs."""
    if path == STANDARD_INPUT:
        file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        shutil.copyfileobj(sys.stdin.buffer, file)
        num_bytes = file.tell()
        file.seek(0)
        return _Source("standard input", file, num_bytes)
    _require_file(path)
    return _Source(str(path), stack.enter_context(path.open("rb")), path.stat().st_size)


def _append_verdicts(
    file: BinaryIO, grader: Grader, rows: Iterator[tuple[_Record, GradingItem | None]]
) -> None:
    """Append the record of each row with its verdict, in the order of the rows.

    Holds the rows that are being graded, and those that were graded before their turn.
    """
    waiting: deque[tuple[_Record, bool]] = deque()  # whether the row is graded

    def items() -> Iterator[GradingItem]:
        for record, item in rows:
            waiting.append((record, item is not None))
            yield item or _NO_GOLD

    for verdict in grader.grade(items()):
        record, is_graded = waiting.popleft()
        if is_graded:
            truncated_loop = record["finish_reason"] == "length" and record["loop"]["length"] > 0
            record["reward"], record["grading_failure"] = float(verdict.is_right), verdict.failure
            record["right_in_loop"] = verdict.is_right and truncated_loop
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()


def _measured_rows(
    sources: Sequence[_Source],
    settings: ScoreSettings,
    done: int,
    progress: Callable[[int, float], None],
) -> Iterator[tuple[_Record, GradingItem | None]]:
    """The record of each row after the first `done` ones, and what to grade of it, if anything."""
    total, number, position = sum(source.num_bytes for source in sources), 0, 0
    limits, encode, groups = settings.limits, None, set[str]()
    if settings.tokenizer is not None:
        from stable_opd_mcore.data.chat import Tokenizer

        encode = Tokenizer.load(settings.tokenizer).encode
    for source in sources:
        source.file.seek(0)
        for row_number, (size, line) in enumerate(read_lines(source.file), start=1):
            number, position = number + 1, position + size
            if number <= done:
                continue
            progress(number, position / total)
            record: _Record = {"row": row_number}
            if len(sources) > 1:
                record = {"file": source.name, **record}
            try:
                row = parse_row(line, settings.columns)
            except RowError as error:
                yield record | {"refused": str(error)}, None
                continue
            if settings.columns.group is None and len(sources) > 1:
                row = row.model_copy(update={"group": source.name})
            groups |= {row.group} - {None}
            if len(groups) > MAX_GROUPS:
                raise UserError(
                    f"row {row_number}: more than {MAX_GROUPS:,} groups; --group "
                    f"{settings.columns.group} names a column with few values"
                )
            record |= _measured(row, settings, limits, encode)
            stopped = record["finish_reason"] in ("stop", None)
            yield record, row.item(stopped)


def _measured(
    row: ScoreRow,
    settings: ScoreSettings,
    limits: CompressionLimits,
    encode: Callable[[str], list[int]] | None,
) -> _Record:
    """What a row's record holds before its verdict."""
    token_ids, finish, budget = row.tokens, row.finish, settings.max_length
    if token_ids is None and encode is not None:
        # Half a character, a lone surrogate, counts as a "?": no tokenizer takes it.
        token_ids = encode(row.response.encode("utf-8", "replace").decode())
    length = len(row.response if token_ids is None else token_ids)
    if finish is None and budget is not None:
        finish = "length" if length >= budget else "stop"
    response = measure(row.response, token_ids, limits, finish_reason=finish, reward=None)
    named = {"id": row.id, "group": row.group, "label": row.label, "right_in_loop": False}
    return named | asdict(response)


def _identity(sources: Sequence[_Source], settings: ScoreSettings) -> _Record:
    """What a continued call must share with the one that began."""
    files = []
    for source in sources:
        source.file.seek(0)
        digest = xxhash.xxh3_128_hexdigest(source.file.read(_FIRST_BYTES))
        files.append({"name": source.name, "bytes": source.num_bytes, "hash": digest})
    return {
        "files": files,
        **{f"column_{role}": name for role, name in asdict(settings.columns).items()},
        **asdict(settings.limits),
        "unit": settings.unit,
        "max_length": settings.max_length,
        "tokenizer": settings.tokenizer,
        "timeout_seconds": settings.timeout_seconds,
    }


def _resume(file: BinaryIO, verdicts: Path, numbers: Path, identity: _Record) -> int:
    """Drop an incomplete last line and check the settings, or write them; the rows done.

    Raises:
        UserError: verdicts without settings, or of others.
    """
    num_rows = end = 0
    file.seek(0)
    for line in file:
        if line.endswith(b"\n"):
            num_rows, end = num_rows + 1, end + len(line)
    if not numbers.is_file() and not end:
        _write_summary(numbers, {"settings": identity})
    try:
        earlier = read_json_object(numbers)["settings"]
    except (OSError, DataError, KeyError):
        raise UserError(
            f"{verdicts}: there is no {numbers.name} of this command beside it; give another "
            "--output"
        ) from None
    remedy = "give another --output, or remove that directory to score again"
    require_same(earlier, identity, verdicts, remedy)
    file.truncate(end)
    return num_rows


def _write_summary(path: Path, values: _Record) -> None:
    write_atomically(path, (json.dumps(values, indent=1) + "\n").encode())
