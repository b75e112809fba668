"""The output head as a loss sees it: one vocabulary shard, and the operations that join the shards.

C rows of a block, V columns of this rank's shard (padding excluded), J looked-up columns per row,
H hidden size. Blocks of logits are local, [C, V]; token ids are global.
Not here: sums over the vocabulary (vocabulary_sums.py) and losses (fused.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

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
    """Rows whose logits exist at once: `wanted`, but more where the vocabulary is small.

    On a CPU fewer where the vocabulary is large: larger products are not faster there.
    """
    vocab = max(1, head.vocab_size)
    rows = max(wanted, MIN_BLOCK_ELEMENTS // vocab)
    if head.weight_VH.is_cuda:
        return rows
    return min(rows, max(MIN_CPU_BLOCK_ROWS, MAX_CPU_BLOCK_ELEMENTS // vocab))


def add_product_(sum_VH: Tensor, gradient_CV: Tensor, hidden_CH: Tensor) -> None:
    """sum += gradient.T @ hidden, rounded to the sum's dtype only.

    A narrower gradient is multiplied in slices of the vocabulary, so that the product in the sum's
    dtype needs little memory.
    """
    if gradient_CV.dtype == sum_VH.dtype:
        torch.addmm(sum_VH, gradient_CV.T, hidden_CH, out=sum_VH)
        return
    for start in range(0, len(sum_VH), PRODUCT_COLUMNS):
        columns = slice(start, start + PRODUCT_COLUMNS)
        gradient_VC = gradient_CV[:, columns].T
        if gradient_CV.is_cuda:
            sum_VH[columns] += torch.mm(gradient_VC, hidden_CH, out_dtype=sum_VH.dtype)
        else:  # only CUDA multiplies into a wider dtype
            sum_VH[columns].addmm_(gradient_VC.to(sum_VH.dtype), hidden_CH.to(sum_VH.dtype))


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
    """A loss whose gradients by hidden states and head are known already; backward returns them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        total: Tensor,
        d_hidden_NH: Tensor | None,
        d_weight_VH: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(d_hidden_NH, d_weight_VH)
        return total.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # position-only `ctx`
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        gradients = ctx.saved_tensors
        if not torch.equal(scale, torch.ones_like(scale)):
            gradients = [g if g is None else g * scale.to(g.dtype) for g in gradients]
        return (*gradients, None, None, None)
