"""How a server process is started and waited for, without SGLang."""

from dataclasses import replace
from pathlib import Path

import pytest

from stable_opd_mcore.serving import process as process_module
from stable_opd_mcore.serving.process import (
    ServerOptions,
    ServerStartError,
    SglangServer,
    check_release,
)


def server_of(directory: Path, script: str, **changes) -> SglangServer:
    """A server whose program is a shell script."""
    program = directory / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    options = replace(ServerOptions(str(program), "model"), **changes)
    return SglangServer(options, directory / "log")


def test_a_server_without_an_interpreter_is_refused(tmp_path):
    server = SglangServer(ServerOptions("/no/python", str(tmp_path)), tmp_path / "log")
    with pytest.raises(ServerStartError, match=r"/no/python: no such interpreter.*make sglang"):
        server.start()


@pytest.mark.parametrize(
    ("release", "is_tested"),
    [("0.5.23", True), ("0.5.23.post2", True), ("0.6", False), ("0.0.0", False)],
)
def test_another_than_the_tested_release_is_used_with_a_warning(release, is_tested, caplog):
    check_release(release, "a server")
    warning = f"a server runs SGLang {release}, which is not tested; 0.5.23 is"
    assert caplog.messages == ([] if is_tested else [warning])


def test_a_server_that_ends_is_named_with_the_end_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    server = server_of(tmp_path, "echo rank=$RANK $@")
    server.start()
    expected = r"ended; the end of .*log:\nrank= -P .*--device cpu"
    with pytest.raises(ServerStartError, match=expected):
        server.wait_until_healthy()


def test_a_server_whose_port_was_taken_is_not_waited_for(tmp_path):
    """SGLang says so in its log and keeps running."""
    taken = "[Errno 98] error while attempting to bind on address ('127.0.0.1', 1): in use"
    server = server_of(tmp_path, f'echo "{taken}"\nexec sleep 600')
    server.start()
    with pytest.raises(ServerStartError, match=r"ended; (?s:.*)Errno 98"):
        server.wait_until_healthy()
    assert not server.is_running


@pytest.mark.parametrize(
    ("first_of_connections", "allowed"), [(32768, (10000, 32767)), (1024, (10000, 65535))]
)
def test_a_free_port_is_not_one_of_the_kernels(
    tmp_path, monkeypatch, first_of_connections, allowed
):
    (tmp_path / "range").write_text(f"{first_of_connections}\t60999\n")
    monkeypatch.setattr(process_module, "_CONNECTION_PORTS", tmp_path / "range")
    ports = [process_module.free_port("127.0.0.1") for _ in range(50)]
    assert allowed[0] <= min(ports)
    assert max(ports) <= allowed[1]


def test_a_server_that_does_not_answer_in_time_is_stopped(tmp_path):
    server = server_of(tmp_path, "exec sleep 600", startup_timeout_seconds=0.1)
    server.start()
    with pytest.raises(ServerStartError, match=r"did not answer in 0\.1 s"):
        server.wait_until_healthy()
    assert not server.is_running
