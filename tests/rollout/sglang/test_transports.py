"""What all transports share: two buffers, requests to all servers at once, and their failures."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.multiprocessing import reductions

from stable_opd_mcore.rollout.sglang.transports import (
    GROUP_LOST,
    Bucket,
    DiskTransport,
    Pending,
    Target,
    Transport,
    handle_of,
)
from stable_opd_mcore.serving.client import SglangClient
from tests.rollout.weight_receiver import read_handle
from tests.serving.http_server import Request, http_server

DONE = 200, b'{"success": true}'


def targets_of(*urls: str) -> list[Target]:
    return [Target(f"server_{i}", SglangClient(url), 1) for i, url in enumerate(urls)]


def opened(*urls: str) -> Transport:
    transport = Transport(30.0)
    transport.open(targets_of(*urls), "0")
    return transport


def bucket_of(**tensors: torch.Tensor) -> Bucket:
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])
    return Bucket(flat, tuple(tensors.items()))


def recording(reply: tuple[int, bytes]) -> tuple[list[str], Callable[[Request], tuple[int, bytes]]]:
    paths: list[str] = []

    def answer(request: Request) -> tuple[int, bytes]:
        paths.append(request.path)
        return reply

    return paths, answer


def test_a_server_that_fails_is_recorded_and_sent_nothing_more():
    loads, accept = recording(DONE)
    refused, refuse = recording((200, b'{"success": false, "message": "no such group"}'))
    invalid, reject = recording((400, b"bad shape"))
    with http_server(accept) as a, http_server(refuse) as b, http_server(reject) as c:
        transport = opened(a, b, c)
        for _ in range(2):
            Pending(transport, "/update", lambda _: {}).wait()
    assert (len(loads), len(refused), len(invalid)) == (2, 1, 1)
    assert [target.name for target in transport.alive] == ["server_0"]
    assert transport.failed.keys() == {"server_1", "server_2"}
    assert transport.failed["server_1"].endswith("/update: no such group")
    assert "bad shape" in transport.failed["server_2"]


@pytest.mark.parametrize("grace_seconds", [None, 0.05])
def test_after_a_failure_other_servers_are_waited_for_no_longer_than_the_grace(grace_seconds):
    """The second server replies only after the first has failed, or after the wait is over."""
    released = threading.Event()

    def refuse(_: Request) -> tuple[int, bytes]:
        if grace_seconds is None:
            released.set()
        return 400, b"refused"

    def reply_late(_: Request) -> tuple[int, bytes]:
        released.wait(30)
        time.sleep(0.2)
        return DONE

    with http_server(refuse) as fails, http_server(reply_late) as hangs:
        transport = opened(fails, hangs)
        pending = Pending(transport, "/update", lambda _: {})
        pending.wait(grace_seconds)
        assert pending.has_failed()
        released.set()
    assert "refused" in transport.failed.pop("server_0")
    dropped = {"server_1": f"{GROUP_LOST}: another server failed"}
    assert transport.failed == ({} if grace_seconds is None else dropped)


class Counters:
    """In place of a CUDA storage's class: how many processes hold what was shared."""

    holders: ClassVar[dict[str, int]] = {}

    @classmethod
    def _release_ipc_counter(cls, handle: str, offset: int, device: int) -> None:
        assert (offset, device) == (12, 6)
        cls.holders[handle] -= 1


@pytest.fixture
def shared(monkeypatch) -> list[tuple[Any, ...]]:
    """Pretends that tensors are on a GPU; lists the arguments by which torch would rebuild."""
    gpus = [SimpleNamespace(uuid=f"GPU-{gpu}") for gpu in range(8)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(Counters, "holders", {})
    found: list[tuple[Any, ...]] = []

    def share(_: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        counter = f"counter {len(found)}"
        Counters.holders[counter] = 1
        found.append((*range(4), Counters, *range(5, 11), counter, *range(12, 15)))
        return reductions.rebuild_cuda_tensor, found[-1]

    monkeypatch.setattr(reductions, "reduce_tensor", share)
    return found


def test_a_handle_shares_the_buffer_once_and_names_its_gpu_by_the_uuid(monkeypatch, shared):
    tensors = {"matrix": torch.arange(6.0).view(2, 3), "norm": torch.ones(5)}
    bucket = bucket_of(**tensors)
    handle = handle_of(bucket)
    assert b"GPU-6" in base64.b64decode(handle)
    (arguments,) = shared

    def rebuild(*found: Any) -> torch.Tensor:
        assert found == (*arguments[:11], b"none", *arguments[12:]), "6 is found again"
        return bucket.flat

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    received = dict(read_handle(handle))
    assert received.keys() == tensors.keys()
    assert all(torch.equal(received[name], tensors[name]) for name in tensors)


def test_no_handle_is_counted_so_a_server_that_dies_keeps_no_memory(shared):
    for _ in range(2):
        handle_of(bucket_of(weight=torch.zeros(3)))
    assert len(shared) == 2
    assert Counters.holders == {"counter 0": 0, "counter 1": 0}


def test_servers_read_a_directory_when_all_its_files_are_written(tmp_path):
    """Files of an earlier publish with the same label are gone."""
    seen: list[dict[str, int]] = []

    def read(request: Request) -> tuple[int, bytes]:
        assert request.path == "/update_weights_from_disk"
        seen.append({file.name: file.stat().st_size for file in (tmp_path / "3-1").iterdir()})
        return DONE

    (tmp_path / "3-1").mkdir()
    (tmp_path / "3-1" / "model-00003.safetensors").write_bytes(b"old")
    with http_server(read) as url:
        transport = DiskTransport(30.0, tmp_path, {"architectures": ["Tiny"]})
        transport.open(targets_of(url), "3-1")
        for size in (1000, 10):
            transport.send(bucket_of(weight=torch.zeros(size)))
        assert seen == []
        transport.close()
    config = json.loads((tmp_path / "3-1" / "config.json").read_text())
    assert config == {"architectures": ["Tiny"]}
    assert transport.failed == {}
    ((files),) = seen
    names = ["config.json", "model-00001.safetensors", "model-00002.safetensors"]
    assert sorted(files) == names
    assert files[names[1]] - files[names[2]] >= 4 * 990
    transport.clean_up()
    assert not list(tmp_path.iterdir())
