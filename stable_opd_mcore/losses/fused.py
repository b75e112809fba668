"""Turn hidden states and output heads into a loss and its gradients, never holding [N, V].

The N scored rows go through in blocks. One GEMM per model gives the logits of a block; leaves.py
turns them into the loss of its rows and the gradient by the student's logits, written over them;
two GEMMs carry that to hidden states and head. Extra memory, for any N: one block of logits per
model, and the gradients. docs/evidence/loss.md counts bytes, launches and copies.

N scored rows, C rows of a block, V columns of this rank's vocabulary shard, J looked-up columns of
a row (the target first, then stop ids), K entries of a top-K list, G golden rows, H hidden size.
"""

# torch types `split` and `tolist` only in part; the results in use are cast.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses.leaves import Block
from stable_opd_mcore.losses.output_head import (
    Head,
    ModelTensors,
    WithGradients,
    accumulation_dtype,
    add_product_,
    gradient_sum,
    require_same_columns,
)
from stable_opd_mcore.losses.stop_tokens import looked_up_ids
from stable_opd_mcore.losses.token_losses import NO_SCORES, Rows, Terms
from stable_opd_mcore.losses.token_weights import return_to_go
from stable_opd_mcore.records import LossOutput, MicroBatch, split_rows


def fused_loss(
    hidden_NH: Tensor,
    head: Head,
    batch: MicroBatch,
    terms: Terms,
    *,
    teacher_head: Head | None = None,
    reference_head: Head | None = None,
    context_group: dist.ProcessGroup | None = None,
    block_rows: int = 1024,
) -> LossOutput:
    """The loss of one micro-batch, differentiable in hidden_NH and head.weight_VH.

    Under tensor parallelism every rank of the group calls it with the same rows; the loss is the
    same on all of them, and the gradient by hidden_NH is summed over the shards. The head's
    gradient accumulates over blocks in fp32. It is rounded once, or not at all where the weight has
    Megatron's `main_grad`: then it is added there by this call, whose result must be differentiated
    once, with an incoming gradient of 1. Under context parallelism the rows
    are those of this rank's slice, and losses and gradients add up over `context_group`.

    Raises:
        ValueError: heads cover different vocabulary ranges.
        UserError: a stop id or top_k outside the common vocabulary, or scores that are not finite.
    """
    heads = needed_heads(hidden_NH, batch, terms, head, teacher_head, reference_head)
    grad = torch.is_grad_enabled()
    wants = grad and hidden_NH.requires_grad, grad and head.weight_VH.requires_grad
    with torch.no_grad():
        evaluation = _Evaluation(hidden_NH, batch, terms, heads, block_rows)
        rows, *gradients = evaluation.run(*wants, context_group)
    inputs = (hidden_NH, head.weight_VH, rows.loss.sum())
    loss = cast(Tensor, WithGradients.apply(*inputs, *gradients))  # pyright: ignore[reportUnknownMemberType]
    sums = {"pg": rows.pg.sum(), "kl": rows.kl.sum(), "sft": rows.sft.sum()}
    return replace(rows, loss=loss, **sums)


