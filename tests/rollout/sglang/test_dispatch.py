"""The queue of requests against servers of this process; tests/integration has SGLang."""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stable_opd_mcore.data.bridge import Observed
from stable_opd_mcore.data.samples import rollout_samples
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.metrics import Mean, Sum
from stable_opd_mcore.records import Rollout, Segment, SequenceScores
from stable_opd_mcore.rollout.episodes import End, Episode, WhatFollows
from stable_opd_mcore.rollout.sglang import dispatch
from stable_opd_mcore.rollout.sglang.dispatch import Dispatcher
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.rollout.sglang.group import in_daemon
from stable_opd_mcore.rollout.sglang.prompt_requests import PromptRequests
from stable_opd_mcore.serving.client import RefusedRequest
from stable_opd_mcore.serving.requests import Generation
from tests.rollout.sglang.abortable_server import (
    AbortableServer,
    fleet_over,
    prompts_of,
    request,
    talked,
)
from tests.rollout.sglang.test_fleet import fleet_of
from tests.serving.http_server import Request, http_server

RESPONSE = {
    "output_ids": [2],
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, 2, None]],
        "weight_version": "0",
        "cached_tokens": 0,
    },
}


def sampled(fleet: Fleet, requests: Sequence[Generation], *accept: Any) -> list[PromptRequests]:
    """The prompts of the requests, when nothing more happens."""
    prompts, dispatcher = prompts_of(requests, *accept), Dispatcher(fleet)
    dispatcher.submit(prompts)
    dispatcher.wait(prompts)
    dispatcher.close()
    return prompts


def test_aborted_responses_go_on_from_their_tokens_over_two_publishes(tmp_path):
    client = AbortableServer()
    dispatcher = Dispatcher(fleet_over(tmp_path, client))
    (prompt,) = prompts_of([request(max_new_tokens=8, num_samples=2)])
    dispatcher.submit([prompt])
    for version in (1, 2):
        client.await_requests(2 * version)
        dispatcher.pause(abort=True)
        assert [len(rollout.token_ids) for rollout in prompt.rollouts] == [3 * version] * 2
        client.version = version
        dispatcher.resume()
    client.await_requests(6)
    client.end()
    dispatcher.wait([prompt])
    for rollout in prompt.rollouts:
        assert rollout.token_ids.tolist() == list(range(2, 10))
        assert rollout.segments == (Segment(3, 0), Segment(3, 1), Segment(2, 2))
        assert (len(rollout.rollout_logprobs), rollout.finish_reason) == (8, "length")
    asked = [(r.num_sampled, r.sampling.max_new_tokens) for r in client.requests]
    assert asked == [(0, 8), (0, 8), (3, 5), (3, 5), (6, 2), (6, 2)]
    metrics = dispatcher.take_metrics()
    assert metrics["engine/continued"] == Sum(4)
    assert metrics["engine/accepted_tokens_per_step"] == Mean(16, 6)  # 3, 3 and 2 tokens, twice
    dispatcher.close()


def test_every_request_asks_for_the_next_token_of_a_sample(tmp_path):
    """Over turns, aborts and publishes; every turn has a budget of its own, which is that of the
    environment."""
    client = AbortableServer()
    dispatcher = Dispatcher(fleet_over(tmp_path, client))
    (prompt,) = prompts_of([request(max_new_tokens=9, num_samples=2)])
    prompt.observe = talked
    for sample, episode in enumerate(prompt.episodes):
        own = replace(episode.prompt, max_new_tokens=5)
        prompt.episodes[sample] = replace(episode, prompt=own)
    dispatcher.submit([prompt])
    for version in range(1, 6):
        client.await_requests(2 * version)
        dispatcher.pause(abort=True)
        client.version = version
        dispatcher.resume()
    client.await_requests(12)
    client.end()
    dispatcher.wait([prompt])
    asked = [
        (tuple(r.token_ids), r.num_sampled, r.sampling.max_new_tokens) for r in client.requests
    ]
    for rollout in prompt.rollouts:
        first, second = rollout_samples([rollout])
        turns = [first.token_ids[:2], first.token_ids[:8], second.token_ids[:2]]
        assert first.token_ids.tolist() == [1, 2, *range(2, 7), 8, *range(8, 13)]
        assert second.token_ids.tolist() == [8, 8, *range(2, 7)]
        assert [first.places.tolist(), second.places.tolist()] == [
            [*range(2, 7), *range(8, 13)],
            [*range(2, 7)],
        ]
        assert asked[rollout.sample_index :: 2] == [
            (tuple(whole.token_ids[: len(before) + sampled].tolist()), sampled, 5 - sampled)
            for before, whole in zip(turns, (first, first, second), strict=True)
            for sampled in (0, 3)
        ]
        assert [(turn.num_tokens, turn.finish_reason) for turn in rollout.turns] == [
            (5, "length")
        ] * 3
        assert [one.num_tokens for one in rollout.segments] == [3, 2, 3, 2, 3, 2]
        assert [one.weight_version for one in rollout.segments] == [*range(6)]
        assert rollout.finish_reason == "stop"
    dispatcher.close()


