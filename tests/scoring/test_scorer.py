"""`with_scores` stores the scores of each scorer in the micro-batches."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from stable_opd_mcore.records import Scores
from stable_opd_mcore.scoring.scorer import with_scores
from tests.models.tiny import microbatch

BATCHES = [microbatch([5, 3]), microbatch([4], seed=1)]


class ConstantScorer:
    """A scorer that returns one value for every token."""

    head = None

    def __init__(self, value: float, last_stage: bool = True):
        self.value, self.last_stage = value, last_stage

    def score(self, microbatches, samples=()):
        if not self.last_stage:
            return []
        return [
            Scores(
                logprob_N=torch.full((len(batch.rows_N),), self.value),
                token_logprob_N=torch.full((len(batch.rows_N),), self.value - 1),
                hidden_NH=torch.full((len(batch.rows_N), 2), self.value),
            )
            for batch in microbatches
        ]


def test_each_scorer_fills_its_own_field():
    scored = with_scores(
        BATCHES,
        teacher=ConstantScorer(-1.0),
        reference=ConstantScorer(-2.0),
        behaviour=ConstantScorer(-3.0),
    )
    for before, after in zip(BATCHES, scored, strict=True):
        assert after.tokens_T is before.tokens_T
        assert after.teacher.logprob_N.tolist() == [-1.0] * len(before.rows_N)
        assert after.reference.logprob_N.tolist() == [-2.0] * len(before.rows_N)
        assert after.reference.hidden_NH.eq(-2.0).all()
        assert after.old_logprob_N.tolist() == [-3.0] * len(before.rows_N)
        assert after.old_token_logprob_N.tolist() == [-4.0] * len(before.rows_N)


@pytest.mark.parametrize("role", ["teacher", "reference", "behaviour"])
def test_nobody_is_asked_where_no_rollout_of_a_minibatch_has_a_token(role):
    golden = [replace(batch, is_scored=False) for batch in BATCHES]
    scorer = ConstantScorer(-1.0)
    with patch.object(scorer, "score", side_effect=AssertionError):
        assert with_scores(golden, **{role: scorer}) == golden


def test_golden_solutions_whose_scores_nobody_reads_are_not_scored():
    batches = [BATCHES[0], replace(BATCHES[1], is_scored=False)]
    scorer = ConstantScorer(-1.0)
    with patch.object(scorer, "score", wraps=scorer.score) as score:
        scored, golden = with_scores(batches, teacher=scorer, reference=scorer, behaviour=scorer)
    assert [len(call.args[0]) for call in score.call_args_list] == [1, 1, 1]
    assert scored.teacher is not None
    assert golden is batches[1]
