"""Settings of the reward: a function of the user's own. Loads without torch."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from stable_opd_mcore.config.section import Section
from stable_opd_mcore.host.user_code import UserFunction, read_user_function


class RewardConfig(Section):
    """What a response is worth, where a function of the user's says it: docs/own_code.md."""

    function: str | None = None
    """`path/to/file.py:function`, relative to the working directory. It is called with a row, as a
    dict of its columns, and the text of a response, and returns a number in [0, 1]. `null`: 1 where
    the response has the row's answer, else 0."""
    sha256: str | None = None
    """SHA-256 of the function's file, which then may be no other. `null`: the present one; a run's
    config.resolved.yaml has it."""
    timeout_seconds: float = Field(default=10.0, gt=0)
    """Longest time for one response, which then counts as wrong."""

    @model_validator(mode="after")
    def _hashed(self) -> Self:
        sha256 = self.read().sha256 if self.function else None
        object.__setattr__(self, "sha256", sha256)  # it is frozen
        return self

    def read(self) -> UserFunction:
        """The function, unchanged since the settings were read."""
        assert self.function is not None
        return read_user_function(self.function, ("row", "response"), self.sha256)
