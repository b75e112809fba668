"""Responses that outlive publishes, on two real servers."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.config.models import LoraConfig
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.data.samples import rollout_samples
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.layers.factors import factors_of
from stable_opd_mcore.models.lora import adapt
from stable_opd_mcore.monitoring.throughput import PhaseTimer
from stable_opd_mcore.parallel.world import World, gather_objects, start_world, stop_world
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from stable_opd_mcore.rollout.sglang.build import build_sglang_engine
from stable_opd_mcore.rollout.sglang.sglang_engine import SglangEngine
from stable_opd_mcore.scoring.megatron import MegatronScorer
from tests.integration.sglang_tools import (
    PYTHON,
    ROOT,
    events,
    external,
    needs_sglang,
    wait_until,
)
from tests.models import tiny
from tests.parallel.launch import run_ranks
from tests.shares import weights_of

pytestmark = [needs_sglang, pytest.mark.cluster]
VOCABULARY = 32  # that of configs/smoke_cpu.yaml
PROMPTS = [Prompt(f"test:{i}", "", tuple(range(3 + i, 15 + i))) for i in range(4)]
SAMPLING = Sampling(num_samples=2, max_new_tokens=600)  # without stop ids: no response ends early


class Student(NamedTuple):
    engine: SglangEngine
    world: World
    chunks: list[Module]
    weights: dict[int, dict[str, Tensor]]  # copies, by version
    scorer: MegatronScorer

    def publish(self) -> int:
        """Change what is trained and publish it; returns its version."""
        version = len(self.weights)
        if factors_of(self.chunks):
            tiny.redraw_factors(self.chunks, version, std=0.1)
        else:
            with torch.no_grad():
                for parameter in self.chunks[0].parameters():
                    parameter.mul_(1.1)
        state = self.chunks[0].state_dict()
        self.weights[version] = {k: v.clone() for k, v in state.items() if v is not None}
        self.engine.publish(version)
        return version

    def largest_gap(self, rollouts: list[Rollout]) -> float:
        """The largest difference between the engine's and the trainer's log-probability under the
        weights of the token's segment."""
        present = {k: v.clone() for k, v in self.weights[len(self.weights) - 1].items()}
        gap = 0.0
        for version, weights in self.weights.items():
            self.chunks[0].load_state_dict(weights, strict=False)
            for rollout in rollouts:
                ends = accumulate(segment.num_tokens for segment in rollout.segments)
                for segment, end in zip(rollout.segments, ends, strict=True):
                    if segment.weight_version == version:
                        gap_N = self._gaps(rollout)[end - segment.num_tokens : end]
                        gap = max(gap, float(gap_N.max()))
        self.chunks[0].load_state_dict(present, strict=False)
        return gap

    def _gaps(self, rollout: Rollout) -> Tensor:
        samples = rollout_samples([rollout])
        (batch,) = pack(samples, weights_of(samples, 1, 1, 1), max_tokens=2048)
        (scores,) = self.scorer.score([batch])
        assert scores.logprob_N is not None
        return (scores.logprob_N - batch.rollout_logprob_N).abs()


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
    if lora := config.student.lora:
        adapt(chunks, LoraConfig(rank=lora.rank, alpha=lora.alpha))
    engine = build_sglang_engine(config, world, chunks, None, VOCABULARY)
    scorer = MegatronScorer(chunks, world, vocab_size=VOCABULARY)
    return Student(engine, world, list(chunks), {}, scorer)


WEIGHTS = ("rollout.sglang.num_servers=2",)
FACTORS = ("rollout.sglang.num_servers=1", "student.lora.rank=4", "student.lora.alpha=8")


@pytest.fixture(scope="module", params=[WEIGHTS, FACTORS], ids=["weights", "factors"])
def student(world, tmp_path_factory, request) -> Iterator[Student]:
    started = student_of(
        tmp_path_factory.mktemp("partial"),
        world,
        *request.param,
        f"rollout.sglang.python={PYTHON}",
        "rollout.sglang.arguments=['--max-total-tokens','16384']",
    )
    yield started
    started.engine.close()


def versions_of(rollout: Rollout) -> list[int]:
    return [segment.weight_version for segment in rollout.segments]


