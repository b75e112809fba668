"""The command and the environment of one SGLang server, as data. Nothing is started here.

The server runs in an environment of its own: what a launcher or the trainer set for the trainer's
process is left out of it, and what both sides must share (NCCL_SOCKET_IFNAME, say) stays.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stable_opd_mcore.host.cuda_libraries import library_folders
from stable_opd_mcore.host.network import gloo_settings

PROGRAM = Path(__file__).with_name("launch_server.py")
# The function of PROGRAM that writes a parameter into a file, as SGLang's processes import it.
VALUES_WRITER = "__main__.write_parameter"
_KEY_VARIABLE = "STABLE_OPD_SGLANG_API_KEY"  # passes the key to the child; argv is public
# SGLang's own defaults for its NCCL. All ranks of a group must agree, so a trainer that sends
# weights through NCCL takes them too. It then goes without NVLink SHARP (NVLS), which needs cuMem.
NCCL_SETTINGS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
_TRAINERS_OWN = re.compile(
    # torchrun's rendezvous; with TORCHELASTIC_USE_AGENT_STORE, torch waits for its store for ever
    r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|TORCH_NCCL_\w+"  # watchdogs of the trainer's collectives
    r"|CUDA_DEVICE_MAX_CONNECTIONS"  # Megatron needs 1; a server's streams would wait in one queue
    r"|NVTE_\w+|(CUDNN|NVRTC|CURAND)_HOME"  # Transformer Engine
    r"|PYTORCH(_CUDA)?_ALLOC_CONF"  # expandable segments cannot be released by colocated servers
    r"|PYTHONPATH|PYTHONHOME|VIRTUAL_ENV"  # another Python environment
)


@dataclass(frozen=True)
class ServerOptions:
    """How one server is started."""

    python: str  # interpreter of the servers' venv
    model: str  # directory with config.json, and with weights unless dummy_weights
    device: str = "cpu"  # cpu | cuda
    dtype: str = "float32"
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    tensor: int = 1  # tensor-parallel ranks
    api_key: str | None = None  # None: a random one
    dummy_weights: bool = True  # random weights; the first publish sends the real ones
    prefill_graphs: bool = False  # CUDA graphs of prefills; True: SGLang's choice
    memory_saver: bool = False  # colocated on a GPU: weights and cache can be released
    gpus: tuple[int, ...] = ()  # local ids, one per tensor rank; unused on a CPU
    memory_share: float | None = None  # share of the free GPU memory; None: SGLang's choice
    arguments: tuple[str, ...] = ()  # further SGLang arguments
    startup_timeout_seconds: float | None = None  # until it answers; None: timeouts.START


def launch_command(options: ServerOptions, port: int, owner_pid: int) -> list[str]:
    """The program and SGLang's arguments. Requests hold token ids, so it loads no tokenizer."""
    command = [
        *(options.python, "-P", str(PROGRAM), "--owner-pid", str(owner_pid)),
        *("--model-path", options.model),
        *("--host", options.host),
        *("--port", str(port)),
        *("--dtype", options.dtype),
        *("--tp-size", str(options.tensor)),
        *("--device", options.device),
        "--skip-tokenizer-init",
        "--skip-server-warmup",
    ]
    if options.dummy_weights:
        # Published tensors keep their names: SGLang would put a shared expert among the others.
        command += ["--load-format", "dummy", "--disable-shared-experts-fusion"]
        command += ["--custom-weight-loader", VALUES_WRITER]
    if options.device == "cpu":
        # without --sleep-on-idle an idle scheduler keeps a core busy
        command += ["--attention-backend", "torch_native", "--sleep-on-idle"]
    else:
        if not options.prefill_graphs:
            # They keep references to memory that later captures reuse, and stay on the GPU when the
            # server's memory is released.
            command += ["--cuda-graph-backend-prefill", "disabled"]
        if options.memory_share is not None:
            command += ["--mem-fraction-static", str(options.memory_share)]
        if options.memory_saver:
            command.append("--enable-memory-saver")
    return command + list(options.arguments)


def server_environment(
    options: ServerOptions, api_key: str, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The server's variables, from those of the trainer's process.

    The interpreter's own folder comes first in PATH: SGLang compiles kernels with the ninja there.
    The CUDA libraries of its environment come first in LD_LIBRARY_PATH: the memory saver's hook
    finds its CUDA runtime only there, and cuDNN its parts there first.
    """
    environment = {k: v for k, v in inherited.items() if not _TRAINERS_OWN.fullmatch(k)}
    own_folder = str(Path(options.python).absolute().parent)  # the venv's: links are not followed
    environment["PATH"] = os.pathsep.join([own_folder, inherited.get("PATH", os.defpath)])
    environment |= gloo_settings(options.host) | {_KEY_VARIABLE: api_key}
    if "--speculative-algorithm" in options.arguments:
        # The draft reads positions of the student's window, which its config.json may not reach.
        environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if not os.path.isdir(environment.get("TMPDIR", "/")):  # a container has its own /tmp only
        del environment["TMPDIR"]  # nvcc would not write elsewhere
    if options.device != "cpu":
        if options.gpus:
            visible = inherited.get("CUDA_VISIBLE_DEVICES", "")
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(device_names(options.gpus, visible))
        libraries = [*map(str, library_folders(options.python)), inherited.get("LD_LIBRARY_PATH")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
        return NCCL_SETTINGS | environment
    environment["OMP_NUM_THREADS"] = "1"
    # malloc keeps the memory that weights are received into: fresh pages cost ten times
    environment |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}
    if options.tensor > 1:  # SGLang binds each rank to cores
        cores = sorted(os.sched_getaffinity(0))
        ranks = (str(cores[rank % len(cores)]) for rank in range(options.tensor))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(ranks)
    return environment


def device_names(gpus: Sequence[int], visible: str) -> list[str]:
    """CUDA's names of a machine's GPUs, so that a server sees only its own GPUs.

    A launcher may name the job's GPUs in CUDA_VISIBLE_DEVICES (`visible`); a local id counts those.
    A launcher may also show each rank one GPU; a local id then counts the machine's GPUs.
    """
    names = visible.split(",")
    if max(gpus) < len(names) and all(names):
        return [names[gpu] for gpu in gpus]
    return [str(gpu) for gpu in gpus]
