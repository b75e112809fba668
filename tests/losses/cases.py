"""Small random micro-batches, and runs of the fused path and the float64 definition on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.losses.fused import require_finite_scores
from stable_opd_mcore.losses.objectives import Objective, build_objective
from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.records import LossOutput, MicroBatch, Scores
from tests.losses.definitions import defined_loss, merge_ids, target_logprob

STUDENT_STOP, TEACHER_STOP = (1,), (2,)


def make_config(**changes: Any) -> Config:
    """A config with dotted changes, keys written with double underscores: objective__name="lsm"."""
    values: dict[str, Any] = {
        "run": {"name": "test"},
        "student": {"architecture": {}},
        "teacher": {"architecture": {}},
        "tokenizer": {"path": "synthetic"},
        "data": {"train": {"path": "synthetic:arithmetic"}},
    }
    for key, value in changes.items():
        node = values
        *path, leaf = key.split("__")
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return parse_config(values, "test")


@dataclass(frozen=True)
class Case:
    """A micro-batch with the inputs of every objective, in float64."""

    objective: Objective
    hidden_NH: Tensor
    weight_VH: Tensor
    teacher_hidden_NH: Tensor
    teacher_weight_VH: Tensor
    reference_hidden_NH: Tensor
    reference_weight_VH: Tensor
    batch: MicroBatch


def make_case(
    config: Config,
    rows: int = 13,
    vocab: int = 31,
    *,
    seed: int = 0,
    spread: float = 1.5,
    stop_ids: tuple[tuple[int, ...], tuple[int, ...]] = (STUDENT_STOP, TEACHER_STOP),
    old: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """Random hidden states and heads (three hidden sizes); a third of the rows golden, some masked.

    dtype: values are rounded to it first, so that a low-precision run and the float64 definition
    have the same inputs.
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(*shape, generator=rng, dtype=torch.float64) * scale
        return x.to(dtype).double()

    objective = build_objective(config, *stop_ids)
    hidden, teacher, reference = normal(rows, 8), normal(rows, 6), normal(rows, 5)
    heads = [normal(vocab, size, scale=spread / size**0.5) for size in (8, 6, 5)]
    targets = torch.randint(vocab, (rows,), generator=rng)
    targets[::4] = min(1, vocab - 1)
    targets[1::5] = min(2, vocab - 1)
    golden = torch.arange(rows) % 3 == 2
    masked = torch.arange(rows) % 7 == 3
    temperature = config.sampling.temperature
    log_q = (teacher @ heads[1].T / temperature).log_softmax(-1)
    log_r = (reference @ heads[2].T / temperature).log_softmax(-1)
    log_p = (hidden @ heads[0].T / temperature).log_softmax(-1)
    weight = torch.rand(3, rows, generator=rng, dtype=torch.float64) + 0.1
    old_logprob = target_logprob(log_p, targets, objective.stop_ids)
    old_logprob = old_logprob + 0.3 * torch.randn(rows, generator=rng, dtype=torch.float64)
    batch = MicroBatch(
        tokens_T=torch.zeros(rows + 2, dtype=torch.int64),
        positions_T=torch.arange(rows + 2),
        cu_seqlens=torch.tensor([0, rows + 2], dtype=torch.int32),
        max_seqlen=rows + 2,
        rows_N=torch.arange(rows),
        targets_N=targets,
        sample_index_N=torch.arange(rows) // 4,
        token_index_N=torch.arange(rows) % 4,
        turn_N=torch.zeros(rows, dtype=torch.int64),
        index_in_turn_N=torch.arange(rows) % 4,
        golden_N=golden,
        pg_weight_N=weight[0].masked_fill(golden | masked, 0),
        kl_weight_N=weight[1].masked_fill(golden, 0) * config.kl.beta,
        sft_weight_N=weight[2].masked_fill(~golden, 0),
        rollout_logprob_N=old_logprob,
        repetitive_N=torch.zeros(rows, dtype=torch.bool),
        truncated_N=torch.zeros(rows, dtype=torch.bool),
        golden_rows_G=golden.nonzero()[:, 0],
        given_advantage_N=normal(rows),
        old_logprob_N=old_logprob if old else None,
        teacher=teacher_scores(objective, log_q, targets, teacher),
        reference=Scores(logprob_N=log_r.gather(1, targets[:, None])[:, 0], hidden_NH=reference),
    )
    return Case(objective, hidden, heads[0], teacher, heads[1], reference, heads[2], batch)


def teacher_scores(
    objective: Objective, log_q_NV: Tensor, targets_N: Tensor, hidden_NH: Tensor
) -> Scores:
    """The scores that the objective needs, from the teacher's whole distribution."""
    if objective.teacher_needs == "hidden":
        return Scores(None, hidden_NH=hidden_NH)
    outcomes_NV = merge_ids(log_q_NV, objective.terms.merged_ids)
    top = outcomes_NV.topk(min(objective.top_k, log_q_NV.shape[1]), dim=1)
    return Scores(
        logprob_N=target_logprob(log_q_NV, targets_N, objective.stop_ids),
        topk_ids_NK=top.indices,
        topk_logprobs_NK=top.values,
        hidden_NH=hidden_NH,
    )


