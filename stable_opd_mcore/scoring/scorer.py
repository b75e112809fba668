"""What a scorer is: a model that is only asked how probable the response tokens are.

The teacher, the frozen reference and, when one batch of rollouts serves several updates, the
student itself as its behaviour policy are all asked in the same way, over the micro-batches that
the update will use. Not here: how a model answers (megatron.py), which scores an objective needs
(losses/).

Ordering: scores describe the weights at the time of the call; nothing is cached between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from stable_opd_mcore.losses.head import Head
from stable_opd_mcore.records import MicroBatch, Scores


class Scorer(Protocol):
    """A model on the same tensor x pipeline x data ranks as the student."""

    @property
    def head(self) -> Head | None:
        """This rank's shard of the output head, which turns the kept hidden states into logits.

        None off the last pipeline stage.
        """
        ...

    def about(self, prompt_ids: Sequence[str]) -> Scorer:
        """The scorer for micro-batches of these samples, whose prompts may decide who answers."""
        ...

    def score(self, microbatches: Sequence[MicroBatch]) -> list[Scores]:
        """Scores of each micro-batch's N rows; an empty list off the last pipeline stage.

        Every rank of the replica makes the call, with the same micro-batches.
        """
        ...


def with_scores(
    microbatches: Sequence[MicroBatch],
    *,
    teacher: Scorer | None = None,
    reference: Scorer | None = None,
    behaviour: Scorer | None = None,
) -> list[MicroBatch]:
    """The micro-batches with what each scorer says of them; unchanged off the last pipeline stage.

    Args:
        behaviour: gives `old_logprob_N` and `old_token_logprob_N`. Without it the present policy
            stands for the old one, which is exact for the first update of a batch.
    """
    scored = list(microbatches)
    if teacher is not None:
        scored = [
            replace(batch, teacher=said)
            for batch, said in zip(scored, _asked(teacher, microbatches), strict=True)
        ]
    if reference is not None:
        scored = [
            replace(batch, reference=said)
            for batch, said in zip(scored, _asked(reference, microbatches), strict=True)
        ]
    if behaviour is not None:
        scored = [
            batch if said is None else _with_behaviour(batch, said)
            for batch, said in zip(scored, _asked(behaviour, microbatches), strict=True)
        ]
    return scored


def _asked(scorer: Scorer, microbatches: Sequence[MicroBatch]) -> Sequence[Scores | None]:
    """One answer per micro-batch; None off the last pipeline stage."""
    return scorer.score(microbatches) or [None] * len(microbatches)


def _with_behaviour(batch: MicroBatch, said: Scores) -> MicroBatch:
    return replace(batch, old_logprob_N=said.logprob_N, old_token_logprob_N=said.token_logprob_N)
