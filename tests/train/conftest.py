"""The run of the tests of one step's parts."""

import pytest
import torch

from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.train.setup import build_run
from tests.train.runs import tiny_architecture, tiny_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny run on one rank in this process; a step has two minibatches of one prompt each."""
    torch.set_num_threads(1)
    small = {"architecture": tiny_architecture(32, 1)}
    config = tiny_config(
        tmp_path_factory.mktemp("step"),
        "parts",
        student=small,
        teacher=small,
        rollout={"prompts_per_step": 2, "samples_per_prompt": 2},
        train={"steps": 10, "micro_batch_tokens": 64, "minibatches": 2},
        optimizer={"lr": 1e-3, "warmup_steps": 0, "schedule": "linear"},
    )
    yield build_run(RunInputs(config), start_world(config.parallel, 0))
    stop_world()
