"""Publishes to servers that two data-parallel ranks share, without SGLang."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stable_opd_mcore.config.models import LoraConfig
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.lora import adapt
from stable_opd_mcore.models.weights import iter_hf_tensors
from stable_opd_mcore.parallel.device_memory import DeviceMemory
from stable_opd_mcore.parallel.world import gather_objects, start_world, stop_world
from stable_opd_mcore.rollout.sglang import publisher as publisher_module
from stable_opd_mcore.rollout.sglang.event_log import EventLog
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.rollout.sglang.group import DistributedTransport
from stable_opd_mcore.rollout.sglang.publisher import Publisher, ServerStatus, one_per_server
from stable_opd_mcore.rollout.sglang.server_values import first_difference
from stable_opd_mcore.rollout.sglang.sync import Outcome
from stable_opd_mcore.rollout.sglang.transports import TensorTransport
from stable_opd_mcore.serving.client import SglangClient
from tests.config.cases import run_with
from tests.integration.sglang_tools import architecture
from tests.parallel.launch import run_ranks
from tests.rollout.weight_receiver import receiver
from tests.serving.http_server import http_server

FIELDS = architecture(tied=False)


def publish_on_two_ranks(rank: int, _: int, urls: list[str], method: str, folder: str) -> None:
    """Each rank leads; it started the server of its number where weights go through memory."""
    world = start_world(ParallelConfig(), seed=0)
    chunks = build_model(
        read_architecture(FIELDS), world, precision="fp32", trainable=False, seed=2
    )
    placement = "colocated" if method == "tensor" else "disaggregated"
    settings: dict[str, Any] = {"engine": "sglang", "sglang": {"placement": placement}}
    lora = {"rank": 4} if method == "adapter" else None
    config = run_with(rollout=settings, student={"architecture": {}, "lora": lora})
    if lora is not None:
        adapt(chunks, LoraConfig(rank=4, alpha=32.0))
    own: Any = SimpleNamespace() if method == "tensor" else None
    mine = [rank] if own else range(len(urls))
    members = [
        Member(f"server_{n}", SglangClient(urls[n]), own, state="needs_weights") for n in mine
    ]
    events = EventLog(Path(folder) / "events.jsonl")
    fleet = Fleet(members, events)
    transport: Any = TensorTransport(60.0, world.model_group, {})
    if method != "tensor":
        transport = DistributedTransport(60.0, "gloo") if rank == 0 else None
    publisher = Publisher(config, world, chunks, fleet, transport, DeviceMemory())
    for version in range(2):
        if rank == 1:
            fleet.weights_outdated(members[0])  # a shared one still counts as ready on rank 0
        lost, num_bytes = publisher.deliver(version, resent=False)
        assert [member.state for member in members] == ["ready"] * len(members)
        sends = rank == 1 or version == 0 if method == "tensor" else rank == 0
        assert (num_bytes > 0, lost) == (sends, None)
        names = gather_objects([member.adapter for member in members])
        if method == "adapter":
            assert names[0] == names[1]
            assert names[0][0].endswith(f"-{version}-{version + 1}")
        else:
            assert names == [[None] * len(members)] * 2
    stop_world()


@pytest.mark.parametrize("method", ["distributed", "tensor", "adapter"])
def test_every_leader_learns_that_a_server_has_the_weights(tmp_path, method):
    with receiver(FIELDS) as first, receiver(FIELDS) as second:
        urls = [first, second] if method == "tensor" else [first]
        run_ranks(2, publish_on_two_ranks, urls, method, str(tmp_path))


class FailingFleet(Fleet):
    """Counts how often it gives up its member, which is back at once. After each of the first
    `restarts` pushes it says that a server is restarting."""

    def __init__(self, member: Member, path: Path, restarts: int) -> None:
        super().__init__([member], EventLog(path))
        self._unfinished, self.given_up = restarts, 0

    def fail(self, member: Member, reason: str) -> None:
        assert reason == "weights did not arrive: lost"
        self.given_up += 1

    @property
    def is_restarting(self) -> bool:
        self._unfinished -= 1
        return self._unfinished >= 0


@pytest.mark.parametrize(
    ("is_healthy", "failures", "restarts", "pushes", "given_up"),
    [
        (True, 3, 0, 4, 0),
        (True, 99, 0, 9, 3),  # the first five failures give up nobody, the ninth ends the run
        (False, 99, 0, 9, 8),
        (False, 99, 2, 11, 10),
        (True, 99, 2, 11, 3),
    ],
)
def test_weights_are_sent_again_until_they_arrive_or_the_attempts_are_used_up(
    world, tmp_path, monkeypatch, is_healthy, failures, restarts, pushes, given_up
):
    pushed: list[str] = []

    def push(chunks: Any, targets: Any, transport: Any, *, label: str, **_: Any) -> Outcome:
        assert [target.name for target in targets] == ["server_0"]
        pushed.append(label)
        if len(pushed) > failures:
            return Outcome(("server_0",), {}, 10)
        return Outcome((), {"server_0": "lost"}, 10)

    monkeypatch.setattr(publisher_module, "send_weights", push)
    monkeypatch.setattr(publisher_module, "disagreements", lambda *_: ({}, {}))
    monkeypatch.setattr(publisher_module, "stamp", lambda *_: None)
    config = run_with(rollout={"engine": "sglang"}, student={"architecture": {}})
    chunks = build_model(read_architecture(FIELDS), world, precision="fp32", trainable=False)
    events = tmp_path / "events.jsonl"
    with http_server(lambda _: (200 if is_healthy else 503, b"{}")) as url:
        member = Member("server_0", SglangClient(url), None, state="needs_weights")
        fleet = FailingFleet(member, events, restarts)
        publisher = Publisher(config, world, chunks, fleet, TensorTransport(1.0), DeviceMemory())
        lost, num_bytes = publisher.deliver(4, resent=False)
    assert pushed == [f"4-{number}" for number in range(1, pushes + 1)]
    assert (fleet.given_up, num_bytes) == (given_up, 10 * pushes)
    named = [json.loads(line)["event"] for line in events.read_text().splitlines()]
    if failures < pushes:
        assert (lost, member.state) == (None, "ready")
        assert named == ["failure"] * failures + ["published", "resent"]
    else:
        assert lost == "weights did not arrive 9 times: lost"
        assert named == ["failure"] * (pushes - given_up - 1) + ["lost"]


class LostFleet(Fleet):
    """Lost with its first failure."""

    def fail(self, member: Member, reason: str) -> None:
        self.lose(reason)


@pytest.mark.parametrize(
    ("verify", "fault"),
    [("refuse", "halves"), ("warn", "halves"), ("refuse", "hides values")],
)
def test_a_checksum_that_differs_is_explained_by_values(world, tmp_path, verify, fault):
    """`warn` uses the server all the same, in each publish; its values are read in the first."""
    config = run_with(
        run={"name": "r", "directory": str(tmp_path)},
        rollout={"engine": "sglang", "sglang": {"verify": verify}},
        student={"architecture": {}},
    )
    chunks = build_model(
        read_architecture(FIELDS), world, precision="fp32", trainable=False, seed=2
    )
    name = "model.layers.0.mlp.down_proj.weight"
    expected = dict(iter_hf_tensors(chunks))[name]
    with receiver(FIELDS, fault=fault) as url:
        member = Member("server_0", SglangClient(url), None, state="needs_weights")
        fleet = LostFleet([member], EventLog(tmp_path / "events.jsonl"))
        publisher = Publisher(config, world, chunks, fleet, TensorTransport(60.0), DeviceMemory())
        lost, _ = publisher.deliver(1, resent=False)
        fleet.weights_outdated(member)
        lost = lost or publisher.deliver(2, resent=False)[0]
    counted = fleet.events.take_metrics().values_by_key()["engine/unverified"]
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    if verify == "warn":
        assert (lost, member.state, counted) == (None, "ready", 2)
        assert [row["event"] for row in rows] == ["published", "unverified"] * 2
        detail = rows[1]["detail"]
        assert rows[3]["detail"].endswith(" in the server"), "only checksums the second time"
    else:
        assert (member.state, counted) == ("needs_weights", 0)
        detail = lost or ""
    assert f"2 of 17 parameters of rank 0 differ from the trainer's, e.g. {name}, " in detail
    folder = config.run.files.servers / "differences"
    if fault == "hides values":
        assert detail.endswith("not shown: the server was not started by `stable-opd`")
        assert not list(folder.glob("*.safetensors"))
        return
    file = folder / f"server_0_rank_0_{name}.safetensors"
    assert detail.endswith(str(file))
    both = load_file(file)
    assert torch.equal(both["trainer"], expected.flatten())
    if fault == "halves":
        row = expected[0].tolist()
        assert "1 of 8,192 values differ, the first at [0, 1]" in detail
        assert f"the trainer has {row[0]:.6g} [{row[1]:.6g}] {row[2]:.6g} {row[3]:.6g}," in detail
        assert f"the server {row[0]:.6g} [{row[1] / 2:.6g}] {row[2]:.6g} {row[3]:.6g};" in detail
        assert both["server"][0, 1] == both["trainer"][1] / 2


@pytest.mark.parametrize("verify", ["refuse", "warn"])
def test_a_server_that_computes_with_what_it_derived_before_is_found(world, tmp_path, verify):
    """Its checksums are right, also of the second version."""
    sglang = {"verify": verify}
    config = run_with(rollout={"engine": "sglang", "sglang": sglang}, student={"architecture": {}})
    chunks = build_model(
        read_architecture(FIELDS), world, precision="fp32", trainable=False, seed=2
    )
    with receiver(FIELDS, fault="keeps what it derived") as url:
        member = Member("server_0", SglangClient(url), None, state="needs_weights")
        fleet = LostFleet([member], EventLog(tmp_path / "events.jsonl"))
        publisher = Publisher(config, world, chunks, fleet, TensorTransport(60.0), DeviceMemory())
        assert publisher.deliver(1, resent=False)[0] is None
        fleet.weights_outdated(member)
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.mul_(1.5)
        lost, _ = publisher.deliver(2, resent=False)
        stated = member.client.weight_version()
    (*_, row) = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    found = "from the same weights it computes other log-probabilities than the trainer: "
    if verify == "warn":
        assert (lost, stated, row["event"]) == (None, "2", "unverified")
        assert row["detail"].startswith(f"version 2: {found}")
    else:
        assert lost is not None
        assert found in lost
        assert stated == "incomplete"


def test_equal_values_with_other_checksums_are_called_harmless():
    values = torch.tensor([[1.0, float("nan")], [-0.0, 2.0]])
    assert "every value is the same" in first_difference(values.flatten(), values)
    found = first_difference(values.flatten(), values.abs())
    assert "1 of 4 values differ, the first at [1, 0]" in found
    assert "4 values of torch.float32" in first_difference(values.flatten(), values.bfloat16())


CLIENT = SglangClient("http://127.0.0.1:9")


def status(name: str, state: str, life: int = 0, sender: int | None = 0) -> ServerStatus:
    return ServerStatus(name, CLIENT, 1, life, state, sender)


def test_a_shared_server_is_sent_the_weights_once_if_any_leader_saw_that_it_lacks_them():
    seen = [status("a", "ready"), status("b", "ready"), status("a", "needs_weights", life=2)]
    assert one_per_server(seen) == [status("a", "needs_weights", life=2), status("b", "ready")]


def test_every_failure_that_a_leader_sees_changes_the_life():
    lives = ((0, 0), (1, 0), (1, 1))
    found = {
        one_per_server([status("a", "ready", first), status("a", "ready", second)])[0].life
        for first, second in lives
    }
    assert len(found) == len(lives)


def test_the_leader_that_started_a_server_sends():
    seen = [status("a", "ready", sender=None), status("a", "ready", sender=3)]
    assert [each.sender for each in one_per_server(seen)] == [3]
    assert one_per_server(seen[:1])[0].sender is None
