"""Training does what each objective is for, in a few steps of tiny models on generated problems."""

from pathlib import Path
from statistics import fmean

import pytest

from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.losses.objectives import OBJECTIVES
from tests.parallel.launch import run_ranks
from tests.train.runs import ALONE, metrics_of, tiny_architecture, tiny_config

pytestmark = pytest.mark.slow

STEPS = 20
WITH_TEACHER = [name for name, spec in OBJECTIVES.items() if spec.teacher != "none"]
EASY = {"rows": 64, "min_operations": 1, "max_operations": 1, "modulus": 3}


def column(directory: Path, key: str) -> list[float]:
    return [row[key] for row in metrics_of(directory) if row.get(key) is not None]


def distil(rank: int, world_size: int, directory: Path) -> None:
    for name in WITH_TEACHER:
        config = tiny_config(
            directory,
            name,
            student={"architecture": tiny_architecture(32, 2)},
            teacher={"architecture": tiny_architecture(32, 1)},
            objective={"name": name, **({"top_k": 8} if name in ("lsm", "student_topk") else {})},
            kl={"beta": 0.0},
            mixture={"lambda": 0.0},
            aggregation="token_mean",
            sampling={"max_new_tokens": 12},
            rollout={"prompts_per_step": 16, "samples_per_prompt": 2, "save": "none"},
            optimizer={"lr": 5e-3, "warmup_steps": 2},
            train={"steps": STEPS, "micro_batch_tokens": 4096},
        )
        train(config, show_progress=False)


def test_every_objective_with_a_teacher_comes_closer_to_it_in_twenty_steps(tmp_path):
    assert {*WITH_TEACHER, "sft", "grpo"} == OBJECTIVES.keys()  # the other two: below
    run_ranks(1, distil, tmp_path)
    for name in WITH_TEACHER:
        divergences = column(tmp_path / name, "kl/teacher")
        assert len(divergences) == STEPS, name
        assert fmean(divergences[-5:]) < 0.9 * fmean(divergences[:5]), name


def reinforce(rank: int, world_size: int, directory: Path) -> None:
    config = tiny_config(
        directory,
        "grpo",
        student={"architecture": tiny_architecture(32, 2)},
        **ALONE,
        data={key: {"path": "synthetic:arithmetic", "options": EASY} for key in ("train", "eval")},
        objective={"name": "grpo"},
        sampling={"max_new_tokens": 12},
        rollout={"prompts_per_step": 16, "samples_per_prompt": 8, "save": "none"},
        cold_start={"steps": 40, "lr": 3e-3, "prompts_per_step": 32, "warmup_steps": 5},
        optimizer={"lr": 5e-3, "warmup_steps": 2},
        train={"steps": 25, "micro_batch_tokens": 4096},
        evaluation={"every": 25, "temperature": 1.0, "num_samples": 4},
    )
    train(config, show_progress=False)


def test_sft_learns_the_task_and_grpo_improves_on_it(tmp_path):
    run_ranks(1, reinforce, tmp_path)
    losses = column(tmp_path / "grpo" / "cold_start", "loss/sft")
    assert fmean(losses[-5:]) < 0.5 * fmean(losses[:5])
    before, after = column(tmp_path / "grpo", "eval/accuracy")
    assert before > 0.2, "the cold start has taught the form"
    assert after > before + 0.08
