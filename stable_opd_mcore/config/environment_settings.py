"""Settings of an environment, which plays episodes of several turns. Loads without torch."""

import math
from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from stable_opd_mcore.config.horizon import horizon_at, require_growth
from stable_opd_mcore.config.rollouts import RolloutConfig
from stable_opd_mcore.config.section import Section
from stable_opd_mcore.host.user_code import UserFunction, read_user_function


class EnvironmentConfig(Section):
    """Episodes of several turns with a function of yours: docs/environments.md."""

    function: str | None = None
    """`path/to/file.py:function`, relative to the working directory. It is called with a row, as a
    dict of its columns, and a seed, and returns a generator that yields what the student reads and
    returns the reward, a number. With a third parameter `base_url` it is an agent: it calls the
    student there, as often as it likes, and returns the reward. `null`: one response to each
    prompt."""
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
    """Processes that play the episodes of a data-parallel rank; each holds many, or one of an
    agent."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Time for one answer of the environment; after it the process is ended. For an agent: its own
    time between a reply and its next request or its end."""
    memory_gib: float = Field(default=4.0, gt=0)
    """Address space of a process."""
    address: str = Field(default="127.0.0.1", min_length=1)
    """Address of this machine at which agents reach the student; `0.0.0.0` for containers and other
    machines, which then use this machine's name. The URL of an episode has a secret of 128 bits,
    but no encryption."""
    max_lost_share: float | None = Field(default=None, ge=0, le=1)
    """Largest share of rewritten requests among a step's requests with turns of the student: those
    whose turns have another form than the student's. A larger share ends the run. `null`: no
    limit."""
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
        if self.is_agent:
            return math.inf
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
        return read_user_function(self.function, ("row", "seed"), optional="base_url")

    @property
    def is_agent(self) -> bool:
        """Whether the function calls the student, and is no generator."""
        return self.function is not None and self.read().takes_optional

    def agent_refusal(self, rollout: RolloutConfig) -> str | None:
        """Why this agent cannot play with these settings; None: it can."""
        if rollout.engine == "embedded" and rollout.partial:
            return (
                f"rollout.partial=true with rollout.engine=embedded and the agent "
                f"{self.function}: this engine would wait for agents that wait for it; set "
                "rollout.partial=false, or rollout.engine=sglang"
            )
        if rollout.prefix.by is not None:
            return (
                f"rollout.prefix.by={rollout.prefix.by} with the agent {self.function}: an "
                "agent's first turn answers its own request; drop rollout.prefix, or write the "
                "function as a generator, without base_url"
            )
        return None

    def several_contexts_refusal(self, key: str) -> str | None:
        """Why episodes may have several contexts, with which `key` is wrong; None: one."""
        if self.is_agent:
            return (
                f"environment.function={self.function} with {key}: an agent may begin contexts of "
                f"its own, and {key} needs episodes of one; write the function as a generator, "
                f"without base_url, or drop {key}"
            )
        if self.history == "template":
            return (
                f"environment.history=template with {key}: where the chat template rewrites "
                f"earlier turns a new context begins, and {key} needs episodes of one; set "
                f"environment.history=append, or drop {key}"
            )
        return None

    @model_validator(mode="after")
    def _usable(self) -> Self:
        start, steps = self.horizon_start, self.horizon_steps
        require_growth("environment", start, steps, "max_turns", self.max_turns)
        if self.function is not None and not self.is_agent:
            for key in ("address", "max_lost_share"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(
                        f"environment.{key} with environment.function={self.function}, a "
                        "generator: it is for agents, functions with a parameter base_url; drop it"
                    )
        return self
