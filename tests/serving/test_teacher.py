"""A served teacher that fails, is lost, or is several; no SGLang. Real ones: tests/integration."""

import itertools
import threading
from typing import Any

import pytest

from stable_opd_mcore.config.schema import TeacherConfig
from stable_opd_mcore.records import Sample
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.process import free_port
from stable_opd_mcore.serving.teacher import ServedTeacher, TeacherLost, Wanted
from tests.serving.fake_teacher import fake_teacher
from tests.serving.http_server import http_server
from tests.shares import sample_of

VOCABULARY = 53
PROMPT, RESPONSE = (1, 2, 3), (4, 5)


@pytest.fixture
def absent() -> str:
    """The address of a port on which nothing listens."""
    return f"http://127.0.0.1:{free_port('127.0.0.1')}"


def served_by(*urls: str, **options: Any) -> ServedTeacher:
    settings = TeacherConfig(engine="sglang", urls=urls)
    return ServedTeacher(settings, vocab_size=VOCABULARY, temperature=1.0, **options)


def ask(teacher: ServedTeacher, number: int = 1, source: str = "s") -> list[Any]:
    return [teacher.ask(sample(f"{source}:{i}"), step=0) for i in range(number)]


def sample(prompt_id: str) -> Sample:
    return sample_of("rollout", prompt_id, PROMPT, RESPONSE)


def test_a_request_says_what_the_step_needs_and_comes_back_in_half_precision():
    wanted = {0: Wanted(3, (9, 2)), 1: Wanted()}
    with fake_teacher() as (url, asked):
        teacher = served_by(url, wanted=wanted.__getitem__)
        replies = [teacher.ask(sample("s:0"), step) for step in (0, 1)]
        first, second = teacher.wait(replies)
    assert asked == [(*PROMPT, *RESPONSE)] * 2
    assert first is not None
    assert second is not None
    assert (first.top_ids_LK.shape, first.extra_logprobs_LE.shape) == ((2, 3), (2, 2))
    assert (second.top_ids_LK.shape, second.extra_logprobs_LE.shape) == ((2, 0), (2, 0))
    assert first.logprobs_L.tolist() == second.logprobs_L.tolist()
    assert (first.logprobs_L.dtype, first.top_logprobs_LK.dtype) == ("float32", "float16")
    assert len(set(first.extra_logprobs_LE[0].tolist())) == 2
    teacher.close()


def test_an_absent_teacher_is_lost_when_somebody_waits_however_many_requests_there_are(absent):
    teacher = served_by(absent, patience_seconds=0.0)
    replies = ask(teacher, 640)
    assert teacher.lost is None
    assert teacher.wait(replies) == [None] * 640
    assert teacher.lost is not None
    assert teacher.lost.startswith(f"no teacher answered for 0 s: {absent}")
    assert teacher.wait(ask(teacher)) == [None], "it stays lost"
    teacher.close()


def test_a_failure_that_nobody_waits_for_is_repeated_until_it_is_answered():
    """The response may be one that a later step trains on."""
    failures = itertools.count()
    with fake_teacher(lambda _: next(failures) >= 3) as (url, asked):
        teacher = served_by(url, patience_seconds=0.0)
        (reply,) = ask(teacher)
        assert len(reply.result(30).logprobs_L) == len(RESPONSE)
        assert (len(asked), teacher.lost) == (4, None)
        teacher.close()


def test_a_teacher_that_refuses_a_request_is_lost():
    """So the run saves a checkpoint, although asking again cannot help."""
    reply = (400, b"Input length (9 tokens) exceeds 8")
    with http_server(lambda _: reply) as url:
        teacher = served_by(url)
        assert teacher.wait(ask(teacher)) == [None]
        assert teacher.lost is not None
        assert "400" in teacher.lost
        assert "exceeds 8" in teacher.lost
        teacher.close()


def test_the_first_lost_request_ends_the_wait_for_those_that_hang():
    """The first one to arrive fails, the server never replies to the others."""
    arrivals, waits, never = itertools.count(), threading.Event(), threading.Event()

    def reply(_: Any) -> bool:
        if next(arrivals):
            return never.wait(30)
        return not waits.wait(30)

    with fake_teacher(reply) as (url, asked):
        teacher = served_by(url, patience_seconds=0.0)
        threading.Timer(0.2, waits.set).start()
        replies = ask(teacher, 200)
        teacher.wait(replies)
        assert teacher.lost is not None
        assert "HTTP 503" in teacher.lost
        assert len(asked) <= 64 + 1  # those in flight, and the one after the failed request
        teacher.close()
        with pytest.raises(TeacherLost, match="HTTP 503"):
            replies[-1].result(10)
        never.set()


def test_each_replica_is_tried_before_the_teacher_is_lost(monkeypatch, absent):
    """One never replies, four refuse connections, the last one answers."""
    monkeypatch.setattr(timeouts, "SCORE", 3.0)
    never = threading.Event()
    with fake_teacher(lambda _: never.wait(30)) as (silent, _), fake_teacher() as (good, asked):
        teacher = served_by(silent, *[absent] * 4, good, patience_seconds=0.0)
        scores = teacher.wait(ask(teacher, 6))
        assert None not in scores
        assert (len(asked), teacher.lost) == (6, None)
        never.set()
        teacher.close()


def test_each_source_has_its_teacher():
    with fake_teacher() as (first, asked), fake_teacher() as (second, asked_second):
        settings = TeacherConfig(engine="sglang", routes={"a": (first,), "coder": (second,)})
        options: dict[str, Any] = {"vocab_size": VOCABULARY, "temperature": 1.0}
        teacher = ServedTeacher(settings, **options, route_of={"a": "a", "b": "coder"})
        assert None not in teacher.wait(ask(teacher, source="a") + ask(teacher, 2, source="b"))
        assert (len(asked), len(asked_second)) == (1, 2)
        teacher.close()
    with pytest.raises(ValueError, match=r"rollouts are sampled at 0\.7"):
        ServedTeacher(settings, vocab_size=VOCABULARY, temperature=0.7)


def test_a_teacher_that_is_absent_at_the_start_is_lost(absent):
    with pytest.raises(TeacherLost, match=f"no teacher answered .* {absent}"):
        served_by(absent, patience_seconds=0.0).self_test(range(9))


def test_an_error_of_a_repeated_request_is_raised_where_its_scores_are_waited_for(
    absent, monkeypatch
):
    teacher = served_by(absent)
    (client,) = teacher._clients[""]
    submit, attempts = client.submit, itertools.count()

    def fails_again(*arguments):
        if next(attempts):
            raise OSError("no process can be started")
        return submit(*arguments)

    monkeypatch.setattr(client, "submit", fails_again)
    monkeypatch.setattr("stable_opd_mcore.serving.teacher._MAX_IN_FLIGHT", 1)
    for reply in ask(teacher, 3):  # also of those that waited for their turn
        assert isinstance(reply.exception(timeout=30), OSError)
    teacher.close()
