"""Rollouts on disk: one JSON Lines file a step, for people, the report and the replay engine.

`rollouts/step_000012.jsonl` holds one object a rollout with everything of `Rollout` and `Prompt`,
text first. `read_rollouts` gives back exactly what `write_rollouts` was given (floats in round-trip
form, ids, None where None was). A file is written whole or not at all.

Not the metrics (monitoring/sinks.py), and not a place where rollouts are judged or decoded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from stable_opd_mcore.atomic_files import write_atomically
from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.records import AnswerFormat, FinishReason, Prompt, Rollout

NUM_SAMPLES = 16  # what rollout.save=samples keeps of each step

_Save = Literal["all", "samples", "none"]

# Column -> the JSON types it may hold. None in the tuple: null is allowed.
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
    """Where the rollouts of `step` live in a run."""
    return Path(run_directory) / "rollouts" / f"step_{step:06d}.jsonl"


def write_rollouts(path: str | Path, rollouts: Iterable[Rollout]) -> None:
    """Write `path` atomically, parent directory included; an older file of that name is replaced.

    Raises:
        UserError: a log-probability that is not finite (JSON has no such number), or as many
            log-probabilities as tokens are not given.
    """
    lines = [json.dumps(_to_row(rollout), ensure_ascii=False) + "\n" for rollout in rollouts]
    # A decoded text may hold half of a split emoji: lone surrogates survive both ways.
    write_atomically(Path(path), "".join(lines).encode("utf-8", "surrogatepass"))


def read_rollouts(path: str | Path) -> list[Rollout]:
    """Read a file of `write_rollouts` back, in order.

    Raises:
        DataError: missing file; or a row that is no rollout, with its line, column and the remedy.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(
            f"{path}: no such rollout file; a run keeps them when rollout.save is all or samples"
        )
    rollouts = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(
                    line.decode("utf-8", "surrogatepass"), parse_constant=_refuse_constant
                )
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number}: not a JSON object ({error}); the file is cut or "
                    "edited: store the run again"
                ) from error
            rollouts.append(_from_row(row, f"{path}, line {number}"))
    return rollouts


class RolloutWriter:
    """Writes each step's rollouts into `<run>/rollouts/`, as much as `rollout.save` asks for.

    One rank writes: rollouts are the global list, so the others have nothing to add.
    """

    def __init__(self, run_directory: str | Path, save: _Save = "all"):
        self.run_directory = Path(run_directory)
        self.save = save

    def write(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Keep all rollouts of `step`, the first `NUM_SAMPLES`, or none."""
        if self.save == "none":
            return
        kept = rollouts if self.save == "all" else rollouts[:NUM_SAMPLES]
        write_rollouts(rollout_path(self.run_directory, step), kept)


def _to_row(rollout: Rollout) -> dict[str, Any]:
    name = f"rollout {rollout.sample_index} of prompt {rollout.prompt.prompt_id}"
    if len(rollout.token_ids) != len(rollout.rollout_logprobs):
        raise UserError(
            f"{name}: {len(rollout.token_ids)} tokens but {len(rollout.rollout_logprobs)} "
            "log-probabilities"
        )
    for position, logprob in enumerate(rollout.rollout_logprobs):
        if not math.isfinite(logprob):
            raise UserError(f"{name}: log-probability {logprob} at token {position}")
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
    for column, kinds in _COLUMNS.items():
        _require_column(row, column, kinds, where)
    if row["finish_reason"] not in get_args(FinishReason):
        raise DataError(
            f"{where}: column finish_reason is {row['finish_reason']!r}; "
            f"expected one of {', '.join(get_args(FinishReason))}"
        )
    if row["answer_format"] not in get_args(AnswerFormat):
        raise DataError(
            f"{where}: column answer_format is {row['answer_format']!r}; "
            f"expected one of {', '.join(get_args(AnswerFormat))}"
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
            "only files this package wrote can be read as rollouts"
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
        if type(value) is not int or value < 0:
            raise DataError(f"{where}: {column}[{position}] is {value!r:.60}, not a token id")
    return tuple(row[column])


def _numbers(row: dict[str, Any], column: str, where: str) -> tuple[float, ...]:
    for position, value in enumerate(row[column]):
        if type(value) not in (int, float):
            raise DataError(f"{where}: {column}[{position}] is {value!r:.60}, not a number")
    return tuple(float(value) for value in row[column])


def _refuse_constant(name: str) -> float:
    raise UserError(f"{name} is not JSON")
