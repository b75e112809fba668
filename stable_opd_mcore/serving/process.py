"""One SGLang server process: start it, wait until it answers, end it.

    server = SglangServer(options, log=run_directory / "sglang/server_0.log")
    server.start(); server.wait_until_healthy()
    ...
    server.stop()

The server leads a process group of its own, so ending the group ends its workers and nothing else.
The server also ends when its owner dies, even by SIGKILL: sglang_cpu_stand_in/serve.py watches the
owner. Not here: requests (client.py), restarts (rollout/sglang/fleet.py).
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.network import gloo_settings
from stable_opd_mcore.serving.client import RefusedRequest, ServerFailure, SglangClient

PROGRAM = Path(__file__).parent / "sglang_cpu_stand_in"
_KEY_VARIABLE = "STABLE_OPD_SGLANG_API_KEY"  # passes the key to the child; argv is public
OLDEST_RELEASE = (0, 5, 13)  # the oldest in requirements/
# SGLang's own defaults for its NCCL. All ranks of a group must agree, so a trainer that sends
# weights through NCCL takes them too. It then goes without NVLink SHARP (NVLS), which needs cuMem.
NCCL_SETTINGS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
_POLL_SECONDS = 0.3


class ServerStartError(UserError):
    """A server did not start; the message holds the end of its log."""


class UnsupportedRelease(ServerStartError):
    """The server's SGLang is too old; starting it again cannot help."""


def require_release(client: SglangClient) -> None:
    """Refuse a server whose SGLang is older than OLDEST_RELEASE, before any weights are sent.

    Raises:
        UnsupportedRelease: see `check_release`.
        ServerFailure, RefusedRequest: the server does not state its release.
    """
    check_release(client.release(), client.url)


