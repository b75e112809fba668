"""Builds the engine and its servers from a config.

The run's topology (placement/topology.py) says which servers there are and whose prompts they
answer. The first of a server's leaders starts it; others that share it wait until it answers. The
first publish sends the weights, so a server needs only the student's config.json to start.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import Module

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.device_memory import DeviceMemory
from stable_opd_mcore.parallel.world import World, gather_objects, ranks_on_this_machine
from stable_opd_mcore.placement.hardware import GIB, Cluster
from stable_opd_mcore.placement.topology import Topology, derive_topology
from stable_opd_mcore.rollout.interaction import Interaction
from stable_opd_mcore.rollout.sglang.event_log import EventLog
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member, is_leader
from stable_opd_mcore.rollout.sglang.group import DistributedTransport
from stable_opd_mcore.rollout.sglang.server_setup import (
    model_config,
    server_options,
    write_model_config,
)
from stable_opd_mcore.rollout.sglang.sglang_engine import SglangEngine
from stable_opd_mcore.rollout.sglang.transports import (
    DiskTransport,
    TensorTransport,
    Transport,
)
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.api_key import read_api_key
from stable_opd_mcore.serving.client import SglangClient
from stable_opd_mcore.serving.http_process import HTTP
from stable_opd_mcore.serving.process import SglangServer
from stable_opd_mcore.serving.teacher import ServedTeacher


def build_sglang_engine(
    config: Config,
    world: World,
    chunks: Sequence[Module],
    tokenizer: str | None,
    vocab_size: int,
    stop_requested: Callable[[], bool] = lambda: False,
    progress: Callable[[], None] = lambda: None,
    memory: DeviceMemory | None = None,
    teacher: ServedTeacher | None = None,
    interaction: Interaction | None = None,
) -> SglangEngine:
    """Start this rank's servers, or connect to external ones, and wait until they answer.

    Colocated servers size their cache by the memory that is free as they start, so the trainer's
    parts move to the host first. They come back, and the servers release their memory, when the
    trainer next holds one.

    Args:
        tokenizer: tokenizer.json; None: rollouts have no text.

    Raises:
        UserError: see `derive_topology` and `read_api_key`.
    """
    folder = config.run.files.servers
    events = EventLog(folder / "events.jsonl")
    architecture = architecture_of(chunks)
    topology = run_topology(config, architecture, world)
    memory = memory or DeviceMemory()
    members = _members(config, architecture, world, folder, topology)
    fleet = Fleet(members, events, stop_requested, progress)
    if config.is_colocated:
        memory.lend(fleet.release_memory)
    if tokenizer is not None and members:
        HTTP.use_tokenizer(tokenizer)
    fleet.start()
    transport = _transport(config, architecture, world, folder, topology)
    return SglangEngine(
        config,
        world,
        chunks,
        fleet,
        transport,
        vocab_size,
        memory,
        teacher,
        interaction or Interaction(),
    )


def run_topology(config: Config, architecture: Architecture, world: World) -> Topology:
    """The places of this run's ranks and servers, from what this machine has."""
    ranks = ranks_on_this_machine()
    memory_gib, spare_gpus = None, 0
    if world.device.type == "cuda":
        memory_gib = torch.cuda.get_device_properties(world.device).total_memory / GIB
        spare_gpus = max(0, torch.cuda.device_count() - ranks)
    cluster = Cluster(world.world_size // ranks, ranks, spare_gpus=spare_gpus)
    return derive_topology(config, architecture, cluster, memory_gib)


def _members(
    config: Config, architecture: Architecture, world: World, folder: Path, topology: Topology
) -> list[Member]:
    """The servers that this rank talks to; those that it starts are not started yet. Collective."""
    sglang = config.rollout.sglang
    places = topology.servers_of(world.data_rank) if is_leader(world) else []
    own: dict[str, SglangServer] = {}
    if sglang.placement == "external":
        api_key = read_api_key(sglang.api_key_file)
        addresses = {place.name: (sglang.urls[place.number], api_key) for place in places}
    else:
        # a directory per data-parallel rank, because leaders write at the same time
        model = folder / f"model_{world.data_rank}"
        for place in places:
            if place.data_ranks[0] == world.data_rank:
                options = server_options(
                    config,
                    write_model_config(architecture, model),
                    place.number,
                    place.gpus,
                    topology.tensor,
                    world.device.type,
                )
                own[place.name] = SglangServer(options, folder / f"{place.name}.log")
        started = {name: (server.url, server.api_key) for name, server in own.items()}
        addresses = dict(ChainMap(*gather_objects(started)))
    return [
        Member(
            place.name,
            SglangClient(addresses[place.name][0], api_key=addresses[place.name][1]),
            own.get(place.name),
            topology.tensor,
            leaders=len(place.data_ranks),
        )
        for place in places
    ]


def _transport(
    config: Config, architecture: Architecture, world: World, folder: Path, topology: Topology
) -> Transport | None:
    """How this rank sends weights; None if it sends none."""
    sglang = config.rollout.sglang
    timeout = timeouts.BUCKET
    if sglang.transport == "tensor":
        return TensorTransport(timeout, world.model_group, _sources(world, topology))
    if world.rank != 0:
        return None
    if sglang.transport == "disk":
        return DiskTransport(timeout, folder / "weights", model_config(architecture))
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    return DistributedTransport(timeout, backend)


def _sources(world: World, topology: Topology) -> dict[str, list[int]]:
    """Colocated server -> for each of its tensor ranks, the replica's rank on the same GPU."""
    replica = dist.get_process_group_ranks(world.model_group)
    first = {place.name: place.node * topology.gpus_per_node for place in topology.servers}
    return {
        place.name: [replica.index(first[place.name] + gpu) for gpu in place.gpus]
        for place in topology.servers_of(world.data_rank)
        if topology.placement == "colocated" and place.gpus
    }
