"""A module that runs again has the value of its own micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from stable_opd_mcore.models.recompute import OfMicrobatch


@pytest.mark.parametrize("recomputes", [False, True])
def test_each_run_has_its_micro_batchs_value(recomputes: bool) -> None:
    of_microbatch, seen = OfMicrobatch[int](), []

    def module(x):
        seen.append((of_microbatch.current(), of_microbatch.is_first_run))
        return x * 2

    outputs = []
    for value in (1, 2):  # forward of both, then backward in their order
        x = torch.ones((), requires_grad=True)
        of_microbatch.begin(value, keeps=True)
        outputs.append(checkpoint(module, x, use_reentrant=True) if recomputes else module(x))
        of_microbatch.end()
    for output in outputs:
        output.backward()
    module(torch.ones(()))  # for another purpose
    again = [(1, False), (2, False)] if recomputes else []
    assert seen == [(1, True), (2, True), *again, (None, False)]


def test_a_pass_without_backward_keeps_nothing() -> None:
    of_microbatch = OfMicrobatch[int]()
    of_microbatch.begin(1, keeps=False)
    with torch.no_grad():
        assert of_microbatch.current() == 1
    of_microbatch.end()
    assert of_microbatch.current() is None