@dataclass(frozen=True)
class _Evaluation:
    """One evaluation of the loss, over all blocks of a micro-batch."""

    hidden_NH: Tensor
    batch: MicroBatch
    terms: Terms
    heads: Mapping[str, Head]  # "student", and the other models whose logits the terms need
    block_rows: int
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # block logits per model

    def run(
        self, wants_hidden: bool, wants_weight: bool, context_group: dist.ProcessGroup | None
    ) -> tuple[LossOutput, Tensor | None, Tensor | None]:
        """Results of all rows, not summed yet, and those gradients that are wanted."""
        head, hidden_NH = self.heads["student"], self.hidden_NH
        weight_VH = head.weight_VH[: head.num_columns]
        d_hidden = hidden_NH.new_zeros(hidden_NH.shape, dtype=weight_VH.dtype)
        d_weight = gradient_sum(head) if wants_weight else None
        returns_N = self._returns(context_group)
        outputs: list[LossOutput] = []
        for rows, block in self._blocks():
            output, by_leaf = block.differentiate(None if returns_N is None else returns_N[rows])
            outputs.append(output)
            if head.num_columns == 0 or not (wants_hidden or wants_weight):
                continue
            gradient_CV = block.write_gradient_(by_leaf)
            if wants_hidden:
                torch.mm(gradient_CV, weight_VH, out=d_hidden[rows])
            if d_weight is not None:
                hidden_CH = hidden_NH[rows].to(gradient_CV.dtype)
                add_product_(d_weight[: head.num_columns], gradient_CV, hidden_CH)
        if wants_hidden:
            head.reduce_(d_hidden)
        if d_weight is not None and not hasattr(head.weight_VH, "main_grad"):
            d_weight = d_weight.to(head.weight_VH.dtype)
        return (
            self._joined(outputs),
            d_hidden.to(hidden_NH.dtype) if wants_hidden else None,
            d_weight,
        )

    def _joined(self, outputs: Sequence[LossOutput]) -> LossOutput:
        """The results of all blocks; an empty micro-batch has none."""
        names = [item.name for item in fields(LossOutput)]
        if not outputs:
            empty = self.hidden_NH.new_zeros(0, dtype=accumulation_dtype(self.hidden_NH))
            return replace(LossOutput(*[empty] * len(names)), ratio_clipped_N=empty.bool())
        parts = {name: [getattr(output, name) for output in outputs] for name in names}
        whole: dict[str, Any] = {
            name: None if values[0] is None else torch.cat(values) for name, values in parts.items()
        }
        return LossOutput(**whole)

    def _returns(self, context_group: dist.ProcessGroup | None) -> Tensor | None:
        """Discounted returns, after a forward-only pass where log-probabilities are missing."""
        batch, terms, teacher = self.batch, self.terms, self.batch.teacher or NO_SCORES
        if terms.discounted is None or terms.settings.discount == 0:
            return None
        given = None if terms.settings.advantage.policy == "present" else batch.old_logprob_N
        if given is not None and teacher.logprob_N is not None:
            rows = [replace(Rows.of(batch, given, given), teacher_logprob=teacher.logprob_N)]
        else:
            rows = [block.rows(block.leaves) for _, block in self._blocks()]
        advantages = [terms.discounted(each, terms.settings.advantage) for each in rows]
        empty = self.hidden_NH.new_zeros(0, dtype=accumulation_dtype(self.hidden_NH))
        values_N = torch.cat([empty, *advantages]).masked_fill(batch.pg_weight_N == 0, 0)
        tokens = (batch.sample_index_N, batch.token_index_N)
        return return_to_go(values_N, *tokens, terms.settings.discount, context_group)

    def _blocks(self) -> Iterator[tuple[slice, Block]]:
        """Rows and sums of each block. Its logits are valid until the next one is taken."""
        count, head = len(self.hidden_NH), self.heads["student"]
        ids_NJ = looked_up_ids(self.batch.targets_N, self.terms.stop_ids, head.vocab_size)
        if count == 0:
            return
        golden_G = self.batch.golden_rows_G  # on the host, read only if the temperature is not 1
        golden = [] if self.terms.temperature == 1 else cast("list[int]", golden_G.tolist())
        for index, batch in enumerate(split_rows(self.batch, self.block_rows)):
            start = index * self.block_rows
            rows = slice(start, min(start + self.block_rows, count))
            own_G = golden_G[bisect_left(golden, start) : bisect_left(golden, rows.stop)]
            golden_rows = own_G.to(ids_NJ.device, non_blocking=True) - start
            logits = self._logits(self.hidden_NH[rows], batch)
            yield rows, Block.of(self.terms, batch, head, logits, ids_NJ[rows], golden_rows)

    def _logits(self, hidden_CH: Tensor, batch: MicroBatch) -> ModelTensors:
        """Logits of a block, of each model of `heads`. All blocks share one buffer per model."""
        hidden = {"student": hidden_CH}
        for name, scores in (("teacher", batch.teacher), ("reference", batch.reference)):
            if scores is not None and scores.hidden_NH is not None:
                hidden[name] = scores.hidden_NH
        logits: dict[str, Tensor] = {}
        for name, head in self.heads.items():
            if name not in self.buffers:
                self.buffers[name] = head.logits_buffer(len(hidden_CH))
            logits[name] = head.logits(hidden[name], out=self.buffers[name][: len(hidden_CH)])
        return ModelTensors(**logits)


def needed_heads(
    hidden_NH: Tensor,
    batch: MicroBatch,
    terms: Terms,
    student: Head,
    teacher: Head | None,
    reference: Head | None,
) -> dict[str, Head]:
    """Heads of the models whose logits the terms need; refuses unfit ones."""
    assert len(hidden_NH) == len(batch.targets_N), "hidden_TH.index_select(0, batch.rows_N)"
    heads = {"student": student}
    for name, needed, head, scores in (
        ("teacher", terms.teacher_logits, teacher, batch.teacher),
        ("reference", terms.reference == "exact", reference, batch.reference),
    ):
        if needed:
            assert head is not None and scores is not None and scores.hidden_NH is not None, name
            require_same_columns(student, head, name)
            heads[name] = head
    return heads


def finite_scores(batch: MicroBatch, rows: LossOutput) -> Tensor:
    """bool []: whether all scores are finite. The host does not wait."""
    return torch.stack([x.isfinite().all() for x in _scores(batch, rows).values()]).all()


def require_finite_scores(batch: MicroBatch, rows: LossOutput) -> None:
    """Raise a UserError for scores that are not finite: even a weight of zero times NaN is NaN."""
    for name, x in _scores(batch, rows).items():
        bad = ~x.isfinite()
        if bad.any():
            first = int(bad.reshape(len(x), -1).any(1).nonzero()[0])
            raise UserError(
                f"{name}: {int(bad.sum())} of {x.numel()} values are not finite, the first in "
                f"scored row {first}: no weight was moved. Check that model's checkpoint, its "
                "precision and its server"
            )


def _scores(batch: MicroBatch, rows: LossOutput) -> dict[str, Tensor]:
    teacher = batch.teacher or NO_SCORES
    scores = {
        "the teacher's log-probabilities": rows.teacher_logprob_N,
        "the teacher's top-k log-probabilities": teacher.topk_logprobs_NK,
        "the teacher's entropies": rows.teacher_entropy_N,
        "the reference's log-probabilities": rows.reference_logprob_N,
        "the old log-probabilities": batch.old_logprob_N,
        "the old log-probabilities of tokens": batch.old_token_logprob_N,
        "the given advantages": batch.given_advantage_N,
    }
    return {name: x for name, x in scores.items() if x is not None}
