"""A server in this process whose responses end when a test says so, a fleet of such servers, and
prompts and an environment for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from stable_opd_mcore.data.bridge import Observed
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.records import Prompt, Sampling
from stable_opd_mcore.rollout.episodes import End, Episode, WhatFollows
from stable_opd_mcore.rollout.interaction import Interaction
from stable_opd_mcore.rollout.sglang.event_log import EventLog
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.rollout.sglang.prompt_requests import PromptRequests
from stable_opd_mcore.serving.client import ServerFailure
from stable_opd_mcore.serving.requests import Call, Completion, Generation

WINDOW = 32


@dataclass(eq=False)
class AbortableServer:
    """A client whose server has sampled `pace` tokens of each response when its requests are
    aborted, and samples to the end when `finish` is set. A token is its position."""

    pace: int = 3
    version: int = 0
    url, api_key = "http://here", None

    def __post_init__(self) -> None:
        self.requests: list[Generation] = []
        self.finish, self._woken = threading.Event(), threading.Condition()
        self._waiting: list[tuple[Generation, Future[Completion]]] = []
        self._is_dead = False

    def submit(
        self, request: Generation | Call, timeout_seconds: float = 0, delay_seconds: float = 0
    ) -> Future[Any]:
        reply: Future[Any] = Future()
        if isinstance(request, Call):
            self._reply()
            reply.set_result("aborted")
            return reply
        with self._woken:
            self.requests.append(request)
            self._waiting.append((request, reply))
            self._woken.notify_all()
        if self.finish.is_set():
            self._reply()
        return reply

    def _reply(self) -> None:
        """As SGLang replies: not in the thread of the request."""
        with self._woken:
            waiting, self._waiting = self._waiting, []
        for request, reply in waiting:
            if self._is_dead:
                failure = ServerFailure("here", "unreachable", "it was killed")
                threading.Timer(0.01, reply.set_exception, (failure,)).start()
            else:
                threading.Timer(0.01, reply.set_result, (self.completion(request),)).start()

    def completion(self, request: Generation) -> Completion:
        first, longest = len(request.token_ids), request.sampling.max_new_tokens
        number = longest if self.finish.is_set() else min(self.pace, longest)
        ids = np.arange(first, first + number, dtype=np.int32)
        reason = "length" if number == longest else "open"
        logprobs = np.full(number, -0.5, np.float32)
        versions, passes = (str(self.version),), number // 2  # of which one accepts all the rest
        return Completion(ids, logprobs, reason, versions, 0, passes, number - passes)

    def end(self) -> None:
        self.finish.set()
        self._reply()

    def kill(self) -> None:
        self._is_dead = True
        self._reply()

    def await_requests(self, number: int) -> None:
        with self._woken:
            assert self._woken.wait_for(lambda: len(self.requests) >= number, 30)

    def close(self) -> None:
        pass


def request(**sampling: Any) -> Generation:
    settings = {"max_new_tokens": 1, "stop_token_ids": (2,)} | sampling
    return Generation((1, 2), Sampling(**settings), vocab_size=5)


def fleet_over(directory: Path, *clients: AbortableServer, **settings: Any) -> Fleet:
    members = [
        Member(f"server_{n}", client, None, state="ready")  # type: ignore[arg-type]
        for n, client in enumerate(clients)
    ]
    return Fleet(members, EventLog(directory / "events.jsonl"), **settings)


def prompts_of(
    requests: Sequence[Generation],
    accept: Callable[[Member, Completion], bool] = lambda *_: True,
    step: int = 0,
) -> list[PromptRequests]:
    return [
        PromptRequests(
            request,
            accept,
            [
                Episode.begin(Prompt("a:0", "", tuple(request.token_ids)), sample, 0)
                for sample in range(request.sampling.num_samples)
            ],
            step,
            WINDOW,
            partial(Interaction().observe, sampling=request.sampling, step=step),
        )
        for request in requests
    ]


def known(observation: WhatFollows) -> Future[WhatFollows]:
    answer = Future[WhatFollows]()
    answer.set_result(observation)
    return answer


def talked(episode: Episode) -> Future[WhatFollows]:
    """Three turns: the second one continues the context, the third one begins another."""
    number = len(episode.turns)
    if number == 3:
        return known(End(Ending.STOP))
    return known(Observed((8,) * number, restarts=number == 2))
