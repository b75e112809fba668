"""Settings of an environment, which plays episodes of several turns. Loads without torch."""

import math
from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from stable_opd_mcore.config.horizon import horizon_at, require_growth
from stable_opd_mcore.config.section import Section
from stable_opd_mcore.host.user_code import UserFunction, read_user_function


class EnvironmentConfig(Section):
    """Episodes of several turns with a function of yours: docs/environments.md."""

    function: str | None = None
    """`path/to/file.py:function`, relative to the working directory. It is called with a row, as a
    dict of its columns, and a seed, and returns a generator that yields what the student reads and
    returns the reward, a number. `null`: one response to each prompt."""
    max_turns: PositiveInt = 10
    """Most turns of the student in an episode; one that has not ended by then has reward 0."""
    max_new_tokens: PositiveInt | None = None
    """Longest turn, in every step and evaluation. `null`: what `sampling` and `evaluation` give
    other responses."""
    horizon_start: PositiveInt | None = None
    """Most turns in the first step. They grow linearly, to `max_turns` after `horizon_steps`; until
    then the guard rests. `null`: `max_turns` in every step."""
    horizon_steps: PositiveInt | None = None
    """With `horizon_start`: steps until episodes may have `max_turns`."""
    history: Literal["append", "template"] = "append"
    """What the student reads of its earlier turns. `append`: exactly what it sampled, except that
    the chat template's token ends each turn. `template`: what the chat template makes of them,
    which for some models leaves their thoughts out."""
    workers: PositiveInt = 4
    """Processes that play the episodes of a data-parallel rank; each holds many."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Time for one answer of the environment; after it the process is ended."""
    memory_gib: float = Field(default=4.0, gt=0)
    """Address space of a process."""
    max_observation_tokens: PositiveInt | None = 2048
    """Longest observation; the middle of a longer one is left out. `null`: whatever fits in the
    window."""

    @property
    def longest(self) -> int:
        """Turns of the longest episode in any step."""
        return self.max_turns if self.function else 1

    @property
    def most_observed(self) -> float:
        """The most tokens that the student reads between its turns."""
        if self.longest == 1:
            return 0
        each = self.max_observation_tokens
        return math.inf if each is None else (self.longest - 1) * each

    @property
    def own_budget(self) -> int | None:
        """Tokens of the longest turn; None: of the longest response without an environment."""
        return self.max_new_tokens if self.function else None

    def turns_at(self, step: int) -> int:
        """Most turns of an episode in the step that follows `step` finished ones."""
        return horizon_at(step, self.horizon_start, self.horizon_steps, self.max_turns)

    def read(self) -> UserFunction:
        """The function."""
        assert self.function is not None
        return read_user_function(self.function, ("row", "seed"))

    def require_one_context(self, key: str) -> None:
        """Raise a ValueError if episodes may have several contexts, with which `key` is wrong."""
        if self.history == "template":
            raise ValueError(
                f"environment.history=template with {key}: where the chat template rewrites "
                f"earlier turns a new context begins, and {key} needs episodes of one; set "
                f"environment.history=append, or drop {key}"
            )

    @model_validator(mode="after")
    def _usable(self) -> Self:
        start, steps = self.horizon_start, self.horizon_steps
        require_growth("environment", start, steps, "max_turns", self.max_turns)
        if self.function is not None:
            self.read()
        return self
