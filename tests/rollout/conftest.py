"""A tiny student on disk, and a world of one rank."""

from pathlib import Path

import pytest

from tests.rollout.tiny import save_tiny


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))
