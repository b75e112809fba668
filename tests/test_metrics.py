"""Metrics add exactly, keep their counts, and are equal on every rank."""

import json
import math
from pathlib import Path

import pytest

from stable_opd_mcore.metrics import Max, Mean, Metrics, Same, Sum, reduce_over_ranks
from tests.parallel.launch import run_ranks


def test_means_add_by_their_counts_and_are_undefined_over_nothing():
    merged = Metrics({"a/b": Mean(10.0, 1)}) | Metrics({"a/b": Mean(0.0, 9)})
    assert merged["a/b"].value() == 1.0
    assert Mean(0.0, 0).value() is None
    assert (Mean(0.0, 0) + Mean(3.0, 2)).value() == 1.5


def test_sum_and_max():
    assert (Sum(1.5) + Sum(2.5)).value() == 4.0
    assert (Max(None) + Max(-2.0)).value() == -2.0
    assert (Max(-3.0) + Max(-2.0) + Max(None)).value() == -2.0
    assert Max(None).value() is None


@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_maximum_does_not_hide_nan(order):
    first, second = order
    assert math.isnan((Max(first) + Max(second)).maximum)


def test_a_shared_number_must_agree():
    assert (Same(2.0) + Same(2.0)).value() == 2.0
    assert (Same(None) + Same(None)).value() is None
    with pytest.raises(ValueError, match=r"a/b: .*1.0 and 2.0"):
        _ = Metrics({"a/b": Same(1.0)}) | Metrics({"a/b": Same(2.0)})


def test_kinds_do_not_mix():
    with pytest.raises(ValueError, match="a/b: cannot add a mean and a sum"):
        _ = Metrics({"a/b": Mean(1.0, 1)}) | Metrics({"a/b": Sum(1.0)})


def test_merge_keeps_the_keys_of_both_sides_and_leaves_its_operands_alone():
    left, right = Metrics({"x/a": Sum(1.0)}), Metrics({"x/b": Sum(2.0), "x/a": Sum(3.0)})
    assert (left | right).values_by_key() == {"x/a": 4.0, "x/b": 2.0}
    assert left.values_by_key() == {"x/a": 1.0}


def contribution(rank: int) -> Metrics:
    """Values whose sum depends on the order of addition, and keys that differ between ranks."""
    metrics = {
        "x/mean": Mean([0.1, 1e16, -1e16][rank], rank + 1),
        "x/sum": Sum(0.1 * (rank + 1)),
        "x/max": Max([-5.0, None, -7.0][rank]),
        "x/same": Same(0.3),
    }
    if rank == 1:
        metrics["x/only_here"] = Mean(1.0, 4)
    return Metrics(metrics)


def reduce_on_rank(rank: int, world_size: int, directory: Path) -> None:
    import torch.distributed as dist

    reduced = reduce_over_ranks(contribution(rank), dist.group.WORLD)
    silent = reduce_over_ranks(Metrics() if rank else contribution(0), dist.group.WORLD)
    text = json.dumps([reduced.values_by_key(), silent.values_by_key()])
    (directory / f"{rank}.json").write_text(text)


def test_every_rank_gets_the_same_sum(tmp_path):
    run_ranks(3, reduce_on_rank, tmp_path)
    texts = [(tmp_path / f"{rank}.json").read_text() for rank in range(3)]
    assert texts[0] == texts[1] == texts[2]
    reduced, silent = json.loads(texts[0])
    in_rank_order = contribution(0) | contribution(1) | contribution(2)
    assert reduced == in_rank_order.values_by_key()
    assert reduced["x/max"] == -5.0
    assert reduced["x/only_here"] == 0.25
    assert silent == contribution(0).values_by_key()
