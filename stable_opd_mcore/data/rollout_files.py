"""Rollouts as files: one JSON Lines file a step, for readers, the report and the replay engine.

`rollouts/step_000012.jsonl` holds one object per rollout: the fields of `_PromptColumns` and
`_RolloutColumns`. Slots, other columns, the teacher's prompts and scores, and experts are not kept.
Half an emoji in a text is kept as "?".
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from stable_opd_mcore.data.token_files import decode_line
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.host.atomic_files import atomic_file
from stable_opd_mcore.host.json_files import object_in_line, validated
from stable_opd_mcore.records import (
    AnswerFormat,
    GradingFailure,
    Prompt,
    Rollout,
    Segment,
    Turn,
)

_LARGEST = float(np.finfo(np.float32).max)
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Ending = Annotated[Ending, Field(strict=False)]  # a text in JSON
_TokenIds = Annotated[tuple[TokenId, ...], Field(strict=False)]  # a list in JSON
_Float32 = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]


class _Columns(BaseModel):
    """Fields of a record as columns of a file; the alias is the column's name."""

    model_config = ConfigDict(strict=True)

    @classmethod
    def row(cls, record: Any) -> dict[str, Any]:
        """The columns of a record."""
        fields = cls.model_fields.items()
        return {field.alias or name: getattr(record, name) for name, field in fields}


class _PromptColumns(_Columns):
    prompt_id: str
    text: str = Field(alias="prompt")
    answer: str | None
    answer_format: AnswerFormat
    opens_thinking: bool
    token_ids: _TokenIds = Field(alias="prompt_token_ids")
    golden_token_ids: _TokenIds | None
    max_new_tokens: int | None = None  # of a turn, where its environment sets a limit


class _Segment(BaseModel):
    model_config = ConfigDict(strict=True)

    num_tokens: int = Field(ge=0)
    weight_version: int


class _Turn(BaseModel):
    model_config = ConfigDict(strict=True)

    num_tokens: int = Field(ge=0)
    finish_reason: _Ending
    before: _TokenIds
    restarts: bool
    text: str
    observed: str


class _RolloutColumns(_Columns):
    sample_index: int
    text: str = Field(alias="response")
    finish_reason: _Ending
    reward: FiniteFloat | None
    grading_failure: GradingFailure | None = None  # files of older runs lack it
    weight_version: int
    token_ids: list[TokenId] = Field(alias="response_token_ids")
    rollout_logprobs: list[_Float32]
    segments: list[_Segment] | None = None  # where weights of several versions sampled it
    seed: int | None = None  # where an environment plays it
    metrics: dict[str, FiniteFloat] = {}  # what it returned with the reward
    feedback: str | None = None  # what it said of the episode, or a reward function of a response
    account: dict[str, int] = {}  # of an agent's requests and tokens
    turns: list[_Turn] | None = None  # where it is more than one response to its prompt


def write_rollouts(path: str | Path, rollouts: Iterable[Rollout]) -> None:
    """Write `path` atomically, its parent directory included; replaces an older file.

    Raises:
        ValueError: a log-probability is missing or not finite (JSON has no such number).
    """
    with atomic_file(Path(path)) as file:
        for rollout in rollouts:
            file.write(encode_rollout(rollout))


def read_rollouts(
    path: str | Path,
    *,
    limit: int | None = None,
    strict: bool = True,
) -> list[Rollout]:
    """The rollouts of a file of `write_rollouts`, in order; at most `limit`.

    strict: False replaces bytes that are not UTF-8, for people who read the text.

    Raises:
        DataError: missing file, or a row that is not a rollout; the message names line and column.
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
    """The line of one rollout; raises what `write_rollouts` raises."""
    prompt, logprobs = rollout.prompt, rollout.rollout_logprobs
    name = f"rollout {rollout.sample_index} of prompt {prompt.prompt_id}"
    if len(rollout.token_ids) != len(logprobs):
        raise ValueError(
            f"{name}: {len(rollout.token_ids)} tokens but {len(logprobs)} log-probabilities"
        )
    if not np.isfinite(logprobs).all():
        position = int(np.isfinite(logprobs).argmin())
        raise ValueError(f"{name}: log-probability {logprobs[position]} at token {position}")
    turns = [{name: getattr(turn, name) for name in _Turn.model_fields} for turn in rollout.turns]
    row = _PromptColumns.row(prompt) | _RolloutColumns.row(rollout) | {"turns": turns}
    left_out = {
        "segments": len(rollout.segments) == 1,
        "turns": rollout.has_one_turn,
        "seed": rollout.seed is None,
        "metrics": not rollout.metrics,
        "feedback": rollout.feedback is None,
        "account": not rollout.account,
        "max_new_tokens": prompt.max_new_tokens is None,
    }
    row = {key: value for key, value in row.items() if not left_out.get(key)}
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    try:
        return orjson.dumps(row, _plain, options)
    except orjson.JSONEncodeError:  # a text has half an emoji, which most readers of JSON refuse
        text = json.dumps(row, default=_plain, ensure_ascii=False, allow_nan=False)
        return text.encode(errors="replace") + b"\n"


def _plain(value: Any) -> Any:
    """An array as a list and a record as a dict, for a writer that does not take them."""
    return cast("NDArray[Any]", value).tolist() if isinstance(value, np.ndarray) else asdict(value)


def _from_line(line: bytes, where: str, strict: bool) -> Rollout:
    record = object_in_line(line if strict else decode_line(line), where)
    prompt = Prompt(**validated(_PromptColumns, record, where).model_dump())
    columns = validated(_RolloutColumns, record, where)
    fields = columns.model_dump(exclude={"segments", "turns"})
    segments = tuple(Segment(**segment.model_dump()) for segment in columns.segments or ())
    turns = tuple(Turn(**turn.model_dump()) for turn in columns.turns or ())
    rollout = Rollout(prompt, **fields, segments=segments, turns=turns)
    if len(rollout.token_ids) != len(rollout.rollout_logprobs):
        raise DataError(
            f"{where}: {len(rollout.token_ids)} response_token_ids but "
            f"{len(rollout.rollout_logprobs)} rollout_logprobs; each token needs its "
            "log-probability: restore the file"
        )
    for name, parts in {"segments": rollout.segments, "turns": rollout.turns}.items():
        num_tokens = sum(part.num_tokens for part in parts)
        if num_tokens != len(rollout.token_ids):
            raise DataError(
                f"{where}: {name} of {num_tokens} tokens in all for {len(rollout.token_ids)} "
                "response_token_ids; each token belongs to one of them: restore the file"
            )
    return rollout
