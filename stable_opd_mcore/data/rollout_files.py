"""Rollouts as files: one JSON Lines file a step, for readers, the report and the replay engine.

`rollouts/step_000012.jsonl` holds one object per rollout with every field of `Rollout` and
`Prompt`. `read_rollouts` returns exactly what `write_rollouts` wrote. A file is written atomically.

Not here: one file from the rollouts of many ranks (train/persistence/rollout_writer.py), metrics
(monitoring/sinks.py), grading and decoding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.data.token_files import decode_line
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.atomic_files import atomic_file
from stable_opd_mcore.records import AnswerFormat, FinishReason, GradingFailure, Prompt, Rollout

# Column -> the types of its JSON values; None: null is allowed.
_COLUMNS: dict[str, tuple[type | None, ...]] = {
    "prompt_id": (str,),
    "sample_index": (int,),
    "prompt": (str,),
    "response": (str,),
    "finish_reason": (str,),
    "reward": (int, float, None),
    "answer": (str, None),
    "answer_format": (str,),
    "opens_thinking": (bool,),
    "weight_version": (int,),
    "prompt_token_ids": (list,),
    "response_token_ids": (list,),
    "rollout_logprobs": (list,),
    "golden_token_ids": (list, None),
}
_LARGEST = float(np.finfo(np.float32).max)
_LATER_COLUMNS: dict[str, Any] = {"grading_failure": None}  # files of older runs lack them


def rollout_path(run_directory: str | Path, step: int) -> Path:
    """The file of the rollouts of `step`."""
    return Path(run_directory) / "rollouts" / f"step_{step:06d}.jsonl"


def write_rollouts(path: str | Path, rollouts: Iterable[Rollout]) -> None:
    """Write `path` atomically, its parent directory included; replaces an older file.

    Raises:
        ValueError: a log-probability is not finite (JSON has no such number), or the number of
            log-probabilities differs from the number of tokens.
    """
    with atomic_file(Path(path)) as file:
        for rollout in rollouts:
            file.write(encode_rollout(rollout))


def read_rollouts(
    path: str | Path, *, limit: int | None = None, strict: bool = True
) -> list[Rollout]:
    """The rollouts of a file of `write_rollouts`, in order.

    Args:
        limit: read at most so many, the first ones.
        strict: refuse bytes that are no UTF-8. False replaces them, for people who read the text.

    Raises:
        DataError: missing file, or a row that is no rollout; the message names line and column.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(
            f"{path}: no such rollout file; a run keeps them when rollout.save is all or samples"
        )
    rollouts: list[Rollout] = []
    with path.open("rb") as file:
        for number, line in enumerate(islice(file, limit), start=1):
            try:
                text = line.decode("utf-8", "surrogatepass") if strict else decode_line(line)
                row = json.loads(text, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{path}, line {number}: not a JSON object ({error}); the file is cut or "
                    "edited: write it again with a new run"
                ) from error
            rollouts.append(_from_row(row, f"{path}, line {number}"))
    return rollouts


def encode_rollout(rollout: Rollout) -> bytes:
    """The line of one rollout.

    Raises:
        ValueError: as `write_rollouts`.
    """
    name = f"rollout {rollout.sample_index} of prompt {rollout.prompt.prompt_id}"
    logprobs = rollout.rollout_logprobs
    if len(rollout.token_ids) != len(logprobs):
        raise ValueError(
            f"{name}: {len(rollout.token_ids)} tokens but {len(logprobs)} log-probabilities"
        )
    if not np.isfinite(logprobs).all():
        position = int(np.isfinite(logprobs).argmin())
        raise ValueError(f"{name}: log-probability {logprobs[position]} at token {position}")
    row = {
        "prompt_id": rollout.prompt.prompt_id,
        "sample_index": rollout.sample_index,
        "prompt": rollout.prompt.text,
        "response": rollout.text,
        "finish_reason": rollout.finish_reason,
        "reward": rollout.reward,
        "grading_failure": rollout.grading_failure,
        "answer": rollout.prompt.answer,
        "answer_format": rollout.prompt.answer_format,
        "opens_thinking": rollout.prompt.opens_thinking,
        "weight_version": rollout.weight_version,
    }
    golden = rollout.prompt.golden_token_ids
    numbers = {  # str(list) is JSON for integers, in half the time of json.dumps
        "prompt_token_ids": str(list(rollout.prompt.token_ids)),
        "golden_token_ids": "null" if golden is None else str(list(golden)),
        "response_token_ids": str(rollout.token_ids.tolist()),
        "rollout_logprobs": f"[{_decimals(logprobs)}]",
    }
    columns = "".join(f', "{name}": {text}' for name, text in numbers.items())
    line = json.dumps(row, ensure_ascii=False)[:-1] + columns + "}\n"
    # surrogatepass: a decoded text may hold half of a split emoji as a lone surrogate.
    return line.encode("utf-8", "surrogatepass")


