"""From hidden states and output heads to a loss and its gradients, never holding [N, V].

The N scored rows go through in chunks: logits by one GEMM per model, sums of the chunk, per-token
coefficients from the sums, the gradient written over the logits, two GEMMs. Both gradients are
complete when the forward returns; backward only hands them out. Peak extra memory, whatever N: one
logits chunk per model, plus the gradients themselves. METHOD §2 has the algebra; objectives.py
says which terms an objective is made of.

N scored rows, C rows of a chunk, V columns of this rank's vocabulary shard, J looked-up columns of
a row (the target first, then stop ids), K entries of a support, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses.advantages import return_to_go
from stable_opd_mcore.losses.chunk import Chunk
from stable_opd_mcore.losses.head import (
    Head,
    StopClass,
    accumulation_dtype,
    align_head,
    require_same_columns,
    stop_classes,
)
from stable_opd_mcore.losses.lookup import Lookup, Support
from stable_opd_mcore.losses.outcomes import merge_
from stable_opd_mcore.losses.passes import local_sums, reduce_pairs
from stable_opd_mcore.losses.terms import Rows, Terms
from stable_opd_mcore.records import LossOutput, MicroBatch

__all__ = ["Head", "StopClass", "Terms", "align_head", "fused_loss", "stop_classes"]


def fused_loss(
    hidden_NH: Tensor,
    head: Head,
    batch: MicroBatch,
    terms: Terms,
    *,
    teacher_head: Head | None = None,
    reference_head: Head | None = None,
    context_group: dist.ProcessGroup | None = None,
    chunk_tokens: int = 1024,
) -> LossOutput:
    """The loss of one micro-batch, differentiable in hidden_NH and head.weight_VH.

    Under tensor parallelism every rank of the group calls it with the same rows; the loss is the
    same on all of them, and the gradient by hidden_NH comes out summed over the shards. Weight
    gradients accumulate over chunks in the weight's dtype, fp32 inside each product. Under context
    parallelism the rows are those of this rank's slice, and losses and gradients add up over
    `context_group`.

    Raises:
        UserError: a score the terms need is missing, or heads cover different vocabulary ranges.
    """
    heads = (head, teacher_head, reference_head)
    run = _Run(heads, Rows.of(batch), batch, terms, context_group, chunk_tokens)
    run.check(hidden_NH)
    loss = _FusedLoss.apply(hidden_NH, head.weight_VH, run, torch.is_grad_enabled())
    found = run.found
    return LossOutput(
        loss=loss,
        pg=found["pg"].sum(),
        kl=found["kl"].sum(),
        sft=found["sft"].sum(),
        student_logprob_N=found["logprob"],
        token_logprob_N=found["token_logprob"],
        entropy_N=found["entropy"],
        advantage_N=found["advantage"],
        ratio_clipped_N=found["clipped"].bool(),
        kl_reference_N=found["kl_reference"],
        kl_teacher_N=found["kl_teacher"],
        reference_logprob_N=found["reference_logprob"],
        teacher_logprob_N=found["teacher_logprob"],
        teacher_entropy_N=found["teacher_entropy"],
    )


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH: Tensor, weight_VH: Tensor, run: _Run, grad_enabled: bool) -> Tensor:
        wants = [grad_enabled and needed for needed in ctx.needs_input_grad[:2]]
        d_hidden, d_weight = run(hidden_NH, weight_VH, wants_hidden=wants[0], wants_weight=wants[1])
        ctx.save_for_backward(d_hidden, d_weight)
        return (run.found["pg"] + run.found["kl"] + run.found["sft"]).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grad_outputs: Tensor):
        scale = grad_outputs[0]
        gradients = ctx.saved_tensors
        if not torch.equal(scale, torch.ones_like(scale)):
            gradients = [g if g is None else g * scale.to(g.dtype) for g in gradients]
        return (*gradients, None, None)


class _Run:
    """One evaluation over all chunks; `found` holds its per-token results."""

    FOUND = (
        "pg",
        "kl",
        "sft",
        "logprob",
        "token_logprob",
        "entropy",
        "advantage",
        "clipped",
        "kl_reference",
        "kl_teacher",
        "reference_logprob",
        "teacher_logprob",
        "teacher_entropy",
    )

    def __init__(self, heads, rows, batch, terms, context_group, chunk_tokens):
        self.head: Head = heads[0]
        self.rows: Rows = rows
        self.batch: MicroBatch = batch
        self.terms: Terms = terms
        self.teacher_head: Head | None = heads[1]
        self.reference_head: Head | None = heads[2]
        self.context_group: dist.ProcessGroup | None = context_group
        self.chunk_tokens: int = chunk_tokens
        self.scale = 1.0 / terms.temperature
        self.found: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}

    def check(self, hidden_NH: Tensor) -> None:
        """Say what is missing before any work is done."""
        terms, rows = self.terms, self.rows
        if hidden_NH.shape[0] != rows.targets.shape[0]:
            raise UserError(
                f"{hidden_NH.shape[0]} hidden states for {rows.targets.shape[0]} scored rows: "
                "select them with hidden_TH.index_select(0, microbatch.rows_N)"
            )
        for name, needed, head, hidden in (
            ("teacher", terms.teacher_logits, self.teacher_head, rows.teacher_hidden),
            ("reference", terms.reference == "exact", self.reference_head, rows.reference_hidden),
        ):
            if needed and (head is None or hidden is None):
                raise UserError(f"the loss needs the {name}'s hidden states and output head")
            if needed and head is not None:
                require_same_columns(self.head, head, name)
        if terms.reference == "k3" and rows.reference_logprob is None:
            raise UserError("kl.estimator=k3 needs the reference's log-probabilities")
        if terms.divergence == "teacher_support" and rows.topk_ids is None:
            raise UserError("the loss needs the teacher's top-k ids and log-probabilities")

    def __call__(
        self, hidden_NH: Tensor, weight_VH: Tensor, *, wants_hidden: bool, wants_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run all chunks; return the gradients that are wanted."""
        dtype = accumulation_dtype(hidden_NH)
        self.found = {
            name: torch.zeros(hidden_NH.shape[0], dtype=dtype, device=hidden_NH.device)
            for name in self.FOUND
        }
        if self.terms.advantage is not None and self.terms.discount > 0:
            self.rows = replace(self.rows, advantage=self._returns(hidden_NH))
        d_hidden = torch.zeros_like(hidden_NH) if wants_hidden else None
        d_weight = torch.zeros_like(weight_VH) if wants_weight else None
        for rows in self._chunks():
            chunk = self._open(hidden_NH[rows], self.rows[rows])
            gradient_CV = chunk.finish(self.found, rows, wants_hidden or wants_weight)
            if gradient_CV is None or self.head.num_columns == 0:
                continue
            columns = slice(0, self.head.num_columns)
            if d_hidden is not None:
                d_hidden[rows] = gradient_CV @ weight_VH[columns]
            if d_weight is not None:
                hidden_CH = hidden_NH[rows].to(gradient_CV.dtype)
                torch.addmm(d_weight[columns], gradient_CV.T, hidden_CH, out=d_weight[columns])
        if d_hidden is not None:
            self.head.reduce_(d_hidden)
        self.buffers.clear()
        return d_hidden, d_weight

    def _returns(self, hidden_NH: Tensor) -> Tensor:
        """Discounted returns of the whole micro-batch: from a first, forward-only pass unless
        both log-probabilities are given.

        Masked tokens add nothing to the returns of those before them.
        """
        given = self.rows
        if given.old_logprob is not None and given.teacher_logprob is not None:
            values_N = given.token_advantage(given.old_logprob, self.terms)
        else:
            values_N = torch.empty_like(self.found["logprob"])
            for rows in self._chunks():
                values_N[rows] = self._open(hidden_NH[rows], given[rows]).token_advantage()
        values_N = values_N.masked_fill(given.pg_weight == 0, 0)
        tokens = (self.batch.sample_index_N, self.batch.token_index_N)
        return return_to_go(values_N, *tokens, self.terms.discount, self.context_group)

    def _chunks(self) -> Iterator[slice]:
        count = self.rows.targets.shape[0]
        for start in range(0, count, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, count))

    def _logits(self, name: str, head: Head, hidden_CH: Tensor) -> Tensor:
        """Logits into a buffer that all chunks share; the last chunk may fill only part of it."""
        buffer = self.buffers.get(name)
        if buffer is None:
            buffer = head.logits_buffer(hidden_CH.shape[0])
            self.buffers[name] = buffer
        return head.logits(hidden_CH, out=buffer[: hidden_CH.shape[0]])

    def _all_logits(self, hidden_CH: Tensor, rows: Rows) -> dict[str, Tensor]:
        """Logits of the chunk by the student and by those models that the terms need whole."""
        logits = {"student": self._logits("student", self.head, hidden_CH)}
        exact = self.terms.reference == "exact"
        for name, needed, head, other_CH in (
            ("reference", exact, self.reference_head, rows.reference_hidden),
            ("teacher", self.terms.teacher_logits, self.teacher_head, rows.teacher_hidden),
        ):
            if needed:
                assert head is not None and other_CH is not None, "checked before the first chunk"
                logits[name] = self._logits(name, head, other_CH)
        return logits

    def _support_ids(self, student_CV: Tensor, rows: Rows) -> Tensor | None:
        if self.terms.divergence == "teacher_support":
            return rows.topk_ids
        if self.terms.divergence == "student_support":
            return self.head.top_k(student_CV, self.terms.top_k)[1]
        return None

    def _open(self, hidden_CH: Tensor, rows: Rows) -> Chunk:
        """Logits and everything that is known of a chunk before coefficients."""
        terms, head = self.terms, self.head
        logits = self._all_logits(hidden_CH, rows)
        student_CV = logits["student"]
        lookup = Lookup.of(rows.targets, terms.stop, head.vocab_size)
        read = {"target": head.gather_columns(student_CV, lookup.ids_CJ)}
        if "reference" in logits:
            read["reference"] = head.gather_columns(logits["reference"], rows.targets[:, None])
        teachers, alone = None, []
        if "teacher" in logits:
            teachers = Lookup.of(rows.targets, terms.teacher_stop, head.vocab_size)
            read["teacher"] = head.gather_columns(logits["teacher"], teachers.ids_CJ)
            alone = [local_sums(logits["teacher"], None, self.scale)]

        # From here on the stop ids are one outcome in all logits, where the terms ask for it.
        merged = merge_(logits, terms.merged_ids, self.scale, head) if terms.merged_ids else None
        support_ids = self._support_ids(student_CV, rows)
        if support_ids is not None:
            for name in ("student", "teacher"):
                if name in logits:
                    read[f"{name}_support"] = head.gather_columns(logits[name], support_ids)
        others = ["reference"] if "reference" in logits else []
        if terms.teacher_pair:
            others.append("teacher")
        pairs = [local_sums(student_CV, logits[name], self.scale) for name in others]
        pairs = pairs or [local_sums(student_CV, None, self.scale)]
        paired = [bool(others)] * len(pairs) + [False] * len(alone)
        statistics, whole = reduce_pairs([*pairs, *alone], paired, list(read.values()), head)

        read = {name: x * self.scale for name, x in zip(read, whole, strict=True)}
        meets = dict(zip(others, statistics, strict=False))  # without others: the student alone
        reference, reference_logprob_C = meets.get("reference"), rows.reference_logprob
        if reference is not None:
            assert reference.other is not None
            reference_logprob_C = reference.other.log_softmax(read["reference"])[:, 0]
        teacher_entropy_C = None
        if teachers is not None:
            teacher = teachers.read(read["teacher"], statistics[-1].student)
            rows = replace(rows, teacher_logprob=teacher.logprob_C)
            teacher_entropy_C = statistics[-1].entropy_C
        support = None
        if support_ids is not None:
            teacher_CK = read.get("teacher_support", rows.topk_logprobs)
            assert teacher_CK is not None
            support = Support.of(support_ids, read["student_support"], teacher_CK)
        return Chunk(
            head=head,
            terms=terms,
            rows=rows,
            logits=logits,
            student=statistics[0],
            reference=reference,
            teacher=meets.get("teacher"),
            target=lookup.read(read["target"], statistics[0].student),
            reference_logprob_C=reference_logprob_C,
            teacher_entropy_C=teacher_entropy_C,
            support=support,
            merged=merged,
        )