def test_an_environment_may_answer_during_a_pause_and_after_its_episode_is_dropped(tmp_path):
    client = AbortableServer()
    client.end()
    dispatcher = Dispatcher(fleet_over(tmp_path, client))
    kept, dropped = prompts_of([request(), request(num_samples=2)])
    asked: queue.Queue[Future[WhatFollows]] = queue.Queue()

    def ask(episode: Episode) -> Future[WhatFollows]:
        answer = Future[WhatFollows]()
        asked.put(answer)
        return answer

    kept.observe = dropped.observe = ask
    dispatcher.submit([kept])
    answer = asked.get(timeout=30)
    dispatcher.pause(abort=True)  # waits for no environment
    answer.set_result(Observed((8,)))
    assert kept.episodes[0].is_open
    assert len(client.requests) == 1
    dispatcher.resume()
    answer = asked.get(timeout=30)
    assert client.requests[1].token_ids.tolist() == [1, 2, 2, 8]

    dispatcher.submit([dropped])
    late = [asked.get(timeout=30) for _ in dropped.episodes]
    dispatcher.pause(abort=True)
    dispatcher.drop([dropped])
    late[0].set_result(Observed((8,)))
    dispatcher.resume()
    late[1].set_exception(KeyError("door"))
    answer.set_result(End(Ending.STOP))
    dispatcher.wait([kept])
    assert kept.is_done
    assert all(episode.awaits_observation for episode in dropped.episodes)
    assert len(client.requests) == 4
    dispatcher.close()


def test_a_teacher_is_asked_about_finished_responses_while_others_are_sampled(tmp_path):
    """Not those that were interrupted; the last one before `wait` returns."""
    first, second = AbortableServer(), AbortableServer()
    dispatcher = Dispatcher(fleet_over(tmp_path, first, second))
    prompts = prompts_of([request(max_new_tokens=4, num_samples=2), request(max_new_tokens=8)])
    told: queue.Queue[tuple[int, Rollout]] = queue.Queue()
    replies = [[Future[SequenceScores]()] for _ in prompts]
    for number, prompt in enumerate(prompts):
        prompt.ask = lambda rollout, number=number: told.put((number, rollout)) or replies[number]
    dispatcher.submit(prompts)
    second.await_requests(1)
    first.end()
    for number, rollout in [told.get(timeout=30) for _ in range(2)]:
        assert (number, rollout.token_ids.tolist()) == (0, [2, 3, 4, 5])
    dispatcher.pause(abort=True)
    assert told.empty()
    second.end()
    dispatcher.resume()
    dispatcher.wait(prompts)
    number, rollout = told.get_nowait()
    assert (number, rollout.token_ids.tolist()) == (1, list(range(2, 10)))
    assert [prompt.scores for prompt in prompts] == [
        dict.fromkeys((0, 1), replies[0]),
        {0: replies[1]},
    ]
    dispatcher.close()


