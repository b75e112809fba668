"""Golden solutions as token ids: turns of the assistant, and what it observes between them."""

from collections.abc import Sequence
from itertools import chain, groupby
from typing import Literal, NamedTuple

from stable_opd_mcore.config.data import DataConfig
from stable_opd_mcore.data.bridge import Bridge
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.messages import Message
from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.data.sources import is_bare_answer, source_name
from stable_opd_mcore.data.thoughts import MARKS, golden_response
from stable_opd_mcore.data.tool_schemas import Tool
from stable_opd_mcore.errors import DataError

Golden = Literal["none", "optional", "by_source", "required"]  # see PromptSet


class GoldenTurn(NamedTuple):
    observed: Sequence[int]  # ids of what the assistant observes before it
    text: str
    stop: Sequence[int]  # its last id; () where the template ends it with another one


def encode_golden(
    rows: Sequence[Row],
    prompt_texts: Sequence[str],
    tokenizer: Tokenizer,
    golden_of: Sequence[Golden],
    bridge: Bridge,
    config: DataConfig,
) -> list[list[Sequence[int]]]:
    """The ids of each row's golden turns, and between two of them the ids of what the assistant
    observes; [] for a row without a golden solution, and for one of "none". With "by_source", only
    rows of sources whose `columns.solution` is null may have none.
    """
    without = {source_name(each) for each in config.sources if each.columns.solution is None}
    parts_of: list[list[GoldenTurn]] = []
    for row, prompt_text, golden in zip(rows, prompt_texts, golden_of, strict=True):
        if golden == "none":
            parts_of.append([])
            continue
        turns = golden_turns_of(row)
        may_lack = golden == "optional" or (golden == "by_source" and row.source in without)
        if not turns and not may_lack:
            raise DataError(
                f"{row.row_id}: no golden solution, which sft and mixture.lambda > 0 train on; "
                "set data.train.columns.solution, or mixture.lambda=0; with mixture.lambda, rows "
                "without one can be a source of their own that has columns.solution=null"
            )
        if row.solution and is_bare_answer(row.solution, row.answer):
            raise DataError(
                f"{row.row_id}: the golden solution is the bare answer {row.answer or ''!r:.80}; "
                "set data.*.columns.solution to a column of worked solutions, or to null without "
                "sft and with mixture.lambda=0"
            )
        try:
            parts_of.append(golden_parts(turns, prompt_text, bridge, row.tools))
        except DataError as error:
            raise DataError(f"{row.row_id}: {error}") from error
    said = iter(tokenizer.encode_many([part.text for parts in parts_of for part in parts]))
    goldens: list[list[Sequence[int]]] = []
    for parts in parts_of:
        ids = chain(*((part.observed, [*next(said), *part.stop]) for part in parts))
        goldens.append([*ids][1:])  # what is observed before the first turn is the prompt
    if not any(goldens) and not {"none", "optional"}.issuperset(golden_of):
        raise DataError(
            "no row of data.train has a golden solution, which mixture.lambda > 0 trains on; set "
            "data.train.columns.solution, or mixture.lambda=0"
        )
    return goldens


def golden_turns_of(row: Row) -> tuple[Message, ...]:
    """The turns of a row's golden solution, and what is between them; () without one."""
    if row.golden_turns or not row.solution:
        return row.golden_turns
    return ({"role": "assistant", "content": row.solution},)


def golden_parts(
    turns: Sequence[Message],
    prompt_text: str,
    bridge: Bridge,
    tools: Sequence[Tool],
) -> list[GoldenTurn]:
    """Each turn of the assistant. A student that sampled these texts would observe the same."""
    parts: list[GoldenTurn] = []
    observed: Sequence[int] = ()
    turn: Message = {}
    stop = bridge.turns.stop_of(turn)
    for of_assistant, group in groupby(turns, lambda turn: turn["role"] == "assistant"):
        if of_assistant:
            (turn,) = group
            stop = bridge.turns.stop_of(turn)
            said = bridge.turns.said(turn)
            if not any(mark in said for mark in chain(*MARKS)):
                said = bridge.turns.no_thought + said
            text = golden_response(said, prompt_text)
            parts.append(GoldenTurn(observed, text, stop))
        else:
            between = bridge.append(list(group), stop[0], tools, turn)
            observed, prompt_text = between.token_ids, between.text
            if between.replaces_end:
                parts[-1] = parts[-1]._replace(stop=())
    return parts
