"""Builds the engine and its servers from a config; also the options of `stable-opd serve`.

Servers are assigned to data-parallel ranks in turn, and each rank's leader starts its own. The
first publish sends the weights, so a server starts from the student's config.json alone. Not here:
anything after the start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn import Module

from stable_opd_mcore.config.rollouts import SglangConfig
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.rollout.sglang.engine import SglangEngine, is_leader, server_dtype
from stable_opd_mcore.rollout.sglang.events import EventLog
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.rollout.sglang.group import DistributedTransport
from stable_opd_mcore.rollout.sglang.records import Decode
from stable_opd_mcore.rollout.sglang.transports import (
    DiskTransport,
    TensorTransport,
    Transport,
)
from stable_opd_mcore.serving.api_key import read_api_key
from stable_opd_mcore.serving.client import SglangClient
from stable_opd_mcore.serving.process import ServerOptions, SglangServer


def build_sglang_engine(
    config: Config,
    world: World,
    chunks: Sequence[Module],
    decode: Decode,
    vocab_size: int,
    stop_requested: Callable[[], bool] = lambda: False,
    progress: Callable[[], None] = lambda: None,
) -> SglangEngine:
    """Start this rank's servers, or connect to external ones, and wait until they answer.

    Args: as of `SglangEngine` and `Fleet`.

    Raises:
        UserError: fewer servers than data-parallel ranks, or no key in `api_key_file`.
    """
    folder = config.run.path / "sglang"
    events = EventLog(folder / "events.jsonl")
    architecture = architecture_of(chunks)
    fleet = None
    if is_leader(world):
        members = _members(config, architecture, world, folder)
        fleet = Fleet(members, events, config.rollout.sglang, stop_requested, progress)
        fleet.start()
    transport = None
    if dist.get_rank() == 0:
        transport = _transport(config.rollout.sglang, architecture, world, folder)
    return SglangEngine(config, world, chunks, fleet, transport, events, decode, vocab_size)


def server_options(
    config: Config, model: Path, number: int, device: str, *, dummy_weights: bool = True
) -> ServerOptions:
    """The options of the run's server `number`."""
    sglang = config.rollout.sglang
    is_colocated = sglang.placement == "colocated"
    return ServerOptions(
        python=sglang.python,
        model=str(model),
        device=device,
        dtype=server_dtype(config),
        host=sglang.host,
        port=sglang.port + number if sglang.port else 0,
        tensor=sglang.tensor,
        api_key=read_api_key(sglang.api_key_file),
        dummy_weights=dummy_weights,
        memory_saver=is_colocated,
        first_gpu=(0 if is_colocated else sglang.first_gpu) + number * sglang.tensor,
        max_running_requests=sglang.max_running_requests,
        startup_timeout_seconds=sglang.startup_timeout_seconds,
        request_timeout_seconds=sglang.request_timeout_seconds,
        arguments=sglang.arguments,
    )


def write_model_config(architecture: Architecture, directory: Path) -> Path:
    """Write a directory from which a server can start without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(model_config(architecture), indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    return directory


def model_config(architecture: Architecture) -> dict[str, Any]:
    """config.json with the model class, which SGLang needs and an inline architecture may lack."""
    return {"architectures": [architecture.family.sglang_class]} | architecture.source


def _members(
    config: Config, architecture: Architecture, world: World, folder: Path
) -> list[Member]:
    sglang = config.rollout.sglang
    count = len(sglang.urls) or sglang.num_servers
    if count < world.data_size:
        raise ConfigError(
            f"{count} SGLang servers for {world.data_size} data x context parallel ranks: each "
            "needs its own; raise rollout.sglang.num_servers or add to rollout.sglang.urls"
        )
    members = []
    for number in range(world.data_rank, count, world.data_size):
        name = f"server_{number}"
        if sglang.placement == "external":
            client = SglangClient(
                sglang.urls[number],
                api_key=read_api_key(sglang.api_key_file),
                request_timeout_seconds=sglang.request_timeout_seconds,
            )
            members.append(Member(name, client, None))
        else:
            # a directory per data-parallel rank, because leaders write at the same time
            model = write_model_config(architecture, folder / f"model_{world.data_rank}")
            options = server_options(config, model, number, world.device.type)
            server = SglangServer(options, folder / f"{name}.log")
            members.append(Member(name, server.client(), server, tensor=sglang.tensor))
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
