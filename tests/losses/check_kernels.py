"""Compare triton_ops with torch_ops.

Set TRITON_INTERPRET=1 on a CPU; a GPU needs no setting. A separate program, because the interpreter
must be chosen before triton is first imported.
"""

import torch

from stable_opd_mcore.losses import torch_ops, triton_ops
from stable_opd_mcore.losses.stop_tokens import NEVER
from stable_opd_mcore.losses.torch_ops import DenseTerm, Normaliser, ShardSums, SparseColumns
from stable_opd_mcore.losses.vocabulary_sums import PairStatistics

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
# Rows, columns, dtype and 1 / temperature: one column, one tile and a part of one, two of each.
CASES = (
    (1, 1, torch.float64, 1.4),
    (3, 31, torch.bfloat16, 1.0),
    (2, 2048, torch.float32, 1.0),
    (3, 2053, torch.float64, 1.0),
    (3, 2053, torch.float32, 1.4),
    (2, 2053, torch.bfloat16, 1.4),
)


def check(rows: int, columns: int, dtype: torch.dtype, scale: float, device: str) -> None:
    """Check all three passes: ordinary logits, logits of +-1e4 and columns of merged ids."""
    rng = torch.Generator().manual_seed(rows * columns)
    z, r, t = torch.randn(3, rows, columns, generator=rng, dtype=torch.float64) * 2
    z[0, ::2], r[0, ::3] = 1e4, -1e4
    z[:, 1::7] = r[:, 1::7] = t[:, 1::7] = NEVER
    # z and r have unused columns, as a logits_buffer has; their NaN must not be used. t has none.
    z, r = (torch.cat([x, torch.full((rows, 16), torch.nan)], dim=1) for x in (z, r))
    z, r, t = (x.to(device, dtype) for x in (z, r, t))
    z, r = z[:, :columns], r[:, :columns]
    tolerance = TOLERANCE[dtype]

    pairs = [torch_sums(z, o, scale) for o in (r, t)]
    for other, expected in zip((r, t, None), [*pairs, torch_sums(z, None, scale)], strict=True):
        found = triton_ops.shard_sums(z, other, scale)
        if other is not None:  # the anchors may differ: use the kernel's in both
            shift = expected.student_sum * (found.anchor - expected.anchor)
            expected = expected._replace(
                student_gap=expected.student_gap + shift, anchor=found.anchor
            )
        for name, values_C in expected._asdict().items():
            if values_C is not None:
                close(getattr(found, name), values_C, 1e-10 if dtype == torch.float64 else 1e-5)
    reference, teacher = map(PairStatistics, pairs)

    normalisers = (teacher.normaliser, teacher.other)
    found = triton_ops.jsd_sums(z, t, *normalisers, 0.3, scale)
    expected = torch_ops.jsd_sums(z.cpu(), t.cpu(), *map(_cpu, normalisers), 0.3, scale)
    close(found, expected.to(device), tolerance)

    weights = torch.randn(3, rows, generator=rng).to(device, reference.entropy_C.dtype)
    at = torch.arange(2 * rows, device=device).view(rows, 2) % (columns + 1) - 1
    sparse = SparseColumns(at, weights[:2].T * 3)
    for kind in ("none", "reverse", "forward", "jsd"):
        centre = teacher.reverse_kl_C if kind == "reverse" else found[:, 1]
        terms = [DenseTerm("reverse", r, reference.other, weights[0], reference.reverse_kl_C)]
        if kind != "none":
            terms.append(DenseTerm(kind, t, teacher.other, weights[1], centre, 0.3))
        for count in range(len(terms) + 1):
            kernel_z, torch_z = with_unused_columns(z), z.cpu().clone()
            triton_ops.write_gradient_(
                kernel_z, teacher.normaliser, weights[2], sparse, terms[:count], scale
            )
            torch_ops.write_gradient_(
                torch_z,
                _cpu(teacher.normaliser),
                weights[2].cpu(),
                _cpu(sparse),
                [_cpu(term) for term in terms[:count]],
                scale,
            )
            close(kernel_z, torch_z.to(device), tolerance)


def with_unused_columns(z: torch.Tensor) -> torch.Tensor:
    """A copy with z's row stride; the unused columns hold NaN."""
    wide = torch.full((z.shape[0], z.stride(0)), torch.nan, dtype=z.dtype, device=z.device)
    wide[:, : z.shape[1]] = z
    return wide[:, : z.shape[1]]


def torch_sums(z: torch.Tensor, other: torch.Tensor | None, scale: float) -> ShardSums:
    sums = torch_ops.shard_sums(z.cpu(), None if other is None else other.cpu(), scale)
    return ShardSums(*(None if x is None else x.to(z.device) for x in sums))


def _cpu(record):
    values = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in vars(record).items()}
    values = {k: _cpu(v) if isinstance(v, Normaliser) else v for k, v in values.items()}
    return type(record)(**values)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    found, expected = found.double(), expected.double()
    assert torch.isfinite(found).all()
    error = (found - expected).abs() / expected.abs().clamp_min(1.0)
    assert error.max().item() <= tolerance, f"{error.max().item():.2e} > {tolerance:.0e}"


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for case in CASES:
        check(*case, device)
    print(f"{len(CASES)} cases on {device}")


if __name__ == "__main__":
    main()
