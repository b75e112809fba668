"""A student's low-rank factors on a real server, next to its frozen weights. It and the trainer
have two tensor ranks; servers of one rank: test_sglang_partial.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.nn import Module

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.config.models import LoraConfig
from stable_opd_mcore.config.schema import Config, ParallelConfig
from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.data.samples import rollout_samples
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.layers.factors import factors_of
from stable_opd_mcore.models.lora import adapt, base_only
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from stable_opd_mcore.rollout.engine import EngineLost
from stable_opd_mcore.rollout.sglang import publisher
from stable_opd_mcore.rollout.sglang.build import build_sglang_engine
from stable_opd_mcore.rollout.sglang.server_setup import server_options, write_model_config
from stable_opd_mcore.rollout.sglang.sglang_engine import SglangEngine
from stable_opd_mcore.scoring.megatron import MegatronScorer
from stable_opd_mcore.serving.process import SglangServer
from stable_opd_mcore.serving.requests import Scoring
from tests.integration.sglang_tools import (
    PYTHON,
    SERVER_ARGUMENTS,
    VOCABULARY,
    architecture,
    events,
    needs_sglang,
    started,
)
from tests.models import tiny
from tests.parallel.launch import run_ranks
from tests.shares import weights_of

pytestmark = [needs_sglang, pytest.mark.cluster]

FIELDS = architecture("qwen3", tied=False, head_dim=16)
RANK, TOLERANCE = 4, 1e-4
EVERY: dict[str, Any] = {"alpha": 8}
CHOSEN: dict[str, Any] = {"alpha": 8, "matrices": ["k_proj", "down_proj"], "rslora": True}


def config_of(
    directory: Path, name: str, urls: Sequence[str], lora: dict[str, Any], rank: int = RANK
) -> Config:
    settings: dict[str, Any] = {
        "run": {"name": name, "directory": str(directory)},
        "student": {"architecture": FIELDS, "lora": {"rank": rank, **lora}},
        "tokenizer": {"path": "synthetic"},
        "data": {"train": {"path": "synthetic:arithmetic"}},
        "parallel": {"tensor": 2},
        "rollout": {
            "engine": "sglang",
            "sglang": {
                "placement": "external",
                "urls": list(urls),
                "api_key_file": str(directory / "key"),
                "python": PYTHON,
                "arguments": SERVER_ARGUMENTS,
            },
        },
    }
    return parse_config(settings, origin=name)


@pytest.mark.parametrize("lora", [EVERY, CHOSEN], ids=["every", "chosen"])
def test_a_server_answers_through_the_factors_of_each_version(lora, tmp_path):
    """Then it loses them, as in a restart; and it is asked to take factors of a larger rank."""
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text("secret\n")
    config = config_of(tmp_path, "servers", ["http://127.0.0.1:9"], lora)
    model = write_model_config(read_architecture(FIELDS), tmp_path / "model")
    server = SglangServer(server_options(config, model, 0, (), 2, "cpu"), tmp_path / "server.log")
    with started(server):
        run_ranks(2, publish_and_sample, str(tmp_path), [server.url], lora)
    found = [(event["event"], event["detail"]) for event in events(tmp_path / "run")]
    published = [detail for event, detail in found if event == "published"]
    assert published[:2] == ["version 0", "version 1"]
    assert published.count("version 2") == 1
    (lost,) = [detail for event, detail in found if event == "failure"]
    assert "it has lost the adapter" in lost


def publish_and_sample(
    rank: int, world_size: int, directory: str, urls: list[str], lora: dict[str, Any]
) -> None:
    world = start_world(ParallelConfig(tensor=2), seed=0)
    chunks = student(world, lora, RANK)
    config = config_of(Path(directory), "run", urls, lora)
    engine = build_sglang_engine(config, world, chunks, None, VOCABULARY)
    sent = [publish(engine, chunks, version) for version in range(2)]
    if rank == 0:  # the frozen weights were sent once, the factors of chosen matrices each time
        of_factors = 2 * sum(own.nbytes for each in factors_of(chunks) for own in each.A)
        assert sent[0] > sent[1] > of_factors / 2
    sample_and_compare(engine, world, chunks, version=1)
    if rank == 0:
        client = engine.fleet.members[0].client
        lost = {"lora_name": engine.fleet.members[0].adapter}
        client.call("POST", "/unload_lora_adapter", lost)
    sample_and_compare(engine, world, chunks, version=1)
    publish(engine, chunks, 2)
    sample_and_compare(engine, world, chunks, version=2)

    publisher._MAX_ATTEMPTS = 1
    larger = student(world, lora, 2 * RANK)
    refused = config_of(Path(directory), "refused", urls[:1], lora, 2 * RANK)
    engine = build_sglang_engine(refused, world, larger, None, VOCABULARY)
    with pytest.raises(EngineLost, match=r"rank 8 is incompatible.*rollout\.sglang\.lora=merged"):
        engine.generate(PROMPTS, Sampling(max_new_tokens=4), step=0)
    stop_world()


def student(world: World, lora: dict[str, Any], rank: int) -> Sequence[Module]:
    fields = read_architecture(FIELDS)
    chunks = build_model(fields, world, precision="fp32", trainable=False, seed=1)
    adapt(chunks, LoraConfig(rank=rank, **lora))
    return chunks


def publish(engine: SglangEngine, chunks: Sequence[Module], version: int) -> float:
    """Publish other factors; returns the bytes that this rank has sent."""
    tiny.redraw_factors(chunks, version)
    engine.publish(version)
    sent = engine.take_metrics().get("engine/sync_bytes")
    return 0.0 if sent is None else sent.value() or 0.0


PROMPTS = [Prompt(f"test:{i}", "", tuple(range(3 + i, 20 + i))) for i in range(3)]


def sample_and_compare(
    engine: SglangEngine, world: World, chunks: Sequence[Module], version: int
) -> None:
    """The servers' log-probabilities are the trainer's with the factors; of requests that name no
    adapter, they are those of the frozen weights."""
    sampling = Sampling(num_samples=4, max_new_tokens=9)
    rollouts = engine.generate(PROMPTS, sampling, step=version)
    assert {rollout.weight_version for rollout in rollouts} == {version}
    sampled = np.concatenate([rollout.rollout_logprobs for rollout in rollouts])
    assert np.abs(logprobs_of(world, chunks, rollouts) - sampled).max() < TOLERANCE
    with base_only(chunks):
        frozen = logprobs_of(world, chunks, rollouts)
    assert np.abs(frozen - sampled).mean() > 0.1
    for member in engine.fleet.members:
        if member.state == "ready":
            requests = [scoring_of(rollout) for rollout in rollouts]
            replies = [member.client.submit(request) for request in requests]
            scored = np.concatenate([reply.result().logprobs_L for reply in replies])
            assert np.abs(frozen - scored).max() < TOLERANCE


def scoring_of(rollout: Rollout) -> Scoring:
    prompt = rollout.prompt.token_ids
    return Scoring((*prompt, *rollout.token_ids.tolist()), len(prompt), VOCABULARY)


def logprobs_of(
    world: World, chunks: Sequence[Module], rollouts: Sequence[Rollout]
) -> np.ndarray[Any, Any]:
    samples = rollout_samples(rollouts)
    (batch,) = pack(samples, weights_of(samples), max_tokens=1024)
    (scores,) = MegatronScorer(chunks, world, vocab_size=VOCABULARY).score([batch])
    assert scores.logprob_N is not None
    return scores.logprob_N.numpy()
