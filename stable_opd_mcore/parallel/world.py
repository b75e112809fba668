"""This rank's device, its place in the tensor x context x data x pipeline grid, its process groups.

    world = start_world(config.parallel, seed=config.train.seed)
    ...                                   # build models and train, any number of times
    stop_world()

No other folder reads Megatron's global parallel_state. A lone process is a world of one.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.config.training import COLLECTIVE_TIMEOUT_MINUTES, FaultConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.cuda_driver import refuse_unused_gpus
from stable_opd_mcore.parallel.rendezvous import is_launched, launcher_number, meet

Object = TypeVar("Object")
Result = TypeVar("Result")

_START_TIMEOUT = timedelta(minutes=FaultConfig().start_minutes)
_TIMEOUT = timedelta(minutes=COLLECTIVE_TIMEOUT_MINUTES)
_created_process_group = False  # if a caller created the group, stop_world keeps it
_layout: dict[str, int | None] = {}  # the started world's
_host_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}  # NCCL's group -> gloo's, same ranks


@dataclass(frozen=True)
class World:
    """This rank's place. A replica, a tensor x pipeline grid of ranks, holds the weights once.

    Replicas are the data-parallel ranks: each samples rollouts for its share of the prompts.
    `context_size` replicas share the same micro-batches; each holds a slice of every sequence.
    """

    rank: int
    world_size: int
    device: torch.device
    tensor_rank: int
    tensor_size: int
    sequence_parallel: bool
    pipeline_rank: int
    pipeline_size: int
    virtual_pipeline: int | None  # model chunks per pipeline rank; None: one, without interleaving
    data_rank: int
    data_size: int
    context_rank: int
    context_size: int
    batch_rank: int  # data_rank, but replicas that share micro-batches count once
    batch_size: int
    expert_size: int  # ranks of one pipeline stage; each holds a part of the experts
    # Megatron's constructors take it; the properties below name its members
    groups: ProcessGroupCollection

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same weights: one of each replica."""
        return self.groups.dp_cp

    @property
    def context_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold slices of the same sequences; None without context parallelism."""
        return self.groups.cp if self.context_size > 1 else None

    @property
    def model_group(self) -> dist.ProcessGroup:
        """The tensor x pipeline ranks of this replica."""
        return self.groups.mp

    @property
    def coupled_replicas(self) -> int:
        """Consecutive replicas that share one set of experts, and so run all passes together."""
        return max(1, self.expert_size // self.tensor_size)  # one divides the other

    def shares_experts_with(self, data_rank: int) -> bool:
        """Whether the replica of that data-parallel rank is this one or coupled to it."""
        return self.data_rank // self.coupled_replicas == data_rank // self.coupled_replicas

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes losses and scores."""
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def num_chunks(self) -> int:
        return self.virtual_pipeline or 1

    @property
    def token_multiple(self) -> int:
        """T is a multiple of this: context and sequence parallelism cut it into equal parts."""
        return self.context_size * (self.tensor_size if self.sequence_parallel else 1)

    @property
    def sequence_multiple(self) -> int:
        """The length of every packed sequence must be a multiple of this (parallel/context.py)."""
        return 2 * self.context_size if self.context_size > 1 else 1

    @property
    def microbatch_multiple(self) -> int:
        """The number of micro-batches is a multiple of this: interleaving needs whole groups."""
        return self.pipeline_size if self.virtual_pipeline else 1


