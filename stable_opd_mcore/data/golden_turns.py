"""The golden turns of a conversation, and what the assistant observes between them."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from stable_opd_mcore.data.bridge import Bridge
from stable_opd_mcore.data.messages import Message
from stable_opd_mcore.data.thoughts import golden_response
from stable_opd_mcore.data.tool_schemas import Tool


class GoldenTurn(NamedTuple):
    observed: Sequence[int]  # ids of what the assistant observes before it
    text: str
    stop: Sequence[int]  # its last id; () where the template ends it with another one


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
    stop = bridge.stop_of(turn)
    for of_assistant, group in groupby(turns, lambda turn: turn["role"] == "assistant"):
        if of_assistant:
            (turn,) = group
            stop = bridge.stop_of(turn)
            text = golden_response(bridge.said(turn), prompt_text)
            parts.append(GoldenTurn(observed, text, stop))
        else:
            between = bridge.append(list(group), stop[0], tools, turn)
            observed, prompt_text = between.token_ids, between.text
            if between.replaces_end:
                parts[-1] = parts[-1]._replace(stop=())
    return parts
