"""Weights of every family from TP2 x PP2 trainers to SGLang servers of two ranks, bit for bit."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models.build import build_model
from stable_opd_mcore.models.families import read_architecture
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from stable_opd_mcore.records import Prompt
from stable_opd_mcore.rollout.engine import Sampling
from stable_opd_mcore.rollout.sglang.build import build_sglang_engine, write_model_config
from stable_opd_mcore.serving.process import ServerOptions, SglangServer
from tests.integration.sglang_tools import (
    PYTHON,
    SERVER_ARGUMENTS,
    VOCABULARY,
    architecture,
    events,
    needs_sglang,
)
from tests.parallel.launch import run_ranks

pytestmark = [needs_sglang, pytest.mark.cluster]

FAMILIES = {
    "qwen2_tied": architecture("qwen2", tied=True),
    "qwen2_untied": architecture("qwen2", tied=False),
    "qwen3": architecture("qwen3", tied=True, head_dim=16),
    "llama": architecture("llama", tied=False),
}
METHODS = dict(zip(FAMILIES, ("distributed", "disk", "distributed", "disk"), strict=True))


@pytest.mark.parametrize("names", [("qwen2_tied", "qwen2_untied"), ("qwen3", "llama")])
def test_families_arrive_bit_exactly(tmp_path, names):
    """Two publishes with different weights; one that is not bit-exact fails."""
    with ExitStack() as stack:
        servers = [_server(tmp_path / name, FAMILIES[name]) for name in names]
        for server in servers:  # all at once, for starting one takes a while
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_until_healthy()
        urls = {name: server.url for name, server in zip(names, servers, strict=True)}
        run_ranks(4, _publish_all, str(tmp_path), urls)
    for name in names:
        assert [(event["event"], event["detail"]) for event in events(tmp_path / name)] == [
            ("published", "version 0"),
            ("published", "version 1"),
        ]


def _server(directory: Path, fields: dict[str, Any]) -> SglangServer:
    model = write_model_config(read_architecture(fields), directory / "model")
    (directory / "key").write_text("secret\n")
    options = ServerOptions(
        python=PYTHON, model=str(model), tensor=2, api_key="secret", arguments=SERVER_ARGUMENTS
    )
    return SglangServer(options, directory / "server.log")


def _publish_all(rank: int, world_size: int, directory: str, urls: dict[str, str]) -> None:
    world = start_world(ParallelConfig(tensor=2, pipeline=2), seed=0)
    for name, url in urls.items():
        _publish(world, directory, name, url)
    stop_world()


def _publish(world: World, directory: str, name: str, url: str) -> None:
    config = parse_config(
        {
            "run": {"name": name, "directory": directory},
            "student": {"architecture": FAMILIES[name]},
            "tokenizer": {"path": "synthetic"},
            "data": {"train": {"path": "synthetic:arithmetic"}},
            "parallel": {"tensor": 2, "pipeline": 2},
            "rollout": {
                "engine": "sglang",
                "sglang": {
                    "placement": "external",
                    "urls": [url],
                    "api_key_file": f"{directory}/{name}/key",
                    "sync": METHODS[name],
                    "bucket_mib": 1,
                },
            },
        },
        origin=name,
    )
    chunks = build_model(
        read_architecture(FAMILIES[name]), world, precision="fp32", trainable=False, seed=1
    )
    engine = build_sglang_engine(config, world, chunks, str, VOCABULARY)
    engine.publish(0)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.mul_(1.25)
    engine.publish(1)
    prompts = [Prompt(f"test:{i}", "", tuple(range(3 + i, 20 + i))) for i in range(3)]
    rollouts = engine.generate(prompts, Sampling(num_samples=2, max_new_tokens=5), step=0)
    assert [r.prompt.prompt_id for r in rollouts] == [f"test:{i // 2}" for i in range(6)]
    assert {r.weight_version for r in rollouts} == {1}
    engine.close()
