"""Seconds by phase follow work, hardware and layout."""

from __future__ import annotations

import pytest

from stable_opd_mcore.planning.memory import Work
from stable_opd_mcore.planning.plan import Cluster, make_plan
from tests.planning.cases import NODE, config_7b


def test_seconds_follow_work_and_hardware(tmp_path):
    plan = make_plan(config_7b(tmp_path), NODE)
    longer = make_plan(config_7b(tmp_path), NODE, work=Work(response_tokens=8192))
    more = make_plan(config_7b(tmp_path), Cluster(nodes=4, gpus_per_node=8))
    assert longer.seconds.update > 1.9 * plan.seconds.update
    assert more.seconds.score == pytest.approx(plan.seconds.score / 4, rel=0.1)
    assert plan.gpu_hours == pytest.approx(plan.seconds.total * 800 * 8 / 3600)
    pipelined = make_plan(config_7b(tmp_path, "parallel.pipeline=2"), NODE)
    assert pipelined.seconds.update > plan.seconds.update  # the bubble