def start_world(
    parallel: ParallelConfig,
    seed: int,
    settings: Mapping[str, Any] | None = None,
    start_timeout: timedelta = _START_TIMEOUT,
) -> World:
    """Join the process group, or create it; lay out the grid; seed every generator.

    May be called again with the same layout: it keeps the groups and seeds the generators again.
    Rank numbers run fastest over tensor, then context, data, pipeline (Megatron's order).

    Raises:
        UserError: the grid does not divide the number of ranks, or expert those of a stage; a
            launcher's variable is unusable; a rank did not start, or with other `settings` (see
            `meet`); there are GPUs that torch cannot use.
        RuntimeError: a world of another layout is started; call stop_world() first.
    """
    global _layout
    device = _join(settings or {}, start_timeout)
    if reason := _grid_refusal(parallel, dist.get_world_size()):
        stop_world()
        raise UserError(reason)
    layout = parallel.model_dump(exclude={"sequence"})
    if parallel_state.model_parallel_is_initialized():
        if layout != _layout:
            raise RuntimeError(f"a world of {_layout} is started: stop_world() before {layout}")
    else:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=COLLECTIVE_TIMEOUT_MINUTES,
        )
        _layout = layout
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if device.type == "cuda":
        add_host_groups((dist.group.WORLD, groups.mp, groups.dp_cp))
    _seed_generators(seed, pipeline_rank=groups.pp.rank())
    return World(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        tensor_rank=groups.tp.rank(),
        tensor_size=groups.tp.size(),
        sequence_parallel=parallel.sequence,
        pipeline_rank=groups.pp.rank(),
        pipeline_size=groups.pp.size(),
        virtual_pipeline=parallel.virtual_pipeline,
        data_rank=groups.dp_cp.rank(),
        data_size=groups.dp_cp.size(),
        context_rank=groups.cp.rank(),
        context_size=groups.cp.size(),
        batch_rank=groups.dp.rank(),
        batch_size=groups.dp.size(),
        expert_size=groups.ep.size(),
        groups=groups,
    )


def _grid_refusal(parallel: ParallelConfig, world_size: int) -> str | None:
    """Why these ranks cannot be laid out; None if they can."""
    grid = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % grid:
        return (
            f"parallel.tensor={parallel.tensor} x parallel.pipeline={parallel.pipeline} x "
            f"parallel.context={parallel.context} = {grid} does not divide the {world_size} started"
            f" ranks: start a multiple of {grid} (torchrun --nproc-per-node), or lower one of them"
        )
    of_stage = world_size // parallel.pipeline
    if of_stage % parallel.expert:
        return (
            f"parallel.expert={parallel.expert} does not divide the {of_stage} ranks of each "
            "pipeline stage (tensor x context x data): start more of them (torchrun "
            "--nproc-per-node), or lower parallel.expert"
        )
    return None


def stop_world() -> None:
    """Wait for every rank, or gloo may abort at exit; leave the group unless the caller made it."""
    global _created_process_group
    if not dist.is_initialized():
        return
    dist.barrier()
    for group in _host_groups.values():
        dist.destroy_process_group(group)
    _host_groups.clear()
    if parallel_state.model_parallel_is_initialized():
        # Megatron only forgets its groups, and each gloo thread wakes a hundred times a second.
        for group in parallel_state._global_process_group_list or ():
            if group is not None:  # None: the default group
                dist.destroy_process_group(group)
        parallel_state.destroy_model_parallel()
    if _created_process_group:
        dist.destroy_process_group()
        _created_process_group = False


