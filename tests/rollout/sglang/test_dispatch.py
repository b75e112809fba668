"""The queue of requests against servers of this process; tests/integration has SGLang."""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stable_opd_mcore.config.rollouts import SglangConfig
from stable_opd_mcore.metrics import Sum
from stable_opd_mcore.records import Routing, Sampling, Segment, SequenceScores
from stable_opd_mcore.rollout.sglang import dispatch
from stable_opd_mcore.rollout.sglang.dispatch import Dispatcher, has_room
from stable_opd_mcore.rollout.sglang.event_log import EventLog
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.rollout.sglang.records import Answer, Job
from stable_opd_mcore.serving.client import ServerFailure
from stable_opd_mcore.serving.requests import Completion, Generation
from tests.rollout.sglang.test_fleet import fleet_of
from tests.serving.http_server import http_server

RESPONSE = {
    "output_ids": [2],
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, 2, None]],
        "weight_version": "0",
        "cached_tokens": 0,
    },
}


@dataclass(eq=False)
class Drawing:
    """A client whose server has drawn `pace` tokens of each response when its requests are aborted,
    and draws to the end when `finish` is set. A token is its position in the sequence, and its
    experts are the version and its position."""

    pace: int = 3
    version: int = 0
    url, api_key = "http://here", None

    def __post_init__(self) -> None:
        self.requests: list[Generation] = []
        self.finish, self._woken = threading.Event(), threading.Condition()
        self._num_aborts, self.is_dead = 0, False

    def generate(self, request: Generation) -> list[Completion]:
        with self._woken:
            self.requests.append(request)
            before = self._num_aborts
            self._woken.notify_all()
            self._woken.wait_for(lambda: self.finish.is_set() or self._num_aborts > before)
        if self.is_dead:
            raise ServerFailure("here", "unreachable", "it was killed")
        first, longest = len(request.token_ids), request.sampling.max_new_tokens
        number = longest if self.finish.is_set() else min(self.pace, longest)
        ids = np.arange(first, first + number, dtype=np.int32)
        reason = "length" if number == longest else "abort"
        places = range(request.routing_start, first + number - 1)
        experts = np.array([[[self.version, place]] for place in places], np.int16)
        chosen = None if request.routing is None or not number else experts
        logprobs = np.full(number, -0.5, np.float32)
        piece = Completion(ids, logprobs, reason, (str(self.version),), 0, chosen)
        return [piece] * request.sampling.num_samples

    def call(self, method: str, path: str, body: object, timeout_seconds: float) -> None:
        with self._woken:
            self._num_aborts += 1
            self._woken.notify_all()

    def end(self) -> None:
        with self._woken:
            self.finish.set()
            self._woken.notify_all()

    def kill(self) -> None:
        self.is_dead = True
        self.call("", "", None, 0)

    def await_requests(self, number: int) -> None:
        with self._woken:
            assert self._woken.wait_for(lambda: len(self.requests) >= number, 30)

    def close(self) -> None:
        pass


def request(**sampling: Any) -> Generation:
    settings = {"max_new_tokens": 1, "stop_token_ids": (2,)} | sampling
    return Generation((1, 2), Sampling(**settings), vocab_size=5)


def fleet_over(directory: Path, *clients: Drawing, **settings: Any) -> Fleet:
    members = [
        Member(f"server_{n}", client, None, state="ready")  # type: ignore[arg-type]
        for n, client in enumerate(clients)
    ]
    return Fleet(members, EventLog(directory / "events.jsonl"), SglangConfig(), **settings)


def jobs_of(
    requests: Sequence[Generation],
    accept: Callable[[Member, Sequence[Completion]], bool] = lambda *_: True,
    step: int = 0,
) -> list[Job]:
    return [Job(r, accept, [Answer()] * r.sampling.num_samples, step) for r in requests]


def drawn(fleet: Fleet, requests: Sequence[Generation], *accept: Any) -> list[Job]:
    """The jobs of the requests, when nothing more happens."""
    jobs, dispatcher = jobs_of(requests, *accept), Dispatcher(fleet)
    dispatcher.submit(jobs)
    dispatcher.wait(jobs)
    dispatcher.close()
    return jobs


def test_each_accepted_answer_is_progress(tmp_path):
    answers, progress = iter([False, True, True]), []
    client = Drawing()
    client.end()
    fleet = fleet_over(tmp_path, client, progress=lambda: progress.append(1))
    drawn(fleet, [request(), request()], lambda *_: next(answers))
    assert len(progress) == 2


