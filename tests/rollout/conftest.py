"""A tiny student on disk, and pools of environments."""

from pathlib import Path

import pytest

from stable_opd_mcore.host.user_code import read_user_function
from stable_opd_mcore.rollout.environments import EnvironmentPool
from tests.rollout.tiny import save_tiny


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def pool_of(tmp_path):
    """A pool of a function in the given source; it ends with the test."""
    pools = []

    def make(source, name, workers=1, timeout_seconds=20.0, memory_gib=4.0):
        path = tmp_path / f"envs{len(pools)}.py"
        path.write_text(source)
        function = read_user_function(f"{path}:{name}", ("row", "seed"))
        pools.append(EnvironmentPool(function, workers, timeout_seconds, memory_gib))
        return pools[-1]

    yield make
    for pool in pools:
        pool.shutdown()
