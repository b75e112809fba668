"""From hidden states and output heads to a loss and its gradients, never holding [N, V].

The N scored rows go through in blocks: one GEMM per model gives logits, one pass their sums; the
sums give per-token coefficients; one pass writes the gradient over the student's logits, and two
GEMMs carry it to hidden states and head. Every term is linear in its coefficients, which may depend
on the block's sums (docs/method.md §2). What is not needed for the gradient is computed once, after
the last block, from the sums of all rows. Extra memory, whatever N: one block of logits per model,
and the gradients. docs/loss.md counts bytes, launches and copies. Not here: the passes
(torch_ops.py), and which objective has which terms (objectives.py).

N scored rows, C rows of a block, V columns of this rank's vocabulary shard, J looked-up columns of
a row (the target first, then stop ids), K columns of a support, H hidden size.
"""

# torch types `split` and `tolist` only in part; the results in use are cast.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses.coefficients import (
    NO_SCORES,
    RowLosses,
    RowSums,
    Terms,
    needed_heads,
    token_advantage,
)
from stable_opd_mcore.losses.output_head import (
    Head,
    WithGradients,
    accumulation_dtype,
    add_product_,
    gradient_sum,
)
from stable_opd_mcore.losses.stop_tokens import (
    MergedStops,
    TargetColumns,
    compared_sums,
    merge_stops_,
)
from stable_opd_mcore.losses.token_weights import return_to_go
from stable_opd_mcore.losses.torch_ops import DenseTerm, ShardSums
from stable_opd_mcore.losses.vocabulary_sums import (
    GoldenLikelihood,
    PairStatistics,
    Statistics,
    divergence_sums,
    merge_shards,
    operations,
)
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
        ValueError: a score that the terms need is missing, or heads cover different vocabulary
            ranges.
        UserError: a stop id or top_k outside the common vocabulary, or scores that are not finite.
    """
    heads = needed_heads(hidden_NH, batch, terms, head, teacher_head, reference_head)
    grad = torch.is_grad_enabled()
    wants = grad and hidden_NH.requires_grad, grad and head.weight_VH.requires_grad
    with torch.no_grad():
        evaluation = _Evaluation(batch, terms, heads, block_rows)
        rows, *gradients = evaluation.run(hidden_NH, *wants, context_group)
    require_finite_scores(batch, rows)
    inputs = (hidden_NH, head.weight_VH, rows.loss.sum())
    loss = cast(Tensor, WithGradients.apply(*inputs, *gradients))  # pyright: ignore[reportUnknownMemberType]
    sums = {"pg": rows.pg.sum(), "kl": rows.kl.sum(), "sft": rows.sft.sum()}
    return replace(rows, loss=loss, **sums, ratio_clipped_N=rows.ratio_clipped_N.bool())


@dataclass(frozen=True)
class _Evaluation:
    """One evaluation of the loss, over all blocks of a micro-batch."""

    batch: MicroBatch
    terms: Terms
    heads: Mapping[str, Head]  # of "student", and of those others whose logits the terms need
    block_rows: int
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # block logits per model

    @cached_property
    def columns(self) -> TargetColumns:
        """Of all rows; they hold every constant that a block needs on the device."""
        return TargetColumns.of(self.batch.targets_N, self.terms.stop_ids, self.heads["student"])

    @cached_property
    def golden_rows(self) -> tuple[Tensor, list[Tensor]] | None:
        """Golden rows, all and per block, where the temperature of their likelihood is another."""
        if self.terms.temperature == 1:
            return None
        return GoldenLikelihood.rows_of_blocks(self.batch.sft_weight_N, self.block_rows)

    def run(
        self,
        hidden_NH: Tensor,
        wants_hidden: bool,
        wants_weight: bool,
        context_group: dist.ProcessGroup | None,
    ) -> tuple[LossOutput, Tensor | None, Tensor | None]:
        """Results of all rows, of which none is summed yet, and those gradients that are wanted."""
        head, batch = self.heads["student"], self.batch
        if self.terms.advantage is not None and self.terms.discount > 0:
            returns_N = self._returns(hidden_NH, context_group)
            batch = replace(batch, given_advantage_N=returns_N)
        weight_VH = head.weight_VH[: head.num_columns]
        d_hidden = hidden_NH.new_zeros(hidden_NH.shape, dtype=weight_VH.dtype)
        d_weight = gradient_sum(head) if wants_weight else None
        sums: list[RowSums] = []
        for rows, block in self._blocks(hidden_NH, batch):
            sums.append(block.rows.sums)
            if head.num_columns == 0 or not (wants_hidden or wants_weight):
                continue
            gradient_CV = block.write_gradient_()
            if wants_hidden:
                torch.mm(gradient_CV, weight_VH, out=d_hidden[rows])
            if d_weight is not None:
                hidden_CH = hidden_NH[rows].to(gradient_CV.dtype)
                add_product_(d_weight[: head.num_columns], gradient_CV, hidden_CH)
        if wants_hidden:
            head.reduce_(d_hidden)
        if d_weight is not None and not hasattr(head.weight_VH, "main_grad"):
            d_weight = d_weight.to(head.weight_VH.dtype)
        results = self._results(hidden_NH, batch, sums)
        return results, d_hidden.to(hidden_NH.dtype) if wants_hidden else None, d_weight

    def _results(self, hidden_NH: Tensor, batch: MicroBatch, sums: list[RowSums]) -> LossOutput:
        if not sums:
            empty_N = hidden_NH.new_zeros(0, dtype=accumulation_dtype(hidden_NH))
            return LossOutput(*[empty_N] * len(fields(LossOutput)))
        golden_rows = None if self.golden_rows is None else self.golden_rows[0]
        return RowLosses(self.terms, batch, self.columns, _joined(sums)).results(golden_rows)

    def _returns(self, hidden_NH: Tensor, context_group: dist.ProcessGroup | None) -> Tensor:
        """Discounted returns of the whole micro-batch, to which masked tokens add nothing.

        A first, forward-only pass computes the advantages unless both log-probabilities are given.
        """
        batch, teacher = self.batch, self.batch.teacher or NO_SCORES
        if batch.old_logprob_N is not None and teacher.logprob_N is not None:
            values_N = token_advantage(self.terms, batch, batch.old_logprob_N, teacher.logprob_N)
        else:
            sums = [block.rows.sums for _, block in self._blocks(hidden_NH, batch)]
            values_N = hidden_NH.new_zeros(0, dtype=accumulation_dtype(hidden_NH))
            if sums:
                values_N = RowLosses(self.terms, batch, self.columns, _joined(sums)).advantage()
        values_N = values_N.masked_fill(batch.pg_weight_N == 0, 0)
        tokens = (batch.sample_index_N, batch.token_index_N)
        return return_to_go(values_N, *tokens, self.terms.discount, context_group)

    def _blocks(self, hidden_NH: Tensor, batch: MicroBatch) -> Iterator[tuple[slice, _Block]]:
        """Rows and sums of each block. Its logits are valid until the next one is taken."""
        count = len(hidden_NH)
        if count == 0:
            return
        starts = range(0, count, self.block_rows)
        golden = [None] * len(starts) if self.golden_rows is None else self.golden_rows[1]
        hidden = cast("Sequence[Tensor]", hidden_NH.split(self.block_rows))
        batches = split_rows(batch, self.block_rows)
        columns = split_rows(self.columns, self.block_rows)
        for index, start in enumerate(starts):
            rows = slice(start, min(start + self.block_rows, count))
            part = (hidden[index], batches[index], columns[index], golden[index])
            yield rows, self._block(*part)

    def _logits(self, hidden_CH: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
        """Logits of a block, per model of `heads`.

        All blocks share one buffer per model, of which the last block may fill only a part.
        """
        hidden = {"student": hidden_CH}
        for name, scores in (("teacher", batch.teacher), ("reference", batch.reference)):
            if scores is not None and scores.hidden_NH is not None:
                hidden[name] = scores.hidden_NH
        logits: dict[str, Tensor] = {}
        for name, head in self.heads.items():
            if name not in self.buffers:
                self.buffers[name] = head.logits_buffer(len(hidden_CH))
            logits[name] = head.logits(hidden[name], out=self.buffers[name][: len(hidden_CH)])
        return logits

    def _support_ids(self, student_CV: Tensor, batch: MicroBatch) -> Tensor | None:
        if self.terms.divergence == "teacher_support" and batch.teacher is not None:
            return batch.teacher.topk_ids_NK
        if self.terms.divergence == "student_support":
            return self.heads["student"].top_k(student_CV, self.terms.top_k)[1]
        return None

    def _block(
        self,
        hidden_CH: Tensor,
        batch: MicroBatch,
        columns: TargetColumns,
        golden_rows: Tensor | None,
    ) -> _Block:
        """Logits of a block and their sums over the vocabulary."""
        terms, head, scale = self.terms, self.heads["student"], 1.0 / self.terms.temperature
        logits = self._logits(hidden_CH, batch)
        student_CV = logits["student"]
        looked_up = {name: columns.gather(x) for name, x in logits.items()}
        alone = []
        if "teacher" in logits:
            alone = [operations(student_CV).shard_sums(logits["teacher"], None, scale)]
        golden = None
        if golden_rows is not None and len(golden_rows):
            golden = GoldenLikelihood.of(student_CV, golden_rows, batch.targets_N, head)
        # From here on the stop ids are one outcome in all logits, where the terms merge them.
        merged = None
        if terms.merged_ids:
            merged = merge_stops_(logits, terms.merged_ids, scale, head)
        support_ids_CK = self._support_ids(student_CV, batch)
        if support_ids_CK is not None:
            for name in ("student", "teacher"):
                if name in logits:
                    looked_up[f"{name} support"] = head.gather_columns(logits[name], support_ids_CK)
        others = terms.compared_models
        pairs = compared_sums(logits, others, merged, head, scale)
        statistics, whole = merge_shards([*pairs, *alone], list(looked_up.values()), head)
        compared = dict(zip(others or ("",), statistics, strict=False))
        logprob_G = student_CV.new_empty(0, dtype=accumulation_dtype(student_CV))
        sums = RowSums(
            compared=compared,
            teacher=statistics[-1] if alone else None,
            at={
                name: x if scale == 1 else x * scale
                for name, x in zip(looked_up, whole, strict=True)
            },
            support_ids_CK=support_ids_CK,
            merged=merged,
            divergence_C2=self._second_pass(logits, compared.get("teacher"), merged),
            golden_logprob_G=logprob_G if golden is None else golden.logprob_G,
        )
        return _Block(head, RowLosses(terms, batch, columns, sums), logits, golden)

    def _second_pass(
        self, logits: Mapping[str, Tensor], pair: Statistics | None, merged: MergedStops | None
    ) -> Tensor | None:
        """Sums of a divergence from the teacher that need both normalisers, if there is one."""
        kind = self.terms.divergence
        if kind is None or not isinstance(pair, PairStatistics):
            return None
        models = (logits["student"], logits["teacher"])
        options = (self.terms.jsd_beta, 1.0 / self.terms.temperature, self.heads["student"])
        outcome = merged.outcome_here("teacher") if merged else None
        return divergence_sums(kind, pair, *models, *options, outcome)


@dataclass(frozen=True)
class _Block:
    """A block of rows and its logits [C, V] of all models, undivided by the temperature."""

    head: Head
    rows: RowLosses
    logits: Mapping[str, Tensor]
    golden: GoldenLikelihood | None  # of the block's golden rows, where the temperature is not 1

    def write_gradient_(self) -> Tensor:
        """d loss / d student logits, written over them."""
        rows, head, logits_CV = self.rows, self.head, self.logits["student"]
        batch, target, student = rows.batch, rows.target, rows.student.normaliser
        columns, support, merged = rows.columns, rows.support, rows.sums.merged
        scale = 1.0 / rows.terms.temperature
        # Golden tokens of another temperature have a gradient of their own, added at the end.
        token_C = -batch.sft_weight_N if rows.terms.temperature == 1 else None
        if rows.pair("reference") is None and rows.kl is not None:
            kl_C = rows.kl.logprob_gradient_C
            token_C = kl_C if token_C is None else kl_C + token_C
        logprob_gradient_C = torch.zeros_like(target.logprob_C) if token_C is None else token_C
        at_target_CJ = torch.zeros_like(target.share_CJ)
        if rows.terms.advantage is not None and rows.policy is not None:
            policy_C = rows.policy.logprob_gradient_C
            at_target_CJ = target.share_CJ * policy_C[:, None]
            logprob_gradient_C = logprob_gradient_C + policy_C
        if token_C is not None:
            at_target_CJ.select(1, 0).add_(token_C)
        dense = self._dense_terms()
        sparse = columns.sparse(at_target_CJ)
        write_gradient_ = operations(logits_CV).write_gradient_
        write_gradient_(logits_CV, student, logprob_gradient_C, sparse, list(dense.values()), scale)
        values_CK = None
        if support is not None:
            values_CK = support.gradient_CK * batch.pg_weight_N[:, None]
            head.scatter_add_(logits_CV, support.ids_CK, values_CK * scale)
        if merged is not None:
            at_outcome_C1 = torch.zeros_like(at_target_CJ[:, :1])
            if support is not None and values_CK is not None:
                is_outcome_CK = support.ids_CK == merged.ids[0]
                at_outcome_C1 = (values_CK * is_outcome_CK).sum(1, keepdim=True)
            at_ids_CJ = columns.at_stop_ids(at_target_CJ) * scale
            outcome = (student, logprob_gradient_C, at_outcome_C1, at_ids_CJ, dense, scale, head)
            merged.write_gradient_(logits_CV, *outcome)
        if self.golden is not None:
            self.golden.add_gradient_(logits_CV, batch.sft_weight_N, head)
        return logits_CV

    def _dense_terms(self) -> dict[str, DenseTerm]:
        """The full-vocabulary parts of the gradient, per model; at most one is not "reverse"."""
        terms, rows, found = self.rows.terms, self.rows, dict[str, DenseTerm]()
        reference, teacher = rows.pair("reference"), rows.pair("teacher")
        if reference is not None:
            weighted = (self.logits["reference"], rows.batch.kl_weight_N)
            found["reference"] = reference.term("reverse", *weighted, None, 0.5)
        if teacher is not None and terms.divergence is not None and rows.support is None:
            weighted = (self.logits["teacher"], rows.batch.pg_weight_N)
            sums_C2 = rows.sums.divergence_C2
            found["teacher"] = teacher.term(terms.divergence, *weighted, sums_C2, terms.jsd_beta)
        return found


def _joined(records: Sequence[Any]) -> Any:
    """One record of all rows from those of the blocks; what is no tensor is the same in each."""
    first: Any = records[0]
    if isinstance(first, Tensor):
        return torch.cat(list(records))
    if isinstance(first, dict):
        names = list(cast("dict[str, Any]", first))
        return {name: _joined([record[name] for record in records]) for name in names}
    if isinstance(first, ShardSums):
        return ShardSums(*map(_joined, zip(*records, strict=True)))
    if is_dataclass(first):
        names = [item.name for item in fields(first)]
        parts = {name: _joined([getattr(record, name) for record in records]) for name in names}
        return replace(cast(Any, first), **parts)
    return first


def require_finite_scores(batch: MicroBatch, rows: LossOutput) -> None:
    """Refuse scores that are not finite, before any gradient reaches a model.

    A weight of zero does not help against them: 0 * NaN is NaN in the head's gradient. One
    reduction per tensor, and one copy to the host.

    Raises:
        UserError: naming the score and the first of its rows.
    """
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
    finite = {name: torch.isfinite(x) for name, x in scores.items() if x is not None}
    all_finite = cast("list[bool]", torch.stack([x.all() for x in finite.values()]).tolist())
    for (name, x), fine in zip(finite.items(), all_finite, strict=True):
        if not fine:
            first = int((~x.reshape(len(x), -1)).any(1).nonzero()[0])
            raise UserError(
                f"{name}: {int((~x).sum())} of {x.numel()} values are not finite, the first in "
                f"scored row {first}: no weight was moved. Check that model's checkpoint, its "
                "precision and its server"
            )
