"""How long the score phase waits for a served teacher that is asked early, and for one that is not.

    python -m benchmarks.early_scores

The product's queue of requests (rollout/sglang/dispatch.py) and its served teacher
(scoring/served_teacher.py) run over servers that compute nothing and sleep. A response of LIMIT
tokens is drawn in DRAW_SECONDS. The teacher scores one response at a time, and all of them in a
given part of DRAW_SECONDS.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rollout_schedule import LIMIT, LONG, SHORT
from stable_opd_mcore.config.rollouts import SglangConfig
from stable_opd_mcore.config.schema import ParallelConfig, TeacherConfig
from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.parallel.world import World, start_world
from stable_opd_mcore.records import Sample, SampleWeights, Sampling
from stable_opd_mcore.rollout.sglang.dispatch import Dispatcher
from stable_opd_mcore.rollout.sglang.event_log import EventLog
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.rollout.sglang.records import Answer, Job
from stable_opd_mcore.scoring.early_requests import EarlyRequests
from stable_opd_mcore.scoring.served_teacher import ServedTeacher
from stable_opd_mcore.serving.requests import Completion, Generation, Scoring, SequenceScores

PROMPTS, DRAW_SECONDS, SCALE = 64, 6.0, 32  # a token stands for SCALE of them
WHOLE = LIMIT // SCALE


@dataclass
class Servers:
    """Rollout servers that draw all responses at once, and a teacher."""

    lengths: dict[tuple[int, ...], list[int]]  # tokens of the responses to each prompt
    teacher_seconds: float  # for each token
    lock: threading.Lock = field(default_factory=threading.Lock)
    url = "http://nowhere"

    def generate(self, request: Generation) -> list[Completion]:
        """The responses of one prompt are one request, which ends with its longest."""
        lengths = self.lengths[request.token_ids]
        time.sleep(DRAW_SECONDS * max(lengths) / WHOLE)
        draw = np.random.default_rng(request.token_ids[0])
        return [
            Completion(tuple(draw.integers(0, 2**15, n).tolist()), (-0.5,) * n, "length", ("0",), 0)
            for n in lengths
        ]

    def score(self, request: Scoring, timeout_seconds: float) -> SequenceScores:
        number = len(request.token_ids) - request.start
        with self.lock:
            time.sleep(number * self.teacher_seconds)
        none = np.empty((number, 0), np.float32)
        return SequenceScores(np.zeros(number, np.float32), none.astype(np.int32), none, none)

    def close(self) -> None: ...


def score_seconds(world: World, servers: Any, early: bool) -> float:
    """Seconds from the last response to the last score."""
    settings = TeacherConfig(engine="sglang", urls=(servers.url,))
    teacher = ServedTeacher(
        settings,
        world,
        vocab_size=2**15,
        temperature=1.0,
        early=EarlyRequests() if early else None,
    )
    teacher._clients = {"": [servers]}
    jobs: list[Job] = []
    for prompt, lengths in servers.lengths.items():
        sampling = Sampling(num_samples=len(lengths), max_new_tokens=WHOLE)
        job = Job(
            Generation(prompt, sampling, 2**15), lambda *_: True, [Answer()] * len(lengths), 0
        )
        job.when_finished = lambda tokens, prompt=prompt: teacher.ask(sample_of(prompt, tokens), 0)
        jobs.append(job)
    with tempfile.TemporaryDirectory() as folder:
        member = Member("server_0", servers, None, state="ready")
        fleet = Fleet([member], EventLog(Path(folder) / "events.jsonl"), SglangConfig())
        dispatcher = Dispatcher(fleet)
        dispatcher.submit(jobs)
        dispatcher.wait(jobs)
        samples = [
            sample_of(job.request.token_ids, answer.token_ids)
            for job in jobs
            for answer in job.answers
        ]
        batches = pack(samples, SampleWeights(*np.zeros((3, len(samples)))), max_tokens=4096)
        start = time.perf_counter()
        teacher.about(samples).score(batches)
        seconds = time.perf_counter() - start
        dispatcher.close()
    teacher.close()
    return seconds


def sample_of(prompt: Any, tokens: Any) -> Sample:
    return Sample("rollout", f"p:{prompt[0]}", prompt, tokens, np.ones(len(tokens), np.bool_))


def main() -> None:
    world = start_world(ParallelConfig(), seed=0)
    print(f"{PROMPTS} prompts; the longest responses are drawn in {DRAW_SECONDS:g} s\n")
    print("| lengths | responses a prompt | teacher's work / draw | score, s | asked early, s |")
    print("|---|---|---|---|---|")
    for name, (mu, sigma) in (("short", SHORT), ("long", LONG)):
        for samples in (1, 4):
            draw = random.Random(0)
            lengths = {
                (prompt, 1): [
                    max(1, min(LIMIT, int(draw.lognormvariate(mu, sigma))) // SCALE)
                    for _ in range(samples)
                ]
                for prompt in range(PROMPTS)
            }
            total = sum(map(sum, lengths.values()))
            for work in (0.25, 0.75):
                servers = Servers(lengths, work * DRAW_SECONDS / total)
                late, early = (score_seconds(world, servers, way) for way in (False, True))
                print(f"| {name} | {samples} | {work:g} | {late:.2f} | {early:.2f} |", flush=True)


if __name__ == "__main__":
    main()