def test_a_killed_servers_response_goes_on_elsewhere(tmp_path):
    """It keeps the tokens of the replies before; what the dead server drew since was never sent."""
    dies, lives = AbortableServer(), AbortableServer(version=1)
    fleet = fleet_over(tmp_path, dies, lives)
    fleet.members[1].state = "needs_weights"
    dispatcher = Dispatcher(fleet)
    (prompt,) = prompts_of([request(max_new_tokens=8)])
    dispatcher.submit([prompt])
    dies.await_requests(1)
    dispatcher.pause(abort=True)
    dispatcher.resume()
    dies.await_requests(2)
    fleet.members[1].state = "ready"
    dies.kill()
    lives.end()
    dispatcher.wait([prompt])
    assert prompt.rollouts[0].token_ids.tolist() == list(range(2, 10))
    assert prompt.rollouts[0].segments == (Segment(3, 0), Segment(5, 1))
    assert happened(tmp_path) == ["failure", "redrawn"]


def test_without_aborts_a_pause_waits_for_what_is_in_flight_alone(tmp_path):
    client = AbortableServer()
    fleet = fleet_over(tmp_path, client)
    fleet.members[0].max_in_flight = 1
    dispatcher = Dispatcher(fleet)
    prompts = prompts_of([request(max_new_tokens=4)] * 2)
    dispatcher.submit(prompts)
    client.await_requests(1)
    threading.Timer(0.1, client.end).start()
    dispatcher.pause(abort=False)
    assert [prompt.is_done for prompt in prompts] == [True, False]
    dispatcher.resume()
    dispatcher.wait(prompts)
    assert prompts[1].is_done


def test_after_a_request_that_cannot_be_sent_a_pause_ends_and_its_error_is_raised(
    tmp_path, monkeypatch
):
    client, sent = AbortableServer(), itertools.count()
    fleet = fleet_over(tmp_path, client)
    fleet.members[0].max_in_flight = 1
    dispatcher, submit = Dispatcher(fleet), client.submit

    def fails_again(*arguments: Any, **options: Any) -> Future[Any]:
        if next(sent):
            raise OSError("no process can be started")
        return submit(*arguments, **options)

    monkeypatch.setattr(client, "submit", fails_again)
    prompts = prompts_of([request(num_samples=2)])
    dispatcher.submit(prompts)
    client.end()
    while not dispatcher._error:
        time.sleep(0.01)
    in_daemon(lambda: dispatcher.pause(abort=False), "pause").result(10)
    with pytest.raises(OSError, match="no process can be started"):
        dispatcher.wait(prompts)
    dispatcher.close()


def test_the_order_is_by_step_then_sample_then_submission(tmp_path):
    client = AbortableServer()
    fleet = fleet_over(tmp_path, client)
    fleet.members[0].max_in_flight = 1
    dispatcher = Dispatcher(fleet)
    dispatcher.hold()
    for prompt, step in enumerate((2, 1, 1)):
        asked = replace(request(num_samples=2), token_ids=(prompt,))
        dispatcher.submit(prompts_of([asked], step=step))
    dispatcher.resume()
    client.end()
    client.await_requests(6)
    assert [r.token_ids[0] for r in client.requests] == [1, 2, 1, 2, 0, 0]
    dispatcher.close()


def test_servers_have_equally_many_responses_and_each_at_most_its_share(tmp_path):
    clients = AbortableServer(), AbortableServer(), AbortableServer()
    fleet = fleet_over(tmp_path, *clients)
    fleet.members[0].max_in_flight = 3
    dispatcher = Dispatcher(fleet)
    prompts = prompts_of([request(max_new_tokens=9) for _ in range(21)])
    dispatcher.submit(prompts)
    assert [member.in_flight for member in fleet.members] == [3, 9, 9]
    for client in clients:
        client.end()
    dispatcher.wait(prompts)
    assert all(prompt.is_done for prompt in prompts)
    assert [member.in_flight for member in fleet.members] == [0, 0, 0]


