"""Publishes over many steps, without SGLang."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from stable_opd_mcore.models.families import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.parallel.device_memory import DeviceMemory
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import Prompt, Rollout, Sampling, Segment
from stable_opd_mcore.rollout.engine import EngineLost
from stable_opd_mcore.rollout.sglang.engine import SglangEngine
from stable_opd_mcore.rollout.sglang.event_log import EventLog
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member, ServerStatus
from tests.config.cases import run_with
from tests.integration.sglang_tools import architecture
from tests.rollout.sglang.test_dispatch import Drawing

FIELDS = architecture(tied=False)
MIXTURE = architecture(
    "qwen3_moe",
    tied=False,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    norm_topk_prob=True,
)
K = 4
PROMPTS = [Prompt(f"a:{i}", "", (1, 2)) for i in range(2)]


def engine_of(
    directory: Path,
    world: World,
    client: Drawing,
    *,
    partial: bool,
    fields: dict[str, Any] = FIELDS,
) -> tuple[SglangEngine, list[int]]:
    """An engine over one server of this process, and the versions that were sent to it."""
    config = run_with(
        rollout={
            "engine": "sglang",
            "max_staleness": K,
            "partial": partial,
            "routing_replay": fields is MIXTURE,
            "sglang": {"placement": "external", "urls": ["http://127.0.0.1:1"]},
        }
    )
    chunks = build_model(read_architecture(fields), world, precision="fp32", trainable=False)
    member: Any = Member("server_0", cast(Any, client), None, state="needs_weights")
    fleet = Fleet([member], EventLog(directory / "events.jsonl"))
    engine = SglangEngine(config, world, chunks, fleet, None, 32, DeviceMemory())
    sent: list[int] = []

    def send(statuses: Sequence[ServerStatus], version: int) -> tuple[dict[str, str | None], int]:
        assert not member.in_flight, "no request meanwhile"
        client.version = version
        sent.append(version)
        return {status.name: None for status in statuses}, 0

    engine._publisher._send_to = send
    return engine, sent


def steps(engine: SglangEngine, number: int) -> list[list[int]]:
    """Take the calls of a run's steps; returns the versions of each step's first tokens."""
    sampling, versions = Sampling(max_new_tokens=12, num_samples=2), []
    for step in range(number):
        engine.publish(step)
        for later in range(step + 1, step + 1 + K):
            engine.prefetch(PROMPTS, sampling, step=later, weight_version=later)
        drawn = engine.generate(PROMPTS, sampling, step=step)
        versions.append(sorted({rollout.weight_version for rollout in drawn}))
        if step:  # drawn ahead: a run whose teacher is lost now saves what it has sampled
            assert engine.in_flight()[step] == drawn
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
    """An evaluation has the present weights, and so has what is drawn after the guard's return."""
    client = Drawing()
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


def test_restored_responses_go_on_with_their_experts(tmp_path, world):
    """One that lacks them is drawn anew."""
    client, sampling = Drawing(), Sampling(max_new_tokens=8)
    engine, _ = engine_of(tmp_path, world, client, partial=True, fields=MIXTURE)
    engine.publish(0)
    engine.prefetch(PROMPTS, sampling, step=1, weight_version=1)
    client.await_requests(2)
    first, second = engine.in_flight()[1]
    assert first.routed_experts is not None
    assert first.routed_experts[:, 0, 1].tolist() == [0, 1, 2, 3]
    engine.drop_ahead()
    engine.restore({1: [first, replace(second, routed_experts=None)]})
    engine.publish(1)
    client.end()
    drawn = engine.generate(PROMPTS, sampling, step=1)
    assert [rollout.segments for rollout in drawn] == [
        (Segment(3, 0), Segment(5, 1)),
        (Segment(8, 1),),
    ]
    experts = [r.routed_experts[:, 0].T.tolist() for r in drawn if r.routed_experts is not None]
    positions = list(range(9))
    assert experts == [[[0] * 4 + [1] * 5, positions], [[1] * 9, positions]]
    engine.close()


def restored(num_tokens: int, reason: str) -> list[Rollout]:
    """One sample of each prompt as a checkpoint holds it, from weights of version 4."""
    tokens, logprobs = (3,) * num_tokens, (-0.5,) * num_tokens
    return [Rollout(prompt, 0, tokens, logprobs, reason, 4) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("num_tokens", "reason", "max_new_tokens", "token_ids"),
    [
        (6, "stop", 12, (1, 3)),  # of another prompt template, say
        (8, "abort", 8, (1, 2)),
        (9, "abort", 8, (1, 2)),
        (9, "length", 8, (1, 2)),
    ],
)
def test_restored_responses_of_other_settings_are_drawn_anew(
    tmp_path, world, num_tokens, reason, max_new_tokens, token_ids
):
    client = Drawing()
    client.end()
    engine, _ = engine_of(tmp_path, world, client, partial=True)
    engine.restore({5: restored(num_tokens, reason)})
    engine.publish(5)
    prompts = [replace(prompt, token_ids=token_ids) for prompt in PROMPTS]
    drawn = engine.generate(prompts, Sampling(max_new_tokens=max_new_tokens), step=5)
    assert [rollout.segments for rollout in drawn] == [(Segment(max_new_tokens, 5),)] * 2
    assert [rollout.prompt for rollout in drawn] == prompts
    assert [request.token_ids for request in client.requests] == [token_ids] * 2
    engine.close()


@pytest.mark.parametrize("lost", [None, "server_0 does not start"])
def test_restored_responses_of_the_present_step_are_saved_until_its_update(tmp_path, world, lost):
    """A run that resumes and loses its teacher, or its servers, once more keeps them."""
    client, sampling = Drawing(), Sampling(max_new_tokens=12)
    client.end()
    engine, _ = engine_of(tmp_path, world, client, partial=True)
    held = {5: restored(6, "stop"), 6: restored(6, "stop")}
    engine.restore(held)
    engine.publish(5)
    engine.prefetch(PROMPTS, sampling, step=6, weight_version=6)
    engine._lost = lost
    with nullcontext() if lost is None else pytest.raises(EngineLost, match=lost):
        engine.generate(PROMPTS, sampling, step=5)
    saved = engine.in_flight()
    assert {step: [r.token_ids.tolist() for r in saved[step]] for step in saved} == {
        step: [r.token_ids.tolist() for r in held[step]] for step in held
    }
    engine._lost = None
    assert len(engine.generate(PROMPTS, sampling, step=5)) == 2
    engine.publish(6)
    assert engine.in_flight().keys() == {6}
    assert client.requests == []
    engine.close()
