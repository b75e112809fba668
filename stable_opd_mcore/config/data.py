"""Settings of the data: where prompts come from, how they are rendered, and what a response to
them is worth. Loads without torch.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, PositiveInt, Tag, model_validator

from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.config.objective_settings import ObjectiveConfig
from stable_opd_mcore.config.section import Section
from stable_opd_mcore.host.user_code import UserFunction, read_user_function


class RewardConfig(Section):
    """What a response is worth, where a function of the user's says it: docs/own_code.md."""

    function: str | None = None
    """`path/to/file.py:function`, relative to the working directory. It is called with a row, as a
    dict of its columns, and the text of a response, and returns a finite number within 10
    seconds. `null`: 1 where the response has the row's answer, else 0."""

    @model_validator(mode="after")
    def _own_function(self) -> Self:
        if self.function is not None:
            self.read()
        return self

    def read(self) -> UserFunction:
        """The function."""
        assert self.function is not None
        return read_user_function(self.function, ("row", "response"))


class ColumnsConfig(Section):
    """Column names of a source. A dotted name reaches into nested values: `target.0.content`."""

    problem: str = "problem"
    """The problem's text."""
    answer: str | None = "answer"
    """The final answer, for grading; `null`: the data has none."""
    solution: str | None = "solution"
    """The golden solution; `null`: rows may be without one."""
    messages: str | None = None
    """A conversation in OpenAI's form, in place of `problem`: docs/data.md. `null`: none."""
    golden: Literal["last", "all"] = "last"
    """Not a column: which of the assistant's turns in `messages` are golden, the last or all."""

    @model_validator(mode="after")
    def _has_turns(self) -> Self:
        if self.golden == "all" and self.messages is None:
            raise ValueError(
                "golden=all without messages: only a conversation has several golden turns; set "
                "messages to its column, or golden=last"
            )
        return self


class SourceConfig(Section):
    """A set of problems."""

    path: str
    """A .jsonl, .json or .parquet file, a `datasets` directory, a hub id, or
    `synthetic:arithmetic`."""
    split: str = "train"
    """Split of a data set or of the synthetic task; files have none."""
    columns: ColumnsConfig = ColumnsConfig()
    limit: PositiveInt | None = None
    """Number of rows to take, the first ones; `null`: all."""
    options: dict[str, Any] = Field(default={})
    """`synthetic:arithmetic`: the fields of `ArithmeticOptions` in data/synthetic.py. A hub id:
    `revision`, its commit, and `configuration`."""

    @property
    def may_have_golden(self) -> bool:
        """Whether a column may hold golden solutions."""
        return self.columns.solution is not None or self.columns.messages is not None


class TrainSource(SourceConfig):
    """One of several sources; a single source's keys apply too: docs/data.md."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """In metrics, and the first part of its rows' ids; `null`: from `path`."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the run's prompts, relative to the sum of all weights."""
    teacher: str | None = None
    """A key of `teacher.routes` or of `teacher.models`, whose teacher scores its rows. `null`: the
    route of its name, or the teacher's own model."""
    objective: ObjectiveConfig | None = None
    """Objective of its rows: these keys of `objective`, and the run's value of every other. `null`:
    the run's `objective`. Objectives that differ need `normaliser: per_source`."""
    reward: RewardConfig | None = None
    """Reward of its rows, in place of the whole of the run's `reward`: without a `function` here,
    the rows' answers count. `null`: the run's `reward`."""
    environment: EnvironmentConfig | None = None
    """Environment of its rows, in place of the whole of the run's `environment`: without a
    `function` here, its episodes have one turn. `null`: the run's `environment`."""


def _kind(value: object) -> str:
    return "<several>" if isinstance(value, list | tuple) else "<one>"


class DataConfig(Section):
    """Problems to train and to evaluate on."""

    train: Annotated[
        Annotated[SourceConfig, Tag("<one>")]
        | Annotated[tuple[TrainSource, ...], Tag("<several>")],
        Discriminator(_kind),
    ]
    """Problems to train on: a source, or a list of sources."""
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
    golden solution does not fit in the window: end the run, or drop and count the row."""

    @model_validator(mode="after")
    def _some_source(self) -> Self:
        if self.train == ():
            raise ValueError("train is an empty list; expected one source or several; add one")
        return self

    @property
    def sources(self) -> tuple[TrainSource, ...]:
        """All that is trained on; the one source as one of weight 1."""
        if isinstance(self.train, tuple):
            return self.train
        return (TrainSource(**self.train.model_dump()),)
