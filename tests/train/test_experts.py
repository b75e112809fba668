"""A mixture of experts gives the numbers of one rank on every layout, resumed from another.

The embedded engine samples the rollouts on each layout, so decoding is compared, too.
"""

from pathlib import Path
from typing import Any

import pytest

from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.config.schema import Config
from tests.parallel.launch import run_ranks
from tests.train.layouts import ROLLOUT, short_config, train_through
from tests.train.runs import metrics_of, tiny_architecture

pytestmark = pytest.mark.slow

# Layouts of four ranks, in the order in which the run goes through them; data parallelism takes
# the ranks that are left.
LAYOUTS = {
    "ep2_tp2": {"expert": 2, "tensor": 2, "sequence": True},
    "ep2_pp2": {"expert": 2, "pipeline": 2},
    "ep4": {"expert": 4},
    "cp2_ep2": {"expert": 2, "context": 2},
}
MIXTURE = tiny_architecture(
    16,
    2,
    model_type="qwen3_moe",
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    norm_topk_prob=True,
)
SINKS = tiny_architecture(
    16,
    2,
    model_type="gpt_oss",
    head_dim=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    intermediate_size=12,
    sliding_window=5,
    rope_parameters={"rope_type": "default"},
)
OF_SINKS = {name: LAYOUTS[name] for name in ("ep2_tp2", "ep2_pp2")}
AHEAD = {"max_staleness": 1, "partial": True}
# Layout and sections of what the run through LAYOUTS lacks: rollouts ahead, and a dense student.
OTHERS: dict[str, tuple[dict, dict]] = {
    "ahead": ({"expert": 4, "tensor": 2, "sequence": True}, {"rollout": ROLLOUT | AHEAD}),
    "dense_student": (
        LAYOUTS["ep4"],
        {
            "student": {"architecture": tiny_architecture(16, 2)},
            "teacher": {"architecture": MIXTURE},
        },
    ),
}
KEYS = ("loss/total", "loss/pg", "grad_norm", "moe/load_max_over_mean", "moe/unused_experts")


def config_of(directory: Path, name: str, steps: int = 2, **sections: Any) -> Config:
    models = {
        "student": {"architecture": MIXTURE},
        "teacher": {"architecture": tiny_architecture(24, 2)},
    }
    return short_config(directory, name, steps, **models | sections)


def on_one_rank(rank: int, world_size: int, directory: str) -> None:
    config = config_of(Path(directory), "one_rank", len(LAYOUTS))
    train(config, show_progress=False)
    student = {"student": {"architecture": SINKS}}
    config = config_of(Path(directory), "sinks_one_rank", len(OF_SINKS), **student)
    train(config, show_progress=False)
    for name, (_, sections) in OTHERS.items():
        train(config_of(Path(directory), f"{name}_one_rank", **sections), show_progress=False)


def on_every_layout(rank: int, world_size: int, directory: str) -> None:
    path = Path(directory)
    for name, (parallel, sections) in OTHERS.items():
        train(config_of(path, name, parallel=parallel, **sections), show_progress=False)
    train_through(LAYOUTS, config_of, path, "resumed")
    train_through(OF_SINKS, config_of, path, "sinks", student={"architecture": SINKS})


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    run_ranks(1, on_one_rank, str(directory))
    run_ranks(4, on_every_layout, str(directory))
    return directory


@pytest.mark.parametrize(
    ("name", "of_one_rank"),
    [("resumed", "one_rank"), *((name, f"{name}_one_rank") for name in ("sinks", *OTHERS))],
)
def test_losses_gradients_and_loads_are_those_of_one_rank(runs, name, of_one_rank):
    found, expected = metrics_of(runs / name), metrics_of(runs / of_one_rank)
    assert len(found) == len(expected) > 1
    keys = KEYS if name != "dense_student" else KEYS[:3]
    for key in keys:
        wanted = [row[key] for row in expected]
        assert [row[key] for row in found] == pytest.approx(wanted, rel=1e-4, abs=1e-7), key


def test_loads_are_of_all_experts_and_only_of_a_student_that_has_them(runs):
    for row in metrics_of(runs / "one_rank"):
        assert 1 < row["moe/load_max_over_mean"] <= 4  # 2 of 8 experts are chosen
        assert 0 <= row["moe/unused_experts"] <= 6
    assert not any(key.startswith("moe/") for key in metrics_of(runs / "dense_student")[0])
