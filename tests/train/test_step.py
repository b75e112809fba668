"""The updates of one training step: how many, and on which prompts."""

from pathlib import Path
from unittest.mock import patch

import torch

from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.train import step
from stable_opd_mcore.train.setup import build_run
from stable_opd_mcore.train.state import TrainState
from stable_opd_mcore.train.student import Student
from tests.parallel.launch import run_ranks
from tests.train.runs import tiny_config


def test_two_minibatches_give_two_updates_on_disjoint_prompts(tmp_path):
    run_ranks(1, take_a_step_of_two_minibatches, tmp_path)


def take_a_step_of_two_minibatches(_rank: int, _world_size: int, directory: Path) -> None:
    config = tiny_config(directory, "two", train={"minibatches": 2}, optimizer={"warmup_steps": 0})
    run = build_run(config, start_world(config.parallel, 0))
    prompts: list[set[str]] = []
    trained: list[list[int]] = []
    weights = [weights_of(run.student)]
    pack, update, adam = step.pack_minibatch, step.update, Student.update

    def recorded_pack(run, samples):
        prompts.append({sample.prompt_id for sample in samples})
        return pack(run, samples)

    def recorded_update(run, batches, *given):
        trained.append([token for batch in batches for token in batch.tokens_T.tolist()])
        return update(run, batches, *given)

    def recorded_adam(student, lr):
        adam(student, lr)
        weights.append(weights_of(student))

    with (
        patch.object(step, "pack_minibatch", recorded_pack),
        patch.object(step, "update", recorded_update),
        patch.object(Student, "update", recorded_adam),
    ):
        state = step.train_step(run, TrainState()).state
    stop_world()

    first, second = prompts
    assert len(first) == len(second) == config.rollout.prompts_per_step // 2
    assert not first & second
    assert trained[0] != trained[1]
    before, between, after = weights
    assert not torch.equal(before, between)
    assert not torch.equal(between, after)
    assert (state.optimizer_steps, state.step, state.weight_version) == (2, 1, 1)


def weights_of(student: Student) -> torch.Tensor:
    """A copy of all weights, in one vector."""
    return torch.cat([p.detach().flatten() for chunk in student.chunks for p in chunk.parameters()])
