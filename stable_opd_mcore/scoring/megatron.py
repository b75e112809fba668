"""A scorer on the student's own ranks: a Megatron teacher, reference or behaviour policy.

Any architecture that models/ can build, on the same tensor and pipeline ranks, run forward only
over the student's micro-batches. The output head is multiplied in blocks of rows (token_scores.py),
so the logits of a whole micro-batch never exist. A loss over the full vocabulary gets only the
hidden states and multiplies the head itself.

Letters: T tokens of a micro-batch, N scored rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass

from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses.output_head import Head, rows_per_block
from stable_opd_mcore.models.hidden_states import forward_hidden, output_head
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.pipeline import run_forward_backward
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import MicroBatch, Sample, Scores
from stable_opd_mcore.scoring.scorer import Scorer
from stable_opd_mcore.scoring.token_scores import score


@dataclass(eq=False)
class MegatronScorer(Scorer):
    """A `Scorer` over Megatron model chunks; UserError if they have fewer than `vocab_size` ids."""

    chunks: Sequence[Module]  # this rank's, in evaluation mode or without dropout
    world: World
    _: KW_ONLY
    vocab_size: int  # the common vocabulary of student and teacher; larger ids are padding
    temperature: float = 1.0  # the rollouts', so that all log-probabilities are comparable
    stop_ids: tuple[int, ...] = ()  # scored together, as one outcome (docs/method.md §4)
    top_k: int | None = None  # also keep the K most probable tokens and their log-probabilities
    merged_ids: tuple[int, ...] = ()  # stop ids that are one entry of this list
    hidden_only: bool = False  # return only hidden_NH, for losses over the full vocabulary
    # the model's head, if its shards were cut again at the student's boundaries (align_head);
    # None: as Megatron cuts it
    head: Head | None = None
    # has the model on the device, where it takes turns with others (teacher.models)
    take_turn: Callable[[], None] = lambda: None
    bring_head: Callable[[], None] = lambda: None  # the same of its head only
    # a context for the forward pass of each micro-batch
    around: Callable[[MicroBatch], AbstractContextManager[None]] = lambda _: nullcontext()

    def __post_init__(self) -> None:
        num_rows = architecture_of(self.chunks).vocab_size
        if num_rows < self.vocab_size:
            raise UserError(
                f"the model has {num_rows} vocabulary entries, fewer than the {self.vocab_size} of "
                "the student's tokenizer: it belongs to another tokenizer; choose a model with the "
                "student's"
            )
        if self.head is None:
            self.head = output_head(self.chunks, self.vocab_size)

    def head_of(self, batch: MicroBatch) -> Head | None:
        """See `Scorer.head_of`."""
        self.bring_head()
        return super().head_of(batch)

    def score(
        self, microbatches: Sequence[MicroBatch], samples: Sequence[Sample] = ()
    ) -> list[Scores]:
        """See `Scorer.score`."""
        del samples
        self.take_turn()
        return run_forward_backward(
            self.chunks, microbatches, self._forward_step, world=self.world, forward_only=True
        )

    def _forward_step(
        self, chunk: Module, batch: MicroBatch
    ) -> tuple[Tensor, Callable[[Tensor], Scores]]:
        with self.around(batch):
            output = forward_hidden(chunk, batch)
        return output, lambda hidden_TH: self._scores_of(hidden_TH, batch)

    def _scores_of(self, hidden_TH: Tensor, batch: MicroBatch) -> Scores:
        assert self.head is not None, "the last pipeline stage holds the output head"
        hidden_NH = hidden_TH.index_select(0, batch.rows_N)
        if self.hidden_only:
            return Scores(None, hidden_NH=hidden_NH)
        return score(
            hidden_NH,
            self.head,
            batch.targets_N,
            temperature=self.temperature,
            stop_ids=self.stop_ids,
            top_k=self.top_k,
            merged_ids=self.merged_ids,
            block_rows=rows_per_block(self.head),
        )
