"""From hidden states and output heads to a loss and its gradients, never holding [N, V].

The N scored rows go through in blocks: one GEMM per model gives logits, one pass their sums; the
sums give per-token coefficients; one pass writes the gradient over the student's logits, and two
GEMMs carry it to hidden states and head. Every term is linear in its coefficients, which may depend
on the block's sums (docs/method.md §2). Extra memory, whatever N: one block of logits per model,
and the gradients. Not here: the passes (torch_ops.py), and which objective has which terms
(objectives.py).

N scored rows, C rows of a block, V columns of this rank's vocabulary shard, J looked-up columns of
a row (the target first, then stop ids), K columns of a support, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from stable_opd_mcore.losses.coefficients import (
    NO_SCORES,
    Component,
    Terms,
    needed_heads,
    old_logprob,
    require_finite_scores,
    return_to_go,
    sampled_kl,
    surrogate,
    token_advantage,
    weighted,
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
    TargetLogprobs,
    compared_sums,
    merge_stops_,
    support_divergence,
)
from stable_opd_mcore.losses.torch_ops import SparseColumns
from stable_opd_mcore.losses.vocabulary_sums import (
    GoldenLikelihood,
    PairStatistics,
    Statistics,
    SupportDivergence,
    dense_divergence,
    merge_shards,
    operations,
)
from stable_opd_mcore.records import LossOutput, MicroBatch, select_rows


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

    def run(
        self,
        hidden_NH: Tensor,
        wants_hidden: bool,
        wants_weight: bool,
        context_group: dist.ProcessGroup | None,
    ) -> tuple[LossOutput, Tensor | None, Tensor | None]:
        """Results of all rows, of which none is summed yet, and those gradients that are wanted."""
        batch, head = self.batch, self.heads["student"]
        if self.terms.advantage is not None and self.terms.discount > 0:
            returns_N = self._returns(hidden_NH, context_group)
            batch = replace(batch, given_advantage_N=returns_N)
        d_hidden = torch.zeros_like(hidden_NH) if wants_hidden else None
        d_weight = gradient_sum(head) if wants_weight else None
        columns = slice(0, head.num_columns)
        results: list[LossOutput] = []
        for rows in self._blocks():
            block = self._block(hidden_NH[rows], select_rows(batch, rows))
            finished, gradient_CV = block.finish(wants_hidden or wants_weight)
            results.append(finished)
            if gradient_CV is None or head.num_columns == 0:
                continue
            if d_hidden is not None:
                d_hidden[rows] = gradient_CV @ head.weight_VH[columns]
            if d_weight is not None:
                hidden_CH = hidden_NH[rows].to(gradient_CV.dtype)
                add_product_(d_weight[columns], gradient_CV, hidden_CH)
        if d_hidden is not None:
            head.reduce_(d_hidden)
        if not results:
            empty_N = hidden_NH.new_zeros(0, dtype=accumulation_dtype(hidden_NH))
            results = [LossOutput(*[empty_N] * len(fields(LossOutput)))]
        if d_weight is not None and not hasattr(head.weight_VH, "main_grad"):
            d_weight = d_weight.to(head.weight_VH.dtype)
        whole = map(torch.cat, zip(*(vars(block).values() for block in results), strict=True))
        return LossOutput(*whole), d_hidden, d_weight

    def _returns(self, hidden_NH: Tensor, context_group: dist.ProcessGroup | None) -> Tensor:
        """Discounted returns of the whole micro-batch, to which masked tokens add nothing.

        A first, forward-only pass computes the advantages unless both log-probabilities are given.
        """
        batch, teacher = self.batch, self.batch.teacher or NO_SCORES
        if batch.old_logprob_N is not None and teacher.logprob_N is not None:
            values_N = token_advantage(self.terms, batch, batch.old_logprob_N, teacher.logprob_N)
        else:
            values_N = hidden_NH.new_empty(len(hidden_NH), dtype=accumulation_dtype(hidden_NH))
            for rows in self._blocks():
                block = self._block(hidden_NH[rows], select_rows(batch, rows))
                values_N[rows] = block.advantage()
        values_N = values_N.masked_fill(batch.pg_weight_N == 0, 0)
        tokens = (batch.sample_index_N, batch.token_index_N)
        return return_to_go(values_N, *tokens, self.terms.discount, context_group)

    def _blocks(self) -> Iterator[slice]:
        count = self.batch.targets_N.shape[0]
        for start in range(0, count, self.block_rows):
            yield slice(start, min(start + self.block_rows, count))

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

    def _block(self, hidden_CH: Tensor, batch: MicroBatch) -> _Block:
        """Logits of a block and their sums over the vocabulary."""
        terms, head, scale = self.terms, self.heads["student"], 1.0 / self.terms.temperature
        logits = self._logits(hidden_CH, batch)
        student_CV = logits["student"]
        columns = {
            name: TargetColumns.of(
                batch.targets_N, () if name == "reference" else terms.stop_ids, head.vocab_size
            )
            for name in logits
        }
        looked_up = {
            name: head.gather_columns(logits[name], columns[name].ids_CJ) for name in logits
        }
        alone = []
        if "teacher" in logits:
            alone = [operations(student_CV).shard_sums(logits["teacher"], None, scale)]

        golden = None
        if terms.temperature != 1:
            golden = GoldenLikelihood.of(student_CV, batch.targets_N, batch.sft_weight_N, head)
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

        at = {name: x * scale for name, x in zip(looked_up, whole, strict=True)}
        compared = {
            name: pair
            for name, pair in zip(others, statistics, strict=False)
            if isinstance(pair, PairStatistics)
        }
        normalisers = {"student": statistics[0].normaliser}
        if alone:
            normalisers["teacher"] = statistics[-1].normaliser  # over tokens, not merged
        if "reference" in compared:
            normalisers["reference"] = compared["reference"].other
        logprobs = {name: columns[name].logprobs(at[name], normalisers[name]) for name in logits}
        teacher, reference = logprobs.get("teacher"), logprobs.get("reference")
        given, given_reference = batch.teacher or NO_SCORES, batch.reference or NO_SCORES
        return _Block(
            head=head,
            terms=terms,
            batch=batch,
            logits=logits,
            student=statistics[0],
            compared=compared,
            target=logprobs["student"],
            reference_logprob_C=reference.logprob_C if reference else given_reference.logprob_N,
            teacher_logprob_C=teacher.logprob_C if teacher else given.logprob_N,
            teacher_entropy_C=statistics[-1].entropy_C if alone else None,
            support=support_divergence(support_ids_CK, at, merged, given.topk_logprobs_NK, scale),
            merged=merged,
            golden=golden,
        )


@dataclass(frozen=True)
class _Block:
    """A block of rows: logits, undivided by the temperature, and what their sums give."""

    head: Head
    terms: Terms
    batch: MicroBatch  # its [N, ...] fields hold the rows of this block
    logits: Mapping[str, Tensor]  # [C, V] of "student" and where needed "reference", "teacher"
    student: Statistics
    compared: Mapping[str, PairStatistics]  # student against each full distribution it is held to
    target: TargetLogprobs
    reference_logprob_C: Tensor | None  # of the target token
    teacher_logprob_C: Tensor | None  # of the target or its stop class: given, or from the logits
    teacher_entropy_C: Tensor | None  # where the teacher's logits are here
    support: SupportDivergence | None
    merged: MergedStops | None  # the stop ids, where they are one outcome in `logits`
    golden: GoldenLikelihood | None  # where the temperature is not 1

    def finish(self, wants_gradient: bool) -> tuple[LossOutput, Tensor | None]:
        """Results per row, not summed, and if wanted d loss / d logits [C, V], written over the
        student's logits.
        """
        target, batch = self.target, self.batch
        policy, kl = self._policy(), self._kl()
        token_logprob_C = target.token_logprob_C
        if self.golden is not None:
            token_logprob_C = self.golden.write_into(token_logprob_C)
        sft_C = weighted(batch.sft_weight_N, -token_logprob_C)
        entropy_C, zero_C = self.student.entropy_C, torch.zeros_like(target.logprob_C)
        if self.merged is not None:
            entropy_C = self.merged.token_entropy(self.student, self.terms.temperature)

        def given(value_C: Tensor | None) -> Tensor:
            return zero_C if value_C is None else value_C

        kl_teacher_C = None
        if "teacher" in self.compared:
            kl_teacher_C = self.compared["teacher"].reverse_kl_C
        elif self.teacher_logprob_C is not None:
            kl_teacher_C = target.logprob_C - self.teacher_logprob_C
        results = LossOutput(
            loss=policy.value_C + kl.value_C + sft_C,
            pg=policy.value_C,
            kl=kl.value_C,
            sft=sft_C,
            student_logprob_N=target.logprob_C,
            token_logprob_N=token_logprob_C,
            entropy_N=entropy_C,
            advantage_N=given(policy.advantage_C),
            ratio_clipped_N=given(policy.clipped_C).bool(),
            kl_reference_N=given(kl.kl_C),
            kl_teacher_N=given(kl_teacher_C),
            reference_logprob_N=given(self.reference_logprob_C),
            teacher_logprob_N=given(self.teacher_logprob_C),
            teacher_entropy_N=given(self.teacher_entropy_C),
        )
        return results, self._write_gradient(policy, kl) if wants_gradient else None

    def advantage(self) -> Tensor:
        """A of every token by itself, under pi_old, or under the present policy without one."""
        behaviour_C = old_logprob(self.batch, self.target)
        if behaviour_C is None:
            behaviour_C = self.target.logprob_C
        return token_advantage(self.terms, self.batch, behaviour_C, self.teacher_logprob_C)

    def _policy(self) -> Component:
        terms, batch = self.terms, self.batch
        zero_C = torch.zeros_like(self.target.logprob_C)
        if terms.advantage is not None:
            advantage_C = batch.given_advantage_N if terms.discount > 0 else self.advantage()
            assert advantage_C is not None
            if terms.settings.control_variate:
                # After the return-to-go, for it belongs to this prefix alone.
                advantage_C = advantage_C + self.compared["teacher"].reverse_kl_C
            return surrogate(batch, self.target, advantage_C, terms.clip)
        if terms.divergence is None:
            return Component(zero_C, zero_C)
        if self.support is not None:
            return Component(weighted(batch.pg_weight_N, self.support.value_C), zero_C)
        value_C, term = dense_divergence(
            terms.divergence,
            self.compared["teacher"],
            self.logits["student"],
            self.logits["teacher"],
            batch.pg_weight_N,
            terms.jsd_beta,
            1.0 / terms.temperature,
            self.head,
            self.merged.outcome_here("teacher") if self.merged else None,
        )
        return Component(weighted(batch.pg_weight_N, value_C), zero_C, dense=term)

    def _kl(self) -> Component:
        """The KL to the reference."""
        weight_C, logprob_C = self.batch.kl_weight_N, self.target.token_logprob_C
        zero_C = torch.zeros_like(self.target.logprob_C)
        if self.terms.reference == "none":
            return Component(zero_C, zero_C)
        if self.terms.reference != "exact":
            assert self.reference_logprob_C is not None
            return sampled_kl(self.terms.reference, self.batch, logprob_C, self.reference_logprob_C)
        reference = self.compared["reference"]
        term = reference.reverse_term(self.logits["reference"], weight_C)
        kl_C = reference.reverse_kl_C
        return Component(weighted(weight_C, kl_C), zero_C, dense=term, kl_C=kl_C)

    def _write_gradient(self, policy: Component, kl: Component) -> Tensor:
        """Overwrite the student's logits with the gradient of all components."""
        logits_CV, head, student = self.logits["student"], self.head, self.student.normaliser
        write_gradient_ = operations(logits_CV).write_gradient_
        scale = 1.0 / self.terms.temperature
        token_C = kl.logprob_gradient_C
        if self.golden is None:
            token_C = token_C - self.batch.sft_weight_N
        at_target_CJ = self.target.share_CJ * policy.logprob_gradient_C[:, None]
        at_target_CJ[:, 0] += token_C
        logprob_gradient_C = policy.logprob_gradient_C + token_C
        both = {"reference": kl.dense, "teacher": policy.dense}
        dense = {name: term for name, term in both.items() if term is not None}
        columns_CJ, here_CJ = head.local_columns(self.target.ids_CJ)
        sparse = SparseColumns(columns_CJ.masked_fill(~here_CJ, -1), at_target_CJ)
        write_gradient_(logits_CV, student, logprob_gradient_C, sparse, list(dense.values()), scale)
        at_outcome_C = torch.zeros_like(token_C)
        if self.support is not None:
            ids_CK = self.support.ids_CK
            values_CK = self.support.gradient_CK * self.batch.pg_weight_N[:, None]
            head.scatter_add_(logits_CV, ids_CK, values_CK * scale)
            if self.merged is not None:
                at_outcome_C = (values_CK * (ids_CK == self.merged.ids[0])).sum(1)
        if self.merged is not None:
            self.merged.write_gradient_(
                logits_CV,
                student,
                logprob_gradient_C,
                at_outcome_C,
                SparseColumns(self.target.ids_CJ, at_target_CJ * scale),
                dense,
                scale,
                head,
            )
        if self.golden is not None:
            self.golden.add_gradient_(logits_CV, self.batch.sft_weight_N, head)
        return logits_CV
