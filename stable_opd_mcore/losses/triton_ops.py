"""The passes over one block of logits as Triton kernels: what CUDA runs.

The same functions with the same arguments as torch_ops.py, which defines them. Memory-bound on
purpose: `shard_sums` and `divergence_sums` read each block of logits once, `write_gradient_` reads
each once and writes over the student's. Logits keep their dtype in memory and are fp32 (fp64 for
fp64) in registers. Not here: the merging of vocabulary shards, and GEMMs.

C rows of a block, V columns of the local shard; z student logits, o another model's.
"""

# Not strict: Triton's language is untyped. Triton may not be installed, and a type checker knows
# neither its launch options nor its constants.
# pyright: basic
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stable_opd_mcore.losses.output_head import accumulation_dtype
from stable_opd_mcore.losses.torch_ops import DenseTerm, Normaliser, ShardSums, SparseColumns

# Columns a program holds at once. The sums keep six running vectors of this length in registers:
# 2048 columns over 8 warps are 8 values per thread and vector.
TILE_COLUMNS = 2048
NUM_WARPS = 8
VECTOR = 16  # columns that the widest load takes at most


def shard_sums(logits_CV: Tensor, other_CV: Tensor | None, scale: float) -> ShardSums:
    """See torch_ops.shard_sums."""
    rows, columns = logits_CV.shape
    sums, table_CS = ShardSums.zeros(logits_CV, other_CV)
    if rows and columns:
        other = logits_CV if other_CV is None else other_CV
        _sums_kernel[(rows,)](
            logits_CV,
            other,
            table_CS,
            logits_CV.stride(0),
            other.stride(0),
            scale,
            COLUMNS=columns,
            READABLE=_readable(logits_CV, other),
            HAS_OTHER=other_CV is not None,
            WIDTH=table_CS.shape[1],
            DTYPE=_triton_dtype(table_CS.dtype),
            TILE=TILE_COLUMNS,
            num_warps=NUM_WARPS,
        )
    return sums


def divergence_sums(
    kind: str,
    logits_CV: Tensor,
    other_CV: Tensor,
    student: Normaliser,
    other: Normaliser,
    beta: float,
    scale: float,
) -> Tensor:
    """See torch_ops.divergence_sums."""
    assert kind == "jsd", f"{kind} has no second pass"
    rows, columns = logits_CV.shape
    dtype = accumulation_dtype(logits_CV)
    sums_C2 = torch.zeros(rows, 2, dtype=dtype, device=logits_CV.device)
    if rows and columns:
        _jsd_kernel[(rows,)](
            logits_CV,
            other_CV,
            sums_C2,
            _row_scalars(student.maximum_C, student.log_sum_C, other.maximum_C, other.log_sum_C),
            logits_CV.stride(0),
            other_CV.stride(0),
            scale,
            beta,
            COLUMNS=columns,
            READABLE=_readable(logits_CV, other_CV),
            DTYPE=_triton_dtype(dtype),
            TILE=TILE_COLUMNS,
            num_warps=NUM_WARPS,
        )
    return sums_C2


def write_gradient_(
    logits_CV: Tensor,
    student: Normaliser,
    logprob_gradient_C: Tensor,
    target: SparseColumns,
    terms: Sequence[DenseTerm],
    scale: float,
) -> None:
    """See torch_ops.write_gradient_; at most two terms."""
    rows, columns = logits_CV.shape
    if rows == 0 or columns == 0:
        return
    assert len(terms) <= 2, "a reference and a teacher"
    scalars = [student.maximum_C, student.log_sum_C, logprob_gradient_C]
    others: list[Tensor] = []
    options: dict[str, Any] = {"FIRST": "none", "SECOND": "none"}
    betas = [0.5, 0.5]
    for index, (name, term) in enumerate(zip(options, terms, strict=False)):
        options[name] = term.kind
        betas[index] = term.jsd_beta
        others.append(term.logits_CV)
        normaliser = term.normaliser
        scalars += [normaliser.maximum_C, normaliser.log_sum_C, term.weight_C, term.centre_C]
    first = others[0] if others else logits_CV
    second = others[1] if len(others) > 1 else logits_CV
    table_CA = _row_scalars(*scalars)
    _gradient_kernel[(rows, triton.cdiv(columns, TILE_COLUMNS))](
        logits_CV,
        first,
        second,
        table_CA,
        target.columns_CJ.contiguous(),
        target.values_CJ.to(table_CA.dtype).contiguous(),
        logits_CV.stride(0),
        first.stride(0),
        second.stride(0),
        scale,
        betas[0],
        betas[1],
        READABLE=_readable(logits_CV, first, second),
        WIDTH=table_CA.shape[1],
        NUM_SPARSE=target.columns_CJ.shape[1],
        DTYPE=_triton_dtype(accumulation_dtype(logits_CV)),
        TILE=TILE_COLUMNS,
        num_warps=NUM_WARPS,
        **options,
    )


def _row_scalars(*columns_C: Tensor) -> Tensor:
    """Per-row numbers side by side, so that a kernel takes one pointer for all."""
    dtype = accumulation_dtype(columns_C[0])
    return torch.stack([column.to(dtype) for column in columns_C], dim=1).contiguous()