def check_release(release: str, where: str) -> None:
    """Refuse a release of SGLang that is older than OLDEST_RELEASE.

    The first three numbers of a version are compared. A build from source may state 0.0.0 and is
    accepted.

    Raises:
        UnsupportedRelease: older; the message names `where`.
    """
    numbers = tuple(map(int, re.findall(r"\d+", release)[:3]))
    if numbers != (0, 0, 0) and numbers < OLDEST_RELEASE:
        oldest = ".".join(map(str, OLDEST_RELEASE))
        raise UnsupportedRelease(
            f"{where} runs SGLang {release}; {oldest} or later is needed, whose weights can "
            "be verified after an update: install it where rollout.sglang.python points"
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
    memory_saver: bool = False  # colocated on a GPU: weights and cache can be released
    gpus: tuple[int, ...] = ()  # local ids, one per tensor rank; unused on a CPU
    memory_share: float | None = None  # of the free GPU memory; None: SGLang's choice
    max_running_requests: int | None = None
    startup_timeout_seconds: float = 600.0
    request_timeout_seconds: float = 600.0
    arguments: tuple[str, ...] = ()  # further SGLang arguments


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def device_names(gpus: Sequence[int]) -> list[str]:
    """CUDA's names of a machine's GPUs, so that a server sees its own GPUs alone.

    A launcher may name the job's GPUs in CUDA_VISIBLE_DEVICES; a local id counts those. A launcher
    may also show each rank one GPU; a local id then counts the machine's GPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if max(gpus) < len(visible) and all(visible):
        return [visible[gpu] for gpu in gpus]
    return [str(gpu) for gpu in gpus]


def free_port(host: str) -> int:
    """A free port, at most 55,535 because SGLang 0.5.13 also uses port + 10,000."""
    while True:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port: int = probe.getsockname()[1]
        if port <= 55535:
            return port


class SglangServer:
    """A server this process starts. `start` may be called again after the server has ended."""

    def __init__(self, options: ServerOptions, log: Path) -> None:
        self.options = options
        self.log = log
        # also on loopback, where other users of the machine reach the server
        self.api_key = options.api_key or secrets.token_urlsafe(24)
        self.port = options.port or free_port(options.host)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.options.host == "0.0.0.0" else self.options.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id, which is also the group id; None if not started."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def client(self) -> SglangClient:
        return SglangClient(
            self.url,
            api_key=self.api_key,
            request_timeout_seconds=self.options.request_timeout_seconds,
        )

    def start(self) -> None:
        """Launch the process without waiting for it to answer.

        Raises:
            ServerStartError: the servers' interpreter does not exist.
        """
        assert not self.is_running, "a running server is stopped before it is started again"
        if not os.access(self.options.python, os.X_OK):
            raise ServerStartError(
                f"rollout.sglang.python={self.options.python}: no such interpreter; `make sglang` "
                "builds the servers' venv for a CPU, the README describes it for a GPU"
            )
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = self._launch(log)
        atexit.register(self.stop)

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        environment = os.environ | self._environment()
        for name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_USE_AGENT_STORE",  # with it, torch waits for torchrun's store for ever
        ):
            environment.pop(name, None)  # the trainer's rendezvous
        command = [self.options.python, str(PROGRAM / "serve.py"), "--owner-pid", str(os.getpid())]
        return subprocess.Popen(
            command + self.command_arguments(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def command_arguments(self) -> list[str]:
        """SGLang's arguments. Requests hold token ids, so the server loads no tokenizer."""
        options = self.options
        arguments = [
            *("--model-path", options.model),
            *("--host", options.host),
            *("--port", str(self.port)),
            *("--dtype", options.dtype),
            *("--tp-size", str(options.tensor)),
            *("--device", options.device),
            "--skip-tokenizer-init",
            "--skip-server-warmup",
        ]
        if options.dummy_weights:
            arguments += ["--load-format", "dummy"]
        if options.max_running_requests is not None:
            arguments += ["--max-running-requests", str(options.max_running_requests)]
        if options.device == "cpu":
            # without --sleep-on-idle an idle scheduler keeps a core busy
            arguments += ["--attention-backend", "torch_native", "--sleep-on-idle"]
        elif options.memory_share is not None:
            arguments += ["--mem-fraction-static", str(options.memory_share)]
        if options.memory_saver and options.device != "cpu":
            arguments.append("--enable-memory-saver")
        return arguments + list(options.arguments)

    def _environment(self) -> dict[str, str]:
        environment = gloo_settings(self.options.host) | {_KEY_VARIABLE: self.api_key}
        if self.options.device == "cpu":
            environment["PYTHONPATH"] = str(PROGRAM)  # its sgl_kernel and model families
            environment["OMP_NUM_THREADS"] = "1"
            # malloc keeps the memory that weights are received into: fresh pages cost ten times
            environment["MALLOC_MMAP_MAX_"] = "0"
            environment["MALLOC_TRIM_THRESHOLD_"] = "-1"
            if self.options.tensor > 1:  # SGLang binds each rank to cores
                cores = sorted(os.sched_getaffinity(0))
                ranks = (str(cores[rank % len(cores)]) for rank in range(self.options.tensor))
                environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(ranks)
        else:
            environment |= {k: v for k, v in NCCL_SETTINGS.items() if k not in os.environ}
            if self.options.gpus:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(device_names(self.options.gpus))
        return environment

    def wait_until_healthy(self, give_up: Callable[[], bool] = lambda: False) -> float:
        """Block until the server answers; returns the seconds it took.

        Raises:
            ServerStartError: it ended, `startup_timeout_seconds` passed, or `give_up()` is true.
                The server is then stopped.
        """
        began = time.monotonic()
        with contextlib.closing(self.client()) as client:
            while not client.is_healthy(timeout_seconds=5.0):
                waited = time.monotonic() - began
                late = waited > self.options.startup_timeout_seconds
                if not self.is_running or late or give_up():
                    ended = "ended" if not self.is_running else f"did not answer in {waited:.0f} s"
                    self.stop()
                    raise ServerStartError(
                        f"SGLang server {self.url} {ended}; {self._end_of_log()}"
                    )
                time.sleep(_POLL_SECONDS)
            self._freeze_garbage(client)
        return time.monotonic() - began

    def _freeze_garbage(self, client: SglangClient) -> None:
        """Exclude what SGLang's imports created from garbage collection: /flush_cache collects."""
        try:
            client.call("POST", "/freeze_gc")
        except (ServerFailure, RefusedRequest) as failure:
            self.stop()
            raise ServerStartError(
                f"SGLang server {self.url} ended: {failure}; {self._end_of_log()}"
            ) from failure

    def stop(self) -> None:
        """End the process and its workers with SIGKILL. Does nothing if none runs.

        A server holds nothing that must be saved. After SIGTERM, SGLang waits for five seconds or
        for its responses, and then kills its processes itself.
        """
        process, self._process = self._process, None
        if process is None:
            return
        atexit.unregister(self.stop)
        with contextlib.suppress(ProcessLookupError):  # all of them have ended already
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _end_of_log(self, num_lines: int = 15) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-num_lines:]
        return f"the end of {self.log}:\n" + "\n".join(lines)
