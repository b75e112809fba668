"""Spans of servers: requests that overlap are one span, and open ones go on after `take`."""

import time

import pytest

from stable_opd_mcore.serving.activity import Activity


def test_requests_that_overlap_are_one_span():
    activity = Activity(["a", "b"])
    begin = time.perf_counter()
    for change in (1, 1, -1, -1, 1, -1):
        activity.count("draws", "a", change)
    end = time.perf_counter()
    spans = activity.take()
    assert spans["b"] == []
    (first, second) = spans["a"]
    assert begin < first.start < first.end < second.start < second.end < end
    assert activity.take() == {"a": [], "b": []}


def test_what_has_not_ended_is_cut_and_goes_on():
    activity = Activity(["a"])
    activity.count("draws", "a", 1)
    with pytest.raises(RuntimeError), activity.during("weights", ["a"]):
        raise RuntimeError
    weights, draws = activity.take()["a"]
    assert (weights.what, draws.what) == ("weights", "draws")
    assert weights.end < draws.end
    activity.count("draws", "a", -1)
    (rest,) = activity.take()["a"]
    assert rest.start == draws.end < rest.end
