"""How a server process is started, without SGLang."""

import os
import time

import pytest

from stable_opd_mcore.serving.process import (
    ServerOptions,
    ServerStartError,
    SglangServer,
    device_names,
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


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["2", "3"]),
        ("4,5,6,7", ["6", "7"]),  # a job's share of the machine
        ("GPU-a,GPU-b,GPU-c,GPU-d", ["GPU-c", "GPU-d"]),
        ("0", ["2", "3"]),  # one GPU for each rank
        ("", ["2", "3"]),
    ],
)
def test_local_ids_become_the_names_of_the_jobs_gpus(monkeypatch, visible, names):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_names((2, 3)) == names


def test_a_server_sees_its_own_gpus_alone(tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho gpus=$CUDA_VISIBLE_DEVICES $@\n")
    program.chmod(0o700)
    options = ServerOptions(str(program), "model", device="cuda", gpus=(6, 7), memory_share=0.5)
    server = SglangServer(options, tmp_path / "log")
    server.start()
    while server.is_running:
        time.sleep(0.01)
    server.stop()
    printed = server.log.read_text()
    assert printed.startswith("gpus=6,7 ")
    assert "--mem-fraction-static 0.5" in printed
    assert "--base-gpu-id" not in printed
