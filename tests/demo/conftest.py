"""The process from which the demo's workers are forked."""

import pytest

from tests.parallel.launch import start_process


@pytest.fixture(scope="session", autouse=True)
def forkserver() -> None:
    """Start it with what all tests import, before a demo starts it with less."""
    start_process(int).join()
