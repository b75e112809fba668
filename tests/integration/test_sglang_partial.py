"""Responses that outlive publishes, on two real servers: their segments, log-probabilities, a
checkpoint in between and a killed server."""

import os
import signal
import time
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.models.families import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.records import Prompt, Rollout, Sample, Sampling
from stable_opd_mcore.rollout.sglang.build import build_sglang_engine
from stable_opd_mcore.rollout.sglang.engine import SglangEngine
from stable_opd_mcore.scoring.megatron import MegatronScorer
from tests.integration.sglang_tools import PYTHON, ROOT, needs_sglang
from tests.shares import weights_of

pytestmark = [needs_sglang, pytest.mark.cluster]
VOCABULARY = 32  # of configs/smoke_cpu.yaml
PROMPTS = [Prompt(f"test:{i}", "", tuple(range(3 + i, 15 + i))) for i in range(4)]
SAMPLING = Sampling(num_samples=2, max_new_tokens=600)  # without stop ids: no response ends early


class Student(NamedTuple):
    engine: SglangEngine
    chunks: list[Module]
    weights: dict[int, dict[str, Tensor]]  # copies, by version
    scorer: MegatronScorer

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

    def assert_logprobs_of_their_weights(self, rollouts: list[Rollout]) -> None:
        """Each token's log-probability is the trainer's under the weights of its segment."""
        present = {k: v.clone() for k, v in self.weights[len(self.weights) - 1].items()}
        for version, weights in self.weights.items():
            self.chunks[0].load_state_dict(weights, strict=False)
            for rollout in rollouts:
                ends = list(accumulate(segment.num_tokens for segment in rollout.segments))
                ours = self._logprobs(rollout) if version in versions_of(rollout) else None
                for segment, end in zip(rollout.segments, ends, strict=True):
                    if segment.weight_version == version and ours is not None:
                        tokens = slice(end - segment.num_tokens, end)
                        theirs = torch.from_numpy(rollout.rollout_logprobs[tokens].copy())
                        torch.testing.assert_close(ours[tokens], theirs, atol=1e-4, rtol=0)
        self.chunks[0].load_state_dict(present, strict=False)

    def _logprobs(self, rollout: Rollout) -> Tensor:
        tokens = tuple(rollout.token_ids.tolist())
        sample = Sample(
            "rollout",
            rollout.prompt.prompt_id,
            rollout.prompt.token_ids,
            tokens,
            (True,) * len(tokens),
        )
        (batch,) = pack([sample], weights_of([sample], 1, 1, 1), max_tokens=2048)
        (scores,) = self.scorer.score([batch])
        assert scores.logprob_N is not None
        return scores.logprob_N


@pytest.fixture(scope="module")
def student(world, tmp_path_factory) -> Iterator[Student]:
    config = load_config(
        ROOT / "configs/smoke_cpu.yaml",
        [
            f"run.directory={tmp_path_factory.mktemp('partial')}",
            "student.architecture.max_position_embeddings=2048",
            "rollout.engine=sglang",
            "rollout.max_staleness=2",
            "rollout.partial=true",
            "rollout.sglang.num_servers=2",
            f"rollout.sglang.python={PYTHON}",
            "rollout.sglang.arguments=['--max-total-tokens','16384']",
        ],
    )
    assert config.student.architecture is not None
    architecture = read_architecture(config.student.architecture)
    chunks = build_model(architecture, world, precision="fp32", trainable=False, seed=3)
    engine = build_sglang_engine(config, world, chunks, str, VOCABULARY)
    scorer = MegatronScorer(chunks, world, vocab_size=VOCABULARY)
    yield Student(engine, list(chunks), {}, scorer)
    engine.close()


def versions_of(rollout: Rollout) -> list[int]:
    return [segment.weight_version for segment in rollout.segments]


def test_responses_cross_two_publishes(student):
    engine = student.engine
    first = student.publish()
    engine.prefetch(PROMPTS, SAMPLING, step=1, weight_version=first + 2)
    for _ in range(2):
        time.sleep(0.5)
        student.publish()
    drawn = engine.generate(PROMPTS, SAMPLING, step=1)
    assert [(r.prompt.prompt_id, r.sample_index) for r in drawn] == [
        (prompt.prompt_id, sample) for prompt in PROMPTS for sample in range(2)
    ]
    assert {len(rollout.token_ids) for rollout in drawn} == {600}
    assert {rollout.weight_version for rollout in drawn} == {first}, "at most two versions old"
    assert [first, first + 1, first + 2] in [versions_of(rollout) for rollout in drawn]
    student.assert_logprobs_of_their_weights(drawn)
    assert {member.state for member in engine.fleet.members} == {"ready"}


def test_a_checkpoints_responses_go_on_from_their_tokens(student):
    engine = student.engine
    version = len(student.weights) - 1
    engine.prefetch(PROMPTS, SAMPLING, step=2, weight_version=version + 1)
    time.sleep(0.5)
    saved = engine.in_flight()
    unfinished = [rollout for rollout in saved[2] if rollout.finish_reason == "abort"]
    assert unfinished
    engine.drop_ahead()
    engine.restore(saved)
    student.publish()
    engine.prefetch(PROMPTS, SAMPLING, step=2, weight_version=version + 1)
    drawn = engine.generate(PROMPTS, SAMPLING, step=2)
    assert_go_on(saved[2], drawn)
    assert [version, version + 1] in [versions_of(rollout) for rollout in drawn]
    student.assert_logprobs_of_their_weights(drawn)


def test_a_killed_servers_responses_go_on_elsewhere(student):
    engine = student.engine
    engine.prefetch(PROMPTS, SAMPLING, step=3, weight_version=len(student.weights))
    time.sleep(0.5)
    delivered = engine.in_flight()[3]
    time.sleep(0.2)
    killed = engine.fleet.members[0].server
    assert killed is not None
    assert killed.pid is not None
    os.killpg(killed.pid, signal.SIGKILL)
    drawn = engine.generate(PROMPTS, SAMPLING, step=3)
    assert_go_on(delivered, drawn)
    student.assert_logprobs_of_their_weights(drawn)
    metrics = engine.take_metrics()
    assert metrics["engine/failure"].total == 1
    assert metrics["engine/redrawn"].total > 0


def assert_go_on(before: list[Rollout], after: list[Rollout]) -> None:
    """No token of the responses before is lost."""
    assert before
    ends = {(r.prompt.prompt_id, r.sample_index): r for r in after}
    for rollout in before:
        end = ends[rollout.prompt.prompt_id, rollout.sample_index]
        assert end.token_ids[: len(rollout.token_ids)].tolist() == rollout.token_ids.tolist()
