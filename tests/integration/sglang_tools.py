"""Tools of the tests with real SGLang servers: tiny models, processes, and a faulty proxy."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from stable_opd_mcore.serving.process import SglangServer, free_port
from tests.config.cases import layered
from tests.integration.hosts import Host
from tests.integration.with_constants import run_with_constants
from tests.parallel.launch import start_process
from tests.serving.http_server import Request, http_server

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("STABLE_OPD_SGLANG_PYTHON", str(ROOT / ".venv-sglang" / "bin" / "python"))
needs_sglang = pytest.mark.skipif(
    not os.access(PYTHON, os.X_OK) and os.environ.get("CI") != "true",
    reason=f"no SGLang at {PYTHON}: `make sglang` installs it",
)
STABLE_OPD = [sys.executable, "-m", "tests.integration.with_constants"]
VOCABULARY = 128
SERVER_ARGUMENTS = ("--max-total-tokens", "8192")
LARGER = (  # eight buckets of weights, so that a server can be killed during a sync
    "student.architecture.hidden_size=128",
    "student.architecture.intermediate_size=1024",
    "student.architecture.num_hidden_layers=4",
    "stable_opd_mcore.rollout.sglang.publisher.WEIGHT_BUCKET_BYTES=1048576",
)


def architecture(model_type: str = "qwen2", *, tied: bool = True, **changes: Any) -> dict[str, Any]:
    """The fields of config.json of a model of two small layers."""
    return {
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "initializer_range": 0.08,
    } | changes


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 300.0) -> Any:
    """Poll `condition` every millisecond; returns its first true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.001)
    return value


# ---- processes


class Process:
    """A command that writes into a file; ended when the `with` block ends.

    `stable-opd` runs in a fork of a process that has the trainer's imports, which take seconds.
    """

    def __init__(self, command: list[str], output: Path, **variables: str) -> None:
        self.output = output
        output.touch()
        self._process = start_process(_run, command, output, variables)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.running:
            self._process.terminate()
        try:
            self.wait(60)
        finally:
            self._process.kill()

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait(self, seconds: float = 580.0) -> int:
        """Its exit status."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, (
            f"not within {seconds:.0f} s\n{self.text[-3000:]}"
        )
        return self._process.exitcode

    def wait_until(self, condition: Callable[[], Any], what: str) -> Any:
        """As `wait_until`, but fails when the process ends."""

        def alive_and_true() -> Any:
            value = condition()
            assert value or self.running, f"{what}: it ended\n{self.text[-3000:]}"
            return value

        return wait_until(alive_and_true, what)

    def end(self) -> int:
        """Send SIGTERM; returns the exit status."""
        self._process.terminate()
        return self.wait(60)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self.wait(60)


def _run(command: list[str], output: Path, variables: dict[str, str]) -> None:
    with output.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.chdir(ROOT)
    os.environ.update({"OMP_NUM_THREADS": "1"} | variables)
    if command[: len(STABLE_OPD)] != STABLE_OPD:
        os.execvp(command[0], command)
    torch.set_num_threads(1)
    try:
        run_with_constants(command[len(STABLE_OPD) :])
    finally:
        atexit._run_exitfuncs()  # multiprocessing skips them


def train(directory: Path, name: str, *overrides: str, ranks: int = 1) -> Path:
    """Train to the end; returns the run directory."""
    command = training_command(directory, name, *overrides)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with ExitStack() as stack:
        processes = []
        for rank in map(str, range(ranks)):
            variables = shared | {"RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
            process = Process(command, directory / f"{name}.output_{rank}", **variables)
            processes.append(stack.enter_context(process))
        for process in processes:
            assert process.wait() == 0, process.text[-3000:]
    return directory / name


def training_command(directory: Path, name: str, *overrides: str) -> list[str]:
    """`stable-opd train`; `overrides` are settings and constants, as with_constants.py takes."""
    settings = (*_settings(directory, name), "rollout.engine=sglang")
    settings += ("monitoring.tensorboard=false", "evaluation.every=0", *overrides)
    return [*STABLE_OPD, "train", *layered(*settings)]


@contextlib.contextmanager
def started(*servers: SglangServer) -> Iterator[None]:
    """The servers run inside the block. All start at once, because starting one takes a while."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_until_healthy()
        yield


