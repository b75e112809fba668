"""Rollouts as files: one JSON Lines file a step, for readers, the report and the replay engine.

`rollouts/step_000012.jsonl` holds one object per rollout with every field of `Rollout` and
`Prompt`. `read_rollouts` returns exactly what `write_rollouts` wrote. A file is written atomically.

Not here: metrics (monitoring/sinks.py), grading and decoding.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

from stable_opd_mcore.atomic_files import write_atomically
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.records import AnswerFormat, FinishReason, Prompt, Rollout

NUM_SAMPLES = 16  # rollouts of each step that rollout.save=samples keeps

_Save = Literal["all", "samples", "none"]

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


def rollout_path(run_directory: str | Path, step: int) -> Path:
    """The file of the rollouts of `step`."""
    return Path(run_directory) / "rollouts" / f"step_{step:06d}.jsonl"


def write_rollouts(path: str | Path, rollouts: Iterable[Rollout]) -> None:
    """Write `path` atomically, its parent directory included; replaces an older file.

    Raises:
        ValueError: a log-probability is not finite (JSON has no such number), or the number of
            log-probabilities differs from the number of tokens.
    """
    lines = [json.dumps(_to_row(rollout), ensure_ascii=False) + "\n" for rollout in rollouts]
    # surrogatepass: a decoded text may hold half of a split emoji as a lone surrogate.
    write_atomically(Path(path), "".join(lines).encode("utf-8", "surrogatepass"))


def read_rollouts(path: str | Path) -> list[Rollout]:
    """The rollouts of a file of `write_rollouts`, in order.

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
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(
                    line.decode("utf-8", "surrogatepass"), parse_constant=_refuse_constant
                )
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{path}, line {number}: not a JSON object ({error}); the file is cut or "
                    "edited: write it again with a new run"
                ) from error
            rollouts.append(_from_row(row, f"{path}, line {number}"))
    return rollouts


class RolloutWriter:
    """Writes the rollouts of each step into `<run>/rollouts/`, as many as `rollout.save` says.

    One rank writes, because every rank holds the global list.
    """

    def __init__(self, run_directory: str | Path, save: _Save = "all"):
        self.run_directory = Path(run_directory)
        self.save = save

    def write(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write all rollouts of `step`, the first `NUM_SAMPLES`, or none."""
        if self.save == "none":
            return
        kept = rollouts if self.save == "all" else rollouts[:NUM_SAMPLES]
        write_rollouts(rollout_path(self.run_directory, step), kept)


def _to_row(rollout: Rollout) -> dict[str, Any]:
    name = f"rollout {rollout.sample_index} of prompt {rollout.prompt.prompt_id}"
    if len(rollout.token_ids) != len(rollout.rollout_logprobs):
        raise ValueError(
            f"{name}: {len(rollout.token_ids)} tokens but {len(rollout.rollout_logprobs)} "
            "log-probabilities"
        )
    for position, logprob in enumerate(rollout.rollout_logprobs):
        if not math.isfinite(logprob):
            raise ValueError(f"{name}: log-probability {logprob} at token {position}")
    golden = rollout.prompt.golden_token_ids
    return {
        "prompt_id": rollout.prompt.prompt_id,
        "sample_index": rollout.sample_index,
        "prompt": rollout.prompt.text,
        "response": rollout.text,
        "finish_reason": rollout.finish_reason,
        "reward": rollout.reward,
        "answer": rollout.prompt.answer,
        "answer_format": rollout.prompt.answer_format,
        "opens_thinking": rollout.prompt.opens_thinking,
        "weight_version": rollout.weight_version,
        "prompt_token_ids": list(rollout.prompt.token_ids),
        "response_token_ids": list(rollout.token_ids),
        "rollout_logprobs": list(rollout.rollout_logprobs),
        "golden_token_ids": None if golden is None else list(golden),
    }


def _from_row(row: Any, where: str) -> Rollout:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
    row = cast("dict[str, Any]", row)
    for column, kinds in _COLUMNS.items():
        _require_column(row, column, kinds, where)
    for column, values in (
        ("finish_reason", get_args(FinishReason)),
        ("answer_format", get_args(AnswerFormat)),
    ):
        if row[column] not in values:
            raise DataError(
                f"{where}: column {column} is {row[column]!r}; expected one of {', '.join(values)}"
            )
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
        token_ids=_token_ids(row, "response_token_ids", where),
        rollout_logprobs=_numbers(row, "rollout_logprobs", where),
        finish_reason=row["finish_reason"],
        weight_version=row["weight_version"],
        text=row["response"],
        reward=row["reward"],
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


def _numbers(row: dict[str, Any], column: str, where: str) -> tuple[float, ...]:
    for position, value in enumerate(row[column]):
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise DataError(f"{where}: {column}[{position}] is {value!r:.60}, not a finite number")
    return tuple(float(value) for value in row[column])


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