def add_host_groups(groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Have gloo carry the objects of these groups. Collective over all ranks.

    A rank may wait for objects for as long as others sample responses. In NCCL it would spin on a
    core and occupy its GPU, which colocated servers need; in gloo it sleeps.
    """
    for group in groups:
        assert group is not None, "the world is started"
        if group in _host_groups or dist.get_world_size(group) == 1:
            continue
        mine = dist.get_process_group_ranks(group)
        for ranks in sorted(set(map(tuple, gather_objects(mine)))):
            host_group: Any = dist.new_group(list(ranks), timeout=_TIMEOUT, backend="gloo")
            if dist.get_rank() in ranks:
                _host_groups[group] = host_group


def object_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group over which the objects of `group` travel; None: the group of all ranks."""
    every = dist.group.WORLD if group is None else group
    return group if every is None else _host_groups.get(every, group)


def gather_objects(item: Object, group: dist.ProcessGroup | None = None) -> list[Object]:
    """The pickled `item` of each rank of `group` (None: all ranks), in rank order, on each."""
    size = dist.get_world_size(group)
    if size == 1:
        return [item]
    items: list[Any] = [None] * size
    dist.all_gather_object(items, item, group=object_group(group))
    return items


def on_first_rank(world: World, function: Callable[[], Result]) -> Result:
    """Call `function` on rank 0 only; every rank returns its result or raises its UserError."""
    outcome: Any = None
    if world.rank == 0:
        try:
            outcome = function()
        except UserError as error:
            outcome = error
    outcome = broadcast_object(outcome)
    if isinstance(outcome, UserError):
        raise outcome
    return outcome


def gather_on_first_rank(item: Object, group: dist.ProcessGroup | None = None) -> list[Object]:
    """What `gather_objects` returns, on the first rank of `group`; an empty list on the others."""
    size = dist.get_world_size(group)
    if size == 1:
        return [item]
    items: list[Any] | None = [None] * size if dist.get_rank(group) == 0 else None
    dist.gather_object(item, items, group=object_group(group), group_dst=0)
    return items or []


def exchange_objects(
    outgoing: Sequence[Object], group: dist.ProcessGroup | None = None
) -> list[Object]:
    """Item r of `outgoing` goes to rank r of `group`; returns what each rank sent here. Pickled."""
    size, here = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return list(outgoing)
    parts = [b"" if rank == here else pickle.dumps(item) for rank, item in enumerate(outgoing)]
    lengths = [len(part) for part in parts]
    of_ranks = gather_objects(lengths, group)
    received = [of_rank[here] for of_rank in of_ranks]
    sent_bytes = torch.frombuffer(bytearray(b"".join(parts)) or bytearray(1), dtype=torch.uint8)
    received_bytes = torch.empty(sum(received), dtype=torch.uint8)
    dist.all_to_all_single(
        received_bytes, sent_bytes[: sum(lengths)], received, lengths, group=object_group(group)
    )
    blobs = [part.numpy().tobytes() for part in received_bytes.split(received)]
    return [
        outgoing[rank] if rank == here else pickle.loads(blob) for rank, blob in enumerate(blobs)
    ]


def broadcast_object(item: Object, group: dist.ProcessGroup | None = None) -> Object:
    """The pickled `item` of the first rank of `group` (None: all ranks), on all of them."""
    items: list[Any] = [item]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(items, group=object_group(group), group_src=0)
    return items[0]


def _join(settings: Mapping[str, Any], start_timeout: timedelta) -> torch.device:
    global _created_process_group
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(_local_gpu())
        # torch would end a rank whose NCCL thread stands still for 8 minutes, before the watchdog
        seconds = str(int(_TIMEOUT.total_seconds()))
        os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", seconds)
    else:
        refuse_unused_gpus()
    if not dist.is_initialized():
        backend = "nccl" if on_gpu else "gloo"
        if is_launched():
            store, rank, world_size = meet(start_timeout, settings)
            store.set_timeout(_TIMEOUT)  # groups exchange addresses at their first collective
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT
            )
        else:
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        _created_process_group = True
    if on_gpu:
        return torch.device("cuda", torch.cuda.current_device())
    _share_cores()
    return torch.device("cpu")


def _local_gpu() -> int:
    """Index of this rank's GPU. Slurm may show each rank only its own."""
    local_rank = launcher_number("LOCAL_RANK", 0, 2**31) if "LOCAL_RANK" in os.environ else 0
    return local_rank % torch.cuda.device_count()


def ranks_on_this_machine() -> int:
    """All machines have equally many; without the launcher's variable all ranks are on this one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _share_cores() -> None:
    """Divide the machine's cores among its ranks: more threads than cores halve the throughput."""
    ranks_here = ranks_on_this_machine()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    torch.set_num_threads(min(torch.get_num_threads(), max(1, cores // ranks_here)))


def _seed_generators(seed: int, pipeline_rank: int) -> None:
    # Megatron's convention; its tracker adds the tensor rank.
    seed = seed + 100 * pipeline_rank
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
