"""Seconds by phase follow work, hardware and layout."""

import pytest

from stable_opd_mcore.commands.plan.plan import Plan, make_plan
from stable_opd_mcore.commands.plan.planned_run import Work
from stable_opd_mcore.placement.hardware import Cluster
from tests.commands.plan.cases import NODE, config_7b


def test_seconds_follow_work_and_hardware(tmp_path):
    plan = make_plan(config_7b(tmp_path), NODE)
    longer = make_plan(config_7b(tmp_path), NODE, work=Work(response_tokens=8192))
    more = make_plan(config_7b(tmp_path), Cluster(nodes=4, gpus_per_node=8))
    assert longer.seconds.update > 1.9 * plan.seconds.update
    assert more.seconds.score == pytest.approx(plan.seconds.score / 4, rel=0.1)
    assert plan.gpu_hours == pytest.approx(plan.seconds.total * 800 * 8 / 3600)


def test_sft_ignores_a_teacher_that_other_objectives_share(tmp_path):
    sft = ("objective.name=sft", "kl.beta=0", "mixture.lambda=0", "rollout.samples_per_prompt=1")
    plan = make_plan(config_7b(tmp_path, *sft), NODE)
    assert plan.seconds.score == 0
    assert "teacher" not in plan.table()


def test_recompute_adds_a_forward_pass_or_that_of_the_mlps(tmp_path):
    def update(*overrides: str) -> float:
        return make_plan(config_7b(tmp_path, *overrides), NODE).seconds.update

    for length in (4096, 32768):
        none, selective, full = (
            update(f"train.recompute={how}", f"sampling.max_new_tokens={length}")
            for how in ("none", "selective", "full")
        )
        mlp, projections = 3 * 3584 * 18944, 2 * (3584 + 512) * 3584
        scores = 2 * 3584 * (256 + length / 2) / 2
        expected = mlp / (mlp + projections + scores)
        assert (selective - none) / (full - none) == pytest.approx(expected)


def test_offloaded_parts_are_copied_once_each_way_a_step(tmp_path):
    def plan(*overrides: str) -> Plan:
        return make_plan(config_7b(tmp_path, *overrides), NODE)

    none = plan("memory.offload=[]")
    assert none.seconds.offload == 0
    held = {item.name: item.bytes for item in none.memory.components}
    rate = 64e9 * 0.8
    once = (held["teacher weights"] + held["reference weights"]) / rate
    expected = {
        "optimizer": 2 * held["Adam's state"] / rate,
        "student": 2 * held["student weights"] / rate,
        "frozen": once,
        "gradients": 0,
    }
    for part, seconds in expected.items():
        assert plan(f"memory.offload=[{part}]").seconds.offload == pytest.approx(seconds)
    assert plan().seconds.offload == pytest.approx(sum(expected.values()))


def test_servers_work_while_the_trainer_does_where_rollouts_may_lag(tmp_path):
    apart = ("rollout.sglang.placement=disaggregated", "rollout.max_staleness=")
    cluster = Cluster(1, 8, server_nodes=1)
    now, ahead = (
        make_plan(config_7b(tmp_path, apart[0], apart[1] + k), cluster).seconds for k in "01"
    )
    assert ahead.total == pytest.approx(max(now.rollout, now.total - now.rollout))
