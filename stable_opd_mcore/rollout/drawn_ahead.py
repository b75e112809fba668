"""Rollouts that are drawn before their step, as far as they are: the embedded engine's memory, and
which rollouts of a checkpoint any engine may go on with.

A step's rollouts stay until the step has changed the weights: a run whose teacher is lost after
sampling saves them with the checkpoint. Not here: drawing (embedded.py), files
(train/persistence/in_flight.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.records import Prompt, Rollout, Sampling, Segment


@dataclass(frozen=True)
class _Held:
    sampling: Sampling | None  # that of the step; None where a checkpoint held the rollouts
    rollouts: dict[tuple[str, int], Rollout]  # by prompt id and sample


class DrawnAhead:
    """The rollouts of this replica's prompts by step; after `restore`, of any replica's.

    Args:
        max_staleness: as rollout.max_staleness; rollouts that are older are drawn anew.
    """

    def __init__(self, max_staleness: int):
        self._max_staleness = max_staleness
        self._held: dict[int, _Held] = {}  # by step
        self._handed_out: list[int] = []  # steps whose rollouts are trained on now

    def begun(
        self, prompts: Sequence[Prompt], sampling: Sampling, step: int, weight_version: int
    ) -> list[Rollout]:
        """Every sample of the prompts as far as it is drawn, the finish_reason "abort" where that
        is not to its end; without a token where what is held cannot serve.

        Args:
            weight_version: of the weights that the step will update.
        """
        held = self._held[step].rollouts if self.has(step, sampling) else {}
        no_tokens, no_logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
        oldest, begun = weight_version - self._max_staleness, []
        for prompt in prompts:
            for sample in range(sampling.num_samples):
                rollout = held.get((prompt.prompt_id, sample))
                if rollout is None or not serves(rollout, prompt, sampling, oldest):
                    rollout = Rollout(
                        prompt, sample, no_tokens, no_logprobs, "abort", weight_version
                    )
                begun.append(rollout)
        return begun

    def has(self, step: int, sampling: Sampling) -> bool:
        """Whether the step's rollouts were drawn ahead so; an evaluation has its own sampling."""
        return step in self._held and self._held[step].sampling in (None, sampling)

    def hold(self, rollouts: Sequence[Rollout], sampling: Sampling | None, step: int) -> None:
        """Keep the step's rollouts, in place of what was held for it."""
        by_key = {(rollout.prompt.prompt_id, rollout.sample_index): rollout for rollout in rollouts}
        self._held[step] = _Held(sampling, by_key)

    def hand_out(self, rollouts: Sequence[Rollout], sampling: Sampling, step: int) -> None:
        """Keep finished rollouts of a step that was drawn ahead until `new_weights`."""
        if self.has(step, sampling):
            held = self._held[step]
            others = {} if held.sampling is None else held.rollouts  # a checkpoint's: of any rank
            self.hold([*others.values(), *rollouts], sampling, step)
            self._handed_out.append(step)

    def new_weights(self) -> None:
        """Forget the rollouts that were trained on."""
        for step in self._handed_out:
            self._held.pop(step, None)
        self._handed_out.clear()

    def restore(self, rollouts: Mapping[int, Sequence[Rollout]]) -> None:
        """Hold a checkpoint's rollouts, by step."""
        for step, held in rollouts.items():
            self.hold(held, None, step)

    def rollouts(self) -> dict[int, list[Rollout]]:
        """All that is held, by step."""
        return {step: list(held.rollouts.values()) for step, held in self._held.items()}

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()
        self._handed_out.clear()


def with_tokens(
    rollout: Rollout,
    tokens_L: NDArray[np.int64],
    logprobs_L: NDArray[np.float32],
    sampling: Sampling,
    weight_version: int,
) -> Rollout:
    """The rollout with the tokens up to the first stop token, but without its text.

    Args:
        weight_version: of the weights that sampled the tokens.
    """
    stops = np.flatnonzero(np.isin(tokens_L, sampling.stop_token_ids))
    length = int(stops[0]) + 1 if len(stops) else len(tokens_L)
    token_ids = np.concatenate((rollout.token_ids, tokens_L[:length].astype(np.int32)))
    full = len(token_ids) == sampling.max_new_tokens
    *before, last = rollout.segments
    if last.num_tokens and last.weight_version != weight_version:
        before, last = [*before, last], Segment(0, weight_version)
    segments = (*before, Segment(last.num_tokens + length, weight_version))
    return replace(
        rollout,
        token_ids=token_ids,
        rollout_logprobs=np.concatenate((rollout.rollout_logprobs, logprobs_L[:length])),
        finish_reason="stop" if len(stops) else "length" if full else "abort",
        weight_version=segments[0].weight_version,
        segments=segments,
    )


def serves(rollout: Rollout, prompt: Prompt, sampling: Sampling, oldest: int) -> bool:
    """Whether a held rollout is of this prompt and budget, and of no weights before `oldest`.

    A checkpoint's may be of other settings than the run that resumed from it.
    """
    unfinished = rollout.finish_reason == "abort"
    return (
        rollout.prompt.token_ids == prompt.token_ids
        and len(rollout.token_ids) + unfinished <= sampling.max_new_tokens
        and rollout.weight_version >= oldest
    )
