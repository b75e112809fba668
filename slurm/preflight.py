"""Check a node before the job starts. common.sh runs this on every node.

    preflight.py node NOTES --token=T --head=n1 ... -- CONFIG key=value ...    one process a node
    preflight.py network NOTES --floor=100                                     one process a rank

NOTES is a directory that all nodes share. A node writes `<node>.good`, or `<node>.bad`: a JSON
object from the kind of a fault to its message, so that verdict.py can compare nodes. The head node
also writes `run_directory`, or `config_error`. Rank 0 of the all-reduce writes its speed to
`network_good`, or what is wrong to `network_bad`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stable_opd_mcore.commands.check.node import node_faults
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.serving.process import check_release

if TYPE_CHECKING:
    from stable_opd_mcore.config.schema import Config

# NCCL's package carries the release of CUDA in its name.
PACKAGES = (
    "torch",
    "nvidia-nccl-*",
    "transformer-engine",
    "megatron-core",
    "sglang",
    "transformers",
    "numpy",
)
SERVERS = "servers: "  # before what is installed in the servers' environment
# Prints a line for each package; runs in either environment, so it imports none of our modules.
LIST_VERSIONS = f"""
import platform
from fnmatch import fnmatch
from importlib.metadata import distributions
found = {{(d.name or "").lower().replace("_", "-"): d.version for d in distributions()}}
print("python", platform.python_version())
for wanted in {PACKAGES}:
    print(wanted, next((found[name] for name in sorted(found) if fnmatch(name, wanted)), "absent"))
