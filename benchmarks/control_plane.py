"""What it costs the trainer to talk to servers, and what it costs with slime's client.

    python -m benchmarks.control_plane
    python -m benchmarks.control_plane --smoke   # a few short responses: does it run?

Stand-ins for SGLang servers run in one process, on a port each, and reply at once with prepared
bytes of SGLang 0.5.23's form. Seconds are of CPU, unless they are called wall-clock: "trainer" is
this process, "child" the one that talks to servers. Not measured: networks, and real servers.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import random
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import orjson
import psutil
import torch

from stable_opd_mcore.data.bridge import Observed
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.records import Prompt, Sampling
from stable_opd_mcore.rollout.episodes import End, Episode, WhatFollows
from stable_opd_mcore.rollout.sglang.dispatch import Dispatcher
from stable_opd_mcore.rollout.sglang.event_log import EventLog
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.rollout.sglang.prompt_requests import PromptRequests
from stable_opd_mcore.serving.client import SglangClient
from stable_opd_mcore.serving.http_process import HTTP
from stable_opd_mcore.serving.requests import Generation, Scoring

VOCABULARY, LONG, SHORT, PROMPT = 150_000, 16_384, 512, 256
OBSERVATION = 64  # tokens between two turns
TURN_SECONDS = 1.0  # within which one of several turns is sampled
SPREAD_SECONDS = 4.0  # over which replies come in while the main thread works


class Case(NamedTuple):
    servers: int
    episodes: int
    turns: int  # of each
    tokens: int  # of each turn


@dataclass(frozen=True)
class Size:
    """What is measured."""

    cases: tuple[Case, ...]
    long_responses: int  # that come in while the main thread works
    scored: int  # sequences


CASES = Case(8, 256, 1, LONG), Case(64, 1024, 1, SHORT), Case(64, 4096, 1, SHORT)
FULL = Size((*CASES, Case(8, 256, 4, SHORT)), 256, 16)
SMOKE = Size((Case(2, 4, 1, 64), Case(2, 4, 2, 64)), 2, 1)


# ---- the stand-ins


class Tape:
    """JSON of random tokens, so that a reply of any length is a few slices."""

    def __init__(self, vocabulary: int) -> None:
        rng = np.random.default_rng(0)
        ids = rng.integers(10, vocabulary, LONG)
        values = (-rng.exponential(0.3, LONG)).astype(np.float32)
        self.flat = {"val": values, "idx": ids.astype(np.int32)}
        self._ids = [b"%d" % token for token in ids]
        pairs = zip(values.tolist(), ids, strict=True)
        self._entries = [f"[{value!r},{token},null]".encode() for value, token in pairs]

    def response(self, length: int) -> bytes:
        ids, entries = b",".join(self._ids[:length]), b",".join(self._entries[:length])
        return (
            b'{"output_ids":[%b],"meta_info":{"finish_reason":{"type":"length","length":%d},'
            b'"weight_version":"0","cached_tokens":0,"completion_tokens":%d,'
            b'"output_token_logprobs":[%b]}}' % (ids, length, length, entries)
        )

    def scores(self, asked: dict[str, Any]) -> bytes:
        start, top_k = asked["logprob_start_len"], asked["top_logprobs_num"]
        scored = asked["input_ids"][start + 1 :]
        fields: dict[str, Any] = {
            "input_token_logprobs": [[None, 0, None], *([-0.3465735912, t, None] for t in scored)]
        }
        if asked["token_ids_logprob"]:
            row = [[-3.4657359123, token, None] for token in asked["token_ids_logprob"]]
            fields["input_token_ids_logprobs"] = [None, *[row] * len(scored)]
        if top_k:
            for name, values in self.flat.items():
                encoded = base64.b64encode(values[:top_k].tobytes() * len(scored)).decode()
                fields[f"input_top_logprobs_{name}_flat_b64"] = encoded
            fields["input_top_logprobs_shape"] = [len(scored), top_k]
        return orjson.dumps({"output_ids": [], "meta_info": fields})


class PrefixCache:
    """The contexts that one server has computed; none is forgotten."""

    def __init__(self) -> None:
        self._known: dict[int, set[int]] = {}  # hashes, by the number of tokens

    def num_cached(self, ids: list[int], sampled: list[int]) -> int:
        """How many of a request's tokens are known; from now on all of them are."""
        lengths = (n for n in sorted(self._known, reverse=True) if n <= len(ids))
        found = next((n for n in lengths if hash(tuple(ids[:n])) in self._known[n]), 0)
        for whole in (ids, ids + sampled):
            self._known.setdefault(len(whole), set()).add(hash(tuple(whole)))
        return min(found, len(ids) - 1)


