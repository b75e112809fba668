"""A tiny student on disk, and a world of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.parallel.world import start_world, stop_world
from tests.rollout.tiny import save_tiny


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def world():
    torch.set_num_threads(1)
    yield start_world(ParallelConfig(), seed=0)
    stop_world()
