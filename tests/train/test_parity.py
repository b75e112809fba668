"""On the same rollouts every layout gives the losses and gradients of one rank, step by step."""

from pathlib import Path
from typing import Any

import pytest

from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.token_files import VALUES, TokenText, read_tokens
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.train.samples import overlap
from tests.parallel.launch import run_ranks
from tests.train.runs import ALONE, metrics_of, tiny_architecture, tiny_config

pytestmark = pytest.mark.slow

# Layouts of four ranks; data parallelism takes the ranks that are left. Each two kinds meet once,
# context and data parallelism in test_experts.py.
LAYOUTS = {
    "pp2_vpp2_dp2": {"pipeline": 2, "virtual_pipeline": 2},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
    "tp2_sp_cp2": {"tensor": 2, "context": 2, "sequence": True},
    "pp2_cp2": {"pipeline": 2, "context": 2},
}
GRPO_LAYOUT = "tp2_sp_cp2"
STEPS = 2
FEW_PROBLEMS = {"train": {"path": "synthetic:arithmetic", "options": {"rows": 8}}}


def opd_config(directory: Path, name: str, **sections: Any) -> Config:
    """Stable-OPD; the last step measures `overlap/*` and `stop/*` too."""
    overlap.EVERY = STEPS
    models = {  # a layer for each of the four stages
        "student": {"architecture": tiny_architecture(32, 4)},
        "teacher": {"architecture": tiny_architecture(48, 4)},
    }
    return tiny_config(directory, name, train={"steps": STEPS}, **models, **sections)


def solver_config(directory: Path) -> Config:
    """SFT with two updates a step. Some samples of the trained student are then right."""
    return tiny_config(
        directory,
        "solver",
        **ALONE,
        data=FEW_PROBLEMS,
        objective={"name": "sft"},
        optimizer={"lr": 5e-3},
        train={"steps": 20, "minibatches": 2},
    )


def grpo_config(directory: Path, name: str, **sections: Any) -> Config:
    """GRPO from the student of `solver_config`. Ratios of the second update are not 1."""
    return tiny_config(
        directory,
        name,
        teacher=None,
        data=FEW_PROBLEMS,
        student={"path": f"{directory}/solver/model", "architecture": None},
        objective={"name": "grpo"},
        aggregation="token_mean",  # the loss is then not zero, for any rewards
        mixture={"lambda": 0.0},
        train={"steps": 2, "minibatches": 2},
        **sections,
    )


def run_on_one_rank(rank: int, world_size: int, directory: str) -> None:
    train(opd_config(Path(directory), "one_rank"), show_progress=False)
    train(solver_config(Path(directory)), show_progress=False)
    train(grpo_config(Path(directory), "grpo", rollout={"samples_per_prompt": 4}), False)


def replay_on_every_layout(rank: int, world_size: int, directory: str) -> None:
    replay = {
        "engine": "replay",
        "replay_from": f"{directory}/one_rank",
        "prompts_per_step": 8,
        "samples_per_prompt": 2,
    }
    offloaded = {"rollout": replay, "memory": {"offload": ["frozen"]}}  # it changes no number
    for name, parallel in LAYOUTS.items():
        train(opd_config(Path(directory), name, parallel=parallel, **offloaded), False)
    replay |= {"replay_from": f"{directory}/grpo", "samples_per_prompt": 4}
    parallel = LAYOUTS[GRPO_LAYOUT]
    train(grpo_config(Path(directory), "grpo_4", parallel=parallel, rollout=replay), False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    run_ranks(1, run_on_one_rank, str(directory))
    run_ranks(4, replay_on_every_layout, str(directory))
    return directory


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_losses_gradients_and_values_of_tokens(runs, layout):
    one_rank = metrics_of(runs / "one_rank")
    other = metrics_of(runs / layout)
    assert [row["step"] for row in other] == list(range(1, STEPS + 1))
    for key in ("loss/total", "loss/pg", "loss/kl", "loss/sft", "grad_norm"):
        expected = [row[key] for row in one_rank]
        assert [row[key] for row in other] == pytest.approx(expected, rel=1e-4, abs=1e-7), key
    for key in (k for k in one_rank[-1] if k.startswith(("overlap/", "stop/"))):
        assert other[-1][key] == pytest.approx(one_rank[-1][key], rel=1e-4), key
    assert 0 < one_rank[-1]["overlap/ratio"] < 1
    same_values(tokens_of(runs / "one_rank"), tokens_of(runs / layout))


def tokens_of(run: Path) -> list[TokenText]:
    return [
        one for step in range(1, STEPS + 1) for one in read_tokens(RunDirectory(run).tokens(step))
    ]


def same_values(expected: list[TokenText], found: list[TokenText]) -> None:
    assert len(expected) == 8 * STEPS
    assert set(expected[-1].values) == set(VALUES)
    for one, other in zip(expected, found, strict=True):
        assert (one.prompt_id, one.sample_index) == (other.prompt_id, other.sample_index)
        assert one.pieces == other.pieces
        for key in VALUES:  # the student is the reference in the first step: no KL, no values
            zeros = [0.0] * len(one.pieces)
            found_values = other.values.get(key, zeros)
            assert found_values == pytest.approx(one.values.get(key, zeros), rel=1e-2, abs=1e-4)


def test_grpo_under_context_parallelism_gives_the_same_losses_and_gradients(runs):
    one_rank, other = metrics_of(runs / "grpo"), metrics_of(runs / "grpo_4")
    for row in one_rank:
        assert 0 < row["rollout/accuracy"] < 1
        assert row["advantage/abs_sum_regular"] > 10  # rewards differ within groups
    for key in ("loss/total", "loss/pg", "loss/kl", "grad_norm", "advantage/abs_sum_regular"):
        expected = [row[key] for row in one_rank]
        assert [row[key] for row in other] == pytest.approx(expected, rel=1e-4, abs=1e-6), key
