"""The loss on this device against its definitions: passes over logits, objectives, host syncs.

The Triton passes are compared with the torch passes, and every objective with its float64
definition, values and both gradients. On a CPU the passes run in Triton's interpreter at few sizes.
Not here: speed (loss.py).
"""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.part import Options
from benchmarks.gpu.record import Record
from benchmarks.loss import Point, fused, make_inputs
from stable_opd_mcore.losses.token_losses import Terms, divergence_from_teacher, opd
from tests.losses.cases import Case, assert_close, run_definition, run_fused
from tests.losses.definitions import merge_ids
from tests.losses.variants import VARIANTS, case_of

# Rows and vocabulary. Few vocabularies, because Triton compiles its kernels for each.
SIZES = ((13, 31), (130, 4099))
TINY_SIZES = SIZES[:1]
SEVERAL_BLOCKS = (2500, 8209)
DEFINITION_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
PASS_SIZES = ((1, 1), (3, 2053), (2, 152064))
PASS_DTYPES = (torch.float32, torch.bfloat16)
SYNC_TERMS = {
    "opd with exact KL": Terms(policy=opd, reference="exact"),
    "opd with exact KL, temperature 0.7": Terms(policy=opd, reference="exact", temperature=0.7),
    "gkd, jsd": Terms(policy=divergence_from_teacher, divergence="jsd"),
}


def run(record: Record, options: Options) -> None:
    check_definitions(record, options)
    check_passes(record, options)
    count_syncs(record, options)


def check_passes(record: Record, options: Options) -> None:
    """Triton's passes against torch's."""
    if importlib.util.find_spec("triton") is None:
        record.skip("Triton passes", "triton is not installed")
        return
    from tests.losses import check_kernels

    sizes = PASS_SIZES if options.on_gpu else TINY_SIZES
    cases = itertools.product(sizes, PASS_DTYPES, (1.0, 1.4))
    checks = {
        f"{size} {dtype} / {1 / scale:.1f}": partial(
            check_kernels.check, size[0], size[1], dtype, scale, options.device
        )
        for size, dtype, scale in cases
    }
    record_failures(record, "Triton passes that differ from torch's", checks)


def check_definitions(record: Record, options: Options) -> None:
    """Every objective against its float64 definition, which runs on the CPU."""
    sizes = SIZES if options.on_gpu else TINY_SIZES
    for dtype, limit in DEFINITION_LIMITS.items():
        cases = list(itertools.product(VARIANTS, sizes))
        if options.on_gpu:
            cases += [(name, SEVERAL_BLOCKS) for name in ("opd_exact_kl", "gkd_jsd")]
        checks = {
            f"{name} {size}": partial(compare, name, size[0], size[1], dtype, limit, options.device)
            for name, size in cases
        }
        title = f"objectives that differ from their definitions, {dtype}"
        record_failures(record, title, checks)


def compare(
    variant: str, rows: int, vocab: int, dtype: torch.dtype, limit: float, device: str
) -> None:
    case = case_of(variant, rows, vocab, temperature=0.7, old=True, dtype=dtype)
    if case.objective.terms.divergence == "student_support":
        case = without_ties(case, dtype)
    assert_close(run_fused(case, dtype, device=device), run_definition(case), limit)


def without_ties(case: Case, dtype: torch.dtype) -> Case:
    """The case without policy weight on rows whose top-k ends between logits that are equal within
    the rounding of `dtype`: there fp64 and `dtype` may choose different ids."""
    objective = case.objective
    logits_NV = case.hidden_NH @ case.weight_VH.T / objective.temperature
    outcomes_NV = merge_ids(logits_NV.log_softmax(1), objective.terms.merged_ids)
    if objective.top_k >= outcomes_NV.shape[1]:
        return case
    top = outcomes_NV.topk(objective.top_k + 1, dim=1).values
    rounding_N = torch.finfo(dtype).eps * logits_NV.abs().amax(1)
    is_tied_N = top[:, -2] - top[:, -1] <= rounding_N
    weight_N = case.batch.pg_weight_N.masked_fill(is_tied_N, 0)
    return replace(case, batch=replace(case.batch, pg_weight_N=weight_N))


def record_failures(record: Record, title: str, checks: dict[str, Callable[[], None]]) -> None:
    """Run all checks, however many fail, and record their number."""
    failures = []
    for name, check in checks.items():
        try:
            check()
        except AssertionError as error:
            failures.append(f"{name}: {error}")
    for failure in failures:
        print(f"{title}: {failure}")
    note = failures[0] if failures else f"{len(checks)} cases"
    record.check(title, len(failures), 0, note=note)


def count_syncs(record: Record, options: Options) -> None:
    """Waits of the host for the GPU that grow with the number of blocks of logits."""
    if not options.on_gpu:
        record.skip("host syncs a block", "needs CUDA")
        return
    for name, terms in SYNC_TERMS.items():
        few, many = (syncs(terms, blocks) for blocks in (2, 6))
        for line in sorted(set(many)):
            print(f"{name}: {many.count(line)} syncs in 6 blocks at {line}")
        record.check(f"host syncs a block: {name}", (len(many) - len(few)) / 4, 0)


def syncs(terms: Terms, blocks: int) -> list[str]:
    """File and line of every host sync of one evaluation of the loss."""
    point = Point("ours", 512 * blocks, 256, 8192, "bf16", "cuda", 512, 1, 1)
    step, inputs = fused(point, terms, 1 / point.tokens, 1 / point.tokens), make_inputs(point)
    step(inputs)  # compiles
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step(inputs)
        torch.cuda.set_sync_debug_mode("default")
    return [
        f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)
    ]
