"""The tokens of some rollouts of a step: their text, advantage, teacher log-probability and KL.

`tokens/step_000012.jsonl` holds one object per rollout of `monitoring.token_values`, for the reader
of the report and of the live view. Training and the replay engine do not read it. A file is written
atomically; numbers have four digits.

Not here: rollouts (rollout_files.py), and where the values come from
(train/samples/token_values.py).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.atomic_files import write_atomically

VALUES = ("advantage", "teacher_logprob", "kl_reference", "kl_teacher")

Numbers = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class TokenText:
    """The L tokens of one rollout as a reader sees them."""

    prompt_id: str
    sample_index: int
    pieces: tuple[str, ...]  # [L], the text of each token; together the response
    values: Numbers  # of VALUES, those that the run has: [L] each, nats; None: not computed
    golden: str | None  # the prompt's golden solution


def token_path(run_directory: str | Path, step: int) -> Path:
    """The file of the tokens of `step`."""
    return Path(run_directory) / "tokens" / f"step_{step:06d}.jsonl"


def write_tokens(path: str | Path, rollouts: Iterable[TokenText]) -> None:
    """Write `path` atomically, its parent directory included; replaces an older file."""
    rows = [
        {
            "prompt_id": one.prompt_id,
            "sample_index": one.sample_index,
            "pieces": one.pieces,
            "golden": one.golden,
        }
        | {key: [_rounded(value) for value in values] for key, values in one.values.items()}
        for one in rollouts
    ]
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    write_atomically(Path(path), text.encode("utf-8", "surrogatepass"))


def read_tokens(path: str | Path) -> list[TokenText]:
    """The rollouts of a file of `write_tokens`, in order, without a last line that was cut; none if
    there is no file.

    Raises:
        DataError: a malformed row; the message names the line.
    """
    path = Path(path)
    if not path.is_file():
        return []
    found: list[TokenText] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(decode_line(line))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not a JSON object ({error})") from error
        found.append(_from_row(row, f"{path}, line {number}"))
    return found


def decode_line(line: bytes) -> str:
    """A line as text. Lone surrogates are kept; bytes that are no UTF-8 are replaced."""
    try:
        return line.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return line.decode("utf-8", "replace")


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _from_row(row: Any, where: str) -> TokenText:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
    row = cast("dict[str, Any]", row)
    prompt_id, index, golden = row.get("prompt_id"), row.get("sample_index"), row.get("golden")
    if not isinstance(prompt_id, str) or type(index) is not int:
        raise DataError(f"{where}: prompt_id must be a text and sample_index an integer")
    if golden is not None and not isinstance(golden, str):
        raise DataError(f"{where}: golden must be a text or null")
    pieces = _list(row, "pieces", where)
    if not all(isinstance(piece, str) for piece in pieces):
        raise DataError(f"{where}: pieces must be a list of texts")
    values = {key: _list(row, key, where) for key in VALUES if key in row}
    for key, numbers in values.items():
        if len(numbers) != len(pieces) or not all(map(_is_number, numbers)):
            raise DataError(f"{where}: {key} must be {len(pieces)} finite numbers, one per piece")
    return TokenText(prompt_id, index, tuple(pieces), values, golden)


def _list(row: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = row.get(key)
    if not isinstance(value, list):
        raise DataError(f"{where}: {key} must be a list")
    return cast("list[Any]", value)


def _is_number(value: Any) -> bool:
    return value is None or (
        type(value) in (int, float) and abs(cast("float", value)) <= sys.float_info.max
    )
