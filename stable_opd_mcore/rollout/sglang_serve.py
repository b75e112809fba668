"""`stable-opd serve`: servers of their own life, for runs with rollout.sglang.placement=external.

Starts what the config's rollout.sglang section describes, prints addresses when all answer, and
stays until it is told to end or a server dies; then ends them all, by pid. Servers for rollouts
start with random weights, for a run sends the real ones; a teacher's are read from teacher.path.
"""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from stable_opd_mcore.config.load import ConfigError
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.models.families import read_architecture
from stable_opd_mcore.rollout.sglang_build import server_options, write_model_config
from stable_opd_mcore.serving.process import SglangServer, is_loopback

_POLL_SECONDS = 1.0


def serve(config: Config, *, teacher: bool, tell: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ValueError: servers of somebody else's, no model to serve, or a server that does not start
        or ends.
    """
    if config.rollout.sglang.placement == "external":
        raise ConfigError("serve starts servers: set rollout.sglang.placement=disaggregated")
    folder = Path(config.run.directory) / config.run.name / ("teacher" if teacher else "sglang")
    model = _teacher_model(config) if teacher else _student_model(config, folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    key = config.rollout.sglang.api_key
    if key is None and not is_loopback(config.rollout.sglang.host):
        key = secrets.token_urlsafe(24)  # one for all, as the run that uses them has one
    asked_to_end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked_to_end.set())
    with ExitStack() as stack:
        servers = []
        for number in range(config.rollout.sglang.num_servers):
            options = server_options(config, model, number, device, dummy_weights=not teacher)
            server = SglangServer(replace(options, api_key=key), folder / f"server_{number}.log")
            stack.callback(server.stop)
            server.start()
            servers.append(server)
        for server in servers:
            server.wait_until_healthy()
        tell("urls: " + ",".join(server.url for server in servers))
        if key is not None:
            tell(f"api key: {key}")
        while not asked_to_end.wait(_POLL_SECONDS):
            dead = [server.log for server in servers if not server.is_running]
            if dead:
                raise ConfigError(f"a server ended; see {', '.join(map(str, dead))}")


def _student_model(config: Config, folder: Path) -> Path:
    source = config.student.architecture or config.student.path
    assert source is not None, "the schema asks for one of the two"
    return write_model_config(read_architecture(source), folder / "model")


def _teacher_model(config: Config) -> Path:
    if config.teacher is None or config.teacher.path is None:
        raise ConfigError("serve --teacher needs teacher.path: a directory with weights")
    return Path(config.teacher.path)
