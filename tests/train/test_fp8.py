"""Runs with FP8 in all three models: resumed exactly, on other layouts, and what they write."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.train.loop import train
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.setup import build_run
from stable_opd_mcore.train.step import train_step
from tests.parallel.launch import run_ranks
from tests.train.runs import metrics_of, tiny_architecture, tiny_config

pytestmark = pytest.mark.slow

ALL_THREE = {"student": "blockwise", "teacher": "blockwise", "reference": "tensorwise"}
BLOCKWISE = dict.fromkeys(ALL_THREE, "blockwise")  # `tensorwise` scales a whole micro-batch
EMA = {"update": "ema", "decay": 0.5}


def config_of(directory: Path, name: str, steps: int = 4, **sections):
    return tiny_config(
        directory,
        name,
        student={"architecture": tiny_architecture(32, 2)},
        teacher={"architecture": tiny_architecture(64, 2)},
        rollout={"prompts_per_step": 4, "samples_per_prompt": 2},
        sampling={"max_new_tokens": 8},
        train={"steps": steps, "micro_batch_tokens": 96},
        **{"checkpoint": {"every": 0}, **sections},
    )


def train_runs(rank: int, world_size: int, directory: str, runs: dict) -> None:
    for name, sections in runs.items():
        train(config_of(Path(directory), name, 2, fp8=BLOCKWISE, **sections), show_progress=False)


def test_layouts_of_two_ranks_agree_with_one(tmp_path):
    layouts = {"pipeline": {"parallel": {"pipeline": 2}}, "data": {}}
    run_ranks(2, train_runs, str(tmp_path), layouts)
    train_runs(0, 1, str(tmp_path), {"one": {}})
    expected = metrics_of(tmp_path / "one")
    for name in layouts:
        for row, other in zip(metrics_of(tmp_path / name), expected, strict=True):
            for key in ("loss/total", "grad_norm"):
                assert row[key] == pytest.approx(other[key], rel=1e-6), (name, key)
    weights = load_file(tmp_path / "one" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert not [name for name in weights if "scale" in name]


@pytest.mark.parametrize("reference", [{"update": "every", "every": 1}, EMA])
def test_a_moving_reference_keeps_its_weights_unrounded(tmp_path, reference):
    config = config_of(tmp_path, "parts", fp8=ALL_THREE, reference=reference)
    run = build_run(config, start_world(config.parallel, 0))
    try:
        before = weights_of(run.student.chunks)
        train_step(run, TrainState())
        moving = run.moving_reference
        assert moving.kept is not moving.chunks
        after = weights_of(run.student.chunks)
        expected = (before + after) / 2 if reference is EMA else after
        torch.testing.assert_close(weights_of(moving.kept), expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(weights_of(moving.chunks), expected, rtol=1e-6, atol=1e-7)
    finally:
        run.engine.close()
        run.grader.close()
        stop_world()


def weights_of(chunks) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for c in chunks for p in c.parameters()])
