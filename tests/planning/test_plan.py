"""The plan of whole configs: memory by phase, seconds, layouts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.planning.layout import Layout
from stable_opd_mcore.planning.memory import Work
from stable_opd_mcore.planning.plan import (
    Cluster,
    Plan,
    layouts_table,
    make_plan,
    rank_layouts,
)

CONFIGS = Path(__file__).parents[2] / "configs"
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 16384,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
NODE = Cluster(nodes=1, gpus_per_node=8)


def config_7b(directory: Path, *overrides: str) -> Config:
    (directory / "config.json").write_text(json.dumps(QWEN_7B))
    paths = [f"student.path={directory}", f"teacher.path={directory}"]
    return load_config(CONFIGS / "stable_opd_7b.yaml", [*paths, *overrides])


def components(plan: Plan) -> dict[str, float]:
    return {item.name: item.bytes for item in plan.memory.components}


def test_weights_gradients_and_optimizer_follow_the_layout(tmp_path):
    held = components(make_plan(config_7b(tmp_path), NODE))
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
        ("rollout.engine=sglang", "KV cache"),
        ("kl.estimator=k3", "hidden states of the scorers"),
    ],
)
def test_a_part_that_is_not_used_takes_nothing(tmp_path, override, gone):
    assert gone in components(make_plan(config_7b(tmp_path), NODE))
    assert not components(make_plan(config_7b(tmp_path, override), NODE)).get(gone)


def test_full_recompute_and_smaller_budgets_need_less(tmp_path):
    def peak(*overrides: str) -> float:
        return make_plan(config_7b(tmp_path, *overrides), NODE).memory.peak_bytes

    assert peak("train.recompute=full") < peak("train.micro_batch_tokens=16384") < peak()


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


def test_refusals_name_both_numbers(tmp_path):
    with pytest.raises(UserError, match=r"= 4 does not divide 6 trainer GPUs"):
        make_plan(config_7b(tmp_path), Cluster(1, 6))
    with pytest.raises(UserError, match=r"parallel.tensor=8 does not divide .*heads=28"):
        make_plan(config_7b(tmp_path, "parallel.tensor=8"), NODE)
    with pytest.raises(UserError, match="--gpu a100: unknown; expected one of h100, h200"):
        make_plan(config_7b(tmp_path), NODE, gpu="a100")
    with pytest.raises(UserError, match=r"student.path=/nowhere: .* only its config.json"):
        make_plan(config_7b(tmp_path, "student.path=/nowhere"), NODE)


def test_seconds_follow_work_and_hardware(tmp_path):
    plan = make_plan(config_7b(tmp_path), NODE)
    longer = make_plan(config_7b(tmp_path), NODE, work=Work(response_tokens=8192))
    more = make_plan(config_7b(tmp_path), Cluster(nodes=4, gpus_per_node=8))
    assert longer.seconds.update > 1.9 * plan.seconds.update
    assert more.seconds.score == pytest.approx(plan.seconds.score / 4, rel=0.1)
    assert plan.gpu_hours == pytest.approx(plan.seconds.total * 800 * 8 / 3600)
    pipelined = make_plan(config_7b(tmp_path, "parallel.pipeline=2"), NODE)
    assert pipelined.seconds.update > plan.seconds.update  # the bubble


def test_layouts_are_ranked_what_fits_first(tmp_path):
    plans = rank_layouts(config_7b(tmp_path), NODE)
    assert Layout(8, 4, 1, 1, 1, sequence=True) in [plan.layout for plan in plans]
    assert all(28 % plan.layout.tensor == 0 for plan in plans)
    order = [(not plan.memory.fits, plan.seconds.total) for plan in plans]
    assert order == sorted(order)
    assert not plans[-1].memory.fits
    assert "TP4 x PP1 x CP1 x DP2" in layouts_table(plans)


def test_json_holds_the_table(tmp_path):
    plan = make_plan(config_7b(tmp_path), NODE)
    values = json.loads(plan.as_json())
    assert values["fits"] is True
    assert values["layout"]["data"] == 2
    phases = values["memory_gib"]["phases"]
    assert max(phases, key=phases.get) == plan.memory.peak_phase == "update"
    assert f"{phases['update']:.1f}" in plan.table()
