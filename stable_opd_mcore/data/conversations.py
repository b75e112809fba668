"""Split a row's conversation into the turns of the prompt and the golden turns.

An assistant's turn at its end is the golden solution, and the turns before it are the prompt. With
`columns.golden: all` every turn of the assistant is golden, and the prompt ends before the first.
How one message is read is in messages.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from stable_opd_mcore.data.messages import THOUGHT, Message, from_text, read_message, without_nulls
from stable_opd_mcore.errors import DataError

_MAY_BE_EMPTY = ("system", "tool")  # an empty file, a command that prints nothing


def parse_messages(
    value: object,
    where: str,
    text: Callable[[Mapping[str, Any], str], str],
    golden: Literal["last", "all"] = "last",
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The turns of the prompt, and those from the first golden turn on: the assistant's and the
    messages between them; () if the last turn is not an assistant's.

    Args:
        where: file, row and column, for errors.
        text: checks the content of a message; (message, where) -> its text.
        golden: `columns.golden`.

    Raises:
        DataError: no list of messages, a role, key or tool call that is not of OpenAI's form, a
            reply of a tool without a call, a golden turn that answers no user and no tool.
    """
    turns: list[Message] = []
    for number, message in enumerate(_listed(value, where)):
        place = f"{where}, message {number}"
        read, unread = read_message(message, place)
        if unread:
            raise DataError(
                f"{place} has keys that are not read of a message of this role, "
                f"{', '.join(sorted(unread))}: remove the key or the row"
            )
        for turn in read:
            _add(turn, turns, place)
    turns = [
        _checked(turn, f"{where}, message {number}", text) for number, turn in enumerate(turns)
    ]
    _refuse_unordered_replies(turns, where)
    answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    ends_with_answer = len(turns) - 1 in answers
    if golden == "last" or not answers:
        answers = [len(turns) - ends_with_answer]  # the golden solution, or what a rollout adds
    elif not ends_with_answer:
        raise DataError(
            f"{where}: the last turn is of the {turns[-1]['role']}; columns.golden=all expects one "
            "of the assistant: add it, remove the turn, or set columns.golden=last"
        )
    for number in answers:
        if number and number < len(turns) and turns[number - 1]["role"] == "assistant":
            raise DataError(
                f"{where}: messages {number - 1} and {number} are two turns of the assistant in a "
                "row; expected one of the user or of a tool before each that is trained on: join "
                "them, or remove the row"
            )
        if not number or turns[number - 1]["role"] not in ("user", "tool"):
            raise DataError(
                f"{where}: no user turn to answer before message {number}; expected one at the "
                "end, or before the last turn of the assistant, before each one with "
                "columns.golden=all: add it or remove the row"
            )
    return tuple(turns[: answers[0]]), tuple(turns[answers[0] :])


def _listed(value: object, where: str) -> list[Any]:
    """The messages in a list, its text, or a table's columns."""
    value = from_text(value)
    columns = cast("Mapping[str, Any]", value if isinstance(value, Mapping) else {})
    lists = [cast("list[Any]", each) for each in columns.values() if isinstance(each, list)]
    if columns and len(lists) == len(columns) and len({*map(len, lists)}) == 1:  # of a table
        rows = zip(*lists, strict=True)
        value = [dict(zip(columns, row, strict=True)) for row in rows]
    if not isinstance(value, list) or not value:
        found = cast("object", value)
        raise DataError(
            f"{where} holds {type(found).__name__} {found!r:.60}; expected a list of messages, "
            "[{role: user, content: ...}, ...]: fix or remove the row"
        )
    return cast("list[Any]", value)


def _add(turn: Message, turns: list[Message], place: str) -> None:
    """Add a turn to those before it. A thought in a message of its own is one of the next."""
    before = turns[-1] if turns else {"role": "system"}
    if turn["role"] == "tool" and before["role"] not in ("assistant", "tool"):
        raise DataError(
            f"{place}: role 'tool' and no turn of the assistant before it; add the turn that calls "
            "the tool, or make it a user message"
        )
    is_thought = before.keys() == {"role", "content", THOUGHT} and before["content"] == ""
    if turn["role"] == "assistant" and is_thought and THOUGHT not in turn:
        turn = {**turn, THOUGHT: turns.pop()[THOUGHT]}
    turns.append(turn)


def _checked(turn: Message, place: str, text: Callable[[Mapping[str, Any], str], str]) -> Message:
    """Check a turn's content with `text`, unless the content is empty and may be. Remove the null
    arguments of calls: a table has a column for the arguments of every other call."""
    if calls := turn.get("tool_calls"):
        turn = {**turn, "tool_calls": without_nulls(calls)}
    content = turn["content"]
    if content is None or (not content.strip() and turn["role"] in _MAY_BE_EMPTY):
        return {**turn, "content": content and ""}
    return {**turn, "content": text(turn, place)}


def _refuse_unordered_replies(turns: Sequence[Message], where: str) -> None:
    """Raise a DataError for replies of tools in another order than the calls that they answer: most
    chat templates write no ids, so a model would take one result for another's."""
    asked: list[object] = []
    waiting: list[object] = []
    for number, turn in enumerate(turns):
        if turn["role"] == "assistant":
            asked = waiting = [call.get("id") for call in turn.get("tool_calls", ())]
        reply = turn.get("tool_call_id")
        if reply is None or reply not in asked:
            continue
        if reply not in waiting:
            raise DataError(
                f"{where}, message {number}: its call {reply!r:.40} has a reply already, or stands "
                "before one that has; expected one reply to each call, in the calls' order: sort "
                "them, or remove the row"
            )
        waiting = waiting[waiting.index(reply) + 1 :]
