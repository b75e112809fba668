"""Do student and teacher look at the same tokens, and would they stop here? (METHOD §5)

Every `monitoring.overlap_every` steps both models are asked once more about the step's rollouts,
before the update: their most probable tokens on every trained prefix, and the probability they give
to ending the response at its last position. Not here: scores that a loss needs (teacher/), and what
is watched on every step at no cost (monitoring/health.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from stable_opd_mcore.losses.head import StopClass
from stable_opd_mcore.metrics import Mean, Metrics, reduce_over_ranks
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import MicroBatch, Sample, Scores
from stable_opd_mcore.scoring.scorer import Scorer
from stable_opd_mcore.scoring.token_scores import overlap

TOP_K = 16


@dataclass(frozen=True)
class Observer:
    """One of the two models."""

    scorer: Scorer  # asked with `stop` and top_k = TOP_K
    stop: StopClass  # all ids that end its responses, see own_stop


@dataclass(frozen=True)
class Observers:
    student: Observer
    teacher: Observer


def own_stop(stop_ids: Sequence[int]) -> StopClass:
    """The class of one model's stop ids, whether or not the loss sums them."""
    ids = tuple(sorted(set(stop_ids)))
    return StopClass(ids, ids, include_target=False)


def overlap_metrics(
    observers: Observers, world: World, batches: Sequence[MicroBatch], samples: Sequence[Sample]
) -> Metrics:
    """`overlap/*` and `stop/*`, the same on every rank.

    Args:
        batches: this data-parallel rank's micro-batches of `samples`.
        samples: what `sample_index_N` of the micro-batches points into.
    """
    last = [_last_positions(batch, samples) for batch in batches]
    student = _ask(observers.student, batches, last, samples)
    teacher = _ask(observers.teacher, batches, last, samples)
    metrics = Metrics()
    if student and world.tensor_rank == 0:  # its twins would say the same
        for batch, ends_N, p, q in zip(batches, last, student, teacher, strict=True):
            metrics = metrics | _compare(batch, ends_N, p, q)
    return reduce_over_ranks(metrics, dist.group.WORLD)


def _last_positions(batch: MicroBatch, samples: Sequence[Sample]) -> Tensor:
    """bool [N]: the row predicts the last token of a response that is trained on as a rollout."""
    lengths = batch.token_index_N.new_tensor([len(s.response_token_ids) for s in samples])
    final_N = batch.token_index_N == lengths[batch.sample_index_N] - 1
    return final_N & (batch.pg_weight_N != 0)


def _ask(
    observer: Observer,
    batches: Sequence[MicroBatch],
    last: Sequence[Tensor],
    samples: Sequence[Sample],
) -> list[Scores]:
    """Scores with a stop id as the target of every last position."""
    stop_id = observer.stop.class_ids[0]
    asked = [
        replace(batch, targets_N=batch.targets_N.masked_fill(ends_N, stop_id))
        for batch, ends_N in zip(batches, last, strict=True)
    ]
    return observer.scorer.about([sample.prompt_id for sample in samples]).score(asked)


def _compare(batch: MicroBatch, ends_N: Tensor, student: Scores, teacher: Scores) -> Metrics:
    found = overlap(*_top(student), *_top(teacher))
    assert student.logprob_N is not None and teacher.logprob_N is not None
    trained_N = batch.pg_weight_N != 0
    return Metrics(
        {
            "overlap/ratio": _mean(found.ratio_N, trained_N),
            "overlap/student_mass": _mean(found.student_mass_N, trained_N),
            "overlap/teacher_mass": _mean(found.teacher_mass_N, trained_N),
            "overlap/advantage": _mean(found.advantage_N, trained_N),
            "stop/student_mass": _mean(student.logprob_N.exp(), ends_N),
            "stop/teacher_mass": _mean(teacher.logprob_N.exp(), ends_N),
        }
    )


def _top(scores: Scores) -> tuple[Tensor, Tensor]:
    assert scores.topk_ids_NK is not None and scores.topk_logprobs_NK is not None, (
        "asked with top_k"
    )
    return scores.topk_ids_NK, scores.topk_logprobs_NK


def _mean(values_N: Tensor, mask_N: Tensor) -> Mean:
    total = torch.where(mask_N, values_N.double(), 0.0).sum()
    return Mean(float(total), int(mask_N.sum()))