def serve(directory: Path, name: str, *overrides: str, at: Host | None = None) -> Process:
    """Start `stable-opd serve configs/smoke_cpu.yaml`, here or on the host `at`."""
    command = [*STABLE_OPD, "serve", *layered(*_settings(directory, name), *overrides)]
    return Process(command if at is None else at.command(*command), directory / f"{name}.output")


def urls_of(served: Process) -> list[str]:
    """The servers' addresses, when all of them answer."""
    served.wait_until(lambda: "urls: " in served.text and served.text.endswith("\n"), "urls")
    line = next(line for line in served.text.splitlines() if line.startswith("urls: "))
    return line.removeprefix("urls: ").split(",")


def external(*urls: str) -> tuple[str, str]:
    """The overrides of a run over external servers."""
    return "rollout.sglang.placement=external", f"rollout.sglang.urls=[{','.join(urls)}]"


def _settings(directory: Path, name: str) -> list[str]:
    arguments = ",".join(f"'{argument}'" for argument in SERVER_ARGUMENTS)
    return [
        "configs/smoke_cpu.yaml",
        f"run.name={name}",
        f"run.directory={directory}",
        f"rollout.sglang.python={PYTHON}",
        f"rollout.sglang.arguments=[{arguments}]",
    ]


def group_lives(group: int) -> bool:
    """Whether a process of the group runs; zombies do not count."""
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False


def servers_of(owner: int) -> list[int]:
    """The process groups of the servers that `owner` started, the oldest first."""
    found = []
    for process in psutil.Process(owner).children():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if any(part.endswith("launch_server.py") for part in process.cmdline()):
                found.append((process.create_time(), process.pid))  # process ids start again
    return [pid for _, pid in sorted(found)]


# ---- files of a run


def rows(run: Path) -> list[dict[str, Any]]:
    """The run's metrics, one object per step; a row that is being written is left out."""
    file = run / "metrics.jsonl"
    *lines, _ = file.read_text().split("\n") if file.exists() else [""]
    return [row for row in map(json.loads, lines) if "loss/total" in row]


def events(run: Path) -> list[dict[str, Any]]:
    """The events of the run's servers."""
    return [json.loads(line) for line in (run / "sglang/events.jsonl").read_text().splitlines()]


def new_line(log: Path, text: str) -> Callable[[], bool]:
    """A function that returns whether the log has had `text` since this call."""
    start = log.stat().st_size

    def seen() -> bool:
        with log.open("rb") as file:
            file.seek(start)
            return text.encode() in file.read()

    return seen


def rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    """The rollouts of a step."""
    lines = (run / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def assert_nothing_lost(run: Path) -> None:
    """Every step has each of its rollouts once, with the trainer's probabilities."""
    for row in rows(run):
        sampled = rollouts(run, row["step"])
        assert len({(r["prompt_id"], r["sample_index"]) for r in sampled}) == len(sampled) == 32
        assert row["logprob/rollout_gap_max"] < 1e-4


# ---- faults between client and server


@contextlib.contextmanager
def faulty_proxy(
    target: str,
    fault: Callable[[str], tuple[int, bytes] | None] = lambda _: None,
    change: Callable[[bytes], bytes] = lambda body: body,
) -> Iterator[str]:
    """Forwards to a real server; `fault(path)` may reply instead, and `change` alters the replies
    of /generate."""

    def reply(request: Request) -> tuple[int, bytes]:
        if (answer := fault(request.path)) is not None:
            return answer
        kept = ("Authorization", "Content-Type")
        headers = {name: request.headers[name] for name in kept if name in request.headers}
        url, content = target + request.path, request.body
        response = httpx.request(request.method, url, content=content, headers=headers, timeout=60)
        alter = change if request.path == "/generate" else bytes
        return response.status_code, alter(response.content)

    with http_server(reply) as url:
        yield url
