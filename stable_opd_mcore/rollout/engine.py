"""What a rollout engine is: prompts in, sampled responses out, stamped with the weights they were
drawn from.

The training step, the evaluation and the demo know engines by this protocol only. Not here: how
tokens are drawn (noise.py), the engines themselves (embedded.py, replay.py), rewards or metrics.

Ordering: `generate` draws from the weights of the last `publish`; nothing is in flight between
two calls. Every tensor- and pipeline-parallel rank of a replica makes the same calls and gets the
same rollouts; data-parallel ranks pass different prompts and may pass none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.metrics import Metrics
from stable_opd_mcore.records import Prompt, Rollout


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. One object for training, another for evaluation."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    max_new_tokens: int = 1024
    num_samples: int = 1  # responses per prompt
    stop_token_ids: tuple[int, ...] = ()  # a response ends with the first of these, included
    seed: int = 0  # of the sampling noise, together with step, prompt and sample index

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(
                f"temperature {self.temperature} is negative; 0 is greedy, 1 the model itself"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} is outside (0, 1]; 1 keeps the whole distribution")
        for name in ("max_new_tokens", "num_samples"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} {getattr(self, name)} must be at least 1")


class RolloutEngine(Protocol):
    """Draws responses from the student; `weight_version` names the weights it draws from next."""

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
        """The student's weights have changed and are complete: draw from them from now on."""
        ...

    def prefetch(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> None:
        """These are the prompts of `step`: an engine that can draws them while this step trains."""
        ...

    def in_flight(self) -> tuple[int, list[Rollout]] | None:
        """What was drawn ahead, for a checkpoint: the step, and this rank's rollouts of it."""
        ...

    def restore(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Rollouts of `step` that a checkpoint held, of any rank's prompts."""
        ...

    def take_metrics(self) -> Metrics:
        """What the engine has to say since it was last asked; ranks' answers add."""
        ...

    def close(self) -> None:
        """End what the engine started."""
        ...


class NothingInFlight:
    """The part of an engine that draws in this process, when asked, and is done."""

    def prefetch(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> None:
        """Nothing is drawn ahead."""

    def in_flight(self) -> tuple[int, list[Rollout]] | None:
        return None

    def restore(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """What was drawn ahead by another engine is drawn again."""

    def take_metrics(self) -> Metrics:
        return Metrics()

    def close(self) -> None:
        """Nothing was started."""


class EngineLost(UserError):
    """No rollouts can be drawn any more. Raised by `generate` on every rank, before the step has
    changed anything: the training state can be saved."""


def check_prompts(
    prompts: Sequence[Prompt], sampling: Sampling, *, vocab_size: int, window: int
) -> None:
    """Refuse what no engine may be given: foreign token ids, more tokens than the window holds.

    Raises:
        UserError: names the prompt, both numbers and the remedy.
    """
    for prompt in prompts:
        ids = prompt.token_ids
        if not ids:
            raise UserError(
                f"prompt {prompt.prompt_id}: no tokens; a response needs something to follow"
            )
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
