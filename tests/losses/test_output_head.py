"""One shard of an output head by itself, and shards cut at other boundaries."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses import output_head
from stable_opd_mcore.losses.output_head import (
    Head,
    WithGradients,
    add_product_,
    align_head,
    require_same_columns,
    rows_per_block,
)
from tests.losses.variants import case_of

SHARD = Head(torch.arange(40.0).view(8, 5), 10, 16)  # ids 10 to 15, and two rows of padding
ABSENT = Head(torch.zeros(8, 5), 16, 16)  # only padding
IDS = torch.tensor([[9, 10], [15, 16]])  # before, first, last, behind


def test_a_shard_holds_the_vocabulary_without_its_padding():
    assert SHARD.num_columns == 6
    assert ABSENT.num_columns == Head(torch.zeros(8, 5), 24, 16).num_columns == 0
    assert Head(torch.zeros(8, 5), 2, 16).num_columns == 8
    hidden = torch.ones(3, 5, dtype=torch.float64)
    assert torch.equal(SHARD.logits(hidden), SHARD.weight_VH[:6].sum(1).expand(3, 6))
    buffer = SHARD.logits_buffer(4)
    assert (buffer.shape, buffer.dtype) == ((4, 6), torch.float32)
    assert buffer.stride() == (output_head.ROW_ALIGNMENT, 1)
    assert SHARD.logits(hidden, out=buffer[:3]).data_ptr() == buffer.data_ptr()
    assert SHARD.gather(hidden).shape == (1, 3, 5)
    assert SHARD.reduce_(hidden) is hidden


def test_ids_of_other_shards_have_no_column():
    columns, here = SHARD.local_columns(IDS)
    assert columns.tolist() == [[0, 0], [5, 0]]
    assert here.tolist() == [[False, True], [True, False]]
    logits = torch.arange(1.0, 13.0).view(2, 6)
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        gathered = SHARD.gather_columns(logits.to(dtype), IDS)
        assert (gathered.tolist(), gathered.dtype) == ([[0, 1], [12, 0]], wide)
        nothing = ABSENT.gather_columns(logits[:, :0].to(dtype), IDS)
        assert (nothing.tolist(), nothing.dtype) == ([[0, 0], [0, 0]], wide)
    changed = logits.to(torch.bfloat16)
    SHARD.scatter_add_(changed, IDS, torch.tensor([[100.0, 10.0], [20.0, 100.0]]))
    assert (changed.float() - logits).nonzero().tolist() == [[0, 0], [1, 5]]
    assert (changed[0, 0], changed[1, 5]) == (11, 32)
    ABSENT.scatter_add_(logits[:, :0], IDS, torch.ones(2, 2))


def test_the_largest_logits_have_global_ids():
    logits = torch.tensor([[3.0, 1.0, 6.0, 2.0, 5.0, 4.0]]).to(torch.bfloat16)
    values, ids = SHARD.top_k(logits, 2)
    assert (values.tolist(), ids.tolist()) == ([[6, 5]], [[12, 14]])
    assert (values.dtype, ids.dtype) == (torch.float32, torch.int64)
    values, ids = SHARD.top_k(logits, 8)  # more than the shard holds
    assert values[0, :6].tolist() == [6, 5, 4, 3, 2, 1]
    assert values[0, 6:].tolist() == [-torch.inf] * 2
    values, _ = ABSENT.top_k(logits[:, :0], 16)
    assert values.tolist() == [[-torch.inf] * 16]
    with pytest.raises(UserError, match=r"^objective\.top_k=17 exceeds the 16 tokens: lower it$"):
        SHARD.top_k(logits, 17)


@pytest.mark.parametrize(
    ("wanted", "vocab", "rows"),
    [
        (100, 1000, 100),
        (100, 100, 400),  # a small vocabulary: at least MIN_BLOCK_ELEMENTS
        (100, 4000, 50),  # a large one: at most MAX_CPU_BLOCK_ELEMENTS
        (100, 20_000, 30),  # but MIN_CPU_BLOCK_ROWS
        (10, 20_000, 10),
        (1, 0, 30),
        (50_000, 0, 50_000),
    ],
)
def test_rows_of_a_block(monkeypatch, wanted, vocab, rows):
    monkeypatch.setattr(output_head, "MIN_BLOCK_ELEMENTS", 40_000 if vocab else 30)
    monkeypatch.setattr(output_head, "MAX_CPU_BLOCK_ELEMENTS", 200_000)
    monkeypatch.setattr(output_head, "MIN_CPU_BLOCK_ROWS", 30)
    monkeypatch.setattr(output_head, "BLOCK_ROWS", wanted)
    assert rows_per_block(Head(torch.zeros(1, 1), 0, vocab)) == rows


def test_a_block_has_as_many_times_the_rows_as_the_head_has_shards():
    """So the logits of one rank take the same memory in every layout."""

    class FourShards:
        def size(self):
            return 4

    for vocab in (64, 4096, 152064):
        whole, shard = (Head(torch.empty(0, 1), 0, vocab, group) for group in (None, FourShards()))
        assert rows_per_block(shard) == 4 * rows_per_block(whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_added_in_the_sums_dtype(monkeypatch, dtype):
    monkeypatch.setattr(output_head, "PRODUCT_COLUMNS", 3)
    rng = torch.Generator().manual_seed(0)
    gradient = torch.randn(5, 7, generator=rng).to(dtype)
    hidden = torch.randn(5, 4, generator=rng).to(dtype)
    total = torch.ones(7, 4)
    add_product_(total, gradient, hidden)
    torch.testing.assert_close(total, 1 + gradient.float().T @ hidden.float())


def test_heads_of_other_ranges_are_refused():
    require_same_columns(SHARD, Head(torch.zeros(6, 2), 10, 16), "teacher")
    expected = (
        "this rank holds vocabulary entries 10..16 of 16 for the student, but 10..17 of 17 for the "
        "other model: give both the common vocabulary size and re-shard the other model's head "
        "once with output_head.align_head"
    )
    other = Head(torch.zeros(7, 5), 10, 17)
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        align_head(other, like=SHARD)
    assert align_head(SHARD, like=SHARD) is SHARD


@pytest.mark.parametrize("tied", [False, True])
def test_a_gradient_in_main_grad_is_announced_to_megatrons_hook(tied):
    """The hook wants a `grad` to reduce; a tied weight gets the embedding's."""
    hidden = torch.zeros(2, requires_grad=True)
    weight = torch.zeros(2, requires_grad=True)
    weight.main_grad = torch.tensor([3.0, 4.0])
    weight.zero_out_wgrad = tied
    of_hidden = torch.tensor([1.0, 2.0])
    loss = WithGradients.apply(hidden, weight, torch.tensor(5.0), of_hidden, weight.main_grad)
    loss.backward()
    assert weight.grad_added_to_main_grad
    assert weight.main_grad.tolist() == [3, 4]
    assert (weight.grad is None) if tied else (weight.grad.tolist() == [0, 0])
    assert hidden.grad.tolist() == [1, 2]


def check_alignment(rank: int) -> None:
    """On four ranks the student pads a vocabulary of 7 to 8 rows, the teacher to 12."""
    group = dist.group.WORLD
    assert group is not None
    whole = torch.arange(12.0)[:, None].expand(12, 2).contiguous()
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
