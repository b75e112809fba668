"""A topology as `stable-opd topology` prints it: for people and for the Slurm scripts."""

from collections.abc import Sequence

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.placement.topology import Topology, counted, replica_gpus


def as_shell(topology: Topology) -> str:
    """`lines` as comments, and the assignments that the Slurm scripts read."""
    comments = [f"# {line}" for line in lines(topology)]
    numbers = f"SERVERS_PER_NODE={topology.servers_per_node}", f"SERVER_TENSOR={topology.tensor}"
    return "\n".join([*comments, *numbers])


def places(topology: Topology, hosts: Sequence[str] = ()) -> list[str]:
    """One line a node: the GPUs of its data-parallel ranks and of its servers.

    `hosts` names the nodes, the trainer's first; without them nodes have numbers.
    """
    number = topology.nodes + topology.server_nodes
    if hosts and len(hosts) != number:
        raise UserError(
            f"--hosts names {counted(len(hosts), 'node')}, but the run has {number}: name each "
            "of its nodes once"
        )
    names = list(hosts) or [f"node {node}" for node in range(number)]
    held: list[list[str]] = [[] for _ in names]
    for rank in range(topology.layout.gradient_ranks):
        held_by = replica_gpus(topology.layout, topology.gpus_per_node, rank)
        for node in dict.fromkeys(node for node, _ in held_by):
            gpus = [gpu for other, gpu in held_by if other == node]
            held[node].append(f"data rank {rank} on {_gpus(gpus)}")
    for server in topology.servers:
        if server.node < number:  # else an address, which `lines` counts
            ranks = ", ".join(map(str, server.data_ranks))
            held[server.node].append(f"{server.name} on {_gpus(server.gpus)} for data rank {ranks}")
    return [f"{name}: {'; '.join(what)}" for name, what in zip(names, held, strict=True)]


def lines(topology: Topology) -> list[str]:
    """What a person reads: the trainer's line and the servers' line."""
    nodes, gpus = counted(topology.nodes, "node"), counted(topology.gpus_per_node, "GPU")
    first = f"trainer: {nodes} x {gpus}, {topology.layout}"
    if not topology.servers:
        return [first, "servers: none"]
    where = {
        "colocated": "the trainer's GPUs",
        "disaggregated": "other GPUs of the trainer's machine",
        "external": counted(topology.server_nodes, "node") + " of their own",
    }[topology.placement or "external"]
    servers = f"servers: {len(topology.servers)} of tensor {topology.tensor} on {where}"
    if topology.server_nodes or topology.nodes > 1:
        servers += f", {topology.servers_per_node} a node"
    ranks = len(topology.servers[0].data_ranks)
    each = len(topology.servers_of(0))
    if ranks == 1:
        share = f"{each} for each of {topology.layout.gradient_ranks} data-parallel ranks"
    else:
        share = f"{each} shared by {ranks} data-parallel ranks"
    return [first, f"{servers}; {share}"]


def _gpus(ids: Sequence[int]) -> str:
    return f"GPUs {' '.join(map(str, sorted(ids)))}" if ids else "no GPU"
