"""Tools of a prompt: schemas of functions in OpenAI's form, which a chat template writes.

[{"type": "function", "function": {"name": ..., "parameters": ...}}]
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from stable_opd_mcore.data.messages import from_text, without_nulls
from stable_opd_mcore.errors import DataError

Tool = Mapping[str, Any]
_NAMES = {"input_schema": "parameters", "inputSchema": "parameters"}
_FRAME = ("type", "cache_control")


def parse_tools(value: object, keeps_nulls: bool = False) -> tuple[Tool, ...]:
    """The schemas in a value or in its text; () for a value of another form.

    A function may stand there without its frame: {"name": ..., "parameters": ...}, also with the
    names of Anthropic and MCP, or in Gemini's list. Nulls are left out: a table has the names of
    all other schemas' keys as null. `keeps_nulls`: those in the parameters, such as a default.
    """
    value = from_text(value)
    if isinstance(value, list | tuple):
        parts = cast("Sequence[object]", value)
        return tuple(tool for each in parts for tool in parse_tools(each, keeps_nulls))
    if not isinstance(value, Mapping):
        return ()
    tool = cast("Mapping[str, Any]", value)
    if listed := tool.get("function_declarations") or tool.get("functionDeclarations"):
        return parse_tools(listed, keeps_nulls)
    function = {_NAMES.get(key, key): each for key, each in tool.items() if key not in _FRAME}
    if isinstance(framed := tool.get("function"), Mapping):
        function, frame = cast("Mapping[str, Any]", framed), tool
    elif (
        tool.get("type") == "function"
        or "parameters" in function
        or function.keys() == {"name", "description"}
    ):
        frame = {}
    else:
        return ()
    own = without_nulls(function)
    if keeps_nulls and function.get("parameters") is not None:
        own["parameters"] = function["parameters"]
    if not isinstance(own.get("name"), str):
        return ()
    return ({"type": "function", **without_nulls(frame), "function": own},)


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