"""
GPU_FIELDS = (  # names that nvidia-smi knows
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "clocks_event_reasons.hw_slowdown",
    "clocks_event_reasons.hw_thermal_slowdown",
    "clocks_event_reasons.hw_power_brake_slowdown",
)
HEALTHY = ("0", "No", "Not Active", "[N/A]")  # drivers differ: no remapped row is "No" or "0"
MIB = 2**20


def main() -> int:
    arguments = parse_arguments()
    name = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    if arguments.check == "node":
        return check_node(arguments, name)
    return check_network(arguments.notes, arguments.floor)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    checks = parser.add_subparsers(dest="check", required=True)
    node = checks.add_parser("node")
    node.add_argument("notes", type=Path)
    node.add_argument("--checks", choices=("on", "off"), default="on")
    node.add_argument(
        "--token", required=True, help="text of NOTES/token, to prove that the directory is shared"
    )
    node.add_argument("--gpus", type=int, default=0, help="number of healthy GPUs required")
    node.add_argument("--min-free-gib", type=float, default=0)
    node.add_argument(
        "--head", required=True, help="node of rank 0: other nodes must have its versions"
    )
    node.add_argument("--port", type=int, required=True)
    node.add_argument(
        "--servers",
        default="",
        help="nodes with only SGLang servers, separated by commas; default: none",
    )
    node.add_argument("--subcommand", default="train", help="of `stable-opd`; the job's own")
    node.add_argument(
        "command_line", nargs="+", help="config and overrides, as `stable-opd train` takes them"
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
        print(f"{name}: {notes} is not the batch script's: the file system is not shared")
        return 1  # without a note, which the batch script could not read
    try:
        config = load_config(arguments.command_line[0], arguments.command_line[1:])
    except ConfigError as error:
        if is_head:
            (notes / "config_error").write_text(str(error))
        return 1
    evaluates = arguments.subcommand == "evaluate"
    run_directory = (config.evaluation_path if evaluates else config.run.path).absolute()
    if is_head:
        (notes / "run_directory").write_text(str(run_directory))
    faults: dict[str, str] = {}
    if arguments.checks == "on":
        faults |= disk_faults(run_directory, arguments.min_free_gib)
        faults |= gpu_faults(arguments.gpus)
        server_nodes = arguments.servers.split(",") if arguments.servers else []
        python = servers_python(config, bool(server_nodes))
        faults |= version_faults(notes, name, arguments.head, python)
        if arguments.gpus:
            has_servers = name in (server_nodes or [name])
            trains = name not in server_nodes
            faults |= node_faults(trains, python if has_servers else None, config.is_colocated)
        if is_head:
            faults |= port_faults(arguments.port)
    (notes / f"{name}.{'bad' if faults else 'good'}").write_text(json.dumps(faults))
    return 0


def disk_faults(run_directory: Path, min_free_gib: float) -> dict[str, str]:
    """Whether the run directory is writable and has room."""
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        probe = run_directory / f".preflight-{socket.gethostname()}-{os.getpid()}"
        probe.write_text("writable")
        probe.unlink()
    except OSError as error:
        return {"disk write": f"cannot write to {run_directory}: {error.strerror}"}
    free = shutil.disk_usage(run_directory).free / 2**30
    if free < min_free_gib:
        message = f"{free:.1f} GiB free at {run_directory}, MIN_FREE_GIB={min_free_gib:g}"
        return {"disk space": message}
    return {}


def gpu_faults(required: int) -> dict[str, str]:
    """Faults that nvidia-smi reports: too few GPUs, memory errors, pending repairs, a hardware
    slow-down.
    """
    if not required:
        return {}
    try:
        gpus = query_gpus()
    except FileNotFoundError:
        message = "no nvidia-smi: no GPUs, or no driver in the container"
        return {"driver": f"{message} (REQUIRE_GPU=0: train on CPU)"}
    except subprocess.TimeoutExpired:
        return {"gpu timeout": "nvidia-smi does not answer within 60 s"}
    except RuntimeError as error:
        return {"driver": f"nvidia-smi: {error}"}
    faults = {}
    if len(gpus) < required:
        allocated = int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
        kind = "gpu lost" if allocated >= required else "number of GPUs"
        faults[kind] = f"{len(gpus)} GPUs, RANKS_PER_NODE={required}"
    for gpu in gpus:
        for field, value in gpu.items():
            if field in GPU_FIELDS and value not in HEALTHY:
                faults[f"gpu {field}"] = f"GPU {gpu['index']}: {field} is {value}"
    return faults


def query_gpus() -> list[dict[str, str]]:
    """The GPU_FIELDS of each GPU, without those that an old driver does not know.

    Raises:
        RuntimeError: nvidia-smi fails; its output.
        FileNotFoundError, subprocess.TimeoutExpired: it is missing, or hangs.
    """
    fields = ["index", *GPU_FIELDS]
    while True:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        if not answer.returncode:
            break
        output = (answer.stderr + answer.stdout).strip()
        unknown = re.search(r'Field "(.+?)" is not a valid field', output)
        if unknown is None or unknown[1] not in GPU_FIELDS:
            raise RuntimeError(output)
        print(f"nvidia-smi does not know {unknown[1]}: not checked", flush=True)
        fields.remove(unknown[1])
    rows = [[value.strip() for value in line.split(",")] for line in answer.stdout.splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows]


def servers_python(config: Config, on_own_nodes: bool) -> str | None:
    """The interpreter of the SGLang servers that this job starts; None if it starts none."""
    sglang = config.rollout.sglang
    starts = config.rollout.engine == "sglang" and sglang.placement != "external"
    return sglang.python if starts or on_own_nodes else None


def version_faults(notes: Path, name: str, head: str, servers_python: str | None) -> dict[str, str]:
    """Packages of which trainer and servers, or this node and the head node, have other versions.

    Between trainer and servers only NCCL must agree: both are in the group that weights travel by.
    """
    mine = versions_in(sys.executable)
    if servers_python is not None:
        try:
            theirs = versions_in(servers_python)
        except (OSError, subprocess.SubprocessError) as error:
            return {"servers' python": f"rollout.sglang.python={servers_python}: {error}"}
        faults = server_faults(mine, theirs, servers_python)
        if faults:
            return faults
        mine |= {f"{SERVERS}{package}": version for package, version in theirs.items()}
    return differences(notes, name, head, [f"{key} {version}" for key, version in mine.items()])


def versions_in(python: str) -> dict[str, str]:
    """Version of Python and of each of PACKAGES in an environment, or "absent"."""
    listed = subprocess.run(
        [python, "-c", LIST_VERSIONS], capture_output=True, text=True, timeout=60, check=True
    )
    return dict(line.split() for line in listed.stdout.splitlines())


def server_faults(trainer: dict[str, str], servers: dict[str, str], python: str) -> dict[str, str]:
    """What keeps the servers of one environment from working with this trainer."""
    if servers["sglang"] == "absent":
        return {"servers' sglang": f"rollout.sglang.python={python} has no SGLang"}
    try:
        check_release(servers["sglang"], f"rollout.sglang.python={python}")
    except UserError as error:
        return {"servers' sglang": str(error)}
    nccl = "nvidia-nccl-*"
    if trainer[nccl] != servers[nccl]:
        return {
            "servers' nccl": f"NCCL {trainer[nccl]} (torch {trainer['torch']}) for the trainer, "
            f"{servers[nccl]} (torch {servers['torch']}) for the servers in {python}: they cannot "
            "join one group; install the versions of requirements/cluster.toml in both"
        }
    return {}


def differences(notes: Path, name: str, head: str, mine: list[str]) -> dict[str, str]:
    """Lines of this node's listing that differ from the head node's."""
    listing = notes / f"{name}.versions"
    listing.with_suffix(".partial").write_text("\n".join(mine))
    listing.with_suffix(".partial").rename(listing)
    of_head = notes / f"{head}.versions"
    deadline = time.monotonic() + 60
    while not of_head.exists():
        if time.monotonic() > deadline:
            return {}  # the head node has a fault of its own
        time.sleep(0.2)
    theirs = of_head.read_text().splitlines()
    if len(theirs) != len(mine):
        return {"version list": f"{len(mine)} packages listed, but {len(theirs)} on {head}"}
    return {
        f"version of {here.rpartition(' ')[0]}": f"{here}, but {there} on {head}"
        for here, there in zip(mine, theirs, strict=True)
        if here != there
    }


def port_faults(port: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return {
                "port": f"port {port}, at which the ranks meet, cannot be used: {error.strerror}"
            }
    return {}


def check_network(notes: Path, floor: float) -> int:
    """Measure one all-reduce over all ranks."""
    import torch
    import torch.distributed as dist

    from stable_opd_mcore.host.network import gloo_settings

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        # Slurm may show each task only its own GPU
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    os.environ.update(gloo_settings(os.environ["MASTER_ADDR"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks, speed = dist.get_rank(), dist.get_world_size(), bus_bandwidth(on_gpu)
    print(f"rank {rank}: {speed:.3f} GB/s")
    if rank == 0 and speed < floor:
        (notes / "network_bad").write_text(
            f"all-reduce over {ranks} ranks: {speed:.1f} GB/s, MIN_ALLREDUCE_GBPS={floor:g}: leave "
            "slow nodes out with --exclude (NCCL's all_reduce_perf finds them), or lower the floor"
        )
    elif rank == 0:
        (notes / "network_good").write_text(f"{speed:.3f} GB/s")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def bus_bandwidth(on_gpu: bool) -> float:
    """Bus bandwidth of an all-reduce in GB/s: 2(n-1)/n bytes moved per byte, as in nccl-tests.

    Infinite for one rank.
    """
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()
    if size == 1:
        return float("inf")
    values = torch.ones((512 if on_gpu else 4) * MIB // 4, device="cuda" if on_gpu else "cpu")
    repeats = 10 if on_gpu else 2
    seconds = 0.0
    for measured in (False, True):  # the first round opens the connections
        dist.all_reduce(values)
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats if measured else 1):
            dist.all_reduce(values)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    moved = repeats * values.numel() * values.element_size() * 2 * (size - 1) / size
    return moved / seconds / 1e9


if __name__ == "__main__":
    sys.exit(main())
