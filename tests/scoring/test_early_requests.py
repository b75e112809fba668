"""Requests that are sent before their replies are needed, on one rank; several ranks are in
test_served_teacher.py."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from stable_opd_mcore.metrics import Mean, Metrics
from stable_opd_mcore.scoring import early_requests
from stable_opd_mcore.scoring.early_requests import EarlyRequests
from stable_opd_mcore.serving.requests import SequenceScores

A, B, C = b"a", b"b", b"c"


def scores(value: float) -> SequenceScores:
    none = np.empty((1, 0), np.float32)
    return SequenceScores(np.array([value], np.float32), none.astype(np.int32), none, none)


@pytest.fixture
def early(world):
    requests = EarlyRequests()
    yield requests
    requests.close()


def ask(
    early: EarlyRequests, key: bytes, send: Callable[[], SequenceScores], step: int = 0
) -> None:
    early.ask(key, send, size_bytes=100, step=step)


@pytest.fixture
def blocked(world, monkeypatch):
    """Requests that are sent one by one, and an event for which the first of them waits."""
    monkeypatch.setattr(early_requests, "_MAX_IN_FLIGHT", 1)
    requests, goes_on, begun = EarlyRequests(), threading.Event(), threading.Event()

    def wait() -> SequenceScores:
        begun.set()
        assert goes_on.wait(30)
        return scores(0.0)

    ask(requests, b"first", wait)
    assert begun.wait(30)
    yield requests, goes_on
    requests.close()


def test_a_reply_is_taken_once_and_waited_for(early):
    later, sent = threading.Event(), []

    def slow() -> SequenceScores:
        sent.append(B)
        assert later.wait(30)
        return scores(-2.0)

    ask(early, A, lambda: scores(-1.0))
    early._asked[A].reply.result(30)
    for _ in range(2):  # a second one is the same request
        ask(early, B, slow)
    threading.Timer(0.1, later.set).start()
    found = early.take([A, B, C])
    assert {key: reply.logprobs_L[0] for key, reply in found.items()} == {A: -1.0, B: -2.0}
    assert sent == [B]
    assert early.take([A, B]) == {}
    # A was there, B was waited for, C was never asked for; then nothing was there.
    assert early.take_metrics() == Metrics({"perf/scored_early": Mean(1, 5)})
    assert early.take_metrics() == Metrics()


def test_a_failed_request_is_left_to_the_caller(early, caplog):
    def fails() -> SequenceScores:
        raise RuntimeError("it was killed")

    ask(early, A, fails)
    assert early.take([A]) == {}
    assert "it was killed; the request is repeated when its step is scored" in caplog.text
    ask(early, A, lambda: scores(-1.0))  # nothing of the failure is left
    assert list(early.take([A])) == [A]


def test_after_a_failure_requests_that_are_not_sent_are_left_to_the_caller(blocked):
    early, goes_on = blocked
    sent = []

    def fails() -> SequenceScores:
        sent.append(A)
        raise RuntimeError("no server answers")

    ask(early, A, fails)
    for key in (B, C):
        ask(early, key, lambda key=key: sent.append(key) or scores(0.0))
    threading.Timer(0.1, goes_on.set).start()
    assert early.take([A, B, C]) == {}
    assert sent == [A]
    assert early._asked.keys() == {b"first"}


def test_requests_of_the_lowest_step_are_sent_first(blocked):
    early, goes_on = blocked
    order = []
    for key, step in ((C, 3), (A, 1), (B, 2)):
        ask(early, key, lambda key=key: order.append(key) or scores(0.0), step)
    goes_on.set()
    assert len(early.take([A, B, C])) == 3
    assert order == [A, B, C]


def test_what_is_forgotten_is_not_sent_and_holds_no_memory(blocked):
    early, goes_on = blocked
    sent = []
    for key, step in ((A, 1), (B, 2)):
        ask(early, key, lambda key=key: sent.append(key) or scores(0.0), step)
    early.forget(before_step=2)
    goes_on.set()
    assert list(early.take([A, B])) == [B]
    assert sent == [B]
    ask(early, C, lambda: scores(0.0))
    early.forget()
    assert early._asked == {}


def test_what_fails_because_the_run_ends_is_not_reported(early, caplog):
    begun, ends = threading.Event(), threading.Event()

    def fails() -> SequenceScores:
        begun.set()
        assert ends.wait(30)
        raise RuntimeError("the client is closed")

    ask(early, A, fails)
    assert begun.wait(30)
    early.close()
    ends.set()
    early._pool.shutdown(wait=True)
    assert caplog.text == ""


def test_no_request_exceeds_the_memory(early, monkeypatch):
    monkeypatch.setattr(early_requests, "_MAX_BYTES", 250)
    for key in (A, B, C):
        ask(early, key, lambda: scores(0.0))
    assert sorted(early.take([A, B, C])) == [A, B]
    ask(early, C, lambda: scores(0.0))  # there is room again
    assert list(early.take([C])) == [C]
