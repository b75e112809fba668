"""Settings of the data: where prompts come from and how they are rendered. Loads without torch.

Not here: how many prompts a step takes (rollouts.py).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt

from stable_opd_mcore.config.section import Section


class ColumnsConfig(Section):
    """Column names of a source. A dotted name reaches into nested values: `target.0.content`."""

    problem: str = "problem"
    """The problem's text."""
    answer: str | None = "answer"
    """The final answer, for grading; `null`: the data has none."""
    solution: str | None = "solution"
    """The golden solution; `null`: the data has none."""
    messages: str | None = None
    """A conversation in OpenAI's form, in place of `problem`: docs/data.md. `null`: none."""


class SourceConfig(Section):
    """A set of problems."""

    path: str
    """A .jsonl or .parquet file, a `datasets` directory, a hub id, or `synthetic:arithmetic`."""
    split: str = "train"
    """Split of a data set or of the synthetic task; files have none."""
    columns: ColumnsConfig = ColumnsConfig()
    limit: PositiveInt | None = None
    """Take only the first rows, this many."""
    options: dict[str, Any] = Field(default={})
    """`synthetic:arithmetic`: the fields of `ArithmeticOptions` in data/synthetic.py. A hub id:
    `configuration`."""


class DataConfig(Section):
    """Problems to train and to evaluate on."""

    train: SourceConfig
    """Problems to train on."""
    eval: SourceConfig | None = None
    """Held-out problems; `null`: no evaluation while training."""
    prompt_template: str = "{problem}"
    """The user's message; `{problem}` is replaced by the problem. A conversation stays as
    it is."""
    system_prompt: str | None = None
    """The system message; `null`: the chat template's own, if it has one. A conversation's own
    system message goes before it."""
    overlong: Literal["error", "drop"] = "error"
    """What to do with a row whose prompt leaves no room for `sampling.max_new_tokens`, or whose
    golden solution does not fit in the model's window: end the run, or drop the row and count
    it."""
