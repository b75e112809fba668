"""The output head as a loss sees it: one vocabulary shard, and what it takes to treat the shards
as one.

Dimensions: C rows of a chunk, V columns of this rank's shard (padding excluded), J looked-up
columns per row, H hidden size. Logits chunks are local, [C, V]; ids are global.
Not here: any sum over the vocabulary (passes.py) and any loss (fused.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stable_opd_mcore.errors import UserError

ROW_ALIGNMENT = 64  # elements; 128 bytes in bf16

# Small vocabularies go through in larger chunks than train.loss_chunk_tokens: this many logits.
SMALL_CHUNK_ELEMENTS = 2**22
LARGE_CPU_CHUNK_ELEMENTS = 2**24  # 64 MiB of fp32 logits per model
MIN_CPU_CHUNK_TOKENS = 128


@dataclass(frozen=True)
class Head:
    """One rank's shard of an output head.

    Rows whose global id is vocab_size or more are padding: they are sliced off before any product,
    so models that pad one tokenizer's vocabulary to different sizes can be compared.
    """

    weight_VH: Tensor  # [rows of this shard, H]
    vocab_start: int  # global id of the shard's first row
    vocab_size: (
        int  # the common vocabulary, the same number on every rank and for every model compared
    )
    group: ProcessGroup | None = (
        None  # the ranks that hold the other shards; None: this is all of it
    )

    @property
    def num_columns(self) -> int:
        """Rows of this shard that are real vocabulary entries, >= 0."""
        return max(0, min(self.weight_VH.shape[0], self.vocab_size - self.vocab_start))

    def logits_buffer(self, rows: int) -> Tensor:
        """Uninitialised memory for local logits [rows, V]; each row begins on a 128-byte boundary.

        An odd vocabulary size would otherwise keep GEMMs and kernels from wide loads.
        """
        width = -(-self.num_columns // ROW_ALIGNMENT) * ROW_ALIGNMENT
        return self.weight_VH.new_empty(rows, width)[:, : self.num_columns]

    def logits(self, hidden_CH: Tensor, out: Tensor | None = None) -> Tensor:
        """Local logits [C, V] of hidden states in the weight's dtype, no temperature applied.

        out: rows of a logits_buffer; without it the result is new memory.
        """
        weight_VH = self.weight_VH[: self.num_columns]
        return torch.mm(hidden_CH.to(weight_VH.dtype), weight_VH.T, out=out)

    def reduce_(self, tensor: Tensor) -> Tensor:
        """Sum in place over the shards; nothing to do when there is one."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Every shard's tensor along a new first dimension, in rank order."""
        if self.group is None or self.group.size() == 1:
            return tensor[None]
        parts = [torch.empty_like(tensor) for _ in range(self.group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.stack(parts)

    def local_columns(self, ids_CJ: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each id in this shard (0 if it lives elsewhere), and whether it lives here."""
        columns_CJ = ids_CJ - self.vocab_start
        here_CJ = (columns_CJ >= 0) & (columns_CJ < self.num_columns)
        return columns_CJ.masked_fill(~here_CJ, 0), here_CJ

    def gather_columns(self, logits_CV: Tensor, ids_CJ: Tensor) -> Tensor:
        """This shard's part of logits at ids [C, J], fp32 or fp64; the shards add up."""
        dtype = accumulation_dtype(logits_CV)
        if self.num_columns == 0:
            return torch.zeros(ids_CJ.shape, dtype=dtype, device=logits_CV.device)
        columns_CJ, here_CJ = self.local_columns(ids_CJ)
        return logits_CV.gather(1, columns_CJ).to(dtype).masked_fill_(~here_CJ, 0)

    def scatter_add_(self, logits_CV: Tensor, ids_CJ: Tensor, values_CJ: Tensor) -> None:
        """Add values at ids into the local [C, V], for those ids that live here."""
        if self.num_columns == 0:
            return
        columns_CJ, here_CJ = self.local_columns(ids_CJ)
        values_CJ = values_CJ.masked_fill(~here_CJ, 0).to(logits_CV.dtype)
        logits_CV.scatter_add_(1, columns_CJ, values_CJ)

    def top_k(self, logits_CV: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest logits of every row over all shards: values (fp32) and global ids, [C, k]
        each.

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


@dataclass(frozen=True)
class StopClass:
    """METHOD §4: where the target is in trigger_ids, its probability is that of the whole class."""

    class_ids: tuple[int, ...]  # this model's own stop ids
    trigger_ids: tuple[int, ...]  # stop ids of the student and of the teacher together
    include_target: (
        bool  # student: the sampled token belongs to its class even when class_ids lacks it
    )


def stop_classes(
    student_stop_ids: Sequence[int], teacher_stop_ids: Sequence[int]
) -> tuple[StopClass | None, StopClass | None]:
    """Student's and teacher's stop class; None twice where both stop on one and the same token."""
    student, teacher = tuple(sorted(set(student_stop_ids))), tuple(sorted(set(teacher_stop_ids)))
    if not student or not teacher:
        raise UserError(
            f"a stop class needs stop ids of both models; student has {student}, teacher has "
            f"{teacher}: set student.stop_token_ids and teacher.stop_token_ids, "
            "or objective.stop_class=false"
        )
    if student == teacher and len(student) == 1:
        return None, None
    union = tuple(sorted({*student, *teacher}))
    return StopClass(student, union, True), StopClass(teacher, union, False)


def chunk_rows(wanted: int, head: Head) -> int:
    """Rows whose logits exist at once: `wanted`, more where the vocabulary is small.

    Fewer on a CPU with a large vocabulary, which has nothing to gain from larger products.
    """
    vocab = max(1, head.vocab_size)
    rows = max(wanted, SMALL_CHUNK_ELEMENTS // vocab)
    if head.weight_VH.is_cuda:
        return rows
    return min(rows, max(MIN_CPU_CHUNK_TOKENS, LARGE_CPU_CHUNK_ELEMENTS // vocab))


def require_stop_ids(ids: Sequence[int], vocab_size: int) -> None:
    """
    Raises:
        UserError: a stop id outside the common vocabulary.
    """
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise UserError(f"stop ids {outside} lie outside the common vocabulary of {vocab_size}")


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """fp32 for anything narrower; fp64 stays, so that gradients can be checked in it."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def require_same_columns(student: Head, other: Head, name: str) -> None:
    """Refuse heads whose shards cover different vocabulary ranges.

    Raises:
        UserError: with both ranges and the remedy.
    """
    ranges = [
        (h.vocab_start, h.vocab_start + h.num_columns, h.vocab_size) for h in (student, other)
    ]
    if ranges[0] != ranges[1]:
        (start, stop, size), (other_start, other_stop, other_size) = ranges
        raise UserError(
            f"this rank holds vocabulary entries {start}..{stop} of {size} for the student, but "
            f"{other_start}..{other_stop} of {other_size} for the {name}: give both the common "
            f"vocabulary size and re-shard the {name}'s head once with losses.fused.align_head"
        )


@torch.no_grad()
def align_head(head: Head, like: Head) -> Head:
    """A frozen head re-sharded at another head's boundaries (collective over the group, once per
    run).

    Two models that pad one vocabulary to different sizes are cut at different rows under tensor
    parallelism. Returns `head` itself where nothing moves; otherwise a copy of this rank's new
    rows. Peak memory: two shards.
    """
    if head.vocab_size != like.vocab_size:
        require_same_columns(like, head, "other model")
    wanted = torch.tensor([like.vocab_start, like.vocab_start + like.num_columns])
    held = torch.tensor([head.vocab_start, head.vocab_start + head.num_columns])
    differs = head.weight_VH.new_tensor([float(not torch.equal(wanted, held))], dtype=torch.float32)
    if not head.reduce_(differs).item():
        return head
    if head.group is None:
        require_same_columns(like, head, "other model")
        raise AssertionError(
            "unreachable: an unsharded head of the same vocabulary is always aligned"
        )
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
