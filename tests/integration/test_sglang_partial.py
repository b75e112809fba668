"""Responses that outlive publishes, on two real servers: their segments, log-probabilities, a
killed server, and two data-parallel ranks that share a server. Of a dense student, and of one with
experts that the trainer replays."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.data.golden import rollout_samples
from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.models.families import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.routers import Routers
from stable_opd_mcore.monitoring.throughput import PhaseTimer
from stable_opd_mcore.parallel.world import World, gather_objects, start_world, stop_world
from stable_opd_mcore.records import Prompt, Rollout, Routing, Sampling
from stable_opd_mcore.rollout.sglang.build import build_sglang_engine
from stable_opd_mcore.rollout.sglang.engine import SglangEngine
from stable_opd_mcore.rollout.sglang.records import Answer, routing_of
from stable_opd_mcore.scoring.megatron import MegatronScorer
from stable_opd_mcore.serving.client import SglangClient
from stable_opd_mcore.serving.requests import Completion, Generation
from tests.integration.sglang_tools import (
    PYTHON,
    ROOT,
    events,
    external,
    needs_sglang,
    wait_until,
)
from tests.parallel.launch import run_ranks
from tests.shares import weights_of

pytestmark = [needs_sglang, pytest.mark.cluster]
VOCABULARY = 32  # of configs/smoke_cpu.yaml
PROMPTS = [Prompt(f"test:{i}", "", tuple(range(3 + i, 15 + i))) for i in range(4)]
SAMPLING = Sampling(num_samples=2, max_new_tokens=600)  # without stop ids: no response ends early


SETTINGS = {
    "dense": (),
    "experts": (
        "rollout.routing_replay=true",
        "student.architecture.model_type=qwen3_moe",
        "student.architecture.head_dim=32",
        "student.architecture.num_experts=8",
        "student.architecture.num_experts_per_tok=2",
        "student.architecture.moe_intermediate_size=64",
        "student.architecture.norm_topk_prob=true",
    ),
}
# The experts of every token of prompt and response that a request has read, by these tokens
Routings = dict[tuple[int, ...], NDArray[np.int16]]


class Student(NamedTuple):
    engine: SglangEngine
    world: World
    chunks: list[Module]
    weights: dict[int, dict[str, Tensor]]  # copies, by version
    scorer: MegatronScorer
    routing: Routing | None  # None: a dense student

    def publish(self) -> int:
        """Change the weights and publish them; returns their version."""
        version = len(self.weights)
        with torch.no_grad():
            for parameter in self.chunks[0].parameters():
                parameter.mul_(1.1)
        state = self.chunks[0].state_dict()
        self.weights[version] = {k: v.clone() for k, v in state.items() if v is not None}
        self.engine.publish(version)
        return version

    def gaps(self, rollouts: list[Rollout], routings: Routings | None = None) -> list[list[float]]:
        """Of each segment of each rollout, the largest difference between the engine's and the
        trainer's log-probability under the weights of the segment.

        Args:
            routings: the trainer replays those of the request that drew the segment; None: the
                experts of the rollout.
        """
        present = {k: v.clone() for k, v in self.weights[len(self.weights) - 1].items()}
        gaps = [[0.0] * len(rollout.segments) for rollout in rollouts]
        for version, weights in self.weights.items():
            self.chunks[0].load_state_dict(weights, strict=False)
            for rollout, row in zip(rollouts, gaps, strict=True):
                ends = list(accumulate(segment.num_tokens for segment in rollout.segments))
                for number, (segment, end) in enumerate(zip(rollout.segments, ends, strict=True)):
                    if segment.weight_version == version:
                        gap_N = self._gaps(begun(rollout, end, routings))
                        row[number] = float(gap_N[end - segment.num_tokens :].max())
        self.chunks[0].load_state_dict(present, strict=False)
        return gaps

    def _gaps(self, rollout: Rollout) -> Tensor:
        samples, routing = rollout_samples([rollout]), self.routing
        (batch,) = pack(
            samples,
            weights_of(samples, 1, 1, 1),
            max_tokens=2048,
            routing=routing and (routing.num_layers, routing.per_token),
        )
        (scores,) = self.scorer.score([batch])
        assert scores.logprob_N is not None
        return (scores.logprob_N - batch.rollout_logprob_N).abs()


def begun(rollout: Rollout, end: int, routings: Routings | None) -> Rollout:
    """The rollout when it had `end` tokens."""
    sequence = (*rollout.prompt.token_ids, *rollout.token_ids[:end].tolist())
    experts = rollout.routed_experts if routings is None else routings[sequence]
    return replace(
        rollout,
        token_ids=rollout.token_ids[:end],
        rollout_logprobs=rollout.rollout_logprobs[:end],
        routed_experts=None if experts is None else experts[: len(sequence) - 1],
    )


def of_students(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("student", names, indirect=True, scope="module")


def student_of(directory: Path, world: World, *overrides: str) -> Student:
    """The student on this rank, and an engine over servers that lack its weights."""
    config = load_config(
        ROOT / "configs/smoke_cpu.yaml",
        [
            f"run.directory={directory}",
            "student.architecture.max_position_embeddings=2048",
            "rollout.engine=sglang",
            "rollout.max_staleness=2",
            "rollout.partial=true",
            *overrides,
        ],
    )
    assert config.student.architecture is not None
    architecture = read_architecture(config.student.architecture)
    chunks = build_model(architecture, world, precision="fp32", trainable=False, seed=3)
    engine = build_sglang_engine(config, world, chunks, None, VOCABULARY)
    replaying = partial(Routers(chunks).applying, trains=False, counts=False)
    scorer = MegatronScorer(chunks, world, vocab_size=VOCABULARY, around=replaying)
    return Student(engine, world, list(chunks), {}, scorer, routing_of(architecture))


@pytest.fixture(scope="module")
def student(request, world, tmp_path_factory) -> Iterator[Student]:
    started = student_of(
        tmp_path_factory.mktemp("partial"),
        world,
        "rollout.sglang.num_servers=2",
        f"rollout.sglang.python={PYTHON}",
        "rollout.sglang.arguments=['--max-total-tokens','16384']",
        *SETTINGS[request.param],
    )
    yield started
    started.engine.close()


@pytest.fixture
def routings(student, monkeypatch) -> Routings | None:
    """Of the test's requests, which ask for all their experts and hand on those that were asked
    for; None without routing replay."""
    if student.routing is None:
        return None
    seen: Routings = {}
    submit = SglangClient.submit

    def whole(client: SglangClient, request: Any, *arguments: Any, **named: Any) -> Future[Any]:
        if not isinstance(request, Generation):
            return submit(client, request, *arguments, **named)
        handed: Future[Any] = Future()

        def hand_on(reply: Future[Completion]) -> None:
            try:
                piece = reply.result()
            except Exception as error:
                handed.set_exception(error)
                return
            chosen = piece.routed_experts
            if chosen is not None:
                seen[*request.token_ids, *piece.token_ids.tolist()] = chosen
                piece = replace(piece, routed_experts=chosen[request.routing_start :])
            handed.set_result(piece)

        whole = replace(request, routing_start=0)
        submit(client, whole, *arguments, **named).add_done_callback(hand_on)
        return handed

    monkeypatch.setattr(SglangClient, "submit", whole)
    return seen


def versions_of(rollout: Rollout) -> list[int]:
    return [segment.weight_version for segment in rollout.segments]


@of_students(*SETTINGS)
def test_responses_cross_two_publishes(student, routings):
    engine = student.engine
    first = student.publish()
    engine.prefetch(PROMPTS, SAMPLING, step=1, weight_version=first + 2)
    for version in (first, first + 1):
        await_tokens(engine, 1, version)
        student.publish()
    drawn = engine.generate(PROMPTS, SAMPLING, step=1)
    assert [(r.prompt.prompt_id, r.sample_index) for r in drawn] == [
        (prompt.prompt_id, sample) for prompt in PROMPTS for sample in range(2)
    ]
    assert {len(rollout.token_ids) for rollout in drawn} == {600}
    assert {rollout.weight_version for rollout in drawn} == {first}, "at most two versions old"
    assert [first, first + 1, first + 2] in [versions_of(rollout) for rollout in drawn]
    assert max(max(gaps) for gaps in student.gaps(drawn, routings)) < 1e-4
    assert {member.state for member in engine.fleet.members} == {"ready"}
    if routings is not None:
        for rollout in drawn:
            assert_joined(rollout, routings)
        joined = student.gaps(drawn)
        assert max(first for first, *_ in joined) < 1e-4
        assert max(max(later, default=0.0) for _, *later in joined) > 1e-3, "other experts replayed"


def await_tokens(engine: SglangEngine, step: int, version: int) -> None:
    """Until each response of the step has tokens of the version, or has ended. Collective."""

    def all_have() -> bool:
        time.sleep(0.3)
        newest = [answer.segments[-1:] for answer in answers(engine, step) if not answer.is_done]
        return all(gather_objects(all(s and s[0].weight_version == version for s in newest)))

    wait_until(all_have, f"tokens of version {version}", 60)


def answers(engine: SglangEngine, step: int) -> list[Answer]:
    """The responses of the step as far as they are drawn. Collective."""
    with engine._paused():
        return [answer for job in engine._ahead[step, SAMPLING].jobs for answer in job.answers]


def assert_joined(rollout: Rollout, routings: Routings) -> None:
    """Each segment has the experts that its request chose for the token before and its own."""
    assert rollout.routed_experts is not None
    before = 0
    for end in accumulate(segment.num_tokens for segment in rollout.segments):
        whole = begun(rollout, end, routings).routed_experts
        assert whole is not None
        assert (rollout.routed_experts[before : len(whole)] == whole[before:]).all()
        before = len(whole)
    assert before == len(rollout.prompt.token_ids) + len(rollout.token_ids) - 1


def assert_logprobs(student: Student, rollouts: list[Rollout]) -> None:
    """Each token's log-probability is the trainer's under the weights of its segment. Where experts
    are replayed only the first segments' are: later ones were drawn after tokens that the new
    weights had routed to other experts."""
    gaps = student.gaps(rollouts)
    exact = gaps if student.routing is None else [row[:1] for row in gaps]
    assert max(map(max, exact)) < 1e-4


@of_students("experts")
def test_a_server_sends_experts_from_a_position_on(student):
    client, sampling = student.engine.fleet.members[0].client, Sampling(0.0, max_new_tokens=8)
    request = Generation(tuple(range(3, 30)), sampling, VOCABULARY, routing=student.routing)
    whole = client.submit(request).result()
    rest = client.submit(replace(request, routing_start=26)).result()
    assert whole.routed_experts is not None
    assert len(whole.routed_experts) == 34
    assert (rest.routed_experts == whole.routed_experts[26:]).all()


@of_students("dense")
def test_a_killed_servers_responses_go_on_elsewhere(student):
    engine = student.engine
    engine.prefetch(PROMPTS, SAMPLING, step=3, weight_version=len(student.weights))
    time.sleep(0.5)
    delivered = answers(engine, 3)
    time.sleep(0.2)
    killed = engine.fleet.members[0].server
    assert killed is not None
    assert killed.pid is not None
    os.killpg(killed.pid, signal.SIGKILL)
    drawn = engine.generate(PROMPTS, SAMPLING, step=3)
    assert_go_on(delivered, drawn)
    assert_logprobs(student, drawn)
    metrics = engine.take_metrics()
    assert metrics["engine/failure"].total == 1
    assert metrics["engine/redrawn"].total > 0


def share_a_server(rank: int, num_ranks: int, directory: Path, url: str) -> None:
    """The responses of both ranks outlive two publishes, which abort the requests of both."""
    world = start_world(ParallelConfig(), seed=0)
    key = f"rollout.sglang.api_key_file={directory / 'key'}"
    student = student_of(directory, world, *external(url), key)
    engine, first = student.engine, student.publish()
    prompts = [Prompt(f"rank_{rank}:{i}", "", tuple(range(3 + i, 15 + i + rank))) for i in range(4)]
    assert engine.idle is not None
    timer = PhaseTimer(idle={"perf/servers_waited": engine.idle})
    engine.prefetch(prompts, SAMPLING, step=1, weight_version=first + 2)
    for version in (first, first + 1):
        await_tokens(engine, 1, version)
        student.publish()
    drawn = engine.generate(prompts, SAMPLING, step=1)
    assert [r.prompt.prompt_id for r in drawn] == [p.prompt_id for p in prompts for _ in range(2)]
    assert {len(rollout.token_ids) for rollout in drawn} == {600}
    assert [first, first + 1, first + 2] in [versions_of(rollout) for rollout in drawn]
    assert_logprobs(student, drawn)
    happened = engine.take_metrics()
    for event in ("failure", "retried", "redrawn", "stale"):
        assert happened[f"engine/{event}"].value() == 0, event
    waited = timer.metrics(num_tokens=1)["perf/servers_waited"].value()
    assert waited is not None
    assert 0 < waited < 1
    engine.close()
    stop_world()


@of_students("dense")
def test_ranks_share_a_server_over_two_publishes(student, tmp_path):
    client = student.engine.fleet.members[1].client
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text(client.api_key)
    run_ranks(2, share_a_server, tmp_path, client.url)
    published = [event["detail"] for event in events(tmp_path / "smoke_cpu")]
    assert sorted(published) == [f"version {v}" for v in range(3) for _ in range(2)]


def assert_go_on(before: list[Answer], after: list[Rollout]) -> None:
    """No token of the responses before is lost."""
    assert any(answer.has_tokens for answer in before)
    for answer, rollout in zip(before, after, strict=True):
        kept = rollout.token_ids[: len(answer.token_ids)]
        assert kept.tolist() == answer.token_ids.tolist()
