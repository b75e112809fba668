"""The order of the tests, the bytecode of the processes that they start, quick imports."""

import gc
import os
import sys

import pytest

# Even where the user wants no bytecode: rewriting and compiling Megatron takes each process 2 s.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

gc.disable()  # while all test files and what they import are loaded: there is nothing to collect


def pytest_collection_finish() -> None:
    """What was imported stays: collections pass it over."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of slow tests come first: at the end one worker would wait for the other."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
