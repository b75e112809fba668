"""Who trains where, and which SGLang server has which GPUs and answers whose prompts.

One frozen record, computed from nodes, GPUs a node, the config and the student. The Slurm scripts,
`stable-opd serve`, the engine, `stable-opd plan` and the tests all read it, so that nobody types a
GPU id. A GPU is named by its node and its local id. Needs no torch and no GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.placement.draft import draft_bytes
from stable_opd_mcore.placement.hardware import GIB, Cluster
from stable_opd_mcore.placement.layout import Layout, layout_of
from stable_opd_mcore.placement.model_size import WEIGHT_BYTES, ModelSize

Placement = Literal["colocated", "disaggregated", "external"]
# Shares of a GPU's memory that one server takes for weights and KV cache. SGLang chooses about as
# much by itself on a GPU of its own; a colocated server leaves the rest to the trainer.
MEMORY_SHARES: dict[Placement, float] = {
    "colocated": 0.5,
    "disaggregated": 0.85,
    "external": 0.85,
}
WEIGHT_BUCKET_BYTES = 512 * 2**20  # weights that are sent at once; the trainer holds two buckets
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
WEIGHTS_SHARE = 0.5  # largest share of a server's memory; the rest is its KV cache


@dataclass(frozen=True)
class ServerPlace:
    """One SGLang server."""

    number: int  # among all servers; its port is the first port + number
    node: int  # trainer nodes first
    gpus: tuple[int, ...]  # local ids, one per tensor rank; empty on a CPU without enough ranks
    data_ranks: tuple[int, ...]  # whose prompts it answers; the first one starts it if the run does

    @property
    def name(self) -> str:
        return f"server_{self.number}"


@dataclass(frozen=True)
class Topology:
    """The places of all trainer ranks and servers of one run."""

    nodes: int  # the trainer's
    gpus_per_node: int
    server_nodes: int  # after the trainer's nodes
    layout: Layout
    placement: Placement | None  # None: no servers
    tensor: int  # GPUs of one server
    servers: tuple[ServerPlace, ...]

    @property
    def servers_per_node(self) -> int:
        """Servers on a node that has any; all such nodes have equally many."""
        num_nodes = len({server.node for server in self.servers})
        return len(self.servers) // num_nodes if num_nodes else 0

    def servers_of(self, data_rank: int) -> tuple[ServerPlace, ...]:
        """The servers that answer the prompts of a data-parallel (times context) rank."""
        return tuple(server for server in self.servers if data_rank in server.data_ranks)


def derive_topology(
    config: Config,
    architecture: Architecture,
    cluster: Cluster,
    memory_gib: float | None,
) -> Topology:
    """The places of a run, from the config's layout and the student.

    Args:
        memory_gib: one GPU's. None: a CPU, where nothing has to fit and no GPU can be idle.

    Raises:
        UserError: a layout that does not divide the GPUs, a student that no server size holds,
            servers that do not divide a node's GPUs, GPUs without a server.
    """
    nodes, gpus_per_node, server_nodes = cluster.nodes, cluster.gpus_per_node, cluster.server_nodes
    layout = layout_of(config.parallel, cluster.trainer_gpus)
    if not config.rollout.has_servers and not server_nodes:
        return Topology(nodes, gpus_per_node, 0, layout, None, 0, ())
    _refuse_windows(architecture, "student")
    sglang = config.rollout.sglang
    placement: Placement = "external" if server_nodes else sglang.placement
    if placement == "external" and not server_nodes:  # someone else chose their places
        shares = ranks_of_servers(len(sglang.urls), layout.gradient_ranks)
        urls = tuple(ServerPlace(n, nodes, (), ranks) for n, ranks in enumerate(shares))
        return Topology(nodes, gpus_per_node, 0, layout, placement, 0, urls)
    gpus = cluster.spare_gpus if placement == "disaggregated" else gpus_per_node
    if not gpus and memory_gib is not None:
        raise UserError(
            f"rollout.sglang.placement=disaggregated: all {counted(gpus_per_node, 'GPU')} of the "
            "machine train, and none is left for servers: start fewer ranks, set "
            "rollout.sglang.placement=colocated, or give servers nodes (SERVER_NODES, or plan's "
            "--server-nodes)"
        )
    count, tensor = machine_servers(config, architecture, gpus, memory_gib, placement)
    if placement == "colocated":
        blocks = _colocated(layout, gpus_per_node, tensor)
        if memory_gib is None:
            blocks = _as_many_as(blocks, count * nodes, layout.gradient_ranks)
        else:
            _refuse_bare_gpus(layout, nodes, gpus_per_node, tensor, blocks)
        servers = tuple(ServerPlace(n, *place) for n, place in enumerate(blocks))
        return Topology(nodes, gpus_per_node, 0, layout, placement, tensor, servers)
    shares = ranks_of_servers(count * max(1, server_nodes), layout.gradient_ranks)
    first_gpu = 0 if server_nodes else gpus_per_node
    servers = tuple(
        ServerPlace(
            number=number,
            node=number // count + (nodes if server_nodes else 0),
            gpus=server_gpus(first_gpu, number % count, tensor),
            data_ranks=ranks,
        )
        for number, ranks in enumerate(shares)
    )
    return Topology(nodes, gpus_per_node, server_nodes, layout, placement, tensor, servers)


def machine_servers(
    config: Config,
    architecture: Architecture,
    gpus: int,
    memory_gib: float | None,
    placement: Placement,
    role: Literal["student", "teacher"] = "student",
) -> tuple[int, int]:
    """The number of servers on a machine with this many GPUs for them, and their tensor ranks.

    rollout.sglang.num_servers and tensor where they are set; else what follows from the GPUs.
    """
    _refuse_windows(architecture, role)
    count, tensor = config.rollout.sglang.num_servers, config.rollout.sglang.tensor
    if memory_gib is None:
        tensor = tensor or 1
        return count or (1 if placement == "disaggregated" else max(1, gpus // tensor)), tensor
    if tensor is None and count is not None and gpus % count == 0:
        tensor = gpus // count
    if tensor is None:
        dtype = server_dtype(config)
        tensor = smallest_tensor(
            *(architecture, dtype, gpus, memory_gib, placement, role),
            draft_gib=_draft_gib(config, architecture) if role == "student" else 0.0,
        )
        # A step waits for its longest response, which a server on more GPUs samples faster: a
        # colocated one takes those of a tensor group.
        group = config.parallel.tensor
        if placement == "colocated" and group > tensor and gpus % group == 0:
            tensor = tensor if _not_divided(architecture, group, role) else group
    count = count or gpus // tensor
    if gpus != count * tensor:
        given = f"{counted(count, 'server')} of {counted(tensor, 'GPU')}"
        many = count * tensor - gpus
        what = f"{many} too many" if many > 0 else f"{-many} would be idle"
        raise UserError(
            f"rollout.sglang.num_servers and tensor: {given} on the {counted(gpus, 'GPU')} that a "
            f"machine has for servers: {what}. Set both to null, or so that their product is {gpus}"
        )
    refused = _not_divided(architecture, tensor, role)
    if refused:
        raise UserError(
            f"rollout.sglang.tensor={tensor} does not divide the {role}'s {refused}: set it to "
            "a divisor, or to null"
        )
    return count, tensor


def _refuse_windows(architecture: Architecture, role: Literal["student", "teacher"]) -> None:
    """Raise a UserError for sliding windows that SGLang reads over."""
    window = architecture.sliding_window
    if window is None or architecture.family.sliding_windows in ("typed", "patterned"):
        return
    remedies = {
        "student": f"student.window={window} (positions, none of which is then out of the window), "
        "or rollout.engine=embedded",
        "teacher": f"max_position_embeddings={window} in config.json of the servers' model, or "
        "teacher.engine=megatron",
    }
    raise UserError(
        f"the {role}'s sliding window of {window} tokens in {len(architecture.sliding_layers)} of "
        f"{architecture.num_layers} layers: SGLang computes full attention in a "
        f"{architecture.model_type} model, which differs beyond {window} of its "
        f"{architecture.max_positions} positions; set {remedies[role]}"
    )


def server_dtype(config: Config) -> str:
    """The precision of the servers' weights, by torch's name."""
    return _DTYPES[config.train.precision]


def sends_adapter(config: Config, student: Architecture) -> bool:
    """Whether servers are sent the student's low-rank factors, and its frozen weights only once;
    False: they are sent all weights, merged with the factors if it has any.

    Raises:
        UserError: rollout.sglang.lora=adapter with a student whose adapter SGLang cannot serve.
    """
    if config.student.lora is None or not config.rollout.has_servers:
        return False
    if student.experts is not None:
        reason = "reports that it has updated the weights of experts with an adapter, and has not"
    elif student.delta_net is not None:
        reason = "leaves out the factors of decay and step size of gated delta nets"
    else:
        return config.rollout.sglang.lora != "merged"
    if config.rollout.sglang.lora == "adapter":
        raise UserError(
            f"rollout.sglang.lora=adapter with a {student.model_type} student: SGLang {reason}; "
            "set rollout.sglang.lora=merged"
        )
    return False


def smallest_tensor(
    architecture: Architecture,
    dtype: str,
    gpus: int,
    memory_gib: float,
    placement: Placement,
    role: Literal["student", "teacher"] = "student",
    draft_gib: float = 0.0,
) -> int:
    """The fewest GPUs, a power of two, that hold the model in `dtype` with a draft, and as much KV
    cache."""
    share = MEMORY_SHARES[placement]
    size_bytes = 2 if dtype == "bfloat16" else 4
    weights_gib = size_bytes * ModelSize(architecture, Layout(1)).total_parameters() / GIB
    weights_gib += draft_gib
    room_gib = WEIGHTS_SHARE * share * memory_gib
    sizes = [2**n for n in range(gpus.bit_length()) if gpus % 2**n == 0]
    sizes = [size for size in sizes if _not_divided(architecture, size, role) is None]
    for size in sizes:
        if weights_gib / size <= room_gib:
            return size
    largest = max(sizes, default=0)
    others = (
        "server nodes (SERVER_NODES, or plan's --server-nodes) or "
        if placement == "colocated"
        else ""
    )
    raise UserError(
        f"the {role}'s {dtype} weights take {weights_gib:.1f} GiB, and the largest {placement} "
        f"server, on {counted(largest, 'GPU')}, has {largest * room_gib:.1f} GiB for them: use "
        f"{others}GPUs with more memory, or, with a smaller KV cache, "
        f"rollout.sglang.tensor={largest}"
    )


def _draft_gib(config: Config, student: Architecture) -> float:
    return draft_bytes(config, student, WEIGHT_BYTES[config.train.precision]) / GIB


def ranks_of_servers(num_servers: int, data_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The data-parallel ranks whose prompts each server answers.

    Servers and ranks are divided into as many groups as divide both numbers. Within a group every
    rank samples from every server, so that servers have equal loads at any two numbers.
    """
    groups = gcd(num_servers, data_ranks)
    servers, ranks = num_servers // groups, data_ranks // groups
    return tuple(
        tuple(range(number // servers * ranks, (number // servers + 1) * ranks))
        for number in range(num_servers)
    )


def server_gpus(first_gpu: int, number_on_machine: int, tensor: int) -> tuple[int, ...]:
    """Local ids of a server's GPUs, where servers follow one another from `first_gpu` on."""
    start = first_gpu + number_on_machine * tensor
    return tuple(range(start, start + tensor))


def replica_gpus(layout: Layout, gpus_per_node: int, data_rank: int) -> tuple[tuple[int, int], ...]:
    """(node, local id) of the replica's GPUs, its leader's first.

    Ranks run fastest over tensor, then context and data, then pipeline (parallel/world.py).
    """
    ranks = (
        tensor + layout.tensor * (data_rank + layout.gradient_ranks * stage)
        for stage in range(layout.pipeline)
        for tensor in range(layout.tensor)
    )
    return tuple(divmod(rank, gpus_per_node) for rank in ranks)


_Block = tuple[int, tuple[int, ...], tuple[int, ...]]  # node, GPUs, data ranks of a server


def _colocated(layout: Layout, gpus_per_node: int, tensor: int) -> list[_Block]:
    """Servers on neighbouring GPUs of one replica, on the node of its leader, which starts them.

    Each GPU's trainer rank then gives its server the weights from the GPU's own memory.
    """
    blocks: list[_Block] = []
    for data_rank in range(layout.gradient_ranks):
        places = replica_gpus(layout, gpus_per_node, data_rank)
        node = places[0][0]
        here = sorted(gpu for each, gpu in places if each == node)
        while len(here) >= tensor:
            block = tuple(here[:tensor])
            if block[-1] - block[0] == tensor - 1:
                blocks.append((node, block, (data_rank,)))
                here = here[tensor:]
            else:
                here = here[1:]
    return blocks


def _as_many_as(blocks: Sequence[_Block], count: int, data_ranks: int) -> list[_Block]:
    """`blocks` if there are `count` of them; else `count` servers on a CPU, without GPUs."""
    if len(blocks) == count:
        return list(blocks)
    if count < data_ranks:
        raise UserError(
            f"rollout.sglang.num_servers: {counted(count, 'colocated server')} for {data_ranks} "
            "data-parallel ranks, each of which starts and releases its own: set it to null"
        )
    return [(0, (), share) for share in ranks_of_servers(count, data_ranks)]


def _refuse_bare_gpus(
    layout: Layout, nodes: int, gpus_per_node: int, tensor: int, blocks: Sequence[_Block]
) -> None:
    gpus = nodes * gpus_per_node
    bare = gpus - len(blocks) * tensor
    if bare:
        raise UserError(
            f"colocated servers of {counted(tensor, 'GPU')} leave {bare} of {gpus} GPUs without a "
            f"server ({layout}); a server needs neighbouring GPUs of one data-parallel rank on one "
            "node: give servers nodes of their own (SERVER_NODES, or plan's --server-nodes), or "
            "lower parallel.pipeline or rollout.sglang.tensor"
        )


def _not_divided(architecture: Architecture, tensor: int, role: str) -> str | None:
    """The first size of the model that this many tensor ranks of a server do not divide.

    Ranks may share key-value heads on a teacher's server, since SGLang copies them. A publish to a
    student's servers has no such copies.
    """
    is_copied = role == "teacher" and tensor % architecture.num_key_value_heads == 0
    for name in ("num_attention_heads", "num_key_value_heads", "ffn_hidden_size"):
        number = getattr(architecture, name)
        if number % tensor and not (is_copied and name == "num_key_value_heads"):
            return f"{name}={number}"
    return None


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 GPU", "2 GPUs"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
