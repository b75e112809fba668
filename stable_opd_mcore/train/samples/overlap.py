"""Whether student and teacher prefer the same tokens and would stop at the same place.

Every EVERY steps both models score the step's rollouts once more, before the update. docs/method.md
§5 defines the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stable_opd_mcore.metrics import Mean, Metrics
from stable_opd_mcore.records import MicroBatch, Sample, Scores
from stable_opd_mcore.scoring.scorer import Scorer
from stable_opd_mcore.scoring.token_scores import overlap

TOP_K = 16
EVERY = 10  # steps between comparisons, which cost one more pass of the models in the trainer


@dataclass(frozen=True)
class OverlapModel:
    scorer: Scorer  # built with `stop_ids` and top_k = TOP_K
    stop_ids: tuple[int, ...]  # all ids that end this model's responses


@dataclass(frozen=True)
class OverlapPair:
    student: OverlapModel
    teacher: OverlapModel


def overlap_is_due(step: int) -> bool:
    return step % EVERY == 0


def overlap_metrics(
    pair: OverlapPair, batches: Sequence[MicroBatch], samples: Sequence[Sample]
) -> Metrics:
    """`overlap/*` and `stop/*` of this rank's rows; empty off the last pipeline stage."""
    batches = [batch for batch in batches if batch.is_scored and batch.is_taught]
    if not batches:
        return Metrics()
    is_last = _last_positions(batches, samples)
    student = _stop_scores(pair.student, batches, is_last, samples)
    teacher = _stop_scores(pair.teacher, batches, is_last, samples)
    if not student:
        return Metrics()
    compared = [
        _compare(*of_batch) for of_batch in zip(batches, is_last, student, teacher, strict=True)
    ]
    sums = torch.stack([torch.stack(list(of_batch.values())) for of_batch in compared]).sum(dim=0)
    return Metrics({key: Mean(*pair) for key, pair in zip(compared[0], sums.tolist(), strict=True)})


def _last_positions(batches: Sequence[MicroBatch], samples: Sequence[Sample]) -> list[Tensor]:
    """bool [N] of each batch: the row predicts the last token of a turn of a rollout.

    Masked tokens too: a mask of stop tokens would leave only truncated responses.
    """
    if not batches:
        return []
    ends = [np.empty(0, np.bool_), *(sample.ends_turn for sample in samples)]
    first_B = np.cumsum([len(each) for each in ends])[:-1]
    ends_turn, first_B = (
        torch.from_numpy(values).to(batches[0].golden_N.device)  # pyright: ignore[reportUnknownMemberType]
        for values in (np.concatenate(ends), first_B)
    )
    return [
        ends_turn[first_B[batch.sample_index_N] + batch.token_index_N] & ~batch.golden_N
        for batch in batches
    ]


def _stop_scores(
    model: OverlapModel,
    batches: Sequence[MicroBatch],
    is_last: Sequence[Tensor],
    samples: Sequence[Sample],
) -> list[Scores]:
    """Scores of the micro-batches, with a stop id as the target of every last position."""
    stop_id = model.stop_ids[0]
    retargeted = [
        replace(batch, targets_N=batch.targets_N.masked_fill(is_last_N, stop_id))
        for batch, is_last_N in zip(batches, is_last, strict=True)
    ]
    return model.scorer.score(retargeted, samples)


def _compare(
    batch: MicroBatch, is_last_N: Tensor, student: Scores, teacher: Scores
) -> dict[str, Tensor]:
    """[2] for each metric: sum and count of its mean."""
    shared = overlap(*_top_tokens(student), *_top_tokens(teacher))
    assert student.logprob_N is not None and teacher.logprob_N is not None
    trained_N = (batch.pg_weight_N != 0) & ~batch.golden_N
    return {
        "overlap/ratio": _mean(shared.ratio_N, trained_N),
        "overlap/student_mass": _mean(shared.student_mass_N, trained_N),
        "overlap/teacher_mass": _mean(shared.teacher_mass_N, trained_N),
        "overlap/advantage": _mean(shared.advantage_N, trained_N),
        "stop/student_mass": _mean(student.logprob_N.exp(), is_last_N),
        "stop/teacher_mass": _mean(teacher.logprob_N.exp(), is_last_N),
    }


def _top_tokens(scores: Scores) -> tuple[Tensor, Tensor]:
    assert scores.topk_ids_NK is not None and scores.topk_logprobs_NK is not None, (
        "the scorers of an OverlapPair are built with top_k"
    )
    return scores.topk_ids_NK, scores.topk_logprobs_NK


def _mean(values_N: Tensor, mask_N: Tensor) -> Tensor:
    total = torch.where(mask_N, values_N.double(), 0.0).sum()
    return torch.stack([total, mask_N.sum().double()])
