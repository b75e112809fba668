"""One row of a data source, before any tokenizer has seen it.

Not a `Prompt`: that is a row after the chat template, with token ids (see order.PromptSet).
"""

from __future__ import annotations

from dataclasses import dataclass

from stable_opd_mcore.records import AnswerFormat


@dataclass(frozen=True)
class Row:
    """One problem, with its gold answer and golden solution where the source has them."""

    row_id: str  # "<source>:<row>", unique within a source
    problem: str
    answer: str | None = None  # gold final answer
    solution: str | None = None  # golden response as text, without its stop token
    answer_format: AnswerFormat = "boxed"
    prefix: str = ""  # response text that stands before training starts; belongs to the prompt
    complete: bool = True  # False: the solution was cut at the window, no stop token follows it
