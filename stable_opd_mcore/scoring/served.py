"""A scorer that reads the scores of a served teacher, which came with the samples.

They are packed and sliced like every other value of a token (MicroBatch.served_...), so each rank
of any layout has those of its rows. Two scorers may read the same scores: the loss's, and that of
the metrics of both models' most probable tokens. HTTP carries no hidden states, so objectives over
the full vocabulary need a Megatron teacher (megatron.py).

Letters: N rows, K entries of a top-K list, E extra ids, J merged ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.records import MicroBatch, Sample, Scores
from stable_opd_mcore.scoring.scorer import Scorer
from stable_opd_mcore.serving.teacher import Wanted


@dataclass(eq=False)
class ServedScorer(Scorer):
    """A `Scorer` over scores that have come; UserError for a list longer than the vocabulary."""

    is_last_stage: bool  # others have no scores
    _: KW_ONLY
    vocab_size: int
    stop_ids: tuple[int, ...] = ()  # scored together, as one outcome (docs/method.md §4)
    top_k: int | None = None  # also return the K most probable tokens
    merged_ids: tuple[int, ...] = ()  # stop ids that are one entry of this list
    columns_before: tuple[int, ...] = ()  # the first extra ids, which another scorer reads

    def __post_init__(self) -> None:
        merged = self.merged_ids if self.top_k else ()
        self._list_size = (self.top_k or 0) + max(0, len(merged) - 1)  # see merge_entries
        if self._list_size > self.vocab_size:
            raise UserError(
                f"objective.top_k={self.top_k} exceeds the {self.vocab_size} tokens: lower it"
            )
        own = sorted({*self.stop_ids, *merged}.difference(self.columns_before))
        self._extra_ids = (*self.columns_before, *own)

    @property
    def wanted(self) -> Wanted:
        """What the teacher must be asked for this scorer, and for the one of `columns_before`."""
        return Wanted(self._list_size, self._extra_ids)

    def score(
        self, microbatches: Sequence[MicroBatch], samples: Sequence[Sample] = ()
    ) -> list[Scores]:
        """See `Scorer.score`."""
        del samples
        return [self._scores(batch) for batch in microbatches] if self.is_last_stage else []

    def _scores(self, batch: MicroBatch) -> Scores:
        logprobs_N, extra_NE = batch.served_logprob_N, batch.served_extra_logprobs_NE
        if logprobs_N is None or extra_NE is None:
            assert not len(batch.targets_N), "no server has scored the samples"
            no_rows = batch.targets_N.new_empty(0, dtype=torch.float32)
            listed_NK = no_rows.reshape(0, self.top_k or 0)
            return Scores(no_rows, topk_ids_NK=listed_NK.long(), topk_logprobs_NK=listed_NK)
        if self.stop_ids:
            is_stop_N = torch.isin(
                batch.targets_N, torch.tensor(self.stop_ids, device=extra_NE.device)
            )
            logprobs_N = torch.where(is_stop_N, self._as_one(extra_NE, self.stop_ids), logprobs_N)
        if not self.top_k:
            return Scores(logprobs_N)
        ids_NK, values_NK = batch.served_top_ids_NK, batch.served_top_logprobs_NK
        assert ids_NK is not None and values_NK is not None
        ids_NK = ids_NK[:, : self._list_size].long()
        values_NK = values_NK[:, : self._list_size].float()
        if self.merged_ids:
            merged_N = self._as_one(extra_NE, self.merged_ids)
            merged_ids = torch.tensor(self.merged_ids, device=ids_NK.device)
            ids_NK, values_NK = merge_entries(ids_NK, values_NK, merged_ids, merged_N)
        return Scores(logprobs_N, topk_ids_NK=ids_NK, topk_logprobs_NK=values_NK)

    def _as_one(self, extra_NE: Tensor, ids: Sequence[int]) -> Tensor:
        """[N]: the log-probability of these ids together."""
        columns = [self._extra_ids.index(token) for token in ids]
        return extra_NE[:, columns].logsumexp(1)


def merge_entries(
    ids_NK: Tensor, logprobs_NK: Tensor, merged_ids: Tensor, merged_logprob_N: Tensor
) -> tuple[Tensor, Tensor]:
    """The K most probable entries when J merged ids count as one, from lists of K + J - 1 ids.

    Exact: a list without some merged id holds at least K other ids; a list with all J holds K - 1
    others, and the merged entry is the K-th.
    """
    keep = ids_NK.shape[1] - (len(merged_ids) - 1)
    others_NK = logprobs_NK.masked_fill(torch.isin(ids_NK, merged_ids), -torch.inf)
    top = torch.cat([others_NK, merged_logprob_N[:, None]], dim=1).topk(keep, dim=1)
    first_N1 = merged_ids[:1].expand(len(ids_NK), 1)
    return torch.cat([ids_NK, first_N1], dim=1).gather(1, top.indices), top.values