def cast_batch(
    batch: MicroBatch, dtype: torch.dtype, hidden_dtype: torch.dtype, device: str = "cpu"
) -> MicroBatch:
    """The micro-batch with per-token numbers in dtype and hidden states in hidden_dtype."""

    def cast(record):
        changes = {}
        for name, value in vars(record).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                changes[name] = value.to(device, hidden_dtype if name == "hidden_NH" else dtype)
            elif isinstance(value, Tensor) and name != "golden_rows_G":
                changes[name] = value.to(device)
            elif isinstance(value, Scores):
                changes[name] = cast(value)
        return replace(record, **changes)

    return cast(batch)


@dataclass(frozen=True)
class Result:
    """Loss, its components, both gradients and what is reported per row, in float64."""

    loss: Tensor
    pg: Tensor
    kl: Tensor
    sft: Tensor
    d_hidden: Tensor
    d_weight: Tensor
    rows: dict[str, Tensor]  # [N] each, by the name in LossOutput; without those that are None

    @classmethod
    def of(cls, output: LossOutput, d_hidden: Tensor | None, d_weight: Tensor | None) -> Result:
        assert d_hidden is not None
        assert d_weight is not None
        found = {k: x.detach().double().cpu() for k, x in vars(output).items() if x is not None}
        parts = [found.pop(name) for name in ("loss", "pg", "kl", "sft")]
        return cls(*parts, d_hidden.double().cpu(), d_weight.double().cpu(), found)


def run_fused(
    case: Case,
    dtype: torch.dtype = torch.float64,
    padding: int = 0,
    objective: Objective | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    device: str = "cpu",
) -> Result:
    """Run the fused path on this rank's shard; padding rows of the vocabulary hold large values."""
    objective = objective or case.objective
    vocab = case.weight_VH.shape[0]
    hidden = case.hidden_NH.to(device, dtype, copy=True).requires_grad_()
    heads = []
    for index, weight in enumerate(
        (case.weight_VH, case.teacher_weight_VH, case.reference_weight_VH)
    ):
        padded = torch.cat([weight, torch.full((padding, weight.shape[1]), 30.0 + index)])
        start, shard = 0, padded
        if group is not None:
            shard = padded.chunk(group.size())[group.rank()]
            start = group.rank() * -(-len(padded) // group.size())
        heads.append(Head(shard.to(device, dtype, copy=True), start, vocab, group))
    heads[0].weight_VH.requires_grad_()
    fp = torch.float64 if dtype == torch.float64 else torch.float32
    batch = cast_batch(case.batch, fp, dtype, device)
    out = objective(hidden, heads[0], batch, teacher_head=heads[1], reference_head=heads[2])
    require_finite_scores(batch, out)  # the step does it too
    out.loss.backward()
    return Result.of(out, hidden.grad, heads[0].weight_VH.grad)


def run_definition(case: Case) -> Result:
    """Run the definition in float64."""
    hidden = case.hidden_NH.clone().requires_grad_()
    weight = case.weight_VH.clone().requires_grad_()
    parts = defined_loss(
        case.objective.terms,
        case.batch,
        hidden @ weight.T,
        case.teacher_hidden_NH @ case.teacher_weight_VH.T,
        case.reference_hidden_NH @ case.reference_weight_VH.T,
    )
    parts.loss.backward()
    return Result.of(parts, hidden.grad, weight.grad)


def assert_close(found: Result, expected: Result, tolerance: float) -> None:
    """Compare each field relative to its largest entry; the loss to the sum of its parts' sizes,
    because they may cancel."""
    parts = expected.pg.abs() + expected.kl.abs() + expected.sft.abs()
    for name in ("loss", "pg", "kl", "sft", "d_hidden", "d_weight"):
        a, b = getattr(found, name), getattr(expected, name)
        assert torch.isfinite(a).all(), f"{name} is not finite"
        a = a[: len(b)] if name == "d_weight" else a
        if b.numel() == 0:
            continue
        scale = max(b.abs().max().item(), 1e-6)
        if name in ("loss", "pg", "kl", "sft"):
            scale = max(scale, 0.1, parts.item() if name == "loss" else 0.0)
        error = (a - b).abs().max().item() / scale
        assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"
    # An empty micro-batch has no block whose results could show what is None.
    rows = expected.rows if len(expected.d_hidden) else found.rows
    assert found.rows.keys() == rows.keys()
    for name, b in expected.rows.items():
        a = found.rows[name]
        assert torch.isfinite(a).all(), f"{name} is not finite"
        if name == "ratio_clipped_N" and tolerance > 1e-9:  # a ratio may be at its bound
            continue
        error = (a - b).abs() / b.abs().max().clamp_min(1) if len(b) else b
        assert (error <= tolerance).all(), f"{name}: {error.max():.2e} > {tolerance:.0e}"
