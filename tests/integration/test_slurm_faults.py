"""Faults of the site or of the user on a real Slurm: the right verdict at the first attempt."""

import http.server
import threading

import pytest

from tests.integration.slurm_run import PATIENCE_SECONDS, Run

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("venv", {"VENV": "/wrong"}, "/wrong/bin/python"),
        ("disk", {"PREFLIGHT": "on", "MIN_FREE_GIB": "1e9"}, "MIN_FREE_GIB=1e+09; the same fault"),
        (
            "floor",
            {"PREFLIGHT": "on", "MIN_ALLREDUCE_GBPS": "1e6"},
            "MIN_ALLREDUCE_GBPS=1e+06; the same fault on 2 of 2 nodes",
        ),
    ],
)
def test_a_fault_of_every_node_fails_at_the_first_attempt(
    cluster, tmp_path, name, settings, reason
):
    run = Run(cluster, tmp_path, name)
    job = run.submit(settings=settings)
    cluster.wait(job, {"FAILED"}, PATIENCE_SECONDS)
    (verdict,) = run.verdicts()
    assert verdict["verdict"] == "failed"
    assert reason in verdict["reason"]
    assert cluster.field(job, "ExcNodeList") in ("", "(null)")


def test_a_job_without_permission_to_be_queued_again_says_so(cluster, tmp_path):
    run = Run(cluster, tmp_path, "norequeue")
    job = run.submit(options=("--no-requeue",))
    run.until_step(2)
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    cluster.wait(job, {"FAILED"}, PATIENCE_SECONDS)
    (verdict,) = run.verdicts()
    assert verdict["verdict"] == "stopped"
    assert "stopped after a step, checkpoint" in verdict["reason"]
    assert "not queued again" in verdict["reason"]
    assert not verdict["queued_again"]


def test_a_step_longer_than_the_lead_is_queued_again_before_the_limit(cluster, tmp_path):
    run = Run(cluster, tmp_path, "slow")
    job = run.submit(options=("--time=1", "--signal=B:USR1@30"))
    with run.frozen_at(3):
        run.until_verdicts(1)
    cluster.call("scancel", job)
    (verdict,) = run.verdicts()
    assert (verdict["verdict"], verdict["queued_again"]) == ("stopped", True)
    assert "a longer --signal=B:USR1@SECONDS" in verdict["reason"]


class Proxy(http.server.BaseHTTPRequestHandler):
    """Refuses every request, as a proxy refuses addresses inside the cluster."""

    def do_GET(self) -> None:
        self.send_error(403)


def test_servers_are_reached_without_the_proxy(cluster, tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "healthy.py").write_text(HEALTHY)
    run = Run(cluster, tmp_path, "proxy")
    proxy = f"http://127.0.0.1:{server.server_address[1]}"
    settings = {
        "SERVER_NODES": "1",
        "SERVER_COMMAND": f"/usr/bin/env python3 {tmp_path}/healthy.py",
        "SERVER_RESTARTS": "0",
        "SERVER_TIMEOUT": "60",
        "http_proxy": proxy,
        "https_proxy": proxy,
    }
    job = run.submit(options=("--nodes=2",), settings=settings)
    cluster.wait(job, {"FAILED"}, timeout=120)  # the trainer does not find the server's key
    server.shutdown()
    assert "server 0 on " in run.text()
    assert " is healthy" in run.text()


HEALTHY = """
import http.server, sys

settings = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
address = (settings["rollout.sglang.host"], int(settings["rollout.sglang.port"]))

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

http.server.ThreadingHTTPServer(address, Healthy).serve_forever()
"""
