"""Idle seconds of servers: requests that overlap count once, open ones are known."""

import pytest

from stable_opd_mcore.metrics import Mean
from stable_opd_mcore.serving import idle_clock
from stable_opd_mcore.serving.idle_clock import IdleClock


@pytest.fixture
def at(monkeypatch):
    """Sets the time in seconds."""
    now = [0.0]
    monkeypatch.setattr(idle_clock.time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def test_requests_that_overlap_count_once_and_weights_as_they(at):
    clock = IdleClock(["a", "b", "a"])
    assert clock.idle_share() == Mean(0, 0), "this process has asked for nothing"
    for seconds, change in ((1, 1), (2, 1), (3, -1), (5, -1)):  # a: idle until 1 and from 5
        at(seconds)
        clock.count("a", change)
    at(6)
    with pytest.raises(RuntimeError), clock.busy(["a", "b"]):  # noqa: PT012
        at(8)  # a: idle from 5 to 6; b: idle until 6
        raise RuntimeError
    at(10)
    assert clock.idle_share() == Mean((1 + 1 + 2) + (6 + 2), 20)
