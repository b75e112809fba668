"""What a scorer is: a model that gives the log-probabilities of the sampled tokens.

Teacher, reference and behaviour policy (the student before its update, when one batch of rollouts
serves several) score the same micro-batches through it. A model in the trainer (megatron.py) scores
with its weights at the time of the call; scores of a served teacher (served.py) came with the
samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.records import MicroBatch, Sample, Scores


class Scorer:
    """Scores the rows of micro-batches, on all ranks of the student."""

    # this rank's shard of the output head; None off the last stage and for a served teacher
    head: Head | None = None

    def head_of(self, batch: MicroBatch) -> Head | None:
        """The head that belongs to this micro-batch's scores, on the device until the next call."""
        del batch
        return self.head

    def score(
        self, microbatches: Sequence[MicroBatch], samples: Sequence[Sample] = ()
    ) -> list[Scores]:
        """Scores of each micro-batch's N rows; an empty list off the last pipeline stage.

        All ranks of the replica call it with the same micro-batches, at least one.

        Args:
            samples: those that the micro-batches' `sample_index_N` indexes. Only a teacher with a
                prompt of its own reads them.
        """
        raise NotImplementedError


class ScorerOfObjectives(Scorer):
    """One of several scorers for each objective of the run, of the same model or of its teacher's.

    Args:
        scorers: for each objective its scorer; equal ones score together.
    """

    def __init__(self, scorers: Sequence[Scorer]) -> None:
        self._scorers = scorers
        self.head = scorers[0].head

    def head_of(self, batch: MicroBatch) -> Head | None:
        return self._scorers[batch.objective].head_of(batch)

    def score(
        self, microbatches: Sequence[MicroBatch], samples: Sequence[Sample] = ()
    ) -> list[Scores]:
        """See `Scorer.score`. All ranks have micro-batches of the same objectives."""
        found: dict[int, Scores] = {}
        for scorer in dict.fromkeys(self._scorers):
            own = [
                place
                for place, batch in enumerate(microbatches)
                if self._scorers[batch.objective] is scorer
            ]
            if own:
                scores = scorer.score([microbatches[place] for place in own], samples)
                found.update(zip(own, scores, strict=False))  # none off the last stage
        return [found[place] for place in sorted(found)]


def with_scores(
    microbatches: Sequence[MicroBatch],
    samples: Sequence[Sample] = (),
    *,
    teacher: Scorer | None = None,
    reference: Scorer | None = None,
    behaviour: Scorer | None = None,
) -> list[MicroBatch]:
    """The micro-batches with each scorer's scores; unchanged off the last pipeline stage, and where
    the loss reads none (MicroBatch.is_scored, and is_taught for the teacher).

    Args:
        samples: see `Scorer.score`.
        behaviour: gives `old_logprob_N` and `old_token_logprob_N`. Without it both stay None: the
            loss then uses the current policy, which is exact for the first update of a batch.
    """
    found = list(microbatches)
    scored = [place for place, batch in enumerate(found) if batch.is_scored]
    taught = [place for place in scored if found[place].is_taught]
    scorers = ("teacher", teacher, taught), ("reference", reference, scored)
    for name, scorer, places in (*scorers, ("behaviour", behaviour, scored)):
        if scorer is None or not places:  # no rollout of this minibatch has a token
            continue
        if scores := scorer.score([found[place] for place in places], samples):
            for place, of_batch in zip(places, scores, strict=True):
                found[place] = _with(name, found[place], of_batch)
    return found


def _with(name: str, batch: MicroBatch, scores: Scores) -> MicroBatch:
    if name == "behaviour":
        return replace(
            batch, old_logprob_N=scores.logprob_N, old_token_logprob_N=scores.token_logprob_N
        )
    return replace(batch, **{name: scores})