def test_aborted_responses_go_on_from_their_tokens_over_two_publishes(tmp_path):
    """The samples of a prompt are one request at first, then each is one of its own."""
    client = Drawing()
    dispatcher = Dispatcher(fleet_over(tmp_path, client))
    (job,) = jobs_of([request(max_new_tokens=8, num_samples=2)])
    dispatcher.submit([job])
    for version, sent in ((1, 1), (2, 3)):
        client.await_requests(sent)
        dispatcher.pause(abort=True)
        assert [len(answer.token_ids) for answer in job.answers] == [3 * version] * 2
        client.version = version
        dispatcher.resume()
    client.await_requests(5)
    client.end()
    dispatcher.wait([job])
    for answer in job.answers:
        assert answer.token_ids == tuple(range(2, 10))
        assert answer.segments == (Segment(3, 0), Segment(3, 1), Segment(2, 2))
        assert (len(answer.logprobs), answer.finish_reason) == (8, "length")
    asked = [(r.sampling.num_samples, r.sampling.max_new_tokens) for r in client.requests]
    assert asked == [(2, 8), (1, 5), (1, 5), (1, 2), (1, 2)]
    assert dispatcher.take_metrics()["engine/continued"] == Sum(4)
    dispatcher.close()


def test_tokens_keep_the_experts_of_the_request_that_read_them_first(tmp_path):
    """Of the last token of a request that is the next one, which draws the token after it."""
    client = Drawing()
    dispatcher = Dispatcher(fleet_over(tmp_path, client))
    (job,) = jobs_of([replace(request(max_new_tokens=8), routing=Routing(1, 9, 2))])
    dispatcher.submit([job])
    for version in (1, 2):
        client.await_requests(version)
        dispatcher.pause(abort=True)
        client.version = version
        dispatcher.resume()
    client.await_requests(3)
    client.end()
    dispatcher.wait([job])
    assert [r.routing_start for r in client.requests] == [0, 4, 7]
    (answer,) = job.answers
    assert answer.routed_experts is not None
    versions, positions = answer.routed_experts[:, 0].T.tolist()
    assert versions == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert positions == list(range(9))
    dispatcher.close()


def test_a_server_waits_while_no_request_is_in_flight(tmp_path, monkeypatch):
    """Aborted and sent again: busy twice, with the pause between them."""
    client, noted = Drawing(), []
    fleet = fleet_over(tmp_path, client)
    monkeypatch.setattr(fleet.idle, "count", lambda *counted: noted.append(counted))
    dispatcher = Dispatcher(fleet)
    (job,) = jobs_of([request(max_new_tokens=8, num_samples=2)])
    dispatcher.submit([job])
    client.await_requests(1)
    dispatcher.pause(abort=True)
    assert noted == [("server_0", 1), ("server_0", -1)]
    dispatcher.resume()
    client.await_requests(3)  # each sample has its own request now
    assert noted[2:] == [("server_0", 1)] * 2
    client.end()
    dispatcher.wait([job])
    assert noted[4:] == [("server_0", -1)] * 2
    dispatcher.close()


def test_a_teacher_is_asked_about_finished_responses_while_others_are_drawn(tmp_path):
    """Not those that were interrupted; the last one before `wait` returns."""
    first, second = Drawing(), Drawing()
    dispatcher = Dispatcher(fleet_over(tmp_path, first, second))
    jobs = jobs_of([request(max_new_tokens=4, num_samples=2), request(max_new_tokens=8)])
    told: queue.Queue[tuple[int, Sequence[int]]] = queue.Queue()
    replies = [Future[SequenceScores]() for _ in jobs]
    for number, job in enumerate(jobs):
        job.ask = lambda tokens, number=number: told.put((number, tokens)) or replies[number]
    dispatcher.submit(jobs)
    second.await_requests(1)
    first.end()
    assert [told.get(timeout=30) for _ in range(2)] == [(0, (2, 3, 4, 5))] * 2
    dispatcher.pause(abort=True)
    assert told.empty()
    second.end()
    dispatcher.resume()
    dispatcher.wait(jobs)
    assert told.get_nowait() == (1, tuple(range(2, 10)))
    assert [job.scores for job in jobs] == [dict.fromkeys((0, 1), replies[0]), {0: replies[1]}]
    dispatcher.close()


def test_a_response_without_tokens_is_asked_for_again(tmp_path):
    client = Drawing(pace=0)
    dispatcher = Dispatcher(fleet_over(tmp_path, client))
    (job,) = jobs_of([request(max_new_tokens=4)])
    dispatcher.submit([job])
    client.await_requests(1)
    dispatcher.pause(abort=True)
    assert job.answers == [Answer()]
    dispatcher.resume()
    client.end()
    dispatcher.wait([job])
    assert job.answers[0].segments == (Segment(4, 0),)
    assert not (tmp_path / "events.jsonl").exists()


def test_a_killed_servers_response_goes_on_elsewhere(tmp_path):
    """It keeps the tokens of the replies before; what the dead server drew since was never sent."""
    dies, lives = Drawing(), Drawing(version=1)
    fleet = fleet_over(tmp_path, dies, lives)
    fleet.members[1].state = "needs_weights"
    dispatcher = Dispatcher(fleet)
    (job,) = jobs_of([request(max_new_tokens=8)])
    dispatcher.submit([job])
    dies.await_requests(1)
    dispatcher.pause(abort=True)
    dispatcher.resume()
    dies.await_requests(2)
    fleet.members[1].state = "ready"
    dies.kill()
    lives.end()
    dispatcher.wait([job])
    assert job.answers[0].token_ids == tuple(range(2, 10))
    assert job.answers[0].segments == (Segment(3, 0), Segment(5, 1))
    assert happened(tmp_path) == ["failure", "redrawn"]


