"""The process from which the demo's workers are forked."""

import pytest

from tests.parallel.launch import start_process


@pytest.fixture(scope="session", autouse=True)
def forkserver() -> None:
    """Start the fork server of all tests: a demo would start one that lacks what others need."""
    start_process(int).join()
