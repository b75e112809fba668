"""Rows of a JSON Lines or parquet file, a datasets directory, a hub id, or the synthetic task.

GSM8K's form of an answer ("... #### 42" at the end of the solution) is recognised; where every
solution has it, it becomes a box, and other solutions stay as they are. No row is skipped silently:
a row that cannot be used is an error that names file, row, column and remedy.
"""

# Not strict: pyarrow and datasets have no types.
# pyright: basic

import gzip
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from stable_opd_mcore.config.data import ColumnsConfig, SourceConfig, TrainSource
from stable_opd_mcore.data.conversations import parse_messages
from stable_opd_mcore.data.dataset_folders import (
    STATE,
    read_dataset,
    with_json_values,
    with_shortest_floats,
)
from stable_opd_mcore.data.messages import from_text, with_system, without_nulls
from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.data.synthetic import ARITHMETIC, SYNTHETIC, arithmetic_rows
from stable_opd_mcore.data.tool_schemas import parse_tools
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.hub import COMMIT, is_hub_id
from stable_opd_mcore.host.json_files import list_in_file, object_in_line

Record = Mapping[str, Any]

_DEFAULT_COLUMNS = ColumnsConfig()
_BATCH_ROWS = 64
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
_MAX_LINE_BYTES = 64 * 2**20

# Columns of what belongs to a prompt.
_SYSTEM = ("system", "system_prompt")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
PARTS_OF_PROMPT = (*_SYSTEM, *_MEDIA, "input")

_GSM8K_ANSWER = re.compile(r"\n?####[ \t]*([^\n]+?)\s*\Z")
SURROGATE = re.compile("[\ud800-\udfff]")
_WITH_THOUSANDS = re.compile(r"[-+$]*\d{1,3}(,\d{3})+(\.\d+)?")
_GSM8K_SOLUTION = re.compile(r"(?:\A|\s)####[ \t]*([-+$]*(?:\d[\d,]*)?\.?\d+)\s*\Z")
_GSM8K_CALCULATION = re.compile(r"<<[^<>\n]*=[^<>\n]*>>")


def load_rows(
    source: SourceConfig, with_columns: bool = False, required: Collection[str] = ()
) -> list[Row]:
    """All rows of a source, or its first `limit`; solutions in GSM8K's form with a box.

    Args:
        with_columns: Row.columns keeps all columns.
        required: columns that teacher.prompt reads; Row.columns keeps them.

    Raises:
        DataError: missing file or column, malformed line, empty or wrongly typed value, no rows, a
            hub id without a commit.
    """
    if source.path.startswith(SYNTHETIC):
        if source.path != ARITHMETIC:
            raise DataError(
                f"{source.path}: no such synthetic task; set data.*.path to {ARITHMETIC}"
            )
        rows = arithmetic_rows(source.options, source.split, source.limit)
        return [
            replace(row, columns=_kept(vars(row), with_columns, required, row.row_id))
            for row in rows
        ]
    if is_hub_id(source.path) and not re.fullmatch(COMMIT, str(source.options.get("revision"))):
        raise DataError(
            f"{source.path}: no such file or directory here, and no commit to download from the "
            "hub: correct data.*.path, or give data.*.options a revision, a commit of 40 hex digits"
        )
    name = source_name(source)
    rows: list[Row] = []
    for number, record in read_records(source):
        place = f"{source.path}:{number}"
        row = parse_row(record, source.columns, place, f"{name}:{number}")
        rows.append(replace(row, columns=_kept(record, with_columns, required, place)))
    if not rows:
        raise DataError(f"{source.path}: no rows in it; check the file and data split")
    solutions = [row.solution for row in rows if row.solution]
    if not all(map(_GSM8K_SOLUTION.search, solutions)):
        return rows
    return [replace(r, solution=r.solution and boxed_solution(r.solution)) for r in rows]


def source_name(source: SourceConfig) -> str:
    """First part of every row id; it does not depend on the directory of the data."""
    if isinstance(source, TrainSource) and source.name is not None:
        return source.name
    path = Path(source.path)
    if path.is_file():
        return path.name
    return f"{path.name if path.exists() else source.path}/{source.split}"


