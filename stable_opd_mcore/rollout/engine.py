"""The rollout engine protocol: prompts in, sampled responses and their weight version out.

Training step, evaluation and demo use engines through this protocol only. Not here: how tokens are
drawn (noise.py), the engines (embedded.py, replay.py, sglang/), rewards.

Ordering: `generate` draws from the weights of the last `publish`. All tensor- and pipeline-parallel
ranks of a replica make the same calls and get the same rollouts; data-parallel ranks pass different
prompts and may pass none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.metrics import Metrics
from stable_opd_mcore.records import Prompt, Rollout

MIN_TEMPERATURE = 1e-3  # logits of a thousand over it are a million, exact to 1/16 in fp32


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn; training and evaluation have one each."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    max_new_tokens: int = 1024
    num_samples: int = 1  # responses per prompt
    stop_token_ids: tuple[int, ...] = ()  # a response ends with, and includes, the first of these
    seed: int = 0  # of the noise, with step, prompt and sample index

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(
                f"temperature {self.temperature} is negative; 0 is greedy, 1 the model itself"
            )
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise UserError(
                f"temperature {self.temperature} is too small to divide logits by: at least "
                f"{MIN_TEMPERATURE}, or 0 for greedy decoding"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} is outside (0, 1]; 1 keeps the whole distribution")
        for name in ("max_new_tokens", "num_samples"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} {getattr(self, name)} must be at least 1")


class RolloutEngine(Protocol):
    """Draws responses from the student's weights of version `weight_version`."""

    weight_version: int

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int
    ) -> list[Rollout]:
        """`sampling.num_samples` rollouts per prompt, all of the first prompt first.

        Raises:
            UserError: a prompt that the model cannot take (see `check_prompts`).
        """
        ...

    def publish(self, weight_version: int) -> None:
        """Draw from the student's current weights from now on."""
        ...

    def prefetch(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> None:
        """Start to draw the rollouts of the future `step`, if the engine can."""
        ...

    def in_flight(self) -> tuple[int, list[Rollout]] | None:
        """The step that was drawn ahead and this rank's rollouts of it, for a checkpoint."""
        ...

    def restore(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Use a checkpoint's rollouts for `step`; they may be of any rank's prompts."""
        ...

    def take_metrics(self) -> Metrics:
        """This rank's metrics since the last call; the caller reduces them over ranks."""
        ...

    def close(self) -> None:
        """End the servers that the engine started."""
        ...


class NothingInFlight:
    """The methods of an engine that has no servers and cannot prefetch."""

    def prefetch(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> None:
        """Do nothing."""

    def in_flight(self) -> tuple[int, list[Rollout]] | None:
        return None

    def restore(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Ignore the rollouts; `generate` draws them again."""

    def take_metrics(self) -> Metrics:
        return Metrics()

    def close(self) -> None:
        """Do nothing."""


class EngineLost(UserError):
    """No more rollouts can be drawn.

    `generate` raises it on every rank before the step changes anything, so the training state can
    be saved.
    """


def check_prompts(
    prompts: Sequence[Prompt], sampling: Sampling, *, vocab_size: int, window: int
) -> None:
    """Refuse prompts without tokens, ids outside the vocabulary, and lengths beyond the window.

    Raises:
        UserError: names the prompt, both numbers and the remedy.
    """
    for prompt in prompts:
        ids = prompt.token_ids
        if not ids:
            raise UserError(f"prompt {prompt.prompt_id}: no tokens; drop the prompt")
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            raise UserError(
                f"prompt {prompt.prompt_id}: token id {low if low < 0 else high} is outside the "
                f"model's vocabulary of {vocab_size}; the tokenizer belongs to another model"
            )
        total = len(ids) + sampling.max_new_tokens
        if total > window:
            raise UserError(
                f"prompt {prompt.prompt_id}: {len(ids)} prompt tokens + max_new_tokens "
                f"{sampling.max_new_tokens} = {total} exceed the model's window of {window}; "
                "lower sampling.max_new_tokens or drop the prompt (data.overlong=drop)"
            )
    outside = [token for token in sampling.stop_token_ids if not 0 <= token < vocab_size]
    if outside:
        raise UserError(
            f"stop token ids {outside} are outside the model's vocabulary of {vocab_size}; "
            "check student.stop_token_ids"
        )
