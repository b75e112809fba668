"""A run's GPUs: how many, what one offers, and the share of its rates that is expected.

Peaks are the vendors'. Shares are assumptions until `BENCHMARKS.md` holds measured ones.
"""

from dataclasses import dataclass

from stable_opd_mcore.errors import UserError

GIB = 2**30
MATMUL_SHARE = 0.45  # share of the peak in a whole pass, messages between GPUs included
MEMORY_SHARE, HOST_SHARE = 0.8, 0.8


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a run: trainer nodes first, then nodes of SGLang servers."""

    nodes: int
    gpus_per_node: int
    server_nodes: int = 0
    spare_gpus: int = 0  # disaggregated servers use them, on the trainer's machine

    @property
    def trainer_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def gpus(self) -> int:
        """GPUs of trainer and servers together."""
        return self.trainer_gpus + self.server_nodes * self.gpus_per_node


@dataclass(frozen=True)
class Device:
    """One accelerator. Rates are peaks."""

    name: str
    memory_gib: float
    reserved_gib: float  # CUDA context, NCCL buffers, cuBLAS workspaces, fragmentation
    matmul_tflops: float  # dense bf16
    memory_gbps: float  # 1e9 bytes per second
    host_gbps: float  # copies to pinned host memory, one way; each GPU has a link of its own

    @property
    def usable_bytes(self) -> float:
        return (self.memory_gib - self.reserved_gib) * GIB

    def matmul_seconds(self, flops: float) -> float:
        return flops / (self.matmul_tflops * 1e12 * MATMUL_SHARE)

    def memory_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.memory_gbps * 1e9 * MEMORY_SHARE)

    def host_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.host_gbps * 1e9 * HOST_SHARE)


# The host's link is PCIe 5.0 x16.
DEVICES = {
    "h100": Device("h100", 79.6, 4.0, 989.0, 3350.0, 64.0),
    "h200": Device("h200", 139.0, 4.0, 989.0, 4800.0, 64.0),
}


def device_named(name: str) -> Device:
    """The device of this name; a UserError for an unknown one."""
    if name not in DEVICES:
        raise UserError(f"--gpu {name}: unknown; expected one of {', '.join(sorted(DEVICES))}")
    return DEVICES[name]
