"""Runs whose process dies in the middle, as the tests of a resume need them."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from torch.multiprocessing import ProcessExitedException

from stable_opd_mcore.train import loop
from tests.parallel.launch import run_ranks


def run_killed_at(last: int, function: Callable[..., Any], *args: Any) -> None:
    """`run_ranks(1, function, *args)`, whose process dies after the row of step `last`, before the
    guard's return and a save.
    """
    with pytest.raises(ProcessExitedException):
        run_ranks(1, _run_and_die, last, function, *args)


def _run_and_die(
    rank: int, world_size: int, last: int, function: Callable[..., Any], *args: Any
) -> None:
    write = loop.write_actions

    def write_and_die(sinks: Any, step: int, actions: Any, now: Any) -> None:
        write(sinks, step, actions, now)
        if step == last:
            os._exit(9)

    loop.write_actions = write_and_die
    function(rank, world_size, *args)
