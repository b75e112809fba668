"""`stable-opd serve`: servers without a trainer, for runs with rollout.sglang.placement=external.

Starts the servers of the config's rollout.sglang section and prints their addresses, and the file
of their API key, when all answer. Ends them all after SIGINT or SIGTERM or when one of them dies.
Rollout servers start with random weights, because the run sends the real ones; a teacher's weights
are read from teacher.path.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal, NoReturn

import torch

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.host.cuda_driver import refuse_unused_gpus
from stable_opd_mcore.inputs.loading import configured_architecture
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.placement.hardware import GIB
from stable_opd_mcore.placement.topology import machine_servers, server_gpus
from stable_opd_mcore.rollout.sglang.server_setup import server_options, write_model_config
from stable_opd_mcore.serving.api_key import make_api_key, read_api_key
from stable_opd_mcore.serving.process import SglangServer, check_release

_POLL_SECONDS = 1.0
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(config: Config, *, teacher: bool, say: Callable[[str], None]) -> None:
    """Serve the student, or with `teacher` the model in teacher.path, until SIGINT or SIGTERM."""
    sglang = config.rollout.sglang
    if sglang.placement == "external":
        raise ConfigError(
            "rollout.sglang.placement=external, but serve starts servers: set it to disaggregated"
        )
    folder = config.run.files.teacher_servers if teacher else config.run.files.servers
    model = _model(config, teacher, folder)
    count, tensor, device = _servers_here(config, model, "teacher" if teacher else "student")
    key_file = Path(sglang.api_key_file or folder / "api_key")
    make_api_key(key_file)
    for number in _END_SIGNALS:
        signal.signal(number, _end)
    with ExitStack() as stack:
        servers = []
        for number in range(count):
            gpus = server_gpus(0, number, tensor)
            options = server_options(
                config, model, number, gpus, tensor, device, dummy_weights=not teacher
            )
            options = replace(options, api_key=read_api_key(key_file))
            server = SglangServer(options, folder / f"server_{number}.log")
            stack.callback(server.stop)
            server.start()
            servers.append(server)
        for server in servers:
            server.wait_until_healthy()
            if not teacher:
                check_release(server.client().release(), server.url)
        say(f"api_key_file: {key_file}")
        say("urls: " + ",".join(server.url for server in servers))
        while not (dead := [server.log for server in servers if not server.is_running]):
            time.sleep(_POLL_SECONDS)
        raise ConfigError(f"a server ended; fix what its log shows: {', '.join(map(str, dead))}")


def _end(*_: object) -> NoReturn:
    """Raise SystemExit, once; `serve`'s exit stack then ends the servers."""
    for number in _END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(0)


def _servers_here(
    config: Config, model: Path, role: Literal["student", "teacher"]
) -> tuple[int, int, str]:
    """The number of servers on this machine, their tensor ranks, and cuda or cpu."""
    has_gpus = torch.cuda.is_available()
    if not has_gpus:
        refuse_unused_gpus()
    gpus = torch.cuda.device_count() if has_gpus else 0
    memory_gib = torch.cuda.get_device_properties(0).total_memory / GIB if has_gpus else None
    architecture = read_architecture(str(model))
    count, tensor = machine_servers(config, architecture, gpus, memory_gib, "disaggregated", role)
    return count, tensor, "cuda" if has_gpus else "cpu"


def _model(config: Config, teacher: bool, folder: Path) -> Path:
    if not teacher:
        return write_model_config(configured_architecture(config.student), folder / "model")
    if config.teacher is None or config.teacher.path is None:
        raise ConfigError(
            "serve --teacher without teacher.path: set it to a model directory with weights"
        )
    return Path(config.teacher.path)
