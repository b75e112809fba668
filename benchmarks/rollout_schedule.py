"""How long a training step takes under each schedule of rollouts, on a clock of events.

    python -m benchmarks.rollout_schedule [--generations FILE.jsonl] [--traces FILE.csv]

Nothing computes and nothing sleeps: servers and trainer take the time that a roofline says, and the
clock jumps from event to event. The schedules are those of the product, in a model of their own
(train/step.py, rollout/sglang/), not run through its code:

- Step n trains batch n. It submits batches n + 1 .. n + K, the nearest first, each as soon as n
  minus the servers' version is at most K, and then waits for its own.
- Requests start in order of submission, on the server with the fewest, which has bounded slots.
- Without partial responses servers take new weights every P = max(1, K - 1) updates, and a publish
  waits for all responses in flight. With them every publish interrupts the responses, which
  continue with a new prefill of their prompt and tokens.

Lengths are those of the given files or of log-normals fitted to them (FITTED), cut at LIMIT tokens.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import NormalDist, fmean

from stable_opd_mcore.config.rollouts import RolloutConfig
from stable_opd_mcore.host.atomic_files import write_atomically

LIMIT = 16384  # tokens of the longest response
PROMPT_TOKENS = 256
CHARACTERS_PER_TOKEN = 2.92  # measured on the stored answers, with their tokenizer
# Log-normals (mu, sigma) of tokens. "short" and "long" have the mean and the truncation rate of the
# lower quartile and of the median of 6,510 published steps: 1,564 tokens with 2.3 % truncated, and
# 6,503 with 13.3 %. "base" is fitted to 310 answers of Qwen2.5-Math-7B, loops included; their limit
# was 4,096.
SHORT, LONG, BASE = (5.85, 1.94), (8.44, 1.14), (6.95, 1.22)
Lengths = Callable[[random.Random], int]


@dataclass(frozen=True)
class Hardware:
    """Rates of Qwen2.5-7B in bf16, one H100 a server, at the shares of placement/hardware.py."""

    servers: int = 8
    slots: int = 128  # running responses of one server: 53 GB of cache, 57 kB a token
    # one decoding step: weights once (15.2 GB over 2,680 GB/s) and 2 ms of overhead
    step_seconds: float = 0.0077
    response_seconds: float = 26e-6  # each response's share of a decoding step: products
    context_seconds: float = 21e-9  # and for each token of its context: the cache
    prefill_seconds: float = 26e-6  # each token
    publish_seconds: float = 0.9


@dataclass(frozen=True)
class Schedule:
    max_staleness: int
    partial: bool = False
    every: int = 0  # updates between publishes; 0: the product's

    @property
    def publish_every(self) -> int:
        rollout = RolloutConfig.model_construct(
            max_staleness=self.max_staleness, partial=self.partial
        )
        return self.every or rollout.publish_every

    def __str__(self) -> str:
        if not self.max_staleness:
            return "on-policy"
        every = f" P={self.every}" if self.every else ""
        return f"K={self.max_staleness}{' partial' if self.partial else ''}{every}"


SCHEDULES = [Schedule(ahead, partial) for ahead in (1, 2, 4) for partial in (False, True)]


@dataclass(frozen=True)
class Result:
    """What the steps after the first ones took."""

    schedule: str
    step_seconds: float
    tokens_per_second: float
    speedup: float  # over the on-policy schedule
    # shares of the time, as perf/trainer_waited and perf/servers_waited of a run's metrics
    trainer_waited: float  # publishes included
    servers_waited: float  # without a response, publishes left out; mean of the servers
    slots_used: float  # mean share
    mean_staleness: float
    continued: float  # share of responses that were interrupted


@dataclass(order=True)
class Response:
    step: int
    number: int
    length: int = field(compare=False)
    drawn: float = field(default=0.0, compare=False)  # tokens so far
    version: int = field(default=-1, compare=False)  # the servers' at its first token
    interrupted: bool = field(default=False, compare=False)


class Server:
    """Running responses, each of which gets a token in every decoding step."""

    def __init__(self, hardware: Hardware):
        self.hardware = hardware
        self.now = 0.0
        self.running: list[tuple[float, Response]] = []  # heap: decoding steps at its end
        self.steps = 0.0  # decoding steps so far
        self.context = 0.0  # tokens in the cache
        self.stall = 0.0  # seconds of prefill that come first
        self.busy = self.used = 0.0  # seconds; seconds x responses

    def admit(self, response: Response) -> None:
        self.stall += self.hardware.prefill_seconds * (PROMPT_TOKENS + response.drawn)
        self.context += PROMPT_TOKENS + response.drawn
        heapq.heappush(self.running, (self.steps + response.length - response.drawn, response))

    def _linear(self) -> float:
        """Seconds of the next decoding step; each is longer by one token of every response."""
        hardware, count = self.hardware, len(self.running)
        cache = hardware.context_seconds * self.context
        return hardware.step_seconds + hardware.response_seconds * count + cache

    def next_end(self) -> float:
        """When the first of the running responses ends."""
        if not self.running:
            return math.inf
        steps = self.running[0][0] - self.steps
        growth = self.hardware.context_seconds * len(self.running) / 2
        return self.now + self.stall + steps * (self._linear() + growth * steps)

    def advance(self, now: float) -> None:
        """Decode until `now`, at most to the next end."""
        seconds, self.now = now - self.now, now
        if not self.running:
            return
        self.busy += seconds
        self.used += seconds * len(self.running)
        prefill = min(self.stall, seconds)
        self.stall -= prefill
        growth = self.hardware.context_seconds * len(self.running) / 2
        linear, left = self._linear(), seconds - prefill
        steps = 2 * left / (linear + math.sqrt(linear**2 + 4 * growth * left))
        self.steps += steps
        self.context += steps * len(self.running)

    def pop(self) -> Response:
        """Take out the response that ends now."""
        self.steps, response = heapq.heappop(self.running)
        self.context -= PROMPT_TOKENS + response.length
        return response

    def interrupt(self) -> list[Response]:
        """Take out all responses with the tokens that they have."""
        taken = [response for _, response in self.running]
        for end, response in self.running:
            response.drawn = response.length - max(0.0, end - self.steps)
            response.interrupted = True
        self.running, self.context, self.stall = [], 0.0, 0.0
        return taken


class Servers:
    """All servers with one queue, in order of submission."""

    def __init__(self, hardware: Hardware):
        self.servers = [Server(hardware) for _ in range(hardware.servers)]
        self.slots = hardware.slots
        self.queue: list[Response] = []
        self.left = Counter[int]()  # unfinished responses by step
        self.version, self.now = 0, 0.0

    def submit(self, responses: Sequence[Response]) -> None:
        for response in responses:
            heapq.heappush(self.queue, response)
            self.left[response.step] += 1
        self._fill()

    def _fill(self) -> None:
        while self.queue:
            server = min(self.servers, key=lambda server: len(server.running))
            if len(server.running) >= self.slots:
                return
            response = heapq.heappop(self.queue)
            if response.version < 0:
                response.version = self.version
            server.admit(response)

    def run(self, until: float = math.inf, step: int | None = None) -> float:
        """Sample until a time, or until all responses, or those of `step`, have ended."""
        while self.left.total() if step is None else self.left[step]:
            server = min(self.servers, key=Server.next_end)
            end = server.next_end()
            if end > until:
                break
            self._advance(end)
            self.left[server.pop().step] -= 1
            self._fill()
        if until < math.inf:
            self._advance(until)
        return self.now

    def publish(self, version: int, seconds: float) -> float:
        """Take new weights; responses in flight continue afterwards."""
        for server in self.servers:
            for response in server.interrupt():
                heapq.heappush(self.queue, response)
        self.version = version
        self._advance(self.now + seconds)
        self._fill()
        return self.now

    def _advance(self, now: float) -> None:
        self.now = now
        for server in self.servers:
            server.advance(now)


def simulate(
    schedule: Schedule,
    batches: Sequence[Sequence[int]],
    token_seconds: float,
    hardware: Hardware,
) -> Result:
    """What the steps after the first ones took, and what their seconds were spent on.

    Args:
        batches: the lengths of the responses of each step.
        token_seconds: of the trainer, for each token of a batch.
    """
    servers, ahead, every = Servers(hardware), schedule.max_staleness, schedule.publish_every
    responses = [[Response(n, i, x) for i, x in enumerate(b)] for n, b in enumerate(batches)]
    first, last = 2 * schedule.max_staleness + 2, len(batches) - ahead  # the measured steps
    submitted, waited, published, begin, busy, used = 0, 0.0, 0.0, 0.0, 0.0, 0.0
    trained: list[tuple[int, Response]] = []  # and the step that trained on it
    for n in range(last):
        if n == first:
            begin, waited, published = servers.now, 0.0, 0.0
            busy, used = (sum(getattr(s, key) for s in servers.servers) for key in ("busy", "used"))
        start = servers.now
        while submitted <= n or (submitted <= n + ahead and submitted - servers.version <= ahead):
            servers.submit(responses[submitted])
            submitted += 1
        trains = servers.run(step=n)
        now = servers.run(trains + token_seconds * sum(PROMPT_TOKENS + x for x in batches[n]))
        waited += trains - start
        if n >= first:
            trained += [(n, response) for response in responses[n]]
        if n + 1 - servers.version >= every:
            if not schedule.partial:
                servers.run()
            waited += servers.publish(n + 1, hardware.publish_seconds) - now
            published += hardware.publish_seconds
    seconds, count = servers.now - begin, last - first
    ages = [n - response.version for n, response in trained]
    assert max(ages) <= schedule.max_staleness, "a response is older than the schedule allows"
    busy, used = (
        sum(getattr(s, key) for s in servers.servers) - before
        for key, before in (("busy", busy), ("used", used))
    )
    return Result(
        schedule=str(schedule),
        step_seconds=seconds / count,
        tokens_per_second=sum(response.length for _, response in trained) / seconds,
        speedup=1.0,
        trainer_waited=waited / seconds,
        servers_waited=max(0.0, 1 - (busy / hardware.servers + published) / seconds),
        slots_used=used / seconds / hardware.servers / hardware.slots,
        mean_staleness=fmean(ages),
        continued=fmean(response.interrupted for _, response in trained),
    )


def lengths_of(mu: float, sigma: float, limit: int = LIMIT) -> Lengths:
    """A log-normal, cut at `limit`."""
    return lambda noise: max(1, min(limit, round(noise.lognormvariate(mu, sigma))))


FITTED = {
    "short": lengths_of(*SHORT),
    "long": lengths_of(*LONG),
    "base": lengths_of(*BASE, limit=4096),
    "equal": lambda _: 4096,
}


def lengths_of_answers(file: Path) -> Lengths:
    """The lengths of stored answers: a JSON object a line with `response`."""
    characters = [len(json.loads(line)["response"]) for line in file.read_text().splitlines()]
    tokens = [max(1, round(number / CHARACTERS_PER_TOKEN)) for number in characters]
    return lambda noise: noise.choice(tokens)


def lengths_of_traces(file: Path) -> Lengths:
    """A log-normal for each response: that of a random published step, by mean and truncation."""
    with file.open(newline="") as lines:
        rows = [
            (float(row["response_length_mean"]), float(row["truncation_rate"]))
            for row in csv.DictReader(lines)
        ]
    fits = [fit(mean, cut) for mean, cut in rows[:: max(1, len(rows) // 500)] if 0 < cut < 0.5]
    return lambda noise: lengths_of(*noise.choice(fits))(noise)


def fit(mean: float, truncated: float, limit: int = LIMIT) -> tuple[float, float]:
    """mu and sigma of the log-normal that, cut at `limit`, has this mean and share of cut ones."""
    normal = NormalDist()
    place, low, high = normal.inv_cdf(1 - truncated), 1e-3, 6.0
    for _ in range(50):
        sigma = (low + high) / 2
        mu = math.log(limit) - place * sigma
        whole = math.exp(mu + sigma**2 / 2) * normal.cdf(place - sigma) + limit * truncated
        low, high = (sigma, high) if whole > mean else (low, sigma)
    return math.log(limit) - place * sigma, sigma


def balanced(batches: Sequence[Sequence[int]], hardware: Hardware) -> float:
    """The trainer's seconds for each token with which it is as fast as servers of full slots."""
    lengths = [length for batch in batches for length in batch]
    context = PROMPT_TOKENS + sum(x * x for x in lengths) / sum(lengths) / 2
    of_response = hardware.response_seconds + hardware.context_seconds * context
    of_token = hardware.step_seconds / hardware.slots + of_response
    generated = sum(lengths) * of_token + hardware.prefill_seconds * PROMPT_TOKENS * len(lengths)
    return generated / hardware.servers / (sum(lengths) + PROMPT_TOKENS * len(lengths))


