"""A run over several sources: one rank and two train alike, and a resumed run as a whole one."""

from pathlib import Path

import pytest

from stable_opd_mcore.train.loop import train
from tests.parallel.launch import run_ranks
from tests.train.runs import metrics_of, tiny_config

REWARD = "def reward(row, response): return 0.25"
PATH = "synthetic:arithmetic"


def several(directory: Path, name: str, steps: int, **sections):
    own = directory / "own.py"
    sources = [
        {"path": PATH, "name": "long", "options": {"min_operations": 4, "rows": 32}},
        {"path": PATH, "weight": 3, "reward": {"function": f"{own}:reward"}},
    ]
    return tiny_config(
        directory,
        name,
        data={"train": sources},
        normaliser="per_source",
        train={"steps": steps, "micro_batch_tokens": 192},
        checkpoint={"every": 1},
        optimizer={"lr": 1e-3, "warmup_steps": 0, "schedule": "constant"},
        **sections,
    )


def trained(rank: int, world_size: int, directory: str) -> None:
    home = Path(directory)
    train(several(home, f"whole_{world_size}", 2), show_progress=False)
    if world_size == 1:
        train(several(home, "resumed", 1), show_progress=False)
        train(several(home, "resumed", 2), show_progress=False)


def test_sources_are_drawn_weighed_and_measured(tmp_path):
    (tmp_path / "own.py").write_text(REWARD)
    for ranks in (1, 2):
        run_ranks(ranks, trained, str(tmp_path))
    whole, two = metrics_of(tmp_path / "whole_1"), metrics_of(tmp_path / "whole_2")
    assert metrics_of(tmp_path / "resumed") == whole
    for one, other in zip(whole, two, strict=True):
        for key in ("loss/total", "loss/pg", "loss/kl", "loss/sft", "grad_norm"):
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6)
        assert one["source/long/row_share"] == 0.25
        assert one["source/synthetic_arithmetic_train/accuracy"] == 0.25
        assert one["source/long/weight_share"] == pytest.approx(0.25)
        assert one["source/long/token_share"] == other["source/long/token_share"]
        kl = {key: one[f"source/{key}/kl"] for key in ("long", "synthetic_arithmetic_train")}
        assert min(kl.values()) < one["kl/teacher"] < max(kl.values())