def test_responses_cross_two_publishes(student):
    engine = student.engine
    first = student.publish()
    engine.prefetch(PROMPTS, SAMPLING, step=1, weight_version=first + 2)
    for version in (first, first + 1):
        await_tokens(engine, 1, version)
        student.publish()
    sampled = engine.generate(PROMPTS, SAMPLING, step=1)
    assert [(r.prompt.prompt_id, r.sample_index) for r in sampled] == [
        (prompt.prompt_id, sample) for prompt in PROMPTS for sample in range(2)
    ]
    assert {len(rollout.token_ids) for rollout in sampled} == {600}
    assert {rollout.weight_version for rollout in sampled} == {first}, "at most two versions old"
    assert [first, first + 1, first + 2] in [versions_of(rollout) for rollout in sampled]
    assert student.largest_gap(sampled) < 1e-4
    assert {member.state for member in engine.fleet.members} == {"ready"}


def await_tokens(engine: SglangEngine, step: int, version: int) -> None:
    """Until each response of the step has tokens of the version, or has ended. Collective."""

    def all_have() -> bool:
        time.sleep(0.3)
        unfinished = [r for r in so_far(engine, step) if r.finish_reason == "open"]
        newest = [rollout.segments[-1] for rollout in unfinished]
        have = all(last.num_tokens and last.weight_version == version for last in newest)
        return all(gather_objects(have))

    wait_until(all_have, f"tokens of version {version}")


def so_far(engine: SglangEngine, step: int) -> list[Rollout]:
    """The responses of the step as far as they are sampled. Collective."""
    with engine._paused():
        return [rollout for each in engine._ahead[step, SAMPLING] for rollout in each.rollouts]


@pytest.mark.parametrize("student", [pytest.param(WEIGHTS, id="weights")], indirect=True)
def test_a_killed_servers_responses_continue_elsewhere(student):
    engine = student.engine
    engine.prefetch(PROMPTS, SAMPLING, step=3, weight_version=len(student.weights))
    time.sleep(0.5)
    delivered = so_far(engine, 3)
    time.sleep(0.2)
    killed = engine.fleet.members[0].server
    assert killed is not None
    assert killed.pid is not None
    os.killpg(killed.pid, signal.SIGKILL)
    sampled = engine.generate(PROMPTS, SAMPLING, step=3)
    assert_continued(delivered, sampled)
    assert student.largest_gap(sampled) < 1e-4
    metrics = engine.take_metrics()
    assert metrics["engine/failure"].total == 1
    assert metrics["engine/redrawn"].total > 0


def share_a_server(
    rank: int, num_ranks: int, directory: Path, url: str, settings: Sequence[str]
) -> None:
    """The responses of both ranks outlive two publishes, which abort the requests of both."""
    world = start_world(ParallelConfig(), seed=0)
    key = f"rollout.sglang.api_key_file={directory / 'key'}"
    student = student_of(directory, world, *external(url), key, *settings)
    engine, first = student.engine, student.publish()
    prompts = [Prompt(f"rank_{rank}:{i}", "", tuple(range(3 + i, 15 + i + rank))) for i in range(4)]
    assert engine.idle is not None
    timer = PhaseTimer(idle={"perf/servers_waited": engine.idle})
    engine.prefetch(prompts, SAMPLING, step=1, weight_version=first + 2)
    for version in (first, first + 1):
        await_tokens(engine, 1, version)
        student.publish()
    sampled = engine.generate(prompts, SAMPLING, step=1)
    assert [r.prompt.prompt_id for r in sampled] == [p.prompt_id for p in prompts for _ in range(2)]
    assert {len(rollout.token_ids) for rollout in sampled} == {600}
    assert [first, first + 1, first + 2] in [versions_of(rollout) for rollout in sampled]
    assert student.largest_gap(sampled) < 1e-4
    happened = engine.take_metrics()
    for event in ("failure", "retried", "redrawn", "stale"):
        assert happened[f"engine/{event}"].value() == 0, event
    waited = timer.metrics(num_tokens=1)["perf/servers_waited"].value()
    assert waited is not None
    assert 0 < waited < 1
    engine.close()
    stop_world()


def test_ranks_share_a_server_over_two_publishes(student, tmp_path):
    client = student.engine.fleet.members[-1].client  # not killed
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text(client.api_key)
    settings = FACTORS[1:] if factors_of(student.chunks) else ()
    run_ranks(2, share_a_server, tmp_path, client.url, settings)
    published = [event["detail"] for event in events(tmp_path / "smoke_cpu")]
    assert sorted(published) == [f"version {v}" for v in range(3) for _ in range(2)]


def assert_continued(before: list[Rollout], after: list[Rollout]) -> None:
    """No token of the responses before is lost."""
    assert any(len(rollout.token_ids) for rollout in before)
    for shorter, longer in zip(before, after, strict=True):
        kept = longer.token_ids[: len(shorter.token_ids)]
        assert kept.tolist() == shorter.token_ids.tolist()
