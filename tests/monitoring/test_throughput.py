"""Phase times add up, survive exceptions, and reduce to the slowest rank."""

import time

import pytest

from stable_opd_mcore.monitoring.names import require_known
from stable_opd_mcore.monitoring.throughput import PhaseTimer


def test_phases_add_up_to_less_than_the_total():
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("rollout"):
            time.sleep(0.02)
    with pytest.raises(RuntimeError), timer.phase("update"):  # noqa: PT012
        time.sleep(0.01)
        raise RuntimeError
    values = timer.metrics(num_tokens=1000).values_by_key()
    require_known(values)
    assert values["time/rollout"] >= 0.04
    assert values["time/update"] >= 0.01
    assert values["time/total"] >= values["time/rollout"] + values["time/update"]
    assert values["throughput/tokens_per_second"] == pytest.approx(1000 / values["time/total"])


def test_the_trainer_waits_for_responses_and_while_servers_take_weights():
    timer = PhaseTimer()
    with timer.phase("rollout"), timer.part("wait"):
        time.sleep(0.02)
    with timer.phase("sync"):
        time.sleep(0.02)
    values = timer.metrics(num_tokens=1).values_by_key()
    require_known(values)
    waited = values["time/wait"] + values["time/sync"]
    assert 0.04 <= waited == pytest.approx(values["perf/trainer_waited"] * values["time/total"])
