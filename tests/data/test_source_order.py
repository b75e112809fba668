"""The order of prompts of several sources: shares, epochs, steps and resumes."""

import numpy as np
import pytest

from stable_opd_mcore.data.source_order import SourceOrder
from stable_opd_mcore.errors import UserError

SIZES, WEIGHTS, PER_STEP = {"a": 40, "b": 7, "c": 3}, (6, 3, 1), 10


def make(seed: int = 0) -> SourceOrder:
    return SourceOrder(SIZES, WEIGHTS, seed, PER_STEP)


def test_every_source_has_its_share_of_all_slots_so_far():
    order = make()
    sources = order.sources(np.arange(500))
    for number, weight in enumerate(WEIGHTS):
        taken = np.cumsum(sources == number)
        assert np.abs(taken - np.arange(1, 501) * weight / 10).max() <= 1


def test_a_source_goes_in_epochs_and_no_row_comes_twice_in_a_step():
    order = make()
    steps = [order.indices(PER_STEP * step, PER_STEP) for step in range(80)]
    assert all(len(set(step)) == PER_STEP for step in steps)
    taken, end = np.concatenate(steps), 0
    for size in SIZES.values():
        own = taken[(taken >= end) & (taken < end + size)]
        for epoch in range(len(own) // size):
            rows = own[epoch * size : (epoch + 1) * size].tolist()
            assert sorted(rows) == list(range(end, end + size))
        end += size
    assert not np.array_equal(taken[:50], make(seed=1).indices(0, 50))


def test_any_split_into_calls_and_any_resume_gives_the_same_rows():
    whole = make().indices(0, 300)
    assert [row for at in range(0, 300, 7) for row in make().indices(at, min(7, 300 - at))] == whole
    assert make().indices(170, 60) == whole[170:230]


def test_a_source_with_too_few_rows_for_a_step_is_refused():
    with pytest.raises(UserError, match="b has 3 usable rows, and a step may need 4 of them"):
        SourceOrder({"a": 40, "b": 3, "c": 3}, WEIGHTS, 0, PER_STEP)
    for size, weights, per_step in ((4, WEIGHTS, 10), (3, (6, 2, 1), 9), (3, WEIGHTS, 6)):
        SourceOrder({"a": 40, "b": size, "c": 3}, weights, 0, per_step)
