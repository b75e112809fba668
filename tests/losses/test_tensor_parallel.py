"""Two and four vocabulary shards give the loss, gradients and scores of the whole vocabulary.

One launch of four ranks makes all checks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from stable_opd_mcore.losses.definitions import merge_ids
from stable_opd_mcore.losses.output_head import Head, align_head
from stable_opd_mcore.scoring.token_scores import score
from tests.losses.cases import assert_close, run_definition, run_fused
from tests.losses.test_fused import VARIANTS, case_of
from tests.parallel.launch import run_ranks


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


def check_far_apart(groups: list[dist.ProcessGroup]) -> None:
    """Shards merge precisely for confident models that disagree, with the maximum on any shard.

    Logits of 1800 are multiples of 1/8: their rounding would change the gradient by 1e-5.
    """
    for student_mass, teacher_mass in ((slice(3, 5), slice(20, 22)), (slice(28, 30), slice(9, 11))):
        case = case_of("gkd", 9, 32, dtype=torch.float32)
        weight, teacher = ((8 * x).round() / 8 for x in (case.weight_VH, case.teacher_weight_VH))
        weight[student_mass] += 40
        weight[teacher_mass] += 20  # far from the anchor of another shard
        teacher[teacher_mass] += 300
        ones = {
            "hidden_NH": torch.ones(9, 8).double(),
            "weight_VH": weight,
            "teacher_weight_VH": teacher,
        }
        hidden = torch.ones(9, 6).double()
        scores = replace(case.batch.teacher, hidden_NH=hidden)
        batch = replace(case.batch, teacher=scores)
        case = replace(case, teacher_hidden_NH=hidden, batch=batch, **ones)
        expected = run_definition(case)
        assert expected.loss.abs() > 1000
        for group in groups:
            found = run_fused(case, torch.float32, group=group)
            own_rows = shard_slice(32, 0, group)
            assert_close(found, replace(expected, d_weight=expected.d_weight[own_rows]), 1e-5)


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


def check_alignment(group: dist.ProcessGroup) -> None:
    """The student pads a vocabulary of 7 to 8 rows, the teacher to 12: their shards differ."""
    whole = torch.arange(12.0)[:, None].expand(12, 2).contiguous()
    rank = group.rank()
    student = Head(torch.zeros(2, 3), rank * 2, 7, group)
    teacher = Head(whole[rank * 3 : rank * 3 + 3], rank * 3, 7, group)
    aligned = align_head(teacher, like=student)
    assert (aligned.vocab_start, aligned.num_columns) == (student.vocab_start, student.num_columns)
    expected = whole[student.vocab_start : student.vocab_start + student.num_columns]
    assert torch.equal(aligned.weight_VH[: aligned.num_columns], expected)
    assert align_head(aligned, like=student) is aligned
    case = case_of("gkd", 4, 7)
    if rank > 0:
        hidden = torch.zeros(4, 3)
        batch = replace(case.batch, teacher=replace(case.batch.teacher, hidden_NH=hidden[:, :2]))
        with pytest.raises(ValueError, match="align_head"):
            case.objective(hidden, student, batch, teacher_head=teacher)


def check_on_rank(rank: int, world_size: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    all_ranks = dist.group.WORLD
    assert all_ranks is not None
    groups = [pairs[rank // 2], all_ranks]
    check_losses(groups)
    check_far_apart(groups)
    check_scores(groups)
    check_alignment(all_ranks)


def test_results_do_not_depend_on_the_number_of_shards():
    run_ranks(4, check_on_rank)
