"""The teacher's scores that the loss computes from the teacher's hidden states."""

from __future__ import annotations

import pytest
import torch

from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.scoring.token_scores import score
from tests.losses.cases import make_case, make_config

WITH_LOGITS = {
    "gkd": {"objective__name": "gkd"},
    "gkd_jsd": {"objective__name": "gkd", "objective__divergence": "jsd"},
    "student_topk": {"objective__name": "student_topk", "objective__top_k": 4},
    "vopd": {"objective__advantage__control_variate": True},
    "vopd_sequence": {
        "objective__advantage__control_variate": True,
        "objective__discount": 1.0,
    },
}


@pytest.mark.parametrize("changes", WITH_LOGITS.values(), ids=WITH_LOGITS)
def test_loss_and_scorer_give_the_same_teacher_scores(changes):
    """Entropies are over the teacher's tokens, though stop tokens are merged in the loss."""
    config = make_config(sampling__temperature=0.7, kl__beta=0.1, **changes)
    case = make_case(config, rows=24, stop_ids=((1, 9), (2, 5, 9)))
    assert case.batch.teacher.logprob_N is None
    student, teacher, reference = (
        Head(weight, 0, len(weight))
        for weight in (case.weight_VH, case.teacher_weight_VH, case.reference_weight_VH)
    )
    scores = score(
        case.teacher_hidden_NH,
        teacher,
        case.batch.targets_N,
        temperature=0.7,
        stop_ids=case.objective.stop_ids,
    )
    assert (scores.logprob_N != scores.token_logprob_N).any()

    out = case.objective(
        case.hidden_NH, student, case.batch, teacher_head=teacher, reference_head=reference
    )
    torch.testing.assert_close(out.teacher_logprob_N, scores.logprob_N)
    torch.testing.assert_close(out.teacher_entropy_N, scores.entropy_N)
