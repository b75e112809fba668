"""The student's weights on all servers, sent again to those that they did not reach.

They are sent whole (sync.py), or as low-rank factors for the frozen weights (adapter_sync.py).
Global rank 0 sends to all servers; through shared memory each data-parallel rank sends to the
servers that it started. A server that several leaders share lacks the weights as long as any of
them says so.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch.nn import Module

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.models.lora import base_only
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.device_memory import DeviceMemory
from stable_opd_mcore.parallel.world import World, gather_objects
from stable_opd_mcore.placement.topology import (
    WEIGHT_BUCKET_BYTES,
    sends_adapter,
    server_dtype,
)
from stable_opd_mcore.rollout.sglang.adapter_sync import FactorSender
from stable_opd_mcore.rollout.sglang.agreement import disagreements
from stable_opd_mcore.rollout.sglang.checksums import Difference
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member, is_leader
from stable_opd_mcore.rollout.sglang.server_values import Suspect, compare_values
from stable_opd_mcore.rollout.sglang.sync import Outcome, send_weights, stamp
from stable_opd_mcore.rollout.sglang.transports import Target, Transport, ask_all
from stable_opd_mcore.serving.client import SglangClient

Value = TypeVar("Value")
_log = logging.getLogger(__name__)
_MAX_ATTEMPTS = 8  # attempts at one publish; external servers have no restarts that could run out
_MAX_SPARED = 5  # attempts that spare servers whose process group another server broke


@dataclass(frozen=True)
class ServerStatus(Target):
    """A server as one leader reports it to all ranks, or as all its leaders together."""

    state: str = "needs_weights"  # see Member
    # The data-parallel rank that sends it the weights; None: another leader says which
    sender: int | None = 0


def one_per_server(statuses: Iterable[ServerStatus]) -> list[ServerStatus]:
    """One status per server, from those of all leaders that share it.

    A server needs weights if any leader says so. Its lives are added up, so they differ after each
    failure that any leader has seen.
    """
    by_name: dict[str, ServerStatus] = {}
    for other in statuses:
        status = by_name.setdefault(other.name, other)
        if status is not other:
            by_name[other.name] = replace(
                status,
                state=other.state if other.state == "needs_weights" else status.state,
                life=status.life + other.life,
                sender=other.sender if status.sender is None else status.sender,
            )
    return list(by_name.values())


def _joined(parts: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """What the ranks know by server."""
    return {name: value for part in parts for name, value in part.items()}


@dataclass(eq=False)
class Publisher:
    """Delivers this run's weights to its servers. Fields: see `SglangEngine`."""

    config: Config
    world: World
    chunks: Sequence[Module]
    fleet: Fleet
    transport: Transport | None
    memory: DeviceMemory

    def __post_init__(self) -> None:
        self._num_pushes = 0
        self._tolerant = self.config.rollout.sglang.verify == "warn"
        self._compared: set[tuple[str, str]] = set()  # (server, parameter) that differed
        self._dtype: torch.dtype = getattr(torch, server_dtype(self.config))
        self._adapters: FactorSender | None = None
        if sends_adapter(self.config, architecture_of(self.chunks)):
            self._adapters = FactorSender(
                self.chunks, self.world, self._dtype, WEIGHT_BUCKET_BYTES, self._tolerant
            )
        elif self.config.student.lora and self._dtype != torch.float32 and self.world.rank == 0:
            _log.warning(
                "servers receive matrices that are merged with the low-rank factors and rounded to "
                "bf16, which loses most of what young factors add: logprob/rollout_gap_mean shows "
                "how far the sampler lags behind the student"
            )

    def deliver(self, version: int, *, resent: bool) -> tuple[str | None, int]:
        """Send until every server has the weights or some fleet is lost. Collective.

        Returns:
            Why some rank's fleet cannot continue, the same on every rank; and the number of bytes
            that this rank has sent.
        """
        attempt = 0  # counts only attempts after which no server of this run is being restarted
        num_bytes = 0
        while True:
            self.fleet.await_restarts()
            statuses, lost = self._statuses()
            targets = [status for status in statuses if status.state == "needs_weights"]
            if lost is not None or not targets:
                break
            names = {status.name for status in targets}
            mine = [member for member in self.fleet.members if member.name in names]
            for member in mine:  # another leader may have seen that it lacks them
                self.fleet.weights_outdated(member)
            self._num_pushes += 1
            with self.fleet.idle.busy([member.name for member in mine]):
                outcome, different, sent = self._push(targets, version)
            num_bytes += sent
            failures = [reason for reason in outcome.values() if reason is not None]
            if failures and attempt == _MAX_ATTEMPTS and is_leader(self.world):
                self.fleet.lose(f"weights did not arrive {attempt + 1} times: {failures[0]}")
            else:
                self._apply(outcome, different, version, resent, attempt < _MAX_SPARED)
            resent = True
            some_restart = any(gather_objects(self.fleet.is_restarting))
            if not some_restart:
                attempt += 1
        if self.config.is_colocated:
            if self.transport is not None:
                self.transport.buffers.free()
            self.memory.keep_only()
        return lost, num_bytes

    def _push(
        self, statuses: Sequence[ServerStatus], version: int
    ) -> tuple[dict[str, str | None], dict[str, str], int]:
        """Per server, why it does not have the weights, None if it has, and how it differs,
        the same on every rank; and the number of bytes that this rank has sent."""
        outcome: dict[str, str | None] = {}
        different: dict[str, Difference] = {}
        num_bytes = 0
        for sender in sorted({s.sender for s in statuses if s.sender is not None}):
            if not self.world.shares_experts_with(sender):
                continue  # it needs no weight of this rank
            is_sender = sender == self.world.data_rank
            if self.config.is_colocated:
                self.memory.bring("student")
            targets = [status for status in statuses if is_sender and status.sender == sender]
            result = self._send(targets, self.transport if is_sender else None, version)
            outcome |= dict.fromkeys(result.verified) | result.failed
            different |= result.different
            num_bytes += result.num_bytes
        outcome = _joined(gather_objects(outcome))
        different = _joined(gather_objects(different))
        details = {name: found.reason for name, found in different.items()}
        for name, values in self._values_of(statuses, different).items():
            details[name] += f"; {values}"
            if (reason := outcome[name]) is not None:
                outcome[name] = f"{reason}; {values}"
        return outcome, details, num_bytes

    def _values_of(
        self, statuses: Sequence[ServerStatus], different: Mapping[str, Difference]
    ) -> dict[str, str]:
        """Per server, what differs in its values; once for each parameter. Collective."""
        suspects = [
            (status.sender, Suspect(status, different[status.name]))
            for status in statuses
            if status.name in different and status.sender is not None
            if different[status.name].parameter
        ]
        named = {(each.target.name, each.difference.parameter) for _, each in suspects}
        new = named - self._compared
        self._compared |= named
        if not new:
            return {}
        values: dict[str, str] = {}
        folder = self.config.run.files.servers / "differences"
        for sender in sorted({sender for sender, _ in suspects}):
            if not self.world.shares_experts_with(sender):
                continue  # it needs no weight of this rank
            is_sender = sender == self.world.data_rank and is_leader(self.world)
            own = [each for by, each in suspects if is_sender and by == sender]
            with base_only(self.chunks) if self._adapters is not None else nullcontext():
                values |= compare_values(self.chunks, own, folder, self._dtype)
        return _joined(gather_objects(values))

    def _send(
        self, targets: Sequence[Target], transport: Transport | None, version: int
    ) -> Outcome:
        """Send these servers the version, from this replica, and stamp it on those that sample with
        the trainer's probabilities."""
        label, adapter = self._label(version), None
        if self._adapters is not None:
            adapter = self._adapters.name_of(label)
            outcome = self._adapters.send_factors(targets, transport, label=label)
        else:
            outcome = send_weights(
                self.chunks,
                targets,
                transport,
                label=label,
                dtype=self._dtype,
                bucket_bytes=WEIGHT_BUCKET_BYTES,
                tolerant=self._tolerant,
            )
        arrived = [target for target in targets if target.name in outcome.verified]
        found, failed = disagreements(self.chunks, self.world, arrived, self._dtype, adapter)
        if not self._tolerant:
            failed, found = failed | found, {}
        agreeing = [target for target in arrived if target.name not in failed]
        stamped, refused = ask_all(agreeing, lambda target: stamp(target.client, version))
        differing = {name: Difference(reason) for name, reason in found.items()}
        return replace(
            outcome,
            verified=tuple(stamped),
            failed=outcome.failed | failed | refused,
            different={**differing, **outcome.different},
        )

    def _label(self, version: int) -> str:
        """Unique to the present push, and the same on every rank."""
        return f"{version}-{self._num_pushes}"

    def _apply(
        self,
        outcome: Mapping[str, str | None],
        different: Mapping[str, str],
        version: int,
        resent: bool,
        spare_healthy: bool,
    ) -> None:
        """Update the fleet's members after sending. `spare_healthy` sends a healthy server the
        weights again, because the fault may be another server's or the network's."""
        events, adapter = self.fleet.events, None
        if self._adapters is not None:
            adapter = self._adapters.name_of(self._label(version))
        for member in self.fleet.members:
            if member.name not in outcome:
                continue
            reason = outcome[member.name]
            if reason is None:
                self.fleet.weights_arrived(member, adapter)
                events.add("published", member.name, f"version {version}")
                if detail := different.get(member.name):
                    events.add("unverified", member.name, f"version {version}: {detail}")
                if resent:
                    events.add("resent", member.name, f"version {version}")
            elif spare_healthy and any(member.client.is_healthy() for _ in range(2)):
                events.add("failure", member.name, f"weights did not arrive: {reason}")
            else:
                self.fleet.fail(member, f"weights did not arrive: {reason}")

    def _statuses(self) -> tuple[list[ServerStatus], str | None]:
        """All servers of all fleets, and why one of these cannot continue. Collective."""
        mine = [self._status(member) for member in self.fleet.members]
        gathered = gather_objects((mine, self.fleet.lost))
        lost = next((lost for _, lost in gathered if lost is not None), None)
        return one_per_server(status for statuses, _ in gathered for status in statuses), lost

    def _status(self, member: Member) -> ServerStatus:
        sender: int | None = 0
        if self.config.rollout.sglang.transport == "tensor":  # its memory is shared with its owner
            sender = self.world.data_rank if member.server is not None else None
        # a client of its own, because a transport may close it
        client = SglangClient(member.client.url, api_key=member.client.api_key)
        return ServerStatus(member.name, client, member.tensor, member.life, member.state, sender)