def _readable(*logits_CV: Tensor) -> int:
    """Columns that may be read and written in every row: V, rounded up to whole vectors where the
    rows have room.

    A mask that ends inside a vector would split every load of the kernel into single elements.
    Values beyond V are never used, and write_gradient_ overwrites them.
    """
    columns = logits_CV[0].shape[1]
    whole = triton.cdiv(columns, VECTOR) * VECTOR
    for x in logits_CV:
        last = x.storage_offset() + (x.shape[0] - 1) * x.stride(0) + whole
        if x.stride(0) < whole or last * x.element_size() > x.untyped_storage().nbytes():
            return columns
    return whole


def _triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


@triton.jit
def _load_logits(
    ptr,
    lanes,
    scale,
    fill,
    COLUMNS: tl.constexpr,
    READABLE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Divided logits of one row at some lanes; `fill` beyond the last column."""
    x = tl.load(ptr + lanes, mask=lanes < READABLE, other=0.0).to(DTYPE) * scale
    return tl.where(lanes < COLUMNS, x, fill)


@triton.jit
def _relative(x, inside, tile_max, old_max):
    """A tile's x and e^x relative to the new maximum, that maximum, shift = old - new maximum,
    and e^shift.
    """
    new_max = tl.maximum(old_max, tile_max)
    shift = tl.where(old_max == float("-inf"), 0.0, old_max - new_max)
    x = tl.where(inside, x - new_max, 0.0)
    return x, tl.where(inside, tl.exp(x), 0.0), new_max, shift, tl.exp(shift)


@triton.jit
def _sums_kernel(
    z_ptr,  # [C, V] student logits
    o_ptr,  # [C, V] the other model's; unread without HAS_OTHER
    out_ptr,  # [C, WIDTH], columns in the order of ShardSums
    z_stride,
    o_stride,
    scale,  # 1 / temperature
    COLUMNS: tl.constexpr,  # V, one per run
    READABLE: tl.constexpr,  # >= V, see _readable
    HAS_OTHER: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row per program, one read. Maxima are scalars; the sums stay per lane until the end.

    When a maximum grows by -shift, sums of e^z' shrink by e^shift and their dots gain sum * shift:
    the same algebra as merging two shards (vocabulary_sums.merge_shards).
    """
    row = tl.program_id(0).to(tl.int64)
    low = float("-inf")
    max_z = tl.full((), low, DTYPE)
    max_o = tl.full((), low, DTYPE)
    anchor = tl.zeros((), DTYPE)  # the other's logit where the student's maximum lies
    zeros = tl.zeros((TILE,), DTYPE)
    sum_z, dot_zz = zeros, zeros
    sum_o, dot_zo, dot_oz = zeros, zeros, zeros
    for start in range(0, COLUMNS, TILE):
        lanes = start + tl.arange(0, TILE)
        inside = lanes < COLUMNS
        z = _load_logits(z_ptr + row * z_stride, lanes, scale, low, COLUMNS, READABLE, DTYPE)
        tile_max, tile_at = tl.max(z, 0, return_indices=True)
        z, exp_z, new_max_z, shift_z, shrink_z = _relative(z, inside, tile_max, max_z)
        dot_zz = (dot_zz + sum_z * shift_z) * shrink_z + exp_z * z
        if HAS_OTHER:
            o = _load_logits(o_ptr + row * o_stride, lanes, scale, low, COLUMNS, READABLE, DTYPE)
            at_tile_max = tl.sum(tl.where(lanes == start + tile_at, o, 0.0), 0)
            new_anchor = tl.where(tile_max > max_z, at_tile_max, anchor)
            anchored = shift_z + tl.where(max_z == low, 0.0, new_anchor - anchor)
            gap = tl.where(inside, z - (o - new_anchor), 0.0)
            dot_zo = (dot_zo + sum_z * anchored) * shrink_z + exp_z * gap
            o, exp_o, max_o, shift_o, shrink_o = _relative(o, inside, tl.max(o, 0), max_o)
            dot_oz = (dot_oz - sum_o * (shift_z - shift_o)) * shrink_o + exp_o * (o - z)
            sum_o = sum_o * shrink_o + exp_o
            anchor = new_anchor
        sum_z = sum_z * shrink_z + exp_z
        max_z = new_max_z
    out = out_ptr + row * WIDTH
    tl.store(out, max_z)
    tl.store(out + 1, tl.sum(sum_z, 0))
    tl.store(out + 2, tl.sum(dot_zz, 0))
    if HAS_OTHER:
        tl.store(out + 3, max_o)
        tl.store(out + 4, tl.sum(sum_o, 0))
        tl.store(out + 5, tl.sum(dot_zo, 0))
        tl.store(out + 6, tl.sum(dot_oz, 0))
        tl.store(out + 7, anchor)


@triton.jit
def _log_mixture(log_o, log_p, beta):
    """log(beta o + (1 - beta) p) without overflow."""
    a = log_o + tl.log(beta)
    b = log_p + tl.log(1.0 - beta)
    high = tl.maximum(a, b)
    return high + tl.log(1.0 + tl.exp(tl.minimum(a, b) - high))


@triton.jit
def _jsd_kernel(
    z_ptr,  # [C, V] student logits
    o_ptr,  # [C, V] the other model's
    out_ptr,  # [C, 2]
    rows_ptr,  # [C, 4] maximum and log-sum of z, then of o
    z_stride,
    o_stride,
    scale,  # 1 / temperature
    beta,  # share of o in the mixture
    COLUMNS: tl.constexpr,  # V, one per run
    READABLE: tl.constexpr,  # >= V, see _readable
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row per program: sum o (log o - log m) and sum p (log p - log m)."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    max_z = tl.load(rows_ptr + row * 4)
    log_sum_z = tl.load(rows_ptr + row * 4 + 1)
    max_o = tl.load(rows_ptr + row * 4 + 2)
    log_sum_o = tl.load(rows_ptr + row * 4 + 3)
    share = tl.full((), 1.0, DTYPE) * beta
    from_o = tl.zeros((TILE,), DTYPE)
    from_p = tl.zeros((TILE,), DTYPE)
    for start in range(0, COLUMNS, TILE):
        inside = start + lanes < COLUMNS
        readable = start + lanes < READABLE
        z = tl.load(z_ptr + row * z_stride + start + lanes, mask=readable, other=0.0).to(DTYPE)
        o = tl.load(o_ptr + row * o_stride + start + lanes, mask=readable, other=0.0).to(DTYPE)
        log_p = z * scale - max_z - log_sum_z
        log_o = o * scale - max_o - log_sum_o
        log_m = _log_mixture(log_o, log_p, share)
        from_o += tl.where(inside, tl.exp(log_o) * (log_o - log_m), 0.0)
        from_p += tl.where(inside, tl.exp(log_p) * (log_p - log_m), 0.0)
    tl.store(out_ptr + row * 2, tl.sum(from_o, 0))
    tl.store(out_ptr + row * 2 + 1, tl.sum(from_p, 0))


@triton.jit
def _dense_term(
    o_ptr, lanes, row_ptr, log_p, p, scale, beta, READABLE: tl.constexpr, KIND: tl.constexpr
):
    """One term's gradient by the divided logits; row_ptr holds maximum, log-sum, weight, centre."""
    log_o = tl.load(o_ptr + lanes, mask=lanes < READABLE, other=0.0).to(log_p.dtype) * scale
    log_o = log_o - tl.load(row_ptr) - tl.load(row_ptr + 1)
    weight = tl.load(row_ptr + 2)
    centre = tl.load(row_ptr + 3)
    if KIND == "forward":
        return weight * (p - tl.exp(log_o))
    if KIND == "jsd":
        return weight * (1.0 - beta) * p * (log_p - _log_mixture(log_o, log_p, beta) - centre)
    return weight * p * (log_p - log_o - centre)


@triton.jit
def _gradient_kernel(
    z_ptr,  # [C, V] student logits in, gradient out
    first_ptr,  # [C, V] logits of the first term
    second_ptr,  # [C, V] logits of the second term
    rows_ptr,  # [C, WIDTH] maximum, log-sum, d loss / d log p; then 4 numbers per term
    columns_ptr,  # [C, NUM_SPARSE] int64, -1 for none
    values_ptr,  # [C, NUM_SPARSE] added at those columns
    z_stride,
    first_stride,
    second_stride,
    scale,  # 1 / temperature
    first_beta,
    second_beta,
    READABLE: tl.constexpr,  # >= V, see _readable
    FIRST: tl.constexpr,  # "none", "reverse", "forward", "jsd"
    SECOND: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_SPARSE: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of one row per program: no reduction, one read and one write."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * TILE + tl.arange(0, TILE)
    readable = lanes < READABLE
    row_ptr = rows_ptr + row * WIDTH
    z = tl.load(z_ptr + row * z_stride + lanes, mask=readable, other=0.0).to(DTYPE) * scale
    log_p = z - tl.load(row_ptr) - tl.load(row_ptr + 1)
    p = tl.exp(log_p)
    gradient = -tl.load(row_ptr + 2) * p
    one = tl.full((), 1.0, DTYPE)
    if FIRST != "none":
        o_row, beta = first_ptr + row * first_stride, one * first_beta
        gradient += _dense_term(o_row, lanes, row_ptr + 3, log_p, p, scale, beta, READABLE, FIRST)
    if SECOND != "none":
        o_row, beta = second_ptr + row * second_stride, one * second_beta
        gradient += _dense_term(o_row, lanes, row_ptr + 7, log_p, p, scale, beta, READABLE, SECOND)
    for index in tl.static_range(NUM_SPARSE):
        column = tl.load(columns_ptr + row * NUM_SPARSE + index)
        value = tl.load(values_ptr + row * NUM_SPARSE + index)
        gradient += tl.where(lanes == column, value, 0.0)
    gradient = gradient * scale
    tl.store(z_ptr + row * z_stride + lanes, gradient.to(z_ptr.dtype.element_ty), mask=readable)
