"""Is this node fit for the job? Run by common.sh on every node before anything expensive starts.

    preflight.py node NOTES --token=T --head=n1 ... -- CONFIG key=value ...    one process a node
    preflight.py network NOTES --floor=100                                     one process a rank

Notes are files in a directory that all nodes share: `<node>.good`, or `<node>.bad` with the
reasons, and likewise `<node>.network_good`; the head node also writes `run_directory`, or
`config_error`. A node that writes nothing is bad too. Not here: what is done about a bad node
(common.sh), and whether the settings fit the model.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine", "numpy")
GPU_FIELDS = {  # nvidia-smi's name: the value a healthy GPU answers; "[N/A]" passes
    "ecc.errors.uncorrected.volatile.total": "0",
    "retired_pages.pending": "No",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "No",
    "clocks_event_reasons.hw_slowdown": "Not Active",
    "clocks_event_reasons.hw_thermal_slowdown": "Not Active",
    "clocks_event_reasons.hw_power_brake_slowdown": "Not Active",
}
MIB = 2**20


def main() -> int:
    arguments = parse_arguments()
    name = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    if arguments.check == "node":
        return check_node(arguments, name)
    return check_network(arguments.notes, name, arguments.floor)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    checks = parser.add_subparsers(dest="check", required=True)
    node = checks.add_parser("node")
    node.add_argument("notes", type=Path)
    node.add_argument("--checks", choices=("on", "off"), default="on")
    node.add_argument(
        "--token", required=True, help="what NOTES/token holds, seen through this node's mount"
    )
    node.add_argument("--gpus", type=int, default=0, help="healthy GPUs wanted")
    node.add_argument("--min-free-gib", type=float, default=0)
    node.add_argument(
        "--head", required=True, help="the node of rank 0: its versions count, it checks the port"
    )
    node.add_argument("--port", type=int, required=True)
    node.add_argument(
        "command_line", nargs="+", help="config and overrides, as of `stable-opd train`"
    )
    network = checks.add_parser("network")
    network.add_argument("notes", type=Path)
    network.add_argument("--floor", type=float, required=True, help="GB/s")
    return parser.parse_args()


def check_node(arguments: argparse.Namespace, name: str) -> int:
    from stable_opd_mcore.config.load import ConfigError, load_config

    notes, is_head = arguments.notes, name == arguments.head
    token = notes / "token"
    if not token.is_file() or token.read_text().strip() != arguments.token:
        print(f"{name}: {notes} is not what the batch script wrote: the file system is not shared")
        return 1  # a note could not be read either
    try:
        config = load_config(arguments.command_line[0], arguments.command_line[1:])
    except ConfigError as error:
        if is_head:
            (notes / "config_error").write_text(str(error))
        return 1
    run_directory = config.run.path.absolute()
    if is_head:
        (notes / "run_directory").write_text(str(run_directory))
    problems = []
    if arguments.checks == "on":
        problems = [
            *disk_problems(run_directory, arguments.min_free_gib),
            *gpu_problems(arguments.gpus),
            *version_problems(notes, name, arguments.head),
            *(port_problems(arguments.port) if is_head else []),
        ]
    (notes / f"{name}.{'bad' if problems else 'good'}").write_text("; ".join(problems))
    return 0


def disk_problems(run_directory: Path, min_free_gib: float) -> list[str]:
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        probe = run_directory / f".preflight-{socket.gethostname()}-{os.getpid()}"
        probe.write_text("writable")
        probe.unlink()
    except OSError as error:
        return [f"cannot write to {run_directory}: {error.strerror}"]
    free = shutil.disk_usage(run_directory).free / 2**30
    if free < min_free_gib:
        return [f"{free:.1f} GiB free at {run_directory}, MIN_FREE_GIB={min_free_gib:g}"]
    return []


def gpu_problems(wanted: int) -> list[str]:
    """Read nvidia-smi: as many GPUs as wanted, none with memory errors, pending repairs or
    a hardware slow-down.
    """
    if not wanted:
        return []
    query = ",".join(("index", *GPU_FIELDS))
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except FileNotFoundError:
        return [
            "no nvidia-smi: no GPUs, or no driver in the container (REQUIRE_GPU=0: train on CPU)"
        ]
    except subprocess.TimeoutExpired:
        return ["nvidia-smi does not answer within 60 s"]
    if answer.returncode:
        return [f"nvidia-smi: {(answer.stderr or answer.stdout).strip()}"]
    rows = [[field.strip() for field in line.split(",")] for line in answer.stdout.splitlines()]
    problems = [] if len(rows) >= wanted else [f"{len(rows)} GPUs, {wanted} wanted"]
    for index, *values in rows:
        problems += [
            f"GPU {index}: {field} is {value}"
            for (field, healthy), value in zip(GPU_FIELDS.items(), values, strict=True)
            if value not in (healthy, "[N/A]")
        ]
    return problems


def version_problems(notes: Path, name: str, head: str) -> list[str]:
    """Every node must run what the head node runs; the head's list is waited for."""
    mine = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            mine.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            mine.append(f"{package} absent")
    listing = notes / f"{name}.versions"
    listing.with_suffix(".partial").write_text("\n".join(mine))
    listing.with_suffix(".partial").rename(listing)
    reference = notes / f"{head}.versions"
    deadline = time.monotonic() + 60
    while not reference.exists():
        if time.monotonic() > deadline:
            return []  # the head node is the bad one, and named for it
        time.sleep(0.2)
    theirs = reference.read_text().splitlines()
    return [
        f"{here}, but {there} on {head}"
        for here, there in zip(mine, theirs, strict=True)
        if here != there
    ]


