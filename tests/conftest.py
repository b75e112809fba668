"""A world of one rank, the order of the tests, bytecode of the processes they start, imports."""

import gc
import os
import sys

import pytest

# Even where the user wants no bytecode: rewriting and compiling Megatron takes each process 2 s.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

gc.disable()  # while all test files and what they import are loaded: there is nothing to collect


@pytest.fixture(scope="module")
def world():
    """The world of a run of one rank."""
    import torch

    from stable_opd_mcore.config.schema import ParallelConfig
    from stable_opd_mcore.parallel.world import start_world, stop_world

    torch.set_num_threads(1)
    yield start_world(ParallelConfig(), seed=0)
    stop_world()


def pytest_collection_finish() -> None:
    """Imported objects stay, so collections skip them."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of slow tests come first: at the end one worker would wait for the other."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