class StandIn(asyncio.Protocol):
    """One connection; it has one request."""

    def __init__(
        self, tape: Tape, kept: dict[Any, bytes], spread: float, cache: PrefixCache
    ) -> None:
        self._tape, self._kept, self._spread, self._received = tape, kept, spread, bytearray()
        self._cache = cache

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = bytes(self._received).partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if not found or len(body) < length:
            return
        if not head.startswith(b"POST /generate"):
            self._send(b"{}")
            return
        delay = random.uniform(0, self._spread)
        asyncio.get_running_loop().call_later(delay, self._send, self._reply(body))

    def _reply(self, body: bytes) -> bytes:
        asked = orjson.loads(body)
        tokens = asked["sampling_params"]["max_new_tokens"]
        key = tokens or (asked["top_logprobs_num"], len(asked["token_ids_logprob"] or ()))
        if key not in self._kept:
            self._kept[key] = self._tape.response(tokens) if tokens else self._tape.scores(asked)
        if not tokens:
            return self._kept[key]
        sampled = self._tape.flat["idx"][:tokens].tolist()
        cached = self._cache.num_cached(asked["input_ids"], sampled)
        return self._kept[key].replace(b'"cached_tokens":0', b'"cached_tokens":%d' % cached, 1)

    def _send(self, content: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(content)
        self._transport.write(head + content)
        self._transport.close()


def stand_ins(number: int, spread: float, vocabulary: int, answer: Connection) -> None:
    async def serve() -> None:
        tape, kept, loop = Tape(vocabulary), {}, asyncio.get_running_loop()
        servers = [
            await loop.create_server(
                partial(StandIn, tape, kept, spread, PrefixCache()), "127.0.0.1", 0, backlog=4096
            )
            for _ in range(number)
        ]
        answer.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.sleep(3600)

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(serve())


class Servers:
    """The stand-ins' addresses, as long as the `with` block runs."""

    def __init__(self, number: int, spread: float = 0.0, vocabulary: int = VOCABULARY) -> None:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        arguments = (number, spread, vocabulary, theirs)
        self._process = context.Process(target=stand_ins, args=arguments, daemon=True)
        self._process.start()
        self.urls = [f"http://127.0.0.1:{port}" for port in ours.recv()]

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


# ---- what is measured


def child_seconds() -> float:
    times = psutil.Process(HTTP.pid).cpu_times()
    return times.user + times.system


def after_turn(turns: int, episode: Episode) -> Future[WhatFollows]:
    """Known at once."""
    seen = Future[WhatFollows]()
    is_over = len(episode.turns) == turns
    seen.set_result(End(Ending.LENGTH) if is_over else Observed((10,) * OBSERVATION))
    return seen


def sampled(
    urls: list[str], case: Case, meanwhile: Callable[[Callable[[], bool]], None]
) -> dict[str, float]:
    """CPU seconds of trainer and child for a case, how many episodes were lost, and the share of
    contexts that the servers had computed.

    Args:
        meanwhile: what the main thread does until its argument returns True.
    """
    _, number, turns, tokens = case
    rng = np.random.default_rng(1)
    sampling = Sampling(max_new_tokens=tokens)
    prompts = [tuple(rng.integers(10, VOCABULARY, PROMPT).tolist()) for _ in range(number)]
    requests = [Generation(prompt, sampling, VOCABULARY) for prompt in prompts]
    with tempfile.TemporaryDirectory() as folder:
        members = [
            Member(f"server_{n}", SglangClient(url), None, state="ready")
            for n, url in enumerate(urls)
        ]
        assert members[0].client.is_healthy()
        log = Path(folder) / "events.jsonl"
        fleet = Fleet(members, EventLog(log))
        dispatcher, child, here = Dispatcher(fleet), child_seconds(), time.process_time()
        began = time.perf_counter()
        jobs = [
            PromptRequests(
                request,
                lambda *_: True,
                [Episode.begin(Prompt(f"p:{n}", "", prompts[n]), 0, 0)],
                0,
                PROMPT + turns * (tokens + OBSERVATION),
                partial(after_turn, turns),
            )
            for n, request in enumerate(requests)
        ]
        dispatcher.submit(jobs)
        meanwhile(lambda: all(job.is_done for job in jobs))
        dispatcher.wait(jobs)
        rollouts = [rollout for job in jobs for rollout in job.rollouts]
        seconds = {"trainer": time.process_time() - here, "child": child_seconds() - child}
        seconds["wall"] = time.perf_counter() - began
        assert {len(rollout.token_ids) for rollout in rollouts} == {turns * tokens}
        cached = dispatcher.take_metrics()["engine/prefix_cached_share"].value()
        lost = number - len(rollouts) + (len(log.read_text().splitlines()) if log.exists() else 0)
        dispatcher.close()
        fleet.stop()
    return seconds | {"lost": lost, "cached": cached or 0.0}


def lost_share(run: Callable[[Callable[[Callable[[], bool]], None]], Any]) -> tuple[float, float]:
    """The share of its time, and the seconds, for which the main thread, which launches small
    operations, is neither on a core nor waits for one, while `run` does its work in other threads.
    Where other programs have the cores, the main thread has less time, and the share is larger.

    Args:
        run: called with what the main thread does until its argument returns True.
    """

    def schedule() -> tuple[float, float, float]:
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        on_core, waits, _ = Path(path).read_text().split()
        return time.perf_counter(), int(on_core) / 1e9, int(waits) / 1e9

    one, shares = torch.ones(16), []

    def work(is_over: Callable[[], bool]) -> None:
        before = schedule()
        while not is_over():
            for _ in range(200):
                torch.add(one, one)
        wall, on_core, waits = (b - a for a, b in zip(before, schedule(), strict=True))
        lost = wall - on_core - waits
        shares.append((lost / (wall - waits), lost))

    run(work)
    return shares[0]


def slime_seconds(urls: list[str], number: int, tokens: int) -> float:
    """CPU seconds of one httpx client for all servers, json.loads and lists."""
    sampling = {"max_new_tokens": tokens, "temperature": 1.0}
    body = {"input_ids": [7] * PROMPT, "sampling_params": sampling, "return_logprob": True}

    async def ask(client: httpx.AsyncClient, url: str) -> int:
        reply = json.loads((await client.post(url + "/generate", json=body)).content)
        entries = reply["meta_info"]["output_token_logprobs"]
        return len(list(zip([e[1] for e in entries], [e[0] for e in entries], strict=True)))

    async def ask_all() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:
            replies = [ask(client, urls[n % len(urls)]) for n in range(number)]
            assert set(await asyncio.gather(*replies)) == {tokens}

    before = time.process_time()
    asyncio.run(ask_all())
    return time.process_time() - before


def score_microseconds(url: str, top_k: int, number: int) -> float:
    """CPU of trainer and child per token of sequences that are scored, with two stop ids."""
    request = Scoring(tuple(range(10, 10 + PROMPT + LONG)), PROMPT, VOCABULARY, top_k, (2, 3))
    client = SglangClient(url)
    client.submit(request).result()
    before = child_seconds() + time.process_time()
    for reply in [client.submit(request) for _ in range(number)]:
        assert len(reply.result().logprobs_L) == LONG
    return 1e6 * (child_seconds() + time.process_time() - before) / (number * LONG)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few short responses")
    smoke = parser.parse_args().smoke
    size = SMOKE if smoke else FULL
    torch.set_num_threads(1)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # slime's client holds all connections
    print("| case | ours, trainer | child | slime | ours/slime | wall-clock | cached | lost |")
    print("|---|---|---|---|---|---|---|---|")
    for case in size.cases:
        servers, number, turns, tokens = case
        has_slime = turns == 1 and number < 4096
        with Servers(servers, 0.0 if turns == 1 else TURN_SECONDS) as serving:
            ours = sampled(serving.urls, case, lambda _: None)
            slime = slime_seconds(serving.urls, number, tokens) if has_slime else None
        both = ours["trainer"] + ours["child"]
        theirs = " | " if slime is None else f"{slime:.2f} s | {both / slime:.2f}"
        costs = f"{ours['trainer']:.3f} s | {ours['child']:.2f} s | {theirs} | {ours['wall']:.1f} s"
        name = f"{number} x {tokens}" if turns == 1 else f"{number} x {turns} turns of {tokens}"
        rest = f"{ours['cached']:.2f} | {ours['lost']:.0f}"
        print(f"| {name} over {servers} | {costs} | {rest} |", flush=True)
    with Servers(8, 0.1 if smoke else SPREAD_SECONDS) as serving:
        lost, _ = lost_share(partial(sampled, serving.urls, Case(8, size.long_responses, 1, LONG)))
        print(f"\nmain thread, time lost while replies come in: {lost:.1%}")
    with Servers(1) as serving:
        for top_k in (32, 0):
            cost = score_microseconds(serving.urls[0], top_k, size.scored)
            print(f"scores, top {top_k} and two stop ids: {cost:.2f} us/token")


if __name__ == "__main__":
    main()
