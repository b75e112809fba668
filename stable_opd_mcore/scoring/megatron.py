"""A model that is asked, not trained, on the student's own ranks: teacher, reference, old policy.

Any architecture that models/ can build, cut over the same tensor and pipeline ranks, run forward
only over the student's micro-batches by the same schedule. Its hidden states meet its head in
chunks over tokens (token_scores.py), so logits of a whole micro-batch never exist; where the loss
needs the full vocabulary it is given the hidden states alone, and multiplies the head itself. Not
here: served teachers, losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses.head import Head, StopClass, align_head, chunk_rows
from stable_opd_mcore.models.hidden_states import forward_hidden, output_head
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.pipeline import run_forward_backward
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import MicroBatch, Scores
from stable_opd_mcore.scoring.token_scores import score


class MegatronScorer:
    """A `Scorer` over Megatron chunks.

    Args:
        chunks: this rank's chunks of the model, in evaluation mode or without dropout.
        world: this rank's place.
        vocab_size: the common vocabulary of student and teacher; larger ids are padding.
        temperature: of the rollouts, so that all log-probabilities compare.
        stop: the model's own stop class (METHOD §4), None to score the plain token.
        top_k: also keep the K most probable tokens and their log-probabilities.
        merged_ids: stop ids that are one entry of this list (losses.terms.Terms.merged_ids).
        hidden_alone: give hidden_NH and nothing else, for losses over the full vocabulary, which
            find the rest when they multiply the head.
        like: the student's head; the kept head is cut over the tensor ranks at the same vocabulary
            entries, which a model with more padding rows is not by itself.
        chunk_tokens: rows whose logits exist at once, as losses.head.chunk_rows bends it.

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
        stop: StopClass | None = None,
        top_k: int | None = None,
        merged_ids: tuple[int, ...] = (),
        hidden_alone: bool = False,
        like: Head | None = None,
        chunk_tokens: int = 1024,
    ):
        held = architecture_of(chunks).vocab_size
        if held < vocab_size:
            raise UserError(
                f"the model has {held} vocabulary entries, fewer than the {vocab_size} of the "
                "student's tokenizer: it belongs to another tokenizer"
            )
        self._chunks = list(chunks)
        self._world = world
        self._temperature = temperature
        self._stop = stop
        self._top_k = top_k
        self._merged_ids = merged_ids
        self._hidden_alone = hidden_alone
        self._chunk_tokens = chunk_tokens
        head = output_head(chunks, vocab_size)
        self._head = head if head is None or like is None else align_head(head, like)

    @property
    def head(self) -> Head | None:
        """See `Scorer.head`."""
        return self._head

    def about(self, prompt_ids: Sequence[str]) -> MegatronScorer:  # noqa: ARG002
        """See `Scorer.about`: one model answers for all prompts."""
        return self

    def score(self, microbatches: Sequence[MicroBatch]) -> list[Scores]:
        """See `Scorer.score`."""
        return run_forward_backward(
            self._chunks, microbatches, self._forward_step, world=self._world, forward_only=True
        )

    def _forward_step(
        self, chunk: Module, batch: MicroBatch
    ) -> tuple[Tensor, Callable[[Tensor], Scores]]:
        return forward_hidden(chunk, batch), lambda hidden_TH: self._scores_of(hidden_TH, batch)

    def _scores_of(self, hidden_TH: Tensor, batch: MicroBatch) -> Scores:
        assert self._head is not None, "the last pipeline stage holds the output head"
        hidden_NH = hidden_TH.index_select(0, batch.rows_N)
        if self._hidden_alone:
            return Scores(None, hidden_NH=hidden_NH)
        return score(
            hidden_NH,
            self._head,
            batch.targets_N,
            temperature=self._temperature,
            stop=self._stop,
            top_k=self._top_k,
            merged_ids=self._merged_ids,
            chunk_tokens=chunk_rows(self._chunk_tokens, self._head),
        )
