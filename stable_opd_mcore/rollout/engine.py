"""What a rollout engine is: prompts in, sampled responses and their weight version out.

Training step, evaluation and demo use engines through this class only. Ordering: `generate` samples
what was not sampled ahead, from the weights of the last `publish`. All tensor- and
pipeline-parallel ranks of a replica make the same calls and get the same rollouts; data-parallel
ranks pass different prompts and may pass none.

What an engine has sampled ahead is a cache: `generate` samples what is missing. It is not saved, so
a run that resumes begins without it, as after `drop_ahead`.
"""

from __future__ import annotations

from collections.abc import Sequence

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.metrics import Metrics
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from stable_opd_mcore.rollout.interaction import Interaction
from stable_opd_mcore.serving.idle_clock import IdleClock


class RolloutEngine:
    """Samples responses from the student's weights of version `weight_version`."""

    weight_version: int = 0
    idle: IdleClock | None = None  # this rank's servers; None: an engine without servers
    interaction: Interaction | None = None  # answers the student's turns; None: nothing is sampled

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int
    ) -> list[Rollout]:
        """`sampling.num_samples` rollouts per prompt, all of the first prompt first.

        With `sampling.scored` rollouts from servers have their `teacher_scores`, unless the teacher
        is lost. `check_prompts` refuses prompts that the model cannot take.
        """
        raise NotImplementedError

    def publish(self, weight_version: int) -> None:
        """Sample from the student's current weights from now on."""
        self.weight_version = weight_version

    def prefetch(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int, weight_version: int
    ) -> None:
        """Sample the rollouts of `step` ahead, or continue with them, if the engine can.

        With rollout.max_staleness each step calls it for its own prompts and for those of the steps
        that are sampled ahead, the nearest first, and then `generate` for its own.

        Args:
            weight_version: version of the weights that `step` will update.
        """

    def drop_ahead(self) -> None:
        """Forget what is sampled ahead: its weights are abandoned."""

    def take_metrics(self) -> Metrics:
        """This rank's metrics since the last call; the caller reduces them over ranks."""
        return Metrics()

    @property
    def first_failure(self) -> str | None:
        """Why the first environment that failed in this process did; None: none has failed."""
        return None if self.interaction is None else self.interaction.first_failure

    @property
    def refusal(self) -> str | None:
        """Why the run must end after what an environment yielded in this process; None: it need
        not."""
        return None if self.interaction is None else self.interaction.refusal

    def close(self) -> None:
        """End the servers and environments that the engine started."""


class EngineLost(UserError):
    """No more rollouts: raised on every rank while the training state can still be saved."""


def check_prompts(
    prompts: Sequence[Prompt], sampling: Sampling, *, vocab_size: int, window: int
) -> None:
    """Refuse prompts without tokens, ids outside the vocabulary, and lengths beyond the window."""
    for prompt in prompts:
        ids = prompt.token_ids
        if not ids:
            raise UserError(f"prompt {prompt.prompt_id}: no tokens; drop the prompt")
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            raise UserError(
                f"prompt {prompt.prompt_id}: token id {low if low < 0 else high} is outside the "
                f"model's vocabulary of {vocab_size}; the tokenizer belongs to another model: set "
                "tokenizer.path to the student's"
            )
        response = prompt.max_new_tokens or sampling.max_new_tokens
        total = len(ids) + response
        if total > window:
            raise UserError(
                f"prompt {prompt.prompt_id}: {len(ids)} prompt tokens + max_new_tokens "
                f"{response} = {total} exceed the model's window of {window}; lower "
                f"{'environment' if prompt.max_new_tokens else 'sampling'}.max_new_tokens or drop "
                "the prompt (data.overlong=drop)"
            )
    outside = [token for token in sampling.stop_token_ids if not 0 <= token < vocab_size]
    if outside:
        raise UserError(
            f"stop token ids {outside} are outside the model's vocabulary of {vocab_size}; set "
            "student.stop_token_ids to ids inside it"
        )
