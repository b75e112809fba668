"""The weight group: its ranks, its store, and what a refusal leaves. Transfers: test_sync.py."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stable_opd_mcore.rollout.sglang import group
from stable_opd_mcore.rollout.sglang.group import (
    DistributedTransport,
    GroupStore,
    listen,
)
from stable_opd_mcore.rollout.sglang.transports import Bucket, Target


class Refusing:
    """A client whose server refuses every request; it keeps what was sent."""

    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def submit(self, request, timeout_seconds):
        self.sent.append((request.path, request.content))
        reply = Future()
        reply.set_result({"success": False, "message": "refused"})
        return reply

    def close(self):
        pass


def test_the_trainer_is_rank_0_and_servers_follow_with_all_their_tensor_ranks(monkeypatch):
    monkeypatch.setattr(group, "_CONNECT_SECONDS", 0.0)
    clients = [Refusing(), Refusing()]
    targets = [Target("a", clients[0], 2), Target("b", clients[1], 3)]  # type: ignore[arg-type]
    transport = DistributedTransport(20.0, "gloo")
    transport.open(targets, "7-1")
    bodies = [body for client in clients for _, body in client.sent]
    assert [path for client in clients for path, _ in client.sent] == [
        "/init_weights_update_group"
    ] * 2
    assert [body["rank_offset"] for body in bodies] == [1, 3]
    assert [body["world_size"] for body in bodies] == [6, 6]
    assert {body["master_address"] for body in bodies} == {"127.0.0.1"}
    (name,) = {body["group_name"] for body in bodies}
    assert name.startswith("stable-opd-7-1-")
    assert transport.failed.keys() == {"a", "b"}
    assert all(reason.endswith("refused") for reason in transport.failed.values())
    # Without a group a bucket is not sent, and there is nothing to dissolve.
    transport.send(Bucket(torch.zeros(4, dtype=torch.uint8), ()))
    transport.close()
    transport.leave()
    assert [len(client.sent) for client in clients] == [1, 1]


def test_servers_without_a_route_are_recorded(monkeypatch):
    def no_route(host):
        raise OSError(f"no route to {host}")

    monkeypatch.setattr(group, "address_towards", no_route)
    client = Refusing()
    transport = DistributedTransport(20.0, "gloo")
    transport.open([Target("a", client, 1)], "0")  # type: ignore[arg-type]
    assert client.sent == []
    assert transport.failed["a"].endswith("no route to the servers: no route to 127.0.0.1")


def test_the_trainer_listens_where_servers_on_other_machines_reach_it(monkeypatch):
    addresses = {"localhost": "127.0.0.2", "other": "127.0.0.1"}
    monkeypatch.setattr(group, "address_towards", addresses.__getitem__)
    is_loopback = lambda address: SimpleNamespace(is_loopback=address == "127.0.0.2")  # noqa: E731
    monkeypatch.setattr(group, "ipaddress", SimpleNamespace(ip_address=is_loopback))
    with listen(["http://localhost:1", "http://other:1"]) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with listen(["http://localhost:1"]) as listener:
        assert listener.getsockname()[0] == "127.0.0.2"


def test_a_closed_store_ends_the_wait_for_a_rank_that_never_joins():
    store = GroupStore(listen(["http://127.0.0.1:1"]), 2, 600.0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(store.client.wait, ["rank 1"], timedelta(seconds=600))
        assert not waiting.done()
        store.close()
        with pytest.raises(RuntimeError):
            waiting.result(timeout=60)