def _decimals(values_L: NDArray[np.float32]) -> str:
    """The numbers in JSON, between commas: nine digits, which give back every fp32 number.

    A twentieth of the time of json.dumps, which writes each number with the digits of a double.
    """
    size_L = np.abs(values_L.astype(np.float64))
    power_L = np.floor(np.log10(np.where(size_L == 0, 1.0, size_L)))
    digits_L = np.rint(size_L * 10.0 ** (8 - power_L)).astype(np.uint32)
    carried_L = digits_L == 10**9
    digits_L, power_L = np.where(carried_L, 10**8, digits_L), (power_L + carried_L).astype(np.int8)
    text = np.empty((len(values_L), len(b"-1.23456789e-01, ")), np.uint8)
    text[:] = np.frombuffer(b" 0.00000000e+00, ", np.uint8)
    text[values_L < 0, 0] = ord("-")
    for column in (10, 9, 8, 7, 6, 5, 4, 3, 1):
        text[:, column] += (digits_L % 10).astype(np.uint8)
        digits_L = digits_L // 10
    text[power_L < 0, 12] = ord("-")
    text[:, 13] += (np.abs(power_L) // 10).astype(np.uint8)
    text[:, 14] += (np.abs(power_L) % 10).astype(np.uint8)
    return text.tobytes()[:-2].decode("ascii")


def _from_row(row: Any, where: str) -> Rollout:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
    row = _LATER_COLUMNS | cast("dict[str, Any]", row)
    for column, kinds in _COLUMNS.items():
        _require_column(row, column, kinds, where)
    for column, values in (
        ("finish_reason", get_args(FinishReason)),
        ("answer_format", get_args(AnswerFormat)),
        ("grading_failure", (None, *get_args(GradingFailure))),
    ):
        if row[column] not in values:
            names = ", ".join("null" if value is None else value for value in values)
            raise DataError(f"{where}: column {column} is {row[column]!r}; expected one of {names}")
    if row["reward"] is not None and not abs(row["reward"]) <= sys.float_info.max:
        raise DataError(
            f"{where}: column reward is {row['reward']!r:.60}; expected a finite number"
        )
    ids, logprobs = row["response_token_ids"], row["rollout_logprobs"]
    if len(ids) != len(logprobs):
        raise DataError(
            f"{where}: {len(ids)} response_token_ids but {len(logprobs)} rollout_logprobs; "
            "each token needs its log-probability"
        )
    golden = row["golden_token_ids"]
    prompt = Prompt(
        prompt_id=row["prompt_id"],
        text=row["prompt"],
        token_ids=_token_ids(row, "prompt_token_ids", where),
        answer=row["answer"],
        answer_format=row["answer_format"],
        opens_thinking=row["opens_thinking"],
        golden_token_ids=None if golden is None else _token_ids(row, "golden_token_ids", where),
    )
    return Rollout(
        prompt=prompt,
        sample_index=row["sample_index"],
        token_ids=np.array(_token_ids(row, "response_token_ids", where), np.int32),
        rollout_logprobs=_numbers(row, "rollout_logprobs", where),
        finish_reason=row["finish_reason"],
        weight_version=row["weight_version"],
        text=row["response"],
        reward=row["reward"],
        grading_failure=row["grading_failure"],
    )


def _require_column(
    row: dict[str, Any], column: str, kinds: tuple[type | None, ...], where: str
) -> None:
    if column not in row:
        raise DataError(
            f"{where}: column {column} is missing (found: {', '.join(sorted(row)) or 'none'}); "
            "only files that this package wrote can be read as rollouts"
        )
    value = row[column]
    if value is None and None in kinds:
        return
    types = tuple(kind for kind in kinds if kind is not None)
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        names = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
        raise DataError(f"{where}: column {column} is {value!r:.60}; expected {names}")


def _token_ids(row: dict[str, Any], column: str, where: str) -> tuple[int, ...]:
    for position, value in enumerate(row[column]):
        if type(value) is not int or not 0 <= value < 2**31:
            raise DataError(f"{where}: {column}[{position}] is {value!r:.60}, not a token id")
    return tuple(row[column])


def _numbers(row: dict[str, Any], column: str, where: str) -> NDArray[np.float32]:
    for position, value in enumerate(row[column]):
        if type(value) not in (int, float) or not abs(value) <= _LARGEST:
            raise DataError(f"{where}: {column}[{position}] is {value!r:.60}, not a finite number")
    return np.array(row[column], np.float32)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