@pytest.mark.parametrize(
    ("length", "max_new_tokens", "device", "both"),
    [
        *((2, 1, "cuda", [9, 4]), (1024, 512, "cuda", [9, 4]), (4096, 512, "cuda", [9, 4])),
        *((8, 64, "cuda", [7, 6]), (4096, 512, "cpu", [7, 6]), (2, 1, "cpu", [9, 4])),
    ],
)
def test_a_prompt_stays_where_it_was_computed_until_waiting_there_costs_more(
    tmp_path, length, max_new_tokens, device, both
):
    """Then another server has computed it, too."""
    fleet = fleet_over(tmp_path, AbortableServer(), AbortableServer())
    dispatcher = Dispatcher(fleet, device)
    asked = replace(request(max_new_tokens=max_new_tokens, num_samples=4), token_ids=(1,) * length)
    more = replace(asked, sampling=replace(asked.sampling, num_samples=20))
    *first, prompt = prompts_of([asked, asked, more])
    for each in (*first, prompt):
        each.window = 8192
    dispatcher.submit(first)
    assert [member.in_flight for member in fleet.members] == [4, 4]
    late, prompt.episodes = prompt.episodes[5:], prompt.episodes[:5]
    dispatcher.submit([prompt])
    assert [member.in_flight for member in fleet.members] == both
    prompt.episodes = late
    dispatcher.submit([prompt])
    assert [member.in_flight for member in fleet.members] == [14, 14]
    fleet.stop()


def test_a_turn_is_expected_to_have_as_many_tokens_as_the_replies_so_far(tmp_path):
    clients = AbortableServer(), AbortableServer()
    fleet = fleet_over(tmp_path, *clients)
    dispatcher = Dispatcher(fleet)
    long = request(max_new_tokens=100, num_samples=2)
    dispatcher.submit(prompts_of([long]))
    assert [member.in_flight for member in fleet.members] == [1, 1]
    dispatcher.pause(abort=True)  # after three tokens each
    dispatcher.drop([])
    dispatcher.resume()
    dispatcher.submit(prompts_of([replace(long, token_ids=(1,) * 12)]))
    assert [member.in_flight for member in fleet.members] == [2, 0]
    fleet.stop()


def happened(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (path / "events.jsonl").read_text().splitlines()]


BROKEN = [
    (500, b""),
    (429, b"too many requests"),
    (200, b"[]"),
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
            (prompt,) = sampled(fleet, [request()])
            assert [rollout.token_ids.tolist() for rollout in prompt.rollouts] == [[2]]
    assert next(replies, None) is None
    assert fleet.members[0].state == "ready"
    assert happened(tmp_path) == ["retried"] * len(BROKEN)


def test_a_failing_servers_requests_go_to_the_other_server(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "pause_seconds", lambda attempt: 0.0)
    with http_server(lambda _: (502, b"")) as fails, http_server(lambda _: GOOD) as answers:
        fleet = fleet_of(tmp_path, fails, answers)
        assert all(prompt.is_done for prompt in sampled(fleet, [request()] * 10))
    assert [member.state for member in fleet.members] == ["restarting", "ready"]
    kinds = happened(tmp_path)
    assert kinds.index("retried") < kinds.index("failure") < kinds.index("redrawn")
    assert "HTTP 502" in (tmp_path / "events.jsonl").read_text()


def test_a_server_without_its_adapter_has_failed(tmp_path):
    """It was started again between two requests, and refuses the name that each of them gives."""
    asked: list[str | None] = []

    def refuse(received: Request) -> tuple[int, bytes]:
        asked.append(json.loads(received.body)["lora_path"])
        return 400, f"adapter that has never been loaded: {asked[-1]}".encode()

    with http_server(refuse) as lacks_it, http_server(lambda _: GOOD) as answers:
        fleet = fleet_of(tmp_path, lacks_it, answers)
        for number, member in enumerate(fleet.members):
            member.adapter = f"adapter_{number}"
        assert all(prompt.is_done for prompt in sampled(fleet, [request()] * 4))
        assert set(asked) == {"adapter_0"}
        assert [member.state for member in fleet.members] == ["restarting", "ready"]
        assert "it has lost the adapter" in (tmp_path / "events.jsonl").read_text()
        fleet = fleet_of(tmp_path, lacks_it)
        with pytest.raises(RefusedRequest, match="HTTP 400"):
            sampled(fleet, [request()])
    assert asked[-1] is None


def test_without_a_server_a_job_is_not_done(tmp_path):
    """Its only server's responses come from old weights, and are dropped."""
    with http_server(lambda _: GOOD) as url:
        fleet = fleet_of(tmp_path, url)

        def refuse(member: Member, answer: object) -> bool:
            fleet.weights_outdated(member)
            return False

        (prompt,) = sampled(fleet, [request()], refuse)
    assert not len(prompt.rollouts[0].token_ids)
    assert fleet.members[0].state == "needs_weights"
