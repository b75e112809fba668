"""A draft that the student has left behind is warned of, once each time."""

import json

import pytest

from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.monitoring.metric_sinks import MetricSinks
from stable_opd_mcore.placement.draft import least_tokens
from stable_opd_mcore.train.oversight.draft_watch import DraftWatch
from tests.config.cases import run_with
from tests.models import tiny


def test_a_warning_each_time_that_the_accepted_tokens_fall_below_the_cost(tmp_path, caplog):
    student = read_architecture(tiny.config("qwen3_5"))
    servers = {"engine": "sglang", "sglang": {"speculative": {"algorithm": "mtp"}}}
    config = run_with(rollout=servers, monitoring={"tensorboard": False})
    least = least_tokens(config, student, 4)
    assert least is not None
    watch = DraftWatch(config, student)
    with MetricSinks(tmp_path, config, 0) as sinks:
        for step, above in enumerate((0.2, -0.1, -0.2, None, 0.1, -0.1), start=1):
            accepted = None if above is None else least + above
            watch.look(step, {"engine/accepted_tokens_per_step": accepted}, sinks)
        DraftWatch(run_with(rollout={"engine": "sglang"}), student).look(
            9, {"engine/accepted_tokens_per_step": 1.0}, sinks
        )
    events = [*map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())]
    assert [(each["event"], each["after_step"]) for each in events] == [("draft", 2), ("draft", 6)]
    assert events[0]["costs_below"] == pytest.approx(least)
    assert events[0]["action"] == "warned"
    assert f"below {least:.2f} the draft costs more" in caplog.text
