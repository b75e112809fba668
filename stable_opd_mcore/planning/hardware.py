"""A job's GPUs: how many, what one and its links offer, and the share that is expected of it.

Peaks are the vendors'. Shares are assumptions until `BENCHMARKS.md` holds measured ones.
"""

from dataclasses import dataclass

from stable_opd_mcore.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a job: trainer nodes first, then nodes of SGLang servers."""

    nodes: int
    gpus_per_node: int
    server_nodes: int = 0
    spare_gpus: int = 0  # of the trainer's machine, for disaggregated servers

    @property
    def trainer_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def gpus(self) -> int:
        """Of trainer and servers together."""
        return self.trainer_gpus + self.server_nodes * self.gpus_per_node


@dataclass(frozen=True)
class Device:
    """One accelerator. Rates are per device and in one direction."""

    name: str
    memory_gib: float
    reserved_gib: float  # CUDA context, NCCL buffers, cuBLAS workspaces, fragmentation
    matmul_tflops: float  # dense bf16 peak
    memory_gbps: float  # peak, in 1e9 bytes per second
    node_gbps: float  # to another device of the same node
    network_gbps: float  # to another node
    host_gbps: float  # to pinned host memory; the link is this GPU's alone
    matmul_share: float = 0.6  # of the peak, over a whole forward or backward pass
    memory_share: float = 0.8
    link_share: float = 0.8

    @property
    def usable_bytes(self) -> float:
        return (self.memory_gib - self.reserved_gib) * GIB

    def matmul_seconds(self, flops: float) -> float:
        return flops / (self.matmul_tflops * 1e12 * self.matmul_share)

    def memory_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.memory_gbps * 1e9 * self.memory_share)

    def link_seconds(self, num_bytes: float, *, within_node: bool) -> float:
        rate = self.node_gbps if within_node else self.network_gbps
        return num_bytes / (rate * 1e9 * self.link_share)

    def host_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.host_gbps * 1e9 * self.link_share)


# The host's link is PCIe 5.0 x16.
DEVICES = {
    "h100": Device("h100", 79.6, 4.0, 989.0, 3350.0, 450.0, 50.0, 64.0),
    "h200": Device("h200", 139.0, 4.0, 989.0, 4800.0, 450.0, 50.0, 64.0),
}


def device_named(name: str) -> Device:
    """The device of this name; a UserError for an unknown one."""
    if name not in DEVICES:
        raise UserError(f"--gpu {name}: unknown; expected one of {', '.join(sorted(DEVICES))}")
    return DEVICES[name]
