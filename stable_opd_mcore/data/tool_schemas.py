"""Tools of a prompt: schemas of functions in OpenAI's form, which a chat template writes.

[{"type": "function", "function": {"name": ..., "parameters": ...}}]
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from stable_opd_mcore.data.messages import without_nulls
from stable_opd_mcore.errors import DataError

Tool = Mapping[str, Any]


def parse_tools(value: object) -> tuple[Tool, ...]:
    """The schemas in a value or in its JSON text; () for a value of another form.

    A function may stand there without its frame: {"name": ..., "parameters": ...}. Nulls are left
    out: a table has the names of all other schemas' keys as null.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ()
    if isinstance(value, list | tuple):
        parts = cast("Sequence[object]", value)
        return tuple(tool for each in parts for tool in parse_tools(each))
    if not isinstance(value, Mapping):
        return ()
    tool = cast("Mapping[str, Any]", value)
    if isinstance(tool.get("function"), Mapping):
        framed = without_nulls({"type": "function", **tool})
    elif "parameters" in tool:
        framed = without_nulls({"type": "function", "function": dict(tool)})
    else:
        return ()
    return (framed,) if isinstance(framed["function"].get("name"), str) else ()


def tool_names(tools: Sequence[Tool]) -> Iterator[str]:
    """The names of the functions, in order."""
    return (tool["function"]["name"] for tool in tools)


def holds_schemas(text: str, tools: Sequence[Tool]) -> bool:
    """Whether a text has the schema of each tool already: its name as JSON writes it."""
    return all(
        re.search(rf"""["']name["']\s*:\s*["']{re.escape(name)}["']""", text)
        for name in tool_names(tools)
    )


def refuse_unnamed(tools: Sequence[Tool], text: str, row_id: str, path: str) -> None:
    """Raise a DataError if a prompt does not name all tools. `path` has the chat template."""
    unnamed = [
        name
        for name in tool_names(tools)
        if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)
    ]
    if unnamed:
        raise DataError(
            f"{row_id}: its prompt does not name the tools {', '.join(unnamed)!s:.80} of its "
            f"column tools or functions, because the chat template of {path} does not write tools; "
            "write them into the row's system message in the form that the model knows, or remove "
            "or rename the column"
        )