def read_records(source: SourceConfig) -> Iterator[tuple[int, Record]]:
    """(number, columns) of each row. JSON Lines count lines from 1, other sources rows from 0.

    Raises:
        DataError: missing or unreadable source, unknown split.
    """
    known = {"configuration", "revision"} if is_hub_id(source.path) else {"configuration"}
    if unknown := source.options.keys() - known:
        raise DataError(
            f"{source.path}: unknown data.*.options {sorted(unknown)}; here they are only "
            f"{' and '.join(sorted(known))}; drop the others"
        )
    path = Path(source.path)
    is_file = path.is_file() or path.suffix in _SUFFIXES
    if (is_file or (path / STATE).is_file()) and "[" in source.split:
        raise DataError(
            f"{path}: no splits in it, so no {source.split!r}; drop data.*.split, or set "
            "data.*.limit for its first rows"
        )
    rows = read_file(path) if is_file else ((n, _own(row)) for n, row in read_dataset(source))
    return islice(rows, source.limit)


def read_file(
    path: Path, columns: Collection[str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """`read_records` of one file, in flat memory.

    columns: what is read from a parquet file, which may lack some; None: every column. A dotted
    name reads the column that it reaches into.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; check data.*.path")
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if suffix not in _SUFFIXES:
        raise DataError(
            f"{path}: unknown kind of file; expected {', '.join(_SUFFIXES)}, the first three also "
            "with .gz; set data.*.path to a folder with this file alone, or convert it"
        )
    return _read_parquet(path, columns) if suffix == ".parquet" else _read_json(path)


def parse_row(record: Record, columns: ColumnsConfig, place: str, row_id: str) -> Row:
    """One record as a row, which may lack a solution; `place` is its file and row, for errors.

    Raises:
        DataError: a missing column, an empty problem or answer, a value that is not text.
    """
    messages, golden, answer, solution = (), (), None, None
    if columns.messages is None:
        problem = _text(record, columns.problem, place, "problem")
        alpaca = ("input",) if columns.problem == "instruction" else ()
        _refuse_unread_parts(record, columns.problem, (*_SYSTEM, *alpaca), place)
    else:
        value = from_text(_lookup(record, columns.messages, place, "messages"))
        said = from_text(record.get(columns.solution or ""))
        if isinstance(value, list) and isinstance(said, list):  # TRL's completions are messages
            value = [*value, *(said if all(map(_is_message, said)) else ())]
        where = f"{place}: column {columns.messages!r} (messages)"
        messages, golden = parse_messages(value, where, _content, columns.golden)
        texts = {name: record[name] for name in _SYSTEM if _is_text(record.get(name))}
        if len(texts) == 1 or messages[0]["role"] == "system":
            messages = tuple(with_system(messages, next(iter(texts.values()), None)))
            texts = {}
        _refuse_unread_parts(record, columns.messages, texts, place)
        texts_said = (each["content"] for each in messages if each["role"] != "system")
        problem = "\n\n".join(filter(None, texts_said))
        if len(golden) == 1 and golden[0].keys() == {"role", "content"}:
            solution, golden = golden[0]["content"], ()
    if columns.answer is not None:
        answer = _text(record, columns.answer, place, "answer")
        final = _GSM8K_ANSWER.search(answer)
        if final:
            answer = _without_thousands_commas(final.group(1))
    has_column = columns.solution is not None and not _is_absent(record, columns.solution)
    if solution is None and columns.solution is not None and has_column and not golden:
        solution = _text(record, columns.solution, place, "solution")
    tools = parse_tools([record.get("tools"), record.get("functions")])
    texts = (problem, answer, solution)
    return Row(row_id, *texts, messages=messages, golden_turns=golden, tools=tools)


def _refuse_unread_parts(record: Record, read: str, texts: Collection[str], place: str) -> None:
    """Refuse what belongs to the prompt and stands in a column of its own: a text in one of
    `texts`, an image, a video, a sound."""
    for name in texts:
        text = record.get(name)
        if name != read and _is_text(text):
            raise DataError(
                f"{place}: column {name!r} has a text ({text!r:.40}) of the prompt, but only "
                f"column {read!r} is read; write it into that one, or remove or rename the column"
            )
    for name in _MEDIA:
        value = record.get(name)
        parts = value.values() if isinstance(value, Mapping) else value
        parts = parts if isinstance(parts, Collection) and not isinstance(parts, str) else [parts]
        if name != read and any(part not in (None, "", b"", []) for part in parts):
            raise DataError(
                f"{place}: column {name!r} holds {type(value).__name__}, but a prompt is text "
                "only; remove the row, or remove or rename the column"
            )


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and ("role" in value or "from" in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _kept(record: Record, whole: bool, required: Collection[str], place: str) -> Record | None:
    """The columns of a record that its row keeps; a missing required one is a DataError."""
    for name in required:
        if name not in record:
            raise DataError(
                f"{place}: no column {name!r}, which teacher.prompt reads; it has "
                f"{', '.join(map(str, record))}; name one of these in the template"
            )
    return record if whole else {name: record[name] for name in required} or None


def boxed_solution(solution: str) -> str:
    """A GSM8K solution with its answer boxed and without calculator marks; other text unchanged."""
    final = _GSM8K_SOLUTION.search(solution)
    if not final:
        return solution
    steps = _GSM8K_CALCULATION.sub("", solution[: final.start()]).rstrip()
    answer = _without_thousands_commas(final.group(1))
    return f"{steps}\nThe answer is \\boxed{{{answer}}}.".lstrip()


def _without_thousands_commas(answer: str) -> str:
    """The answer 1,200 as 1200. Commas that separate numbers, as in (3,4), stay."""
    return answer.replace(",", "") if _WITH_THOUSANDS.fullmatch(answer) else answer


def is_bare_answer(solution: str, answer: str | None) -> bool:
    """Whether a solution is the final answer without worked steps."""
    bare = f"#### {answer or ''}"
    return boxed_solution(solution).strip() in (answer or "", bare, boxed_solution(bare))


def _is_absent(record: Record, column: str) -> bool:
    """Whether the solution is null or "", or its column has the default name and does not exist."""
    if column not in record:
        return column == _DEFAULT_COLUMNS.solution
    return record[column] in (None, "")


def _content(message: Record, where: str) -> str:
    return _text(message, "content", where, "message")


def _text(record: Record, column: str, place: str, role: str) -> str:
    """A column's value as text: a string or number; for answers also a list of them."""
    value = _lookup(record, column, place, role)
    parts = value if role == "answer" and isinstance(value, list) else [value]
    texts = ["" if part is None else str(part).strip() for part in parts]
    where = f"{place}: column {column!r} ({role})"
    if not texts or not all(texts):
        raise DataError(f"{where} is empty; fill it or remove the row")
    for part, text in zip(parts, texts, strict=True):
        if not isinstance(part, str | int | float) or isinstance(part, bool):
            raise DataError(
                f"{where} holds {type(value).__name__}, not text; set data.*.columns.{role} to a "
                "text column, or fix the row"
            )
        # Exports of tables write a missing value as the text "nan".
        if (isinstance(part, float) and not math.isfinite(part)) or text.lower() == "nan":
            raise DataError(f"{where} is {text}, not text; fill it or remove the row")
        if SURROGATE.search(text):
            raise DataError(f"{where} has a lone surrogate, half a character; fix the row")
    return ", ".join(texts)


def _lookup(record: Record, column: str, place: str, role: str) -> Any:
    if column in record:
        return record[column]
    value: Any = record
    for part in column.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            optional = "" if role == "problem" else ", or to null if the data have none"
            raise DataError(
                f"{place}: no column {column!r} ({role}); it has {', '.join(map(str, record))}. "
                f"Set data.*.columns.{role} to one of them{optional}"
            )
    return value


def _read_json(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows in lines, or in a file .json the entries of one list."""
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rb") as file:
        if ".json" in map(str.lower, path.suffixes) and file.read(64).lstrip().startswith(b"["):
            file.seek(0)
            for number, value in enumerate(list_in_file(file.read(), path)):
                yield number, value
            return
        file.seek(0)
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), start=1):
            if len(line) == _MAX_LINE_BYTES:
                raise DataError(f"{path}:{number}: a line over 64 MiB; write one row a line")
            if line.strip():
                yield number, object_in_line(line, f"{path}:{number}")


def _read_parquet(
    path: Path, columns: Collection[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    if columns is not None:
        columns = {*columns, *(name.split(".")[0] for name in columns)}
    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(_BATCH_ROWS, columns=columns)
        yield from enumerate(
            _own(record)
            for batch in batches
            for record in with_json_values(
                with_shortest_floats(batch.to_pylist(), batch.schema), batch.schema
            )
        )
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: not readable as parquet; write it again: {error}") from error


def _own(record: Record) -> dict[str, Any]:
    """A record of a table without what Arrow adds to tools and tool calls: each one's arguments
    have the names of all others' as null."""
    own = dict(record)
    for column, value in record.items():
        if column in ("tools", "functions"):
            own[column] = without_nulls(value)
        elif isinstance(value, list):
            own[column] = [
                {**each, "tool_calls": without_nulls(each["tool_calls"])}
                if isinstance(each, dict) and "tool_calls" in each
                else each
                for each in value
            ]
    return own
