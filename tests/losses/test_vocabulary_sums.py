"""Sums of vocabulary shards: merged by hand, and over two and four ranks in the whole loss."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.losses.torch_ops import shard_sums
from stable_opd_mcore.losses.vocabulary_sums import (
    PairStatistics,
    add_sums,
    merge_shards,
)
from stable_opd_mcore.scoring.token_scores import score
from tests.losses.cases import assert_close, run_definition, run_fused
from tests.losses.definitions import merge_ids
from tests.losses.test_fused import select
from tests.losses.test_output_head import check_alignment
from tests.losses.variants import VARIANTS, case_of
from tests.parallel.launch import run_ranks

close = torch.testing.assert_close


def two_models(rows: int = 5, vocab: int = 9) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    z, o = 4 * torch.randn(2, rows, vocab, generator=rng, dtype=torch.float64)
    return z, o


def whole_head(vocab: int) -> Head:
    return Head(torch.empty(vocab, 1), 0, vocab)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(1)


@pytest.mark.parametrize("cut", [0, 1, 4, 9])
def test_sums_over_two_sets_of_columns_add_up(cut):
    z, o = two_models()
    for other in (o, None):
        halves = (
            shard_sums(z[:, part], None if other is None else other[:, part], 0.8)
            for part in (slice(0, cut), slice(cut, None))
        )
        found, expected = add_sums(*halves), shard_sums(z, other, 0.8)
        if other is not None:  # any anchor near E_p[o] serves: compare at the same one
            shift = expected.student_sum * (found.anchor - expected.anchor)
            expected = expected._replace(
                student_gap=expected.student_gap + shift, anchor=found.anchor
            )
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                close(a, b)


@pytest.mark.parametrize("parts", [(slice(0, 4), slice(4, None)), (slice(4, None), slice(0, 4))])
def test_the_anchor_is_that_of_the_columns_with_the_students_maximum(parts):
    """In fp32, from columns 1,000 lower, it would cost the divergence its digits."""
    z, o = (x.float() for x in two_models())
    z[:, 5:7] += 1000
    o[:, 5:7] += 1000
    both = add_sums(*(shard_sums(z[:, part], o[:, part], 1.0) for part in parts))
    (sums,), _ = merge_shards([both], [z[:, :0]], whole_head(9))
    found = PairStatistics(sums)
    log_p, log_o = (x.double().log_softmax(1) for x in (z, o))
    close(found.reverse_kl_C.double(), kl(log_p, log_o), rtol=1e-6, atol=1e-6)


def shard_slice(vocab: int, padding: int, group: dist.ProcessGroup) -> slice:
    """This rank's vocabulary entries without padding; shards of vocab + padding are equal."""
    size = -(-(vocab + padding) // group.size())
    start = group.rank() * size
    return slice(min(start, vocab), min(start + size, vocab))


def check_losses(groups: list[dist.ProcessGroup]) -> None:
    """With V=5 and 3 padding rows the last of four shards holds only padding."""
    for variant in VARIANTS:
        for rows, vocab, padding in ((13, 31, 1), (7, 5, 3), (0, 31, 1)):
            # Merged stop ids lie on three of four shards, with V=5 on two.
            stop_ids = ((1, 9), (20, 30)) if vocab == 31 else ((1,), (2,))
            case = case_of(
                variant,
                rows,
                vocab,
                temperature=0.7,
                old=True,
                dtype=torch.float32,
                stop_ids=stop_ids,
            )
            expected = run_definition(case)
            for group in groups if rows == 13 else groups[-1:]:
                own_rows = shard_slice(vocab, padding, group)
                found = run_fused(case, torch.float32, padding, group=group)
                rows_of_shard = replace(expected, d_weight=expected.d_weight[own_rows])
                assert not found.d_weight[own_rows.stop - own_rows.start :].any(), (
                    "padding has a gradient"
                )
                assert_close(found, rows_of_shard, 1e-5)


def check_scores(groups: list[dist.ProcessGroup]) -> None:
    case = case_of("opd", 13, 31)
    log_p = (case.hidden_NH @ case.weight_VH.T / 0.7).log_softmax(-1)
    for group in groups:
        size = 32 // group.size()
        whole = torch.cat([case.weight_VH, torch.full((1, 8), 9.0)])
        shard = whole[group.rank() * size : (group.rank() + 1) * size]
        head = Head(shard, group.rank() * size, 31, group)
        for merged_ids in ((), (1, 20, 30)):
            found = score(
                case.hidden_NH,
                head,
                case.batch.targets_N,
                temperature=0.7,
                top_k=20,
                merged_ids=merged_ids,
                block_rows=4,
            )
            top = merge_ids(log_p, merged_ids).topk(20, dim=1)
            torch.testing.assert_close(found.topk_logprobs_NK, top.values)
            assert torch.equal(found.topk_ids_NK, top.indices)
            torch.testing.assert_close(found.entropy_N, -(log_p.exp() * log_p).sum(1))


def check_returns(groups: list[dist.ProcessGroup]) -> None:
    """The rows of a micro-batch on several context ranks, of which each has another number."""
    for variant in ("opd_discounted", "opd_present"):
        case = case_of(variant, 13, 31, old=True)
        head = Head(case.weight_VH, 0, 31)
        whole = case.objective(case.hidden_NH, head, case.batch)
        for group in groups:
            bounds = [13 * k * k // group.size() ** 2 for k in range(group.size() + 1)]
            rows = torch.arange(bounds[group.rank()], bounds[group.rank() + 1])
            found = case.objective(
                case.hidden_NH[rows], head, select(case.batch, rows), context_group=group
            )
            torch.testing.assert_close(found.advantage_N, whole.advantage_N[rows])


def check_on_rank(rank: int, world_size: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    all_ranks = dist.group.WORLD
    assert all_ranks is not None
    groups = [pairs[rank // 2], all_ranks]
    check_alignment(rank)
    check_losses(groups)
    check_scores(groups)
    check_returns(groups)


def test_results_do_not_depend_on_the_number_of_shards():
    run_ranks(4, check_on_rank)
