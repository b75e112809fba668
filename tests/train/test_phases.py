"""A run whose parts move to the host between phases trains to the same bits as one whose do not.

An engine that takes the device as colocated servers do counts what is left of the trainer on it.
"""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.config.training import MemoryConfig
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.parallel.device_memory import DeviceMemory
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.train import loop
from stable_opd_mcore.train.held_out import evaluate_student
from stable_opd_mcore.train.persistence.checkpoint import CheckpointSaver
from stable_opd_mcore.train.run import Run
from stable_opd_mcore.train.setup import build_run
from stable_opd_mcore.train.step import train_step
from tests.parallel.launch import run_ranks
from tests.train.runs import ALONE, VOLATILE, problems, tiny_config

pytestmark = pytest.mark.slow

LAYOUTS = {"pp2": {"pipeline": 2}, "dp2": {}}
EVERYTHING = MemoryConfig(offload=("student", "optimizer", "gradients", "frozen"))
HELD_OUT = problems(64, 4)


class Lending(RolloutEngine):
    """The embedded engine in place of colocated servers: everything leaves before it samples."""

    def __init__(self, engine: RolloutEngine, memory: DeviceMemory) -> None:
        self._engine, self._memory = engine, memory
        self.weight_version = 0
        self.largest_left: list[int] = []  # bytes of the trainer's largest tensor, at each call
        self.num_given_back = 0

    def publish(self, weight_version: int) -> None:
        self._engine.publish(weight_version)

    def generate(self, prompts, sampling, *, step):
        if not self._memory.is_lent:
            self._memory.lend(self._give_back, keep=("student",))
        self._memory.keep_only()
        self.largest_left.append(max(bytes_left()))
        self._memory.bring("student")  # this "server" has no copy of the weights
        rollouts = self._engine.generate(prompts, sampling, step=step)
        self._memory.keep_only()
        return rollouts

    def _give_back(self) -> None:
        self.num_given_back += 1


def bytes_left() -> list[int]:
    """Sizes of this process's floating-point storages; host copies are uint8."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
    return [t.untyped_storage().nbytes() for t in tensors if t.is_floating_point()]


def check_layouts(rank: int, world_size: int, directory: str) -> None:
    for layout, sizes in LAYOUTS.items():
        precision = "bf16" if layout == "dp2" else "fp32"
        stays = tiny_config(
            Path(directory),
            layout,
            parallel=sizes,
            data=HELD_OUT,
            sampling={"max_new_tokens": 5},  # gloo's round trips for a token are most of the time
            rollout={"prompts_per_step": 4},
            train={"precision": precision},
        )
        moves = stays.model_copy(update={"memory": EVERYTHING})
        if layout == "pp2":
            assert _train(moves, num_given_back=[1]) == _train(stays, num_given_back=[1])
            continue
        expected = _train(stays, num_given_back=[1, 2])
        assert _train(moves, num_given_back=[1, 3], save_after=1) == expected
        assert _train(moves, num_given_back=[1]) == expected[1:], "resumed after step 1"


def _train(config: Config, *, num_given_back: list[int], save_after: int | None = None) -> list:
    """Steps to step 3, with an evaluation after the first; what each of them left.

    Args:
        num_given_back: how often the servers have released the device after each step.
    """
    left = []
    world = start_world(config.parallel, config.train.seed)
    run = build_run(RunInputs(config), world)
    engine = Lending(run.engine, run.memory)
    run = replace(run, engine=engine, held_out_engine=engine)
    with run.grader:
        state = loop._resume(run)
        for expected in num_given_back:
            result = train_step(run, state)
            state = result.state
            assert engine.num_given_back == expected
            run.memory.hold("student", "optimizer")
            values = result.metrics.values_by_key()
            metrics = {k: v for k, v in values.items() if not k.startswith(VOLATILE)}
            left.append((metrics, [tensor.double().sum().item() for tensor in _tensors(run)]))
            if state.step == 1:
                evaluate_student(run, state)  # the next step samples while the device is still lent
            if state.step == save_after:
                saver = CheckpointSaver(config.run.files.checkpoints, run.student, keep=1)
                loop._save(run, state, saver)
    if config.memory.offload:
        assert max(engine.largest_left) < 1024  # the smallest matrix has 2 KiB
    else:
        assert min(engine.largest_left) > 4096
    stop_world()
    return left


def _tensors(run: Run) -> list[torch.Tensor]:
    weights = [weight for chunk in run.student.chunks for weight in chunk.parameters()]
    return [*weights, *run.student.optimizer_tensors()]


def test_offloaded_parts_change_no_bit_and_leave_nothing(tmp_path):
    run_ranks(2, check_layouts, str(tmp_path))


def test_a_part_that_does_not_exist_is_refused(tmp_path):
    grpo = {"objective": {"name": "grpo"}, **ALONE}
    config = tiny_config(tmp_path, "x", memory={"offload": ["frozen"]}, **grpo)
    with pytest.raises(ConfigError, match=r"`frozen`.*objective.name=grpo.*leave it out"):
        train(config, show_progress=False)
    stop_world()
    with pytest.raises(ConfigError, match=r"`student`.*rollout.engine=embedded.*leave it out"):
        tiny_config(tmp_path, "x", memory={"offload": ["student"]})
