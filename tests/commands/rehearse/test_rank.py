"""One rank's setup, step and publish, in layouts of which each asks other ranks for something."""

import pytest
import torch

from stable_opd_mcore.commands.rehearse.rank import _delta_rule, rehearse_rank
from stable_opd_mcore.config.cold_start import cold_start_config
from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.models.layers.gated_delta_net import delta_rule
from tests.commands.plan.cases import CONFIGS

EXPERTS = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS = {  # settings of the student -> its parameters
    "dense": (
        {"num_hidden_layers": 4},
        4 * (4 * 64 * 64 + 3 * 64 + 3 * 64 * 256 + 2 * 64) + 64 + 2 * 32 * 64,
    ),
    "experts": (
        {"model_type": "qwen3_moe", "norm_topk_prob": "true", **EXPERTS},
        2 * (4 * 64 * 64 + 2 * 32 + 8 * 64 + 8 * 3 * 48 * 64 + 2 * 64) + 64 + 2 * 32 * 64,
    ),
}
# The student as its own teacher, with a prompt of its own.
SELF = ["teacher.architecture=null", "teacher.path=self", "teacher.prompt='{{ solution }}'"]
SERVED = ["teacher.architecture=null", "teacher.engine=sglang", "teacher.api_key_file=absent"]
URLS = [*SERVED, "teacher.urls=['http://absent:1', 'http://absent:2']"]
SOURCE = "{path: synthetic:arithmetic, name: %s}"
ROUTES = [*SERVED, f"data.train=[{SOURCE % 'a'}, {SOURCE % 'b'}]"]
ROUTES += ["teacher.routes={a: ['http://absent:1'], b: ['http://absent:2']}"]
CUT = ["parallel.tensor=2", "parallel.context=2", "parallel.sequence=true"]
LAYOUTS = [  # student, settings of the layout, rank of 8, its stage
    ("dense", ["parallel.pipeline=2", "parallel.virtual_pipeline=2", *SELF], 0, 0),
    ("dense", ["parallel.pipeline=2", "sampling.temperature=0.9", "train.minibatches=2"], 7, 1),
    ("dense", [*CUT, *SELF, "teacher.weights=ema"], 0, 0),
    ("dense", [*CUT, *SELF, "student.lora.rank=4", "train.recompute=full"], 0, 0),
    ("dense", ["parallel.pipeline=2", *ROUTES], 4, 1),
    ("dense", [*CUT, *URLS, "objective.name=lsm", "objective.top_k=4"], 0, 0),
    ("experts", ["parallel.expert=4", "parallel.tensor=2", "parallel.sequence=true"], 0, 0),
    ("experts", ["parallel.expert=2", "parallel.pipeline=2", "train.recompute=full"], 4, 1),
    ("experts", ["parallel.expert=2", "parallel.pipeline=2", "student.lora.rank=4"], 0, 0),
]


@pytest.mark.parametrize(("model", "overrides", "rank", "stage"), LAYOUTS)
def test_a_rank_steps_and_publishes_every_byte(model, overrides, rank, stage):
    settings, parameters = MODELS[model]
    options = [f"student.architecture.{name}={value}" for name, value in settings.items()]
    options += ["rollout.engine=sglang", "rollout.prompts_per_step=8"]
    config = load_config(CONFIGS / "smoke_cpu.yaml", [*options, *overrides])
    report = rehearse_rank(config, 8, rank, prompt_tokens=20, vocab_size=32)
    assert report.stage == stage
    assert report.published_bytes == (4 * parameters if rank == 0 else 0)  # rank 0 sends
    assert report.peak_bytes > 4 * parameters / 4


def test_a_cold_start_keeps_the_expert_ranks_of_a_run_whose_teacher_alone_has_experts():
    """The layout of a process cannot change between its phases."""
    experts = {"model_type": "qwen3_moe", "norm_topk_prob": "true", **EXPERTS}
    options = [f"teacher.architecture.{name}={value}" for name, value in experts.items()]
    cold = ["cold_start.steps=2", "cold_start.lr=1e-3", "cold_start.prompts_per_step=2"]
    config = load_config(CONFIGS / "smoke_cpu.yaml", [*options, *cold, "parallel.expert=2"])
    rehearse_rank(config, 2, 0, prompt_tokens=20, vocab_size=32)
    rehearse_rank(cold_start_config(config), 2, 0, prompt_tokens=20, vocab_size=32)


def test_the_delta_rule_without_its_loop_has_the_outputs_of_the_definition():
    query, key = torch.rand(2, 2, 70, 3, 4, dtype=torch.bfloat16).requires_grad_()
    inputs = query, key, torch.rand(2, 70, 3, 5), -torch.rand(2, 70, 3), torch.rand(2, 70, 3)
    for own, defined in zip(_delta_rule(*inputs), delta_rule(*inputs), strict=True):
        assert (own.shape, own.dtype) == (defined.shape, defined.dtype)
    assert _delta_rule(*inputs)[0].requires_grad
