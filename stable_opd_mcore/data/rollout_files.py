"""Rollouts as files: one JSON Lines file a step, for readers, the report and the replay engine.

`rollouts/step_000012.jsonl` holds one object per rollout with every field of `Rollout` and
`Prompt`. `read_rollouts` returns exactly what `write_rollouts` wrote. A file is written atomically.

Not here: one file from the rollouts of many ranks (train/persistence/rollout_writer.py), metrics
(monitoring/sinks.py), grading and decoding.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from stable_opd_mcore.data.token_files import decode_line
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.atomic_files import atomic_file
from stable_opd_mcore.host.json_files import object_in_line, validated
from stable_opd_mcore.records import AnswerFormat, FinishReason, GradingFailure, Prompt, Rollout

_LARGEST = float(np.finfo(np.float32).max)
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Float32 = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]


class _Row(BaseModel):
    """The columns of a file."""

    model_config = ConfigDict(strict=True)

    prompt_id: str
    sample_index: int
    prompt: str
    response: str
    finish_reason: FinishReason
    reward: FiniteFloat | None
    grading_failure: GradingFailure | None = None  # files of older runs lack it
    answer: str | None
    answer_format: AnswerFormat
    opens_thinking: bool
    weight_version: int
    prompt_token_ids: list[TokenId]
    golden_token_ids: list[TokenId] | None
    response_token_ids: list[TokenId]
    rollout_logprobs: list[_Float32]


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
    with path.open("rb") as file:
        return [
            _from_line(line, f"{path}, line {number}", strict)
            for number, line in enumerate(islice(file, limit), start=1)
        ]


def encode_rollout(rollout: Rollout) -> bytes:
    """The line of one rollout.

    Raises:
        ValueError: as `write_rollouts`.
    """
    prompt, logprobs = rollout.prompt, rollout.rollout_logprobs
    name = f"rollout {rollout.sample_index} of prompt {prompt.prompt_id}"
    if len(rollout.token_ids) != len(logprobs):
        raise ValueError(
            f"{name}: {len(rollout.token_ids)} tokens but {len(logprobs)} log-probabilities"
        )
    if not np.isfinite(logprobs).all():
        position = int(np.isfinite(logprobs).argmin())
        raise ValueError(f"{name}: log-probability {logprobs[position]} at token {position}")
    row = {
        "prompt_id": _json_text(prompt.prompt_id),
        "sample_index": rollout.sample_index,
        "prompt": _json_text(prompt.text),
        "response": _json_text(rollout.text),
        "finish_reason": rollout.finish_reason,
        "reward": rollout.reward,
        "grading_failure": rollout.grading_failure,
        "answer": None if prompt.answer is None else _json_text(prompt.answer),
        "answer_format": prompt.answer_format,
        "opens_thinking": prompt.opens_thinking,
        "weight_version": rollout.weight_version,
        "prompt_token_ids": prompt.token_ids,
        "golden_token_ids": prompt.golden_token_ids,
        "response_token_ids": np.ascontiguousarray(rollout.token_ids),
        "rollout_logprobs": np.ascontiguousarray(logprobs),
    }
    return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _json_text(text: str) -> orjson.Fragment:
    """The text in JSON. A decoded one may hold half of a split emoji, which orjson refuses."""
    return orjson.Fragment(json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def _from_line(line: bytes, where: str, strict: bool) -> Rollout:
    row = validated(_Row, object_in_line(line if strict else decode_line(line), where), where)
    if len(row.response_token_ids) != len(row.rollout_logprobs):
        raise DataError(
            f"{where}: {len(row.response_token_ids)} response_token_ids but "
            f"{len(row.rollout_logprobs)} rollout_logprobs; each token needs its log-probability"
        )
    golden = row.golden_token_ids
    prompt = Prompt(
        prompt_id=row.prompt_id,
        text=row.prompt,
        token_ids=tuple(row.prompt_token_ids),
        answer=row.answer,
        answer_format=row.answer_format,
        opens_thinking=row.opens_thinking,
        golden_token_ids=None if golden is None else tuple(golden),
    )
    return Rollout(
        prompt=prompt,
        sample_index=row.sample_index,
        token_ids=np.array(row.response_token_ids, np.int32),
        rollout_logprobs=np.array(row.rollout_logprobs, np.float32),
        finish_reason=row.finish_reason,
        weight_version=row.weight_version,
        text=row.response,
        reward=row.reward,
        grading_failure=row.grading_failure,
    )
