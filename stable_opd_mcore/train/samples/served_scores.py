"""The scores of a served teacher for golden solutions, and for rollouts of an engine without
servers.

    golden = begin_scoring(run, golden, step)  # before sampling, so that both run at once
    rollouts = ...
    samples = rollouts + golden()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from stable_opd_mcore.parallel.world import broadcast_object, gather_objects
from stable_opd_mcore.records import Sample
from stable_opd_mcore.serving.teacher import TeacherLost
from stable_opd_mcore.train.run import Run


def begin_scoring(run: Run, samples: list[Sample], step: int) -> Callable[[], list[Sample]]:
    """Ask the served teacher, if there is one, about those samples with sampled tokens whose scores
    the loss reads and which have none. One rank of the replica asks.

    Returns:
        A function that waits for the scores and returns the samples with them. Collective over all
        ranks. It raises TeacherLost on all of them, because all of them save a checkpoint then.
    """
    teacher = run.served_teacher
    if teacher is None:
        return lambda: samples
    asks = dist.get_rank(run.world.model_group) == 0
    places = [
        place
        for place, sample in enumerate(samples)
        if sample.is_scored
        and sample.is_taught
        and sample.teacher_scores is None
        and len(sample.places)
    ]
    replies = [teacher.ask(samples[place], step) for place in places if asks]

    def scored() -> list[Sample]:
        found = teacher.wait(replies)
        for reason in gather_objects(teacher.lost):
            if reason is not None:
                raise TeacherLost(reason)
        found = broadcast_object(found, run.world.model_group)
        whole = list(samples)
        for place, scores in zip(places, found, strict=True):
            whole[place] = replace(whole[place], teacher_scores=scores)
        return whole

    return scored
