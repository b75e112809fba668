"""A teacher whose prompt differs from the student's: `teacher.prompt`.

What follows the student's prompt follows the teacher's, token for token. So the teacher has
sequences of its own lengths, packed into micro-batches of its own, and its scores are moved back to
the rows of the student's micro-batches. Under context parallelism a token may be on different ranks
in the two packings; its values are then summed over the context ranks: one has them, the others
have zeros. A served teacher is sent its own prompt (serving/teacher.py), and its scores need not be
moved.

Letters: N rows of a micro-batch, B samples, R sampled tokens of this rank's scored samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import compress

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import MicroBatch, Sample, Scores
from stable_opd_mcore.scoring.scorer import Scorer

Pack = Callable[[Sequence[Sample]], list[MicroBatch]]  # puts them on this rank's device; collective


class OwnPromptScorer(Scorer):
    """A `Scorer` that gives `scorer` the teacher's prompts, in micro-batches of `pack`."""

    def __init__(self, scorer: Scorer, world: World, pack: Pack) -> None:
        self._scorer, self._world, self._pack = scorer, world, pack
        self.head = scorer.head

    def head_of(self, batch: MicroBatch) -> Head | None:
        """See `Scorer.head_of`."""
        return self._scorer.head_of(batch)

    def score(
        self, microbatches: Sequence[MicroBatch], samples: Sequence[Sample] = ()
    ) -> list[Scores]:
        """See `Scorer.score`. Collective over the context ranks."""
        objectives = {batch.objective for batch in microbatches}
        is_read = [s.is_scored and s.is_taught and s.objective in objectives for s in samples]
        scored = [_with_teacher_prompt(sample) for sample in compress(samples, is_read)]
        own = self._pack(scored)
        counts = [len(s.places) * read for s, read in zip(samples, is_read, strict=True)]
        starts = self._starts(counts)
        starts_of_scored = self._starts([len(sample.places) for sample in scored])
        rows_of_teacher = [_numbers(batch, starts_of_scored) for batch in own]
        rows_of_student = [_numbers(batch, starts) for batch in microbatches]
        num_rows = sum(counts)
        to_teacher = (num_rows, rows_of_student, rows_of_teacher)
        to_student = (num_rows, rows_of_teacher, rows_of_student)
        # The student's targets: a caller may ask for others than the sampled tokens.
        targets = self._moved([batch.targets_N for batch in microbatches], *to_teacher)
        scores = self._scorer.score(
            [replace(batch, targets_N=ids) for batch, ids in zip(own, targets, strict=True)]
        )
        if not scores:
            return []
        columns = {field.name: [getattr(s, field.name) for s in scores] for field in fields(Scores)}
        del scores  # so that each field is freed once it is moved
        moved = {
            name: self._moved(values, *to_student)
            if values[0] is not None
            else [None] * len(microbatches)
            for name, values in columns.items()
        }
        return [
            Scores(**dict(zip(moved, values, strict=True)))
            for values in zip(*moved.values(), strict=True)
        ]

    def _starts(self, counts: Sequence[int]) -> Tensor:
        """int64 [B], the number of each sample's first token, from the samples' tokens."""
        lengths_B = np.array(counts, np.int64)
        starts_B = torch.from_numpy(np.cumsum(lengths_B) - lengths_B)
        if self._world.device.type == "cuda":
            starts_B = starts_B.pin_memory()
        return starts_B.to(self._world.device, non_blocking=True)

    def _moved(
        self,
        values: list[Tensor],
        num_rows: int,
        origins: Sequence[Tensor],
        destinations: Sequence[Tensor],
    ) -> list[Tensor]:
        """Values of the rows `origins`, one tensor a micro-batch, as those of `destinations`.
        `values` is emptied, so that its tensors can be freed."""
        all_R = values[0].new_zeros(num_rows, *values[0].shape[1:])
        for rows, numbers in zip(values, origins, strict=True):
            all_R[numbers] = rows
        values.clear()
        if self._world.context_group is not None:
            dist.all_reduce(all_R, group=self._world.context_group)
        return [all_R[numbers] for numbers in destinations]


def _with_teacher_prompt(sample: Sample) -> Sample:
    own, start = sample.teacher_prompt_token_ids, sample.num_prompt_tokens
    assert own is not None, "data/samples.py sets it"
    return replace(
        sample,
        token_ids=np.append(own, sample.token_ids[start:]),
        places=sample.places + (len(own) - start),
        num_prompt_tokens=len(own),
        routed_experts=None,
    )


def _numbers(batch: MicroBatch, starts_B: Tensor) -> Tensor:
    """int64 [N], the number of each row's token among those of all samples."""
    return starts_B[batch.sample_index_N] + batch.token_index_N
