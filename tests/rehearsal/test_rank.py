"""One rank's setup, step and publish, in layouts of which each asks other ranks for something."""

from __future__ import annotations

import pytest

from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.rehearsal.rank import rehearse_rank
from tests.planning.cases import CONFIGS

LAYOUTS = [  # settings of the layout, rank of 8, its stage
    (["parallel.pipeline=2", "parallel.virtual_pipeline=2"], 0, 0),
    (["parallel.pipeline=2", "sampling.temperature=0.9", "train.minibatches=2"], 7, 1),
    (["parallel.tensor=2", "parallel.context=2", "parallel.sequence=true"], 0, 0),
]


EXPERTS = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
EXPERT_LAYOUTS = [  # settings of the layout, rank of 8
    (["parallel.expert=4", "parallel.tensor=2", "parallel.sequence=true"], 0),
    (
        [
            *("parallel.expert=2", "parallel.pipeline=2"),
            *("train.recompute=full", "train.moe_aux_loss_coeff=0.01"),
        ],
        4,
    ),
]


@pytest.mark.parametrize(("overrides", "rank"), EXPERT_LAYOUTS)
def test_a_rank_with_experts_steps_and_publishes_every_byte(overrides, rank):
    settings = {"model_type": "qwen3_moe", "norm_topk_prob": "true", **EXPERTS}
    options = [f"student.architecture.{name}={value}" for name, value in settings.items()]
    config = load_config(
        CONFIGS / "smoke_cpu.yaml", [*options, "rollout.engine=sglang", *overrides]
    )
    report = rehearse_rank(config, 8, rank, prompt_tokens=20, vocab_size=32)
    assert report.stage == rank // 4
    layer = 4 * 64 * 64 + 2 * 32 + 8 * 64 + 8 * 3 * 48 * 64 + 2 * 64
    parameters = 2 * layer + 64 + 2 * 32 * 64
    assert report.published_bytes == (4 * parameters if rank == 0 else 0)


@pytest.mark.parametrize(("overrides", "rank", "stage"), LAYOUTS)
def test_a_rank_steps_and_publishes_every_byte(overrides, rank, stage):
    architecture = "student.architecture.num_hidden_layers=4"
    options = [architecture, "rollout.engine=sglang", *overrides]
    config = load_config(CONFIGS / "smoke_cpu.yaml", options)
    report = rehearse_rank(config, 8, rank, prompt_tokens=20, vocab_size=32)
    assert report.stage == stage
    hidden, ffn = 64, 256
    layer = 4 * hidden * hidden + 3 * hidden + 3 * hidden * ffn + 2 * hidden
    parameters = 4 * layer + hidden + 2 * 32 * hidden
    assert report.published_bytes == (4 * parameters if rank == 0 else 0)  # rank 0 sends
    assert report.peak_bytes > 4 * parameters / 4
