"""How a server process is started, without SGLang."""

import os

import pytest

from stable_opd_mcore.serving.process import (
    ServerOptions,
    ServerStartError,
    SglangServer,
    is_loopback,
)


def test_a_server_without_an_interpreter_is_refused(tmp_path):
    server = SglangServer(ServerOptions("/no/python", str(tmp_path)), tmp_path / "log")
    with pytest.raises(ServerStartError, match=r"/no/python: no such interpreter.*make sglang"):
        server.start()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("node7", False)],
)
def test_every_server_has_a_random_key(tmp_path, host, loopback):
    assert is_loopback(host) == loopback
    server = SglangServer(ServerOptions("python", "model", host=host, port=1), tmp_path / "log")
    assert len(server.api_key) >= 32
    assert server.api_key not in server.command_arguments()
    again = SglangServer(ServerOptions("python", "model", host=host, port=1), tmp_path / "log")
    assert again.api_key != server.api_key


def test_a_server_does_not_inherit_torchruns_rendezvous(tmp_path, monkeypatch):
    names = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}
    for name in names:
        monkeypatch.setenv(name, "1")
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nenv\n")
    program.chmod(0o700)
    server = SglangServer(ServerOptions(str(program), "model"), tmp_path / "log")
    server.start()
    with pytest.raises(ServerStartError, match="ended"):
        server.wait_until_healthy()
    inherited = {line.partition("=")[0] for line in (tmp_path / "log").read_text().splitlines()}
    assert "PATH" in inherited
    assert not inherited & names


def test_a_gpu_servers_nccl_has_the_settings_of_the_trainers(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")  # the user's own, for both sides
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    on_gpu = SglangServer(ServerOptions("python", "model", device="cuda"), tmp_path / "log")
    environment = os.environ | on_gpu._environment()
    assert (environment["NCCL_CUMEM_ENABLE"], environment["NCCL_NVLS_ENABLE"]) == ("0", "1")
    on_cpu = SglangServer(ServerOptions("python", "model"), tmp_path / "log")
    assert "NCCL_CUMEM_ENABLE" not in on_cpu._environment()
