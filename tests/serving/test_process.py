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
def test_a_server_that_others_can_reach_has_a_key(tmp_path, host, loopback):
    """Where none was given, a random one that is not among its arguments."""
    assert is_loopback(host) == loopback
    server = SglangServer(ServerOptions("python", "model", host=host, port=1), tmp_path / "log")
    assert (server.api_key is None) == loopback
    assert server.api_key not in server.command_arguments()
