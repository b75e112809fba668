"""The output head as a loss sees it: one vocabulary shard, and the operations that join the shards.

C rows of a block, V columns of this rank's shard (padding excluded), J looked-up columns per row,
H hidden size. Blocks of logits are local, [C, V]; token ids are global.
Not here: sums over the vocabulary (vocabulary_sums.py) and losses (fused.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stable_opd_mcore.errors import UserError

ROW_ALIGNMENT = 64  # elements; 128 bytes in bf16

PRODUCT_COLUMNS = 2**14  # vocabulary entries whose head gradient is multiplied at once
MIN_BLOCK_ELEMENTS = 2**22  # a block holds at least so many logits per model
MAX_CPU_BLOCK_ELEMENTS = 2**24  # 64 MiB of fp32 logits per model
MIN_CPU_BLOCK_ROWS = 128


@dataclass(frozen=True)
class Head:
    """One rank's shard of an output head.

    Rows of the weight whose global id is vocab_size or more are padding. They are cut off before
    any product, so models that pad one vocabulary to different sizes can be compared.
    """

    weight_VH: Tensor  # [rows of this shard, H]
    vocab_start: int  # global id of the shard's first row
    vocab_size: int  # the common vocabulary: the same on every rank and for every model compared
    group: ProcessGroup | None = None  # ranks that hold the other shards; None: there are none

    @property
    def num_columns(self) -> int:
        """Rows of this shard that are vocabulary entries, >= 0."""
        return max(0, min(self.weight_VH.shape[0], self.vocab_size - self.vocab_start))

    def logits_buffer(self, rows: int) -> Tensor:
        """Uninitialised memory for local logits [rows, V]; each row starts on a 128-byte boundary.

        GEMMs and kernels could not use wide loads at an odd vocabulary size otherwise.
        """
        width = -(-self.num_columns // ROW_ALIGNMENT) * ROW_ALIGNMENT
        return self.weight_VH.new_empty(rows, width)[:, : self.num_columns]

    def logits(self, hidden_CH: Tensor, out: Tensor | None = None) -> Tensor:
        """Local logits [C, V] in the weight's dtype, not divided by the temperature.

        out: rows of a logits_buffer; default: new memory.
        """
        weight_VH = self.weight_VH[: self.num_columns]
        return torch.mm(hidden_CH.to(weight_VH.dtype), weight_VH.T, out=out)

    def reduce_(self, tensor: Tensor) -> Tensor:
        """Sum in place over the shards."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(tensor, group=self.group)  # pyright: ignore[reportUnknownMemberType]
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Every shard's tensor along a new first dimension, in rank order."""
        if self.group is None or self.group.size() == 1:
            return tensor[None]
        parts = [torch.empty_like(tensor) for _ in range(self.group.size())]
        dist.all_gather(  # pyright: ignore[reportUnknownMemberType]
            parts, tensor.contiguous(), group=self.group
        )
        return torch.stack(parts)

    def local_columns(self, ids_CJ: Tensor) -> tuple[Tensor, Tensor]:
        """Each id's column in this shard (0 if it is in another), and whether it is in this one."""
        columns_CJ = ids_CJ - self.vocab_start
        here_CJ = (columns_CJ >= 0) & (columns_CJ < self.num_columns)
        return columns_CJ.masked_fill(~here_CJ, 0), here_CJ

    def gather_columns(self, logits_CV: Tensor, ids_CJ: Tensor) -> Tensor:
        """This shard's part of the logits at ids [C, J], fp32 or fp64; the shards add up."""
        dtype = accumulation_dtype(logits_CV)
        if self.num_columns == 0:
            return torch.zeros(ids_CJ.shape, dtype=dtype, device=logits_CV.device)
        columns_CJ, here_CJ = self.local_columns(ids_CJ)
        return logits_CV.gather(1, columns_CJ).to(dtype).masked_fill_(~here_CJ, 0)

    def scatter_add_(self, logits_CV: Tensor, ids_CJ: Tensor, values_CJ: Tensor) -> None:
        """Add values at those ids that are in this shard to the local [C, V]."""
        if self.num_columns == 0:
            return
        columns_CJ, here_CJ = self.local_columns(ids_CJ)
        values_CJ = values_CJ.masked_fill(~here_CJ, 0).to(logits_CV.dtype)
        logits_CV.scatter_add_(1, columns_CJ, values_CJ)

    def top_k(self, logits_CV: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest logits of every row over all shards: values (fp32) and global ids, [C, k].

        Raises:
            UserError: k exceeds the vocabulary.
        """
        if k > self.vocab_size:
            raise UserError(f"top-{k} of a vocabulary of {self.vocab_size}: lower objective.top_k")
        rows = logits_CV.shape[0]
        width = min(k, self.num_columns)
        values_CK = logits_CV.new_full((rows, k), -torch.inf, dtype=accumulation_dtype(logits_CV))
        ids_CK = torch.zeros((rows, k), dtype=torch.int64, device=logits_CV.device)
        if width:
            top = logits_CV.topk(width, dim=1)
            values_CK[:, :width] = top.values
            ids_CK[:, :width] = top.indices + self.vocab_start
        if self.group is None or self.group.size() == 1:
            return values_CK, ids_CK
        values_CK = torch.cat(self.gather(values_CK).unbind(0), dim=1)
        ids_CK = torch.cat(self.gather(ids_CK).unbind(0), dim=1)
        top = values_CK.topk(k, dim=1)
        return top.values, ids_CK.gather(1, top.indices)


def rows_per_block(wanted: int, head: Head) -> int:
    """Rows whose logits exist at once: `wanted` for every shard of the vocabulary.

    So a rank's logits take the same memory under every number of shards, and collectives, launches
    and passes over the head's gradient become fewer with it. More rows where the vocabulary is
    small. On a CPU fewer where it is large: larger products are not faster there.
    """
    vocab, shards = max(1, head.vocab_size), head.group.size() if head.group is not None else 1
    rows = max(wanted, MIN_BLOCK_ELEMENTS // vocab)
    if not head.weight_VH.is_cuda:
        rows = min(rows, max(MIN_CPU_BLOCK_ROWS, MAX_CPU_BLOCK_ELEMENTS // vocab))
    return shards * rows


def gradient_sum(head: Head) -> Tensor:
    """Where the gradient by the head's weight is summed over blocks, [rows of the shard, H].

    Megatron's fp32 buffer `main_grad` where the parameter has one: then no second sum exists and
    nothing is rounded to the weight's dtype. Else new zeros in fp32, or fp64 for fp64.
    """
    main_grad: Tensor | None = getattr(head.weight_VH, "main_grad", None)
    if main_grad is not None:
        return main_grad
    return torch.zeros_like(head.weight_VH, dtype=accumulation_dtype(head.weight_VH))


def add_product_(sum_VH: Tensor, gradient_CV: Tensor, hidden_CH: Tensor) -> None:
    """sum += gradient.T @ hidden, in place and rounded to the sum's dtype only.

    On CUDA a product of bf16 matrices is added to an fp32 sum by the GEMM itself. A CPU has no such
    GEMM: it multiplies slices of the vocabulary in the sum's dtype.
    """
    if gradient_CV.dtype == sum_VH.dtype:
        sum_VH.addmm_(gradient_CV.T, hidden_CH)
    elif gradient_CV.is_cuda:
        # `out` is the input itself, so nothing is copied. torch's types lack out_dtype.
        addmm: Any = torch.addmm
        addmm(sum_VH, gradient_CV.T, hidden_CH, out_dtype=sum_VH.dtype, out=sum_VH)
    else:
        for start in range(0, len(sum_VH), PRODUCT_COLUMNS):
            columns = slice(start, start + PRODUCT_COLUMNS)
            gradient_VC = gradient_CV[:, columns].T.to(sum_VH.dtype)
            sum_VH[columns].addmm_(gradient_VC, hidden_CH.to(sum_VH.dtype))


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """fp64 for fp64, so that gradients can be checked in it; fp32 for any other dtype."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def require_same_columns(student: Head, other: Head, name: str) -> None:
    """Refuse heads whose shards cover different vocabulary ranges.

    Raises:
        ValueError: with both ranges and the remedy.
    """
    ranges = [
        (h.vocab_start, h.vocab_start + h.num_columns, h.vocab_size) for h in (student, other)
    ]
    if ranges[0] != ranges[1]:
        (start, stop, size), (other_start, other_stop, other_size) = ranges
        raise ValueError(
            f"this rank holds vocabulary entries {start}..{stop} of {size} for the student, but "
            f"{other_start}..{other_stop} of {other_size} for the {name}: give both the common "
            f"vocabulary size and re-shard the {name}'s head once with output_head.align_head"
        )


@torch.no_grad()
def align_head(head: Head, like: Head) -> Head:
    """A frozen head cut at another head's shard boundaries.

    Two models that pad one vocabulary to different sizes have different boundaries under tensor
    parallelism. Collective over the group; call it once per run. Returns `head` itself where no
    boundary moves, else a copy of this rank's new rows. Peak memory: two shards.

    Raises:
        ValueError: the vocabulary sizes differ.
    """
    if head.vocab_size != like.vocab_size or head.group is None:
        require_same_columns(like, head, "other model")
        return head
    wanted = torch.tensor([like.vocab_start, like.vocab_start + like.num_columns])
    held = torch.tensor([head.vocab_start, head.vocab_start + head.num_columns])
    differs = head.weight_VH.new_tensor([float(not torch.equal(wanted, held))], dtype=torch.float32)
    if not head.reduce_(differs).item():
        return head
    start, stop = (int(edge) for edge in wanted)
    weight_VH = head.weight_VH.new_zeros(like.weight_VH.shape[0], head.weight_VH.shape[1])
    for source in range(head.group.size()):
        span = head.weight_VH.new_tensor([held[0], held[1]], dtype=torch.int64)
        dist.broadcast(span, group=head.group, group_src=source)
        first, last = (int(edge) for edge in span)
        rows = head.weight_VH[: head.num_columns].contiguous()
        if source != head.group.rank():
            rows = head.weight_VH.new_empty(last - first, head.weight_VH.shape[1])
        dist.broadcast(rows, group=head.group, group_src=source)
        low, high = max(start, first), min(stop, last)
        if low < high:
            weight_VH[low - start : high - start] = rows[low - first : high - first]
    return replace(head, weight_VH=weight_VH, vocab_start=start)


class WithGradients(torch.autograd.Function):
    """A loss whose gradients by hidden states and head are known already; backward returns them.

    A gradient that is in `main_grad` already is announced to Megatron's gradient hook instead.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        total: Tensor,
        d_hidden_NH: Tensor | None,
        d_weight_VH: Tensor | None,
    ) -> Tensor:
        main_grad: Tensor | None = getattr(weight_VH, "main_grad", None)
        ctx.weight_VH = None
        if d_weight_VH is not None and d_weight_VH is main_grad:
            ctx.weight_VH, d_weight_VH = weight_VH, None
        ctx.save_for_backward(d_hidden_NH, d_weight_VH)
        return total.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # position-only `ctx`
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        if ctx.weight_VH is not None:
            _announce_main_grad(ctx.weight_VH, scale)
        gradients = [g if g is None else g * scale.to(g.dtype) for g in ctx.saved_tensors]
        return (*gradients, None, None, None)


def _announce_main_grad(weight_VH: Tensor, scale: Tensor) -> None:
    """Tell Megatron's DistributedDataParallel that main_grad holds this gradient.

    Its hook runs after this backward node, although no gradient is returned. The hook skips `grad`
    where `grad_added_to_main_grad` is set, and wants one that is not None when it overlaps the
    reduction: one number in the weight's shape, without its memory. A weight that is the embedding,
    too (`zero_out_wgrad`), gets the embedding's gradient there, which the hook adds.
    """
    # No copy to the host: a wrong scale stops the process at its next synchronisation.
    torch.ops.aten._assert_async.msg(  # pyright: ignore[reportUnknownMemberType]
        scale == 1, "the loss must be differentiated as it is: main_grad is summed"
    )
    parameter = cast(Any, weight_VH)
    parameter.grad_added_to_main_grad = True
    if not getattr(weight_VH, "zero_out_wgrad", False):
        parameter.grad = weight_VH.new_zeros(()).expand_as(weight_VH)
