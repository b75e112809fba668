"""The tokens of some rollouts of a step: their text, advantage, teacher log-probability and KL.

`tokens/step_000012.jsonl` holds one object for each of the first rollouts of a step, for the reader
of the report. Numbers have four digits, and half an emoji is "?".
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, FiniteFloat

from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.host.json_files import object_in_line, validated

VALUES = ("advantage", "teacher_logprob", "kl_reference", "kl_teacher")

Numbers = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class TokenText:
    """The L tokens of one rollout as a reader sees them."""

    prompt_id: str
    sample_index: int
    pieces: tuple[str, ...]  # [L], the text of each token; together the response
    values: Numbers  # those of VALUES that the run has: [L] each, nats; None: not computed
    golden: str | None  # the prompt's golden solution


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
    write_atomically(Path(path), text.encode(errors="replace"))


def read_tokens(path: str | Path) -> list[TokenText]:
    """The rollouts of a file of `write_tokens`, in order, without a last line that was cut; none if
    there is no file.

    Raises:
        DataError: a malformed row; the message names the line.
    """
    path = Path(path)
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_from_line(line, f"{path}, line {k}") for k, line in enumerate(lines, start=1)]


def decode_line(line: bytes) -> str:
    """A line as text. Lone surrogates are kept; bytes that are not UTF-8 are replaced."""
    try:
        return line.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return line.decode("utf-8", "replace")


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


class _Row(BaseModel):
    """The columns of a file."""

    model_config = ConfigDict(strict=True)

    prompt_id: str
    sample_index: int
    golden: str | None = None
    pieces: list[str]
    advantage: list[FiniteFloat | None] | None = None
    teacher_logprob: list[FiniteFloat | None] | None = None
    kl_reference: list[FiniteFloat | None] | None = None
    kl_teacher: list[FiniteFloat | None] | None = None


def _from_line(line: bytes, where: str) -> TokenText:
    row = validated(_Row, object_in_line(decode_line(line), where), where)
    values = row.model_dump(include=set(VALUES), exclude_none=True)
    for key, numbers in values.items():
        if len(numbers) != len(row.pieces):
            raise DataError(
                f"{where}: column {key} has {len(numbers)} numbers for {len(row.pieces)} pieces; "
                "expected one for each: restore the file, or delete it"
            )
    return TokenText(row.prompt_id, row.sample_index, tuple(row.pieces), values, row.golden)
