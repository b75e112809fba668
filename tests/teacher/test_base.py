"""How scores get onto micro-batches, and the self-test of a scorer."""

from __future__ import annotations

import pytest
import torch

from stable_opd_mcore.records import TeacherScores
from stable_opd_mcore.teacher.base import require_repeatable, with_scores
from tests.models.tiny import microbatch

BATCHES = [microbatch([5, 3]), microbatch([4], seed=1)]


class Fixed:
    """A scorer whose answers are known: `value` plus the number of earlier calls times `drift`."""

    head = None

    def __init__(self, value: float, drift: float = 0.0, last_stage: bool = True):
        self.value, self.drift, self.last_stage = value, drift, last_stage

    def score(self, microbatches):
        if not self.last_stage:
            return []
        answers = [
            TeacherScores(
                sampled_logprob_N=torch.full((len(batch.rows_N),), self.value),
                hidden_NH=torch.full((len(batch.rows_N), 2), self.value),
            )
            for batch in microbatches
        ]
        self.value += self.drift
        return answers


def test_each_scorer_fills_its_own_field():
    scored = with_scores(BATCHES, teacher=Fixed(-1.0), reference=Fixed(-2.0), behaviour=Fixed(-3.0))
    for before, after in zip(BATCHES, scored, strict=True):
        assert after.tokens_T is before.tokens_T
        assert after.teacher.sampled_logprob_N.tolist() == [-1.0] * len(before.rows_N)
        assert after.reference.sampled_logprob_N.tolist() == [-2.0] * len(before.rows_N)
        assert after.reference.hidden_NH.eq(-2.0).all()
        assert after.old_logprob_N.tolist() == [-3.0] * len(before.rows_N)


def test_no_scorer_and_no_last_stage_change_nothing():
    assert with_scores(BATCHES) == BATCHES
    elsewhere = Fixed(-1.0, last_stage=False)
    kept = with_scores(BATCHES, teacher=elsewhere, reference=elsewhere, behaviour=elsewhere)
    for after, before in zip(kept, BATCHES, strict=True):
        assert after.tokens_T is before.tokens_T
        assert (after.teacher, after.reference, after.old_logprob_N) == (None, None, None)


def test_a_scorer_that_contradicts_itself_is_refused():
    require_repeatable(Fixed(-1.0), BATCHES)
    require_repeatable(Fixed(-torch.inf), BATCHES)
    require_repeatable(Fixed(-1.0, drift=0.001), BATCHES, tolerance=0.01)
    with pytest.raises(ValueError, match=r"sampled_logprob_N differs by 0.5"):
        require_repeatable(Fixed(-1.0, drift=0.5), BATCHES)
    with pytest.raises(ValueError, match="nan"):
        require_repeatable(Fixed(float("nan")), BATCHES)
