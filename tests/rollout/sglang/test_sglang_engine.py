"""Publishes over many steps, without SGLang."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.parallel.device_memory import DeviceMemory
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import Prompt, Sampling
from stable_opd_mcore.rollout.sglang.event_log import EventLog
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.rollout.sglang.publisher import ServerStatus
from stable_opd_mcore.rollout.sglang.sglang_engine import SglangEngine
from tests.config.cases import run_with
from tests.integration.sglang_tools import architecture
from tests.rollout.sglang.abortable_server import AbortableServer

FIELDS = architecture(tied=False)
K = 4
PROMPTS = [Prompt(f"a:{i}", "", (1, 2)) for i in range(2)]


def engine_of(
    directory: Path,
    world: World,
    client: AbortableServer,
    *,
    partial: bool,
) -> tuple[SglangEngine, list[int]]:
    """An engine over one server of this process, and the versions that were sent to it."""
    config = run_with(
        rollout={
            "engine": "sglang",
            "max_staleness": K,
            "partial": partial,
            "sglang": {"placement": "external", "urls": ["http://127.0.0.1:1"]},
        }
    )
    chunks = build_model(read_architecture(FIELDS), world, precision="fp32", trainable=False)
    member: Any = Member("server_0", cast(Any, client), None, state="needs_weights")
    fleet = Fleet([member], EventLog(directory / "events.jsonl"))
    engine = SglangEngine(config, world, chunks, fleet, None, 32, DeviceMemory())
    sent: list[int] = []

    def push(statuses: Sequence[ServerStatus], version: int) -> tuple[dict, dict, int]:
        assert not member.in_flight, "no request meanwhile"
        client.version = version
        sent.append(version)
        return {status.name: None for status in statuses}, {}, 0

    engine._publisher._push = push
    return engine, sent


def steps(engine: SglangEngine, number: int) -> list[list[int]]:
    """Take the calls of a run's steps; returns the versions of each step's first tokens."""
    sampling, versions = Sampling(max_new_tokens=12, num_samples=2), []
    for step in range(number):
        engine.publish(step)
        for later in range(step, step + 1 + K):
            engine.prefetch(PROMPTS, sampling, step=later, weight_version=later)
        sampled = engine.generate(PROMPTS, sampling, step=step)
        versions.append(sorted({rollout.weight_version for rollout in sampled}))
    return versions


@pytest.mark.parametrize(
    ("partial", "versions", "sent"),
    [
        (False, [0, 0, 0, 0, 0, 3, 3, 3], [0, 3, 6]),  # it waits for responses at a third of them
        (True, [0, 0, 0, 0, 0, 1, 2, 3], list(range(8))),
    ],
)
def test_first_tokens_are_at_most_max_staleness_versions_old(
    tmp_path, world, partial, versions, sent
):
    """An evaluation has the current weights, and so has what follows the guard's return."""
    client = AbortableServer()
    client.end()
    engine, published = engine_of(tmp_path, world, client, partial=partial)
    assert steps(engine, 8) == [[version] for version in versions]
    assert published == sent
    (evaluated,) = engine.generate(PROMPTS[:1], Sampling(max_new_tokens=3), step=0)
    assert evaluated.weight_version == published[-1] == 7
    engine.drop_ahead()
    engine.publish(8)
    assert published[-1] == 8
    engine.close()
