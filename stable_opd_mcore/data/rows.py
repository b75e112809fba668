"""One row of a data source, as text; a `Prompt` is a row after the chat template."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stable_opd_mcore.data.messages import Message
from stable_opd_mcore.data.tool_schemas import Tool
from stable_opd_mcore.records import AnswerFormat


@dataclass(frozen=True)
class Row:
    """One problem, with its gold answer and golden solution if the source has them."""

    row_id: str  # "<source>:<row>", unique within a source
    problem: str  # all turns of a conversation except the system message
    answer: str | None = None  # gold final answer
    solution: str | None = None  # golden response as text, without its stop token
    answer_format: AnswerFormat = "boxed"
    messages: tuple[Message, ...] = ()  # the prompt's turns; empty: the problem is the one turn
    # The golden turns and the messages between them, if there are several or one has tool calls;
    # empty: `solution` is the only golden turn
    golden_turns: tuple[Message, ...] = ()
    # Columns by name, where something reads them: teacher.prompt, a user's reward or environment
    # (all of them)
    columns: Mapping[str, Any] | None = None
    tools: tuple[Tool, ...] = ()  # the functions in columns `tools` and `functions`
    environment: str | None = None  # see Prompt
    max_new_tokens: int | None = None  # see Prompt

    @property
    def source(self) -> str:
        """The name of its source."""
        return self.row_id.rpartition(":")[0]
