"""The rollout engine whose responses are drawn by SGLang servers.

Each data-parallel rank's first rank (its leader) talks to its share of the servers, which it may
share with other leaders. Global rank 0 sends the weights to all servers; through shared memory each
data-parallel rank sends them to the servers that it started. Ordering:

- `publish` waits for rollouts in flight; then every rank takes part in sending, and
  again while some server failed and a restart is left. It never raises for a server, because the
  step is finished and its weights are good. The next `generate` raises EngineLost instead, when the
  training state is complete and can be saved.
- `generate` draws what was not drawn ahead. What no server could draw is drawn after a restart and
  another publish of the same weights. All ranks loop together, so that their collectives match.
- `prefetch` draws in a thread that makes no collective call.
- Colocated, `publish` only records the version. `generate` takes the GPU: the trainer's parts but
  the student move to the host, servers resume, they receive the weights, the student moves too, and
  only then they draw. They keep the GPU, for another evaluation batch say, until the trainer holds
  a part again (parallel/device_memory.py); then they release it.

Not here: one rank's requests (fleet.py), one publish (sync.py), the transfer of weights
(transports.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

import torch
from torch.nn import Module

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.metrics import Max, Metrics, Sum
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.device_memory import DeviceMemory
from stable_opd_mcore.parallel.world import World, broadcast_object, gather_objects
from stable_opd_mcore.planning.topology import server_dtype
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from stable_opd_mcore.rollout.engine import EngineLost, RolloutEngine, check_prompts
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member, ServerStatus, one_per_server
from stable_opd_mcore.rollout.sglang.group import in_daemon
from stable_opd_mcore.rollout.sglang.records import (
    Decode,
    Draw,
    cached_share,
    rollouts_of,
    routing_of,
)
from stable_opd_mcore.rollout.sglang.sync import publish_weights
from stable_opd_mcore.rollout.sglang.transports import Target, Transport
from stable_opd_mcore.serving.client import SglangClient
from stable_opd_mcore.serving.requests import Completion, Generation

_MAX_ROUNDS = 5  # of drawing, and of sparing servers whose process group another server broke
_MAX_ATTEMPTS = 8  # at one publish; external servers have no restarts that could run out
_SEE_LOGS = "see sglang/events.jsonl and the servers' logs in the run directory"


@dataclass(eq=False)
class SglangEngine(RolloutEngine):
    """A `RolloutEngine` over running servers."""

    config: Config
    world: World
    chunks: Sequence[Module]  # this rank's model chunks of the student
    fleet: Fleet  # this rank's servers; on ranks that are not leaders it has no members
    transport: Transport | None  # how weights travel; None on ranks that send nothing
    decode: Decode
    vocab_size: int  # of the tokenizer; larger ids are never drawn
    memory: DeviceMemory  # the trainer's parts on this rank's device, for colocated servers

    def __post_init__(self) -> None:
        self.weight_version = -1  # nothing is published yet
        self._architecture = architecture_of(self.chunks)
        self._is_leader = is_leader(self.world)
        self._ahead: dict[int, Draw] = {}  # by step
        self._held: dict[int, dict[tuple[str, int], Rollout]] = {}  # restored rollouts, by step
        self._num_publishes = 0
        self._lost: str | None = None  # why some rank's fleet cannot go on
        self._metrics = Metrics()

    def close(self) -> None:
        """End the servers that this run started."""
        self.fleet.stop()

    # ---- drawing

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int
    ) -> list[Rollout]:
        """`sampling.num_samples` rollouts per prompt, all of the first prompt first.

        Raises:
            UserError: a prompt that the model cannot take; nothing was sent.
            EngineLost: neither a server nor a restart is left.
        """
        requests = self._requests(prompts, sampling)
        if self.weight_version < 0:
            self.publish(0)  # servers start with random weights
        self._raise_if_lost()
        if self.config.is_colocated:
            self._take_gpu()
        held = self._held.pop(step, {})
        answers = self._take_ahead(prompts, sampling, step)
        if self._is_leader:
            drawn_here = [i for i, p in enumerate(prompts) if (p.prompt_id, 0) not in held]
        else:
            drawn_here = []
        self._draw_missing(requests, answers, drawn_here)
        rollouts: list[Rollout] = []  # only leaders have any
        if self._is_leader:
            rollouts = [
                rollout
                for prompt, answer in zip(prompts, answers, strict=True)
                for rollout in rollouts_of(prompt, answer, held, sampling.num_samples, self.decode)
            ]
            self._metrics = self._metrics | cached_share(requests, answers)
        return broadcast_object(rollouts, self.world.model_group)

    def _take_gpu(self) -> None:
        """Colocated: give the servers the GPU and the weights that they lack. Collective."""
        if not self.memory.is_lent:
            self.memory.lend(self.fleet.release_memory, keep=("student",))
            self.fleet.resume_memory()
        self._send_weights(resent=False)
        self._raise_if_lost()
        left = Metrics({"memory/left_gib": Max(self.memory.bytes_left() / 2**30)})
        self._metrics = self._metrics | left

    def _draw_missing(
        self,
        requests: Sequence[Generation],
        answers: list[list[Completion] | None],
        drawn_here: Sequence[int],
    ) -> None:
        """Draw the answers that are None, of the requests `drawn_here`. Collective.

        Raises:
            EngineLost: as `generate`.
        """
        rounds = 0  # without a usable response although no server is being restarted
        while True:
            missing = [i for i in drawn_here if answers[i] is None]
            if missing:
                accept = self._accept(self.config.rollout.max_staleness)
                drawn = self.fleet.draw([requests[i] for i in missing], accept)
                for i, answer in zip(missing, drawn, strict=True):
                    answers[i] = answer
                missing = [i for i in missing if answers[i] is None]
            if not any(gather_objects(bool(missing))):
                return
            if missing and not self.fleet.is_restarting:
                rounds += 1
                if rounds == _MAX_ROUNDS:
                    self.fleet.lose(f"no usable rollouts after {rounds} rounds")
            self._await_ahead()  # a server that is sent weights drops its requests
            self._send_weights(resent=True)
            self._raise_if_lost()

    def prefetch(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int, weight_version: int
    ) -> None:
        """Start drawing `step`'s rollouts from the current weights; `generate` collects them."""
        if step in self._ahead or step in self._held:
            return
        if self.weight_version < 0:
            self.publish(0)  # servers start with random weights
        requests = self._requests(prompts, sampling)
        max_age = self.config.rollout.max_staleness - (weight_version - self.weight_version)
        accept = self._accept(max_age)
        answers = in_daemon(lambda: self.fleet.draw(requests, accept), "prefetch")
        self._ahead[step] = Draw(step, tuple(prompts), sampling, answers)

    def in_flight(self) -> dict[int, list[Rollout]]:
        """See `RolloutEngine.in_flight`. Waits for the rollouts; leaves incomplete prompts out."""
        drawn: dict[int, list[Rollout]] = {}
        for step, ahead in self._ahead.items():
            rollouts = [  # only leaders have any
                rollout
                for prompt, answer in zip(ahead.prompts, ahead.answers.result(), strict=True)
                if answer is not None
                for rollout in rollouts_of(prompt, answer, {}, len(answer), self.decode)
            ]
            drawn[step] = broadcast_object(rollouts, self.world.model_group)
        return drawn

    def restore(self, rollouts: Mapping[int, Sequence[Rollout]]) -> None:
        """See `RolloutEngine.restore`. `generate` draws only what is missing."""
        for step, held in rollouts.items():
            self._held[step] = {(r.prompt.prompt_id, r.sample_index): r for r in held}

    def drop_ahead(self) -> None:
        """See `RolloutEngine.drop_ahead`. Waits for the rollouts."""
        self._await_ahead()
        self._ahead.clear()
        self._held.clear()

    def _await_ahead(self) -> None:
        wait([ahead.answers for ahead in self._ahead.values()])

    def take_metrics(self) -> Metrics:
        """See `RolloutEngine.take_metrics`."""
        metrics, self._metrics = self._metrics, Metrics()
        return metrics | self.fleet.events.take_metrics() if self._is_leader else metrics

    def _requests(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Generation]:
        window, rows = self._architecture.max_positions, self._architecture.vocab_size
        check_prompts(prompts, sampling, vocab_size=self.vocab_size, window=window)
        routing = routing_of(self._architecture) if self.config.rollout.routing_replay else None
        return [
            Generation(prompt.token_ids, sampling, self.vocab_size, rows, routing)
            for prompt in prompts
        ]

    def _accept(self, max_age: int) -> Callable[[Member, Sequence[Completion]], bool]:
        """A function that refuses responses from weights more than `max_age` versions old."""
        current = self.weight_version

        def accept(member: Member, answer: Sequence[Completion]) -> bool:
            versions = {version for completion in answer for version in completion.weight_versions}
            if all(v.isdecimal() and 0 <= current - int(v) <= max_age for v in versions):
                return True
            self.fleet.weights_outdated(member)
            detail = f"weights {sorted(versions)}, expected {current}"
            self.fleet.events.add("stale", member.name, detail, count=len(answer))
            return False

        return accept

    def _take_ahead(
        self, prompts: Sequence[Prompt], sampling: Sampling, step: int
    ) -> list[list[Completion] | None]:
        """What was drawn ahead if it is for this call (it may be an evaluation); else nothing."""
        ahead, call = self._ahead.get(step), (step, sampling, tuple(prompts))
        if ahead is None or (ahead.step, ahead.sampling, ahead.prompts) != call:
            return [None] * len(prompts)
        return self._ahead.pop(step).answers.result()

    # ---- weights

    def publish(self, weight_version: int) -> None:
        """Send every server the student's current weights and verify them; see the file's head.

        Does nothing for a version that is published already.
        """
        if weight_version == self.weight_version:
            return
        self._await_ahead()
        self.weight_version = weight_version
        for member in self.fleet.members:
            self.fleet.weights_outdated(member)
        if not self.config.is_colocated:
            self._send_weights(resent=False)

    def _send_weights(self, *, resent: bool) -> None:
        """Send until every server has the weights or some fleet is lost. Collective."""
        attempt = 0  # only those that no restart of this run's servers pays for
        while True:
            self.fleet.await_restarts()
            targets = [s for s in self._statuses() if s.state == "needs_weights"]
            if self._lost is not None or not targets:
                break
            for member in self.fleet.members:  # another leader may have seen that it lacks them
                if member.name in {status.name for status in targets}:
                    self.fleet.weights_outdated(member)
            self._num_publishes += 1
            outcome = self._send_to(targets)
            failures = [reason for reason in outcome.values() if reason is not None]
            if failures and attempt == _MAX_ATTEMPTS and self._is_leader:
                self.fleet.lose(f"weights did not arrive {attempt + 1} times: {failures[0]}")
            else:
                self._apply(outcome, resent, attempt < _MAX_ROUNDS)
            resent = True
            attempt += not any(gather_objects(self.fleet.is_restarting))
        if self.config.is_colocated:
            if self.transport is not None:
                self.transport.buffers.free()
            self.memory.keep_only()

    def _send_to(self, statuses: Sequence[ServerStatus]) -> dict[str, str | None]:
        """Per server, why it does not have the weights; None if it has. The same on every rank."""
        outcome: dict[str, str | None] = {}
        for sender in sorted({s.sender for s in statuses if s.sender is not None}):
            if not self.world.shares_experts_with(sender):
                continue  # it needs no weight of this rank
            is_sender = sender == self.world.data_rank
            mine = [s for s in statuses if is_sender and s.sender == sender]
            if self.config.is_colocated:
                self.memory.bring("student")
            result = publish_weights(
                self.chunks,
                [
                    Target(s.name, SglangClient(s.url, api_key=s.api_key), s.tensor, s.life)
                    for s in mine
                ],
                self.transport if is_sender else None,
                version=self.weight_version,
                label=f"{self.weight_version}-{self._num_publishes}",
                dtype=getattr(torch, server_dtype(self.config)),
                bucket_bytes=self.config.rollout.sglang.bucket_mib * 2**20,
            )
            outcome |= dict.fromkeys(result.verified) | result.failed
            if result.num_bytes:
                sent = Metrics({"engine/sync_bytes": Sum(float(result.num_bytes))})
                self._metrics = self._metrics | sent
        return {name: why for each in gather_objects(outcome) for name, why in each.items()}

    def _apply(self, outcome: dict[str, str | None], resent: bool, spare_healthy: bool) -> None:
        """Update the fleet's members after sending.

        Args:
            spare_healthy: send a server that is healthy the weights again, because the fault may
                be another server's or the network's; else restart it.
        """
        version = f"version {self.weight_version}"
        for member in self.fleet.members:
            if member.name not in outcome:
                continue
            reason = outcome[member.name]
            if reason is None:
                self.fleet.weights_arrived(member)
                self.fleet.events.add("published", member.name, version)
                if resent:
                    self.fleet.events.add("resent", member.name, version)
            elif spare_healthy and any(member.client.is_healthy() for _ in range(2)):
                self.fleet.events.add("failure", member.name, f"weights did not arrive: {reason}")
            else:
                self.fleet.fail(member, f"weights did not arrive: {reason}")

    def _statuses(self) -> list[ServerStatus]:
        """All servers of all fleets; also sets `_lost`. Collective."""
        mine = [self._status(member) for member in self.fleet.members]
        gathered = gather_objects((mine, self.fleet.lost))
        self._lost = next((lost for _, lost in gathered if lost is not None), None)
        return one_per_server([status for statuses, _ in gathered for status in statuses])

    def _status(self, member: Member) -> ServerStatus:
        sender: int | None = 0
        if self.config.rollout.sglang.transport == "tensor":  # its memory is shared with its owner
            sender = self.world.data_rank if member.server is not None else None
        return ServerStatus(
            name=member.name,
            url=member.client.url,
            api_key=member.client.api_key,
            state=member.state,
            tensor=member.tensor,
            life=member.life,
            sender=sender,
        )

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise EngineLost(f"{self._lost}; {_SEE_LOGS}")


def is_leader(world: World) -> bool:
    """Whether this rank talks to servers for its replica."""
    return world.tensor_rank == 0 and world.pipeline_rank == 0
