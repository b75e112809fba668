"""References and self-teachers: their weights against a definition, resumed, on two ranks."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.run import Run
from stable_opd_mcore.train.setup import build_run
from stable_opd_mcore.train.step import train_step
from tests.parallel.launch import run_ranks
from tests.train.runs import metrics_of, tiny_architecture, tiny_config

pytestmark = pytest.mark.slow

EMA = {"update": "ema", "decay": 0.5}
SELF = {"path": "self", "architecture": None, "prompt": "{{ problem }};{{ solution }}"}


def config_of(directory: Path, name: str, steps: int = 6, **sections):
    return tiny_config(
        directory,
        name,
        student={"architecture": tiny_architecture(16, 2)},
        teacher=sections.pop("teacher", {"architecture": tiny_architecture(32, 2)}),
        rollout={"prompts_per_step": 2, "samples_per_prompt": 2},
        sampling={"max_new_tokens": 8},
        train={"steps": steps, **sections.pop("train", {})},
        checkpoint={"every": 3, "keep": 9},
        **sections,
    )


def weights(chunks) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for c in chunks for p in c.parameters()])


@contextmanager
def started(config: Config) -> Iterator[Run]:
    run = build_run(RunInputs(config), start_world(config.parallel, 0))
    try:
        yield run
    finally:
        run.engine.close()
        run.grader.close()
        stop_world()


def three_steps(directory: Path, **sections):
    """The student's and the reference's weights before the first and after each of three steps."""
    with started(config_of(directory, "parts", **sections)) as run:
        state, students, references = TrainState(), [], []
        for number in range(4):
            if number:
                state = train_step(run, state).state
            students.append(weights(run.student.chunks))
            references.append(weights(run.moving["reference"].chunks))
        return students, references


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"memory": {"offload": ["frozen"]}},
        {"fp8": {"student": "blockwise", "teacher": "blockwise", "reference": "tensorwise"}},
    ],
)
def test_average_moves_by_its_decay_after_every_step(tmp_path, sections):
    """FP8 rounds what is multiplied, not the weights that are kept."""
    students, references = three_steps(tmp_path, reference=EMA, **sections)
    expected = students[0]
    for student, reference in zip(students[1:], references[1:], strict=True):
        expected = 0.5 * expected + 0.5 * student
        torch.testing.assert_close(reference, expected, atol=1e-6, rtol=1e-5)
    assert not torch.equal(students[1], students[0])


def test_copy_is_taken_every_so_many_steps(tmp_path):
    students, references = three_steps(tmp_path, reference={"update": "every", "every": 2})
    assert torch.equal(references[1], students[0])
    assert torch.equal(references[2], students[2])
    assert torch.equal(references[3], students[2])


def test_average_of_bf16_weights_is_kept_in_fp32(tmp_path):
    config = config_of(
        tmp_path, "parts", reference={"update": "ema", "decay": 0.999}, train={"precision": "bf16"}
    )
    with started(config) as run:
        moving = run.moving["reference"]
        before = weights(moving.kept)
        for chunk in run.student.chunks:
            for parameter in chunk.parameters():
                parameter.data.add_(0.125)
        student = weights(run.student.chunks)
        for step in range(1, 101):
            moving.follow(step, run.memory)
        share = 1 - 0.999**100
        torch.testing.assert_close(weights(moving.kept), torch.lerp(before, student, share))
        torch.testing.assert_close(
            weights(moving.chunks), weights(moving.kept).bfloat16().float(), atol=0, rtol=0
        )


def train_to(rank: int, world_size: int, directory: Path, *runs: tuple[str, int]) -> None:
    teacher = {"weights": "ema", "ema_decay": 0.6, **SELF}
    models = {"reference": EMA, "teacher": teacher, "parallel": {"tensor": world_size}}
    for name, steps in runs:
        train(config_of(directory, name, steps, **models), show_progress=False)
        if (name, steps) == ("resumed", 3):
            shutil.copytree(directory / name, directory / "layouts")


def test_moving_models_survive_a_resume_and_other_layouts(tmp_path):
    run_ranks(1, train_to, tmp_path, ("whole", 6), ("resumed", 3), ("resumed", 6))
    whole = metrics_of(tmp_path / "whole")
    assert metrics_of(tmp_path / "resumed") == whole
    run_ranks(2, train_to, tmp_path, ("layouts", 6))
    for key in ("kl/reference", "kl/teacher"):
        found, expected = (
            [row[key] for row in rows] for rows in (metrics_of(tmp_path / "layouts"), whole)
        )
        assert found == pytest.approx(expected, rel=1e-3)
        assert found[-1] != 0


@pytest.mark.parametrize("objective", ["opd", "gkd"])
def test_a_self_teacher_has_the_weights_of_its_setting(tmp_path, objective):
    """All are the student's in the first step, and only the average is a copy of its own."""
    first: list[float] = []
    for weights_of_teacher in ("frozen", "ema", "live"):
        teacher = {"weights": weights_of_teacher, "ema_decay": 0.6, **SELF}
        config = config_of(tmp_path, "parts", teacher=teacher, objective={"name": objective})
        with started(config) as run:
            chunks = run.teacher._scorer.chunks
            shared = {"frozen": run.reference.chunks, "live": run.student.chunks, "ema": chunks}
            assert chunks[0] is shared[weights_of_teacher][0]
            before = weights(run.student.chunks)
            metrics = train_step(run, TrainState()).metrics
            after = weights(run.student.chunks)
            follows = {"frozen": before, "live": after, "ema": 0.6 * before + 0.4 * after}
            expected = follows[weights_of_teacher]
            torch.testing.assert_close(weights(chunks), expected, atol=1e-6, rtol=1e-5)
            assert not torch.equal(before, after)
            first += [metrics["loss/total"].value(), metrics["grad_norm"].value()]
    assert first[:2] == first[2:4] == first[4:]
