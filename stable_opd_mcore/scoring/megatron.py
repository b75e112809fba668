"""A scorer on the student's own ranks: a Megatron teacher, reference or behaviour policy.

Any architecture that models/ can build, on the same tensor and pipeline ranks, run forward only
over the student's micro-batches. The output head is multiplied in blocks of rows (token_scores.py),
so the logits of a whole micro-batch never exist. A loss over the full vocabulary is given the
hidden states alone and multiplies the head itself. Not here: served teachers, losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses.output_head import Head, rows_per_block
from stable_opd_mcore.models.hidden_states import forward_hidden, output_head
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.pipeline import run_forward_backward
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import MicroBatch, Scores
from stable_opd_mcore.scoring.scorer import Scorer
from stable_opd_mcore.scoring.token_scores import score


class MegatronScorer(Scorer):
    """A `Scorer` over Megatron model chunks.

    Args:
        chunks: this rank's model chunks, in evaluation mode or without dropout.
        vocab_size: the common vocabulary of student and teacher; larger ids are padding.
        temperature: of the rollouts, so that all log-probabilities are comparable.
        stop_ids: ids scored together, as one outcome (docs/method.md §4); empty: none.
        top_k: also keep the K most probable tokens and their log-probabilities.
        merged_ids: stop ids that are one entry of this list (losses.token_losses.Terms.merged_ids).
        hidden_alone: return hidden_NH only, for losses over the full vocabulary.
        head: the model's head where its shards have been cut anew, at the student's vocabulary
            entries (align_head); None: as Megatron cuts it.
        block_rows: rows whose logits exist at once, adjusted by output_head.rows_per_block.
        around: a context for the forward pass of each micro-batch.

    Raises:
        UserError: the model has fewer vocabulary entries than `vocab_size`.
    """

    def __init__(
        self,
        chunks: Sequence[Module],
        world: World,
        *,
        vocab_size: int,
        temperature: float = 1.0,
        stop_ids: tuple[int, ...] = (),
        top_k: int | None = None,
        merged_ids: tuple[int, ...] = (),
        hidden_alone: bool = False,
        head: Head | None = None,
        block_rows: int = 1024,
        around: Callable[[MicroBatch], AbstractContextManager[None]] = lambda _: nullcontext(),
    ):
        num_rows = architecture_of(chunks).vocab_size
        if num_rows < vocab_size:
            raise UserError(
                f"the model has {num_rows} vocabulary entries, fewer than the {vocab_size} of the "
                "student's tokenizer: it belongs to another tokenizer"
            )
        self._chunks = list(chunks)
        self._world = world
        self._temperature = temperature
        self._stop_ids = stop_ids
        self._top_k = top_k
        self._merged_ids = merged_ids
        self._hidden_alone = hidden_alone
        self._block_rows = block_rows
        self._around = around
        self.head = output_head(chunks, vocab_size) if head is None else head

    def score(self, microbatches: Sequence[MicroBatch]) -> list[Scores]:
        """See `Scorer.score`."""
        return run_forward_backward(
            self._chunks, microbatches, self._forward_step, world=self._world, forward_only=True
        )

    def _forward_step(
        self, chunk: Module, batch: MicroBatch
    ) -> tuple[Tensor, Callable[[Tensor], Scores]]:
        with self._around(batch):
            output = forward_hidden(chunk, batch)
        return output, lambda hidden_TH: self._scores_of(hidden_TH, batch)

    def _scores_of(self, hidden_TH: Tensor, batch: MicroBatch) -> Scores:
        assert self.head is not None, "the last pipeline stage holds the output head"
        hidden_NH = hidden_TH.index_select(0, batch.rows_N)
        if self._hidden_alone:
            return Scores(None, hidden_NH=hidden_NH)
        return score(
            hidden_NH,
            self.head,
            batch.targets_N,
            temperature=self._temperature,
            stop_ids=self._stop_ids,
            top_k=self._top_k,
            merged_ids=self._merged_ids,
            block_rows=rows_per_block(self._block_rows, self.head),
        )
