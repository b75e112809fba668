"""A deterministic run: its environment, Megatron's own setting, and two steps with identical rows.

No GPU has run it. On a CPU, torch still refuses operations without a deterministic form.
"""

import os
from pathlib import Path

import torch

from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import transformer_config
from stable_opd_mcore.parallel.world import start_world, stop_world
from tests.parallel.launch import run_ranks
from tests.train.runs import metrics_of, tiny_architecture, tiny_config


def _train_twice(rank: int, world_size: int, directory: Path) -> None:
    for name in ("first", "second"):
        settings = {"steps": 2, "deterministic": name == "first"}
        train(tiny_config(directory, name, train=settings), show_progress=False)
        assert torch.are_deterministic_algorithms_enabled()  # already in the first run
    assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    world = start_world(ParallelConfig(), seed=0)
    architecture = read_architecture(tiny_architecture(32, 4))
    assert transformer_config(
        architecture, world, "fp32", "none", fp8=None, trainable=True
    ).deterministic_mode
    stop_world()


def test_a_deterministic_run_takes_steps_and_tells_megatron(tmp_path: Path) -> None:
    run_ranks(1, _train_twice, tmp_path)
    assert metrics_of(tmp_path / "first") == metrics_of(tmp_path / "second")