def port_problems(port: int) -> list[str]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return [f"port {port} for the rendezvous: {error.strerror}"]
    return []


def check_network(notes: Path, name: str, floor: float) -> int:
    """All-reduce over everyone; when that is slow, within nodes and between neighbours, to
    find whose fault it is.
    """
    import torch
    import torch.distributed as dist

    from stable_opd_mcore.network import gloo_settings

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    os.environ.update(gloo_settings(os.environ["MASTER_ADDR"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    node, num_nodes = rank // per_node, world_size // per_node
    speeds = {"all nodes": bus_bandwidth(dist.group.WORLD, on_gpu)}
    if slowest(speeds["all nodes"], on_gpu) < floor:
        mine = [range(n * per_node, (n + 1) * per_node) for n in range(num_nodes)]
        speeds = {"within the node": among(mine, rank, on_gpu)} if per_node > 1 else {}
        # A node that is slow with both neighbours is at fault, one that is fast with one is not.
        pairs = [range(n * per_node, (n + 2) * per_node) for n in range(num_nodes - 1)]
        even, odd = among(pairs[0::2], rank, on_gpu), among(pairs[1::2], rank, on_gpu)
        if found := [speed for speed in (even, odd) if speed is not None]:
            speeds["with its better neighbour"] = max(found)
    if rank % per_node == 0:
        slow = [
            f"all-reduce {what}: {s:.1f} GB/s, floor {floor:g}"
            for what, s in speeds.items()
            if s and s < floor
        ]
        note = notes / f"{name}.network_{'bad' if slow else 'good'}"
        note.write_text("; ".join(slow) or f"{min(filter(None, speeds.values())):.3f} GB/s")
    print(f"node {node} rank {rank}: {speeds}")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def among(groups: list[range], rank: int, on_gpu: bool) -> float | None:
    """Bandwidth within the one of these disjoint groups that holds this rank, None if none does."""
    import torch.distributed as dist

    mine = None
    for members in groups:
        group = dist.new_group(list(members))  # every rank takes part in making every group
        if rank in members:
            mine = group
    speed = bus_bandwidth(mine, on_gpu) if mine is not None else None
    dist.barrier()
    return speed


def bus_bandwidth(group, on_gpu: bool) -> float:
    """GB/s of a ring all-reduce, 2(n-1)/n bytes moved per byte (as nccl-tests counts).

    Infinite for a group of one.
    """
    import torch
    import torch.distributed as dist

    size = dist.get_world_size(group)
    if size == 1:
        return float("inf")
    values = torch.ones((512 if on_gpu else 4) * MIB // 4, device="cuda" if on_gpu else "cpu")
    repeats = 10 if on_gpu else 2
    seconds = 0.0
    for measured in (False, True):  # the first round makes the connections
        dist.all_reduce(values, group=group)
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats if measured else 1):
            dist.all_reduce(values, group=group)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    moved = repeats * values.numel() * values.element_size() * 2 * (size - 1) / size
    return moved / seconds / 1e9


def slowest(speed: float, on_gpu: bool) -> float:
    """The same number on every rank, so that all take the same way."""
    import torch
    import torch.distributed as dist

    found = torch.tensor([speed], dtype=torch.float64, device="cuda" if on_gpu else "cpu")
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return float(found)


if __name__ == "__main__":
    sys.exit(main())
