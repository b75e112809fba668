"""From a config to an engine over running servers, and the servers of `stable-opd serve`.

Servers are dealt to data-parallel ranks in turn; each rank's leader starts its own. Weights come
with the first publish, so a server needs only the student's config.json. Not here: what happens
after the start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module

from stable_opd_mcore.config.rollouts import SglangConfig
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.rollout.sglang.engine import EngineSettings, SglangEngine, is_leader
from stable_opd_mcore.rollout.sglang.events import EventLog
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.rollout.sglang.records import Decode
from stable_opd_mcore.rollout.sglang.transports import (
    DiskTransport,
    DistributedTransport,
    TensorTransport,
    Transport,
)
from stable_opd_mcore.serving.api_key import read_api_key
from stable_opd_mcore.serving.client import SglangClient
from stable_opd_mcore.serving.process import ServerOptions, SglangServer

_MIB = 1024**2
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def build_sglang_engine(
    config: Config,
    world: World,
    chunks: Sequence[Module],
    decode: Decode,
    vocab_size: int,
    stop_asked: Callable[[], bool],
) -> SglangEngine:
    """Start this rank's servers, or find the external ones, and wait until they answer.

    Raises:
        UserError: fewer servers than data-parallel ranks, no key where one is named, or a server
            that does not start.
    """
    sglang, architecture = config.rollout.sglang, architecture_of(chunks)
    folder = config.run.path / "sglang"
    events = EventLog(folder / "events.jsonl")
    fleet = None
    if is_leader(world):
        members = _members(config, architecture, world, folder)
        fleet = Fleet(
            members,
            events,
            max_restarts=sglang.max_restarts,
            health_interval_seconds=sglang.health_interval_seconds,
            startup_timeout_seconds=sglang.startup_timeout_seconds,
            stop_asked=stop_asked,
        )
        fleet.start()
    dtype = getattr(torch, _dtype(config))
    return SglangEngine(
        EngineSettings(
            vocab_size=vocab_size,
            padded_vocab_size=architecture.vocab_size,
            window=architecture.max_positions,
            dtype=dtype,
            bucket_bytes=sglang.bucket_mib * _MIB,
            max_staleness=config.rollout.max_staleness,
            async_steps=config.rollout.async_steps,
            release_memory=sglang.placement == "colocated",
        ),
        world,
        chunks,
        fleet,
        _transport(sglang, architecture, world, folder) if dist.get_rank() == 0 else None,
        events,
        decode,
    )


def server_options(
    config: Config, model: Path, number: int, device: str, *, dummy_weights: bool = True
) -> ServerOptions:
    """What server `number` of the run is started with."""
    sglang = config.rollout.sglang
    colocated = sglang.placement == "colocated"
    return ServerOptions(
        python=sglang.python,
        model=str(model),
        device=device,
        dtype=_dtype(config),
        host=sglang.host,
        port=sglang.port + number if sglang.port else 0,
        tensor=sglang.tensor,
        api_key=read_api_key(sglang.api_key_file),
        dummy_weights=dummy_weights,
        memory_saver=colocated,
        first_gpu=(0 if colocated else sglang.first_gpu) + number * sglang.tensor,
        max_running_requests=sglang.max_running_requests,
        startup_timeout_seconds=sglang.startup_timeout_seconds,
        request_timeout_seconds=sglang.request_timeout_seconds,
        arguments=sglang.arguments,
    )


def write_model_config(architecture: Architecture, directory: Path) -> Path:
    """A directory that a server can start from without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(model_config(architecture), indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    return directory


def model_config(architecture: Architecture) -> dict[str, Any]:
    """config.json as SGLang wants it: with the class that an inline architecture may leave out."""
    classes = {
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "llama": "LlamaForCausalLM",
    }
    return {"architectures": [classes[architecture.model_type]]} | architecture.source


def _members(
    config: Config, architecture: Architecture, world: World, folder: Path
) -> list[Member]:
    sglang = config.rollout.sglang
    count = len(sglang.urls) or sglang.num_servers
    if count < world.data_size:
        raise UserError(
            f"{count} SGLang servers for {world.data_size} data x context parallel ranks: each "
            "needs one of its own; raise rollout.sglang.num_servers or give more "
            "rollout.sglang.urls"
        )
    share = range(world.data_rank, count, world.data_size)
    if sglang.placement == "external":
        clients = [
            SglangClient(
                sglang.urls[number],
                api_key=read_api_key(sglang.api_key_file),
                request_timeout_seconds=sglang.request_timeout_seconds,
            )
            for number in share
        ]
        return [
            Member(f"server_{number}", client, None)
            for number, client in zip(share, clients, strict=True)
        ]
    # one directory per data-parallel rank, for leaders write at the same time
    model = write_model_config(architecture, folder / f"model_{world.data_rank}")
    members = []
    for number in share:
        options = server_options(config, model, number, world.device.type)
        server = SglangServer(options, folder / f"server_{number}.log")
        members.append(Member(f"server_{number}", server.client(), server, tensor=sglang.tensor))
    return members


def _transport(
    sglang: SglangConfig, architecture: Architecture, world: World, folder: Path
) -> Transport:
    timeout = sglang.sync_timeout_seconds
    if sglang.sync == "disk":
        return DiskTransport(timeout, folder / "weights", model_config(architecture))
    if sglang.sync == "tensor":
        return TensorTransport(timeout)
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    return DistributedTransport(timeout, sglang.sync_host, backend)


def _dtype(config: Config) -> str:
    return config.rollout.sglang.dtype or _DTYPES[config.train.precision]