def compare(
    lengths: Lengths,
    schedules: Sequence[Schedule],
    *,
    balance: float = 1.0,
    steps: int = 32,
    responses: int = 512,
    hardware: Hardware | None = None,
    seed: int = 0,
) -> list[Result]:
    """Every schedule with the same responses; on-policy is the first.

    Args:
        balance: the trainer's time over that of servers with full slots.
    """
    noise, hardware = random.Random(seed), hardware or Hardware()
    batches = [[lengths(noise) for _ in range(responses)] for _ in range(steps)]
    token_seconds = balance * balanced(batches, hardware)
    results = [simulate(s, batches, token_seconds, hardware) for s in (Schedule(0), *schedules)]
    base = results[0].tokens_per_second
    return [replace(result, speedup=result.tokens_per_second / base) for result in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--generations", type=Path, help="stored answers, one JSON object a line")
    parser.add_argument("--traces", type=Path, help="published steps, CSV")
    parser.add_argument("--balance", type=float, default=1.0, help="see compare()")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    drawn = dict(FITTED)
    if args.generations:
        drawn["answers"] = lengths_of_answers(args.generations)
    if args.traces:
        drawn["traces"] = lengths_of_traces(args.traces)
    found = {name: compare(which, SCHEDULES, balance=args.balance) for name, which in drawn.items()}
    print(
        f"{'lengths':8} {'schedule':21} {'s/step':>7} {'tokens/s':>8} {'speedup':>7} "
        f"{'trainer_waited':>14} {'servers_waited':>14} {'slots':>6} {'age':>5} {'cont.':>6}"
    )
    for name, results in found.items():
        for r in results:
            print(
                f"{name:8} {r.schedule:21} {r.step_seconds:7.1f} {r.tokens_per_second:8.0f} "
                f"{r.speedup:7.2f} {r.trainer_waited:14.1%} {r.servers_waited:14.1%} "
                f"{r.slots_used:6.1%} {r.mean_staleness:5.2f} {r.continued:6.1%}"
            )
    if args.json:
        values = {name: [asdict(result) for result in results] for name, results in found.items()}
        write_atomically(args.json, json.dumps(values, indent=1).encode())


if __name__ == "__main__":
    main()
