"""Memory by component: which parts a config needs, and how they follow the layout."""

from __future__ import annotations

import pytest

from stable_opd_mcore.planning.plan import Cluster, Plan, make_plan
from tests.planning.cases import NODE, config_7b

EMBEDDED = "rollout.engine=embedded"


def components(plan: Plan) -> dict[str, float]:
    return {item.name: item.bytes for item in plan.memory.components}


def test_weights_gradients_and_optimizer_follow_the_layout(tmp_path):
    held = components(make_plan(config_7b(tmp_path, EMBEDDED), NODE))
    of_rank = held["student weights"] / 2  # bf16
    assert of_rank == pytest.approx(7.6156e9 / 4, rel=1e-3)  # Qwen2.5-7B over four tensor ranks
    assert held["gradients, fp32"] == 4 * of_rank
    assert held["Adam's state"] == 12 * of_rank / 2  # over two data-parallel ranks
    assert held["teacher weights"] == held["reference weights"] == held["student weights"]
    assert held["KV cache"] == 128 * (256 + 8192) * 2 * 28 * 512 * 2 / 4


@pytest.mark.parametrize(
    ("override", "gone"),
    [
        ("kl.beta=0", "reference weights"),
        ("rollout.engine=sglang rollout.sglang.placement=colocated", "KV cache"),
        ("kl.estimator=k3", "hidden states of the scorers"),
    ],
)
def test_a_part_that_is_not_used_takes_nothing(tmp_path, override, gone):
    assert gone in components(make_plan(config_7b(tmp_path, EMBEDDED), NODE))
    plan = make_plan(config_7b(tmp_path, EMBEDDED, *override.split()), NODE)
    assert not components(plan).get(gone)


def test_full_recompute_and_smaller_budgets_need_less(tmp_path):
    def update(*overrides: str) -> float:
        return make_plan(config_7b(tmp_path, *overrides), NODE).memory.bytes_in("update")

    recompute = [update(f"train.recompute={how}") for how in ("full", "selective", "none")]
    assert sorted(recompute) == recompute
    assert recompute[0] < update("train.micro_batch_tokens=16384") < update()


def test_the_largest_budget_fits_and_the_next_does_not(tmp_path):
    budget = make_plan(config_7b(tmp_path), NODE, gpu="h100").largest_micro_batch
    assert budget is not None
    for tokens, fits in ((budget, True), (budget + 1024, False)):
        config = config_7b(tmp_path, f"train.micro_batch_tokens={tokens}")
        assert make_plan(config, NODE, gpu="h100").memory.fits == fits


def test_one_gpu_does_not_hold_a_7b_run(tmp_path):
    config = config_7b(tmp_path, "parallel.tensor=1", "parallel.sequence=false")
    plan = make_plan(config, Cluster(nodes=1, gpus_per_node=1))
    assert not plan.memory.fits
    assert plan.largest_micro_batch is None
    assert "DOES NOT FIT" in plan.table()


def test_another_temperature_keeps_a_copy_of_the_golden_logits(tmp_path):
    def logits(*overrides: str) -> float:
        held = components(make_plan(config_7b(tmp_path, *overrides), NODE))
        return held["loss: logits, hidden states"]

    copy = logits("sampling.temperature=0.8") - logits()
    assert copy == 2 * 4 * 1024 * 152064 / 4  # bf16; four shards of as many times more rows
    assert logits("sampling.temperature=0.8", "mixture.lambda=0") == logits("mixture.lambda=0")


def test_offloaded_parts_are_held_in_the_phases_that_need_them(tmp_path):
    def held(phase: str, *overrides: str) -> set[str]:
        memory = make_plan(config_7b(tmp_path, *overrides), NODE).memory
        return {item.name for item in memory.components if phase in item.phases}

    colocated = ("rollout.engine=sglang", "rollout.sglang.placement=colocated")
    server = "colocated server: weights, KV cache"
    assert held("rollout", *colocated) == {"student weights", "weight sync buckets", server}
    memory = make_plan(config_7b(tmp_path, *colocated), NODE).memory
    (share,) = (item.bytes for item in memory.components if item.name == server)
    assert share == 139 / 2 * 2**30  # SGLang's --mem-fraction-static when colocated
    assert "teacher weights" in held("score", *colocated)
    assert "Adam's state" not in held("score", *colocated)
    assert "teacher weights" not in held("update", "memory.offload=[frozen]")
    assert "Adam's state" in held("score", "memory.offload=[frozen]")