def test_without_aborts_a_pause_waits_for_what_is_in_flight_alone(tmp_path):
    client = Drawing()
    fleet = fleet_over(tmp_path, client)
    fleet.members[0].max_responses = 1
    dispatcher = Dispatcher(fleet)
    jobs = jobs_of([request(max_new_tokens=4)] * 2)
    dispatcher.submit(jobs)
    client.await_requests(1)
    threading.Timer(0.1, client.end).start()
    dispatcher.pause(abort=False)
    assert [job.is_done for job in jobs] == [True, False]
    dispatcher.resume()
    dispatcher.wait(jobs)
    assert jobs[1].is_done


def test_the_order_is_by_step_then_expected_length_then_submission(tmp_path):
    client = Drawing()
    fleet = fleet_over(tmp_path, client)
    fleet.members[0].max_responses = 1
    dispatcher = Dispatcher(fleet)
    dispatcher.pause(abort=False)
    order = [(2, 9), (1, None), (1, 3), (1, 7), (1, None)]
    for prompt, (step, expected) in enumerate(order):
        (job,) = jobs_of([replace(request(), token_ids=(prompt,))], step=step)
        job.expected_tokens = expected
        dispatcher.submit([job])
    dispatcher.resume()
    client.end()
    client.await_requests(len(order))
    assert [r.token_ids[0] for r in client.requests] == [3, 2, 1, 4, 0]


@pytest.mark.parametrize(
    ("in_flight", "responses", "tokens", "fits"),
    [(0, 99, 999, True), (1, 3, 60, True), (1, 4, 60, False), (1, 3, 61, False)],
)
def test_requests_in_flight_are_bounded_by_the_cache(in_flight, responses, tokens, fits):
    member = Member("server_0", Drawing(), None)  # type: ignore[arg-type]
    member.in_flight, member.responses_in_flight, member.tokens_in_flight = in_flight, 1, 40
    member.max_responses, member.max_tokens = 4, 100
    assert has_room(member, responses, tokens) == fits


def test_the_server_with_the_fewest_tokens_in_flight_takes_the_next(tmp_path):
    clients = Drawing(), Drawing()
    dispatcher = Dispatcher(fleet_over(tmp_path, *clients))
    jobs = jobs_of([request(max_new_tokens=n) for n in (90, 30, 30, 30)])
    dispatcher.submit(jobs)
    clients[0].await_requests(1)
    clients[1].await_requests(3)
    for client in clients:
        client.end()
    dispatcher.wait(jobs)


def happened(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (path / "events.jsonl").read_text().splitlines()]


BROKEN = [
    (500, b""),
    (429, b"too many requests"),
    (200, b"<html>"),
    (200, b"[]"),
    (200, b'{"output_ids": [1e999]}'),
    (200, json.dumps(RESPONSE | {"output_ids": [4096]}).encode()),
    (200, json.dumps({"output_ids": [2], "meta_info": {}}).encode()),
]
GOOD = (200, json.dumps(RESPONSE).encode())


def test_broken_replies_are_repeated_and_counted(tmp_path, monkeypatch):
    """Half of the replies are broken in some way; every request is answered once."""
    monkeypatch.setattr(dispatch, "pause_seconds", lambda attempt: 0.0)
    replies = itertools.chain.from_iterable((reply, GOOD) for reply in BROKEN)
    with http_server(lambda _: next(replies, GOOD)) as url:
        fleet = fleet_of(tmp_path, url)
        for _ in BROKEN:
            (job,) = drawn(fleet, [request()])
            assert [answer.token_ids for answer in job.answers] == [(2,)]
    assert next(replies, None) is None
    assert fleet.members[0].state == "ready"
    assert happened(tmp_path) == ["retried"] * len(BROKEN)


def test_a_failing_servers_requests_go_to_the_other_server(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "pause_seconds", lambda attempt: 0.0)
    with http_server(lambda _: (502, b"")) as fails, http_server(lambda _: GOOD) as answers:
        fleet = fleet_of(tmp_path, fails, answers)
        assert all(job.is_done for job in drawn(fleet, [request()] * 10))
    assert [member.state for member in fleet.members] == ["restarting", "ready"]
    kinds = happened(tmp_path)
    assert kinds.index("retried") < kinds.index("failure") < kinds.index("redrawn")
    assert "HTTP 502" in (tmp_path / "events.jsonl").read_text()


def test_without_a_server_a_job_is_not_done(tmp_path):
    """Its only server's responses come from old weights, and are dropped."""
    with http_server(lambda _: GOOD) as url:
        fleet = fleet_of(tmp_path, url)

        def refuse(member: Member, answer: object) -> bool:
            fleet.weights_outdated(member)
            return False

        (job,) = drawn(fleet, [request()], refuse)
    assert job.answers == [Answer()]
    assert fleet.members[0].state == "needs_weights"
