"""One rank and two train alike on several sources, of which one has no golden solutions.

A resumed run asks for the rows at its cursor (test_resume.py); any cursor gives the rows of an
uninterrupted run (tests/data/test_source_order.py).
"""

from pathlib import Path

import pytest

from stable_opd_mcore.commands.train.train import train
from tests.parallel.launch import run_ranks
from tests.train.runs import metrics_of, tiny_config

REWARD = "def reward(row, response): return 0.25"
PATH = "synthetic:arithmetic"


def several(directory: Path, name: str):
    own = directory / "own.py"
    sources = [
        {"path": PATH, "name": "long", "options": {"min_operations": 4, "rows": 32}},
        {
            "path": PATH,
            "weight": 3,
            "reward": {"function": f"{own}:reward"},
            "columns": {"solution": None},
        },
    ]
    return tiny_config(
        directory,
        name,
        data={"train": sources},
        normaliser="per_source",
        train={"steps": 2, "micro_batch_tokens": 192},
        optimizer={"lr": 1e-3, "warmup_steps": 0, "schedule": "constant"},
    )


def trained(rank: int, world_size: int, directory: str) -> None:
    train(several(Path(directory), f"on_{world_size}"), show_progress=False)


def test_sources_are_sampled_weighed_and_measured(tmp_path):
    (tmp_path / "own.py").write_text(REWARD)
    for ranks in (1, 2):
        run_ranks(ranks, trained, str(tmp_path))
    runs = (metrics_of(tmp_path / name) for name in ("on_1", "on_2"))
    for one, other in zip(*runs, strict=True):
        for key in ("loss/total", "loss/pg", "loss/kl", "loss/sft", "grad_norm"):
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6)
        assert one["source/long/row_share"] == 0.25
        assert one["source/synthetic_arithmetic_train/accuracy"] == 0.25
        assert one["source/long/weight_share"] == pytest.approx(0.25)
        assert one["source/long/token_share"] == other["source/long/token_share"]
        kl = {key: one[f"source/{key}/kl"] for key in ("long", "synthetic_arithmetic_train")}
        assert min(kl.values()) < one["kl/teacher"] < max(kl.values())
