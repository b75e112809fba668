"""Whole rehearsals of shipped configs, and mistakes that each is refused with its numbers."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from stable_opd_mcore.cli import app
from stable_opd_mcore.commands.plan.memory import stage_plan
from stable_opd_mcore.commands.plan.planned_run import planned_run, read_models
from stable_opd_mcore.commands.rehearse.worlds import (
    StageReport,
    longest_work,
    rehearse_stage,
    rehearse_worlds,
    with_few_prompts,
)
from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.placement.hardware import Cluster
from tests.commands.plan import cases
from tests.commands.plan.cases import CONFIGS, NODE
from tests.config.cases import layered

pytestmark = pytest.mark.slow


def rehearse(name: str, cluster: Cluster, *overrides: str, stage: int = 0) -> StageReport:
    config = load_config(CONFIGS / f"{name}.yaml", layered(*overrides))
    return rehearse_stage(config, cluster, "h200", stage)


# The first of four stages holds two micro-batches of three rollouts and one golden solution.
GOLDEN_IN_FLIGHT = ("parallel.pipeline=4", "parallel.tensor=2", "rollout.prompts_per_step=2")
GOLDEN_IN_FLIGHT += ("rollout.samples_per_prompt=4", "train.micro_batch_tokens=25344")
LORA = ("student.lora.rank=32", "student.lora.path=absent")
NOT_TENSORS_HERE = ("weight sync buckets", "colocated server")


@pytest.mark.parametrize(
    ("overrides", "stage", "most"),
    [
        ((), 0, 1.02),
        (("parallel.pipeline=2",), 1, 1.02),
        (GOLDEN_IN_FLIGHT, 0, 1.2),
        (LORA, 0, 1.1),
    ],
)
def test_the_plan_has_the_memory_of_the_fake_world(tmp_path, monkeypatch, overrides, stage, most):
    """Torch's layers hold more than the plan's for a moment, and save the same for a recompute."""
    monkeypatch.setitem(cases.QWEN_7B, "num_hidden_layers", 4)
    budget = ("train.micro_batch_tokens=8448", "train.recompute=full")
    config = cases.config_7b(tmp_path, *budget, *overrides)
    report = rehearse_stage(config, Cluster(1, 8, 1), "h200", stage)
    rehearsed = with_few_prompts(replace(report.run, config=config))
    plan = stage_plan(rehearsed, stage)
    held = [item for item in plan.components if not item.name.startswith(NOT_TENSORS_HERE)]
    planned = replace(plan, components=tuple(held)).peak_bytes
    assert 1 <= report.rank.peak_bytes / planned < most


@pytest.mark.parametrize(
    ("name", "overrides", "prompts", "samples", "tokens"),
    [
        # Two ranks, one micro-batch of three sequences each; eight sequences would make two.
        ("recipes/dr_grpo_7b", (), 1, 6, 3 * 8448),
        # Two stages need twice as many micro-batches. The golden solution has one of its own.
        ("stable_opd_7b", ("parallel.pipeline=2", "parallel.tensor=2"), 1, 12, 3 * 8448),
        ("stable_opd_7b", ("train.minibatches=2",), 2, 6, 3 * 8448),
        ("sft_7b", (), 6, 1, 3 * 8448),
        ("recipes/dr_grpo_7b", ("train.micro_batch_tokens=65536",), 1, 14, 7 * 8448),
        # A rank has four sequences, fewer than fit in a micro-batch.
        (
            "recipes/dr_grpo_7b",
            ("rollout.prompts_per_step=1", "train.micro_batch_tokens=65536"),
            *(1, 8, 7 * 8448),
        ),
    ],
)
def test_few_prompts_fill_the_micro_batches_of_the_pipeline(
    name, overrides, prompts, samples, tokens
):
    config = load_config(CONFIGS / f"{name}.yaml", layered(*overrides))
    work = longest_work(config, read_models(config).student)
    few = with_few_prompts(planned_run(config, NODE, work=work)).config
    assert few.train.micro_batch_tokens == tokens
    assert (few.rollout.prompts_per_step, few.rollout.samples_per_prompt) == (prompts, samples)


NO_SEQUENCE = "parallel.sequence=false"
MISTAKES = {  # config, trainer nodes, server nodes, settings -> what the refusal says
    "stages do not divide layers": (
        ("stable_opd_7b", 3, 1, "parallel.pipeline=3", "parallel.tensor=1", NO_SEQUENCE),
        "28 layers do not divide into parallel.pipeline=3",
    ),
    "a micro-batch is less than a sequence": (
        ("stable_opd_7b", 1, 0, "train.micro_batch_tokens=4096"),
        r"train.micro_batch_tokens=4096 .* 256 prompt tokens .*=8192.* set .*=8448 or more"
        r", or lower sampling\.max_new_tokens to 3840",
    ),
    "responses fill the window": (
        ("stable_opd_7b", 1, 0, "sampling.max_new_tokens=16384"),
        "max_new_tokens=16384 leaves no room for a prompt in the student's window of 16384",
    ),
    "idle GPUs": (
        ("stable_opd_7b", 1, 1, "rollout.sglang.num_servers=1", "rollout.sglang.tensor=4"),
        "1 server of 4 GPUs on the 8 GPUs .* 4 would be idle. Set both to null",
    ),
    "expert ranks without experts": (
        ("smoke_cpu", 1, 0, "parallel.expert=2"),
        "parallel.expert=2: qwen2 and qwen2 have no experts to distribute",
    ),
    "an unknown model": (
        ("stable_opd_7b", 1, 0, "student.path=/nowhere"),
        "student.path=/nowhere: no such directory; .* config.json",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused_with_numbers_and_remedy(mistake):
    (name, nodes, server_nodes, *overrides), message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message):
        rehearse(name, Cluster(nodes, 8, server_nodes), *overrides)


def test_worlds_that_are_not_divided_are_skipped_and_said():
    lines: list[str] = []
    config = load_config(CONFIGS / "smoke_cpu.yaml", ["parallel.tensor=2", "parallel.pipeline=2"])
    clusters = [Cluster(1, 2), Cluster(1, 4)]
    assert rehearse_worlds([config], clusters, "h200", lines.append, layers=1)
    assert all("torch's layers (layers: 1); " in line for line in lines[2:])  # the teacher has two
    assert "1 x 2 h200  skipped: " in lines[1]
    assert "= 4 does not divide 2" in lines[1]
    assert [line.rpartition("  ")[2] for line in lines[2:]] == ["ok", "ok"]  # two stages
    assert not rehearse_worlds([config], clusters[:1], "h200", lines.append)
    assert "no world is divided by its layout" in lines[-1]


def test_the_command_ends_with_code_1_where_a_config_is_refused():
    arguments = ["rehearse", str(CONFIGS / "smoke_cpu.yaml"), "train.micro_batch_tokens=16"]
    printed = CliRunner().invoke(app, [*arguments, "--nodes", "1"])
    assert printed.exit_code == 1
    assert "REFUSED: train.micro_batch_tokens=16 is less than" in printed.stdout
    assert "or lower" not in printed.stdout  # a longer prompt would take the room
