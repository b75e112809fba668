"""The plan as a whole: ranked layouts, JSON, the command."""

import json
import math
import shlex
from typing import Any

import pytest
from typer.testing import CliRunner

from stable_opd_mcore.cli import app
from stable_opd_mcore.commands.plan.plan import layouts_table, make_plan, rank_layouts
from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.models.tensors import hf_shapes
from stable_opd_mcore.placement.hardware import GIB, Cluster
from stable_opd_mcore.placement.layout import Layout
from tests.commands.plan.cases import CONFIGS, NODE, config_7b


def test_layouts_are_ranked_what_fits_first(tmp_path):
    plans = rank_layouts(config_7b(tmp_path), NODE)
    assert Layout(8, 4, 1, 1, 1, sequence=True) in [plan.run.layout for plan in plans]
    assert all(28 % plan.run.layout.tensor == 0 for plan in plans)
    order = [(not plan.memory.fits, -plan.run.layout.data) for plan in plans]
    assert order == sorted(order)
    assert not plans[-1].memory.fits
    assert "TP4 x PP1 x CP1 x DP2" in layouts_table(plans)


# Trainer and server nodes
LARGE_RUNS = [("32b", 2, 0), ("32b", 4, 0), ("32b", 4, 2)]
LARGE_RUNS += [("8b_235b", 2, 0), ("8b_235b", 12, 2)]
LARGE_RUNS += [("30b_a3b", 2, 0), ("30b_a3b", 12, 2)]


@pytest.mark.parametrize(("name", "nodes", "server_nodes"), LARGE_RUNS)
def test_the_shipped_runs_on_many_nodes_fit(name, nodes, server_nodes):
    config = load_config(CONFIGS / f"stable_opd_{name}.yaml")
    plan = make_plan(config, Cluster(nodes, 8, server_nodes))
    assert plan.memory.fits
    assert plan.largest_micro_batch is not None
    largest = plan.largest_micro_batch
    assert plan.any_micro_batch_fits or largest >= config.train.micro_batch_tokens


def test_json_holds_the_table(tmp_path):
    plan = make_plan(config_7b(tmp_path), NODE)
    values = json.loads(plan.as_json())
    assert values["fits"] is True
    assert values["layout"]["data"] == 2
    assert values["choice"]["overrides"] == shlex.split(plan.choice.remedy)
    phases = values["memory_gib"]["phases"]
    assert max(phases, key=phases.get) == plan.memory.peak_phase == "rollout"  # the server's share
    assert all(f"{value:.1f}" in plan.table() for value in phases.values())


def test_a_publish_sends_all_weights_or_the_factors_of_every_matrix(tmp_path):
    settings = {"all": [], "factors": ["student.lora.rank=16"]}
    settings["merged"] = [*settings["factors"], "rollout.sglang.lora=merged"]
    plans = {n: make_plan(config_7b(tmp_path, *each), NODE) for n, each in settings.items()}
    shapes = hf_shapes(plans["all"].run.models.student)
    matrices = [shape for name, shape in shapes.items() if ".layers." in name and len(shape) == 2]
    weights = 2 * sum(map(math.prod, shapes.values()))
    factors = 2 * 16 * sum(rows + columns for rows, columns in matrices)
    sent = {n: (plan.run.published_bytes, plan.run.frozen_bytes) for n, plan in plans.items()}
    assert sent == {"all": (weights, 0), "factors": (factors, weights), "merged": (weights, 0)}
    once = f"a publish sends {factors / GIB:.2f} GiB, after {weights / GIB:.1f} GiB once"
    assert once in plans["factors"].table()
    servers = json.loads(plans["factors"].as_json())["servers"]
    assert servers["publish_gib"] < servers["frozen_gib"]


def test_a_draft_is_counted_with_the_point_where_it_costs(tmp_path):
    """A qwen2 model has no such layer, which a plan does not need: about one of its 28 layers."""
    plain = make_plan(config_7b(tmp_path), NODE)
    drafted = make_plan(config_7b(tmp_path, "rollout.sglang.speculative.algorithm=mtp"), NODE)
    servers = json.loads(drafted.as_json())["servers"]
    layer = (2 * 3584 * 18944 * 3 + 2 * 3584 * (3584 * 2 + 512 * 2) + 4 * 3584**2) / GIB
    assert servers["draft_gib"] == pytest.approx(layer, rel=0.01)
    assert json.loads(plain.as_json())["servers"]["draft_gib"] == 0
    assert "it costs more than it saves below 1.32 of" in drafted.table()
    assert "draft:" not in plain.table()


OWN_PROMPT = "teacher.prompt='{{ solution }}'"


def test_the_length_of_the_teachers_prompt_is_given_or_assumed(tmp_path):
    config_7b(tmp_path)
    arguments = ["plan", str(CONFIGS / "stable_opd_7b.yaml"), "--json"]
    arguments += [f"student.path={tmp_path}", f"teacher.path={tmp_path}"]

    def planned(*more: str) -> dict[str, Any]:
        return json.loads(CliRunner().invoke(app, [*arguments, *more]).stdout)

    plans = [planned(OWN_PROMPT, *o) for o in ((), ("--teacher-prompt-tokens=4096",))]
    assert [plan["assumed"]["teacher_prompt_tokens"] for plan in plans] == [256 + 1024, 4096]
    assert (
        planned()["seconds"]["score"] < plans[0]["seconds"]["score"] < plans[1]["seconds"]["score"]
    )


def test_layouts_are_printed_as_json_in_the_order_of_the_table(tmp_path):
    plans = rank_layouts(config_7b(tmp_path), NODE)
    arguments = ["plan", str(CONFIGS / "stable_opd_7b.yaml"), "--layouts", "--json"]
    models = [f"student.path={tmp_path}", f"teacher.path={tmp_path}"]
    found = json.loads(CliRunner().invoke(app, [*arguments, *models]).stdout)["layouts"]
    assert len(found) == len(plans)
    for row, plan in zip(found, plans, strict=True):
        assert Layout(**{k: v for k, v in row["layout"].items() if k != "data"}) == plan.run.layout
        assert row["fits"] == plan.memory.fits
        assert row["peak_gib"] == pytest.approx(plan.memory.peak_bytes / GIB, abs=1e-3)
