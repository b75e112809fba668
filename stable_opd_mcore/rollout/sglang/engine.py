"""The rollout engine whose student lives in SGLang servers.

Each data-parallel rank's first rank (its leader) owns a share of the servers and talks to them;
global rank 0 sends the weights to all. Who waits for whom:

- `publish` first waits for rollouts in flight (async_steps=1), then every rank takes part in
  sending, and again while some server failed and a restart is left. It never raises for a server:
  the weights are the trainer's and the step is done; the next `generate` raises EngineLost when
  there is no going on, at a point where the training state is whole and can be saved.
- `generate` draws what was not drawn ahead; what no server was left to draw is drawn after a
  restart and another publish of the same weights. All ranks go round together, so collectives stay
  in step.
- `prefetch` draws in a thread that makes no collective call.

Not here: one rank's requests (fleet.py), one publish (sync.py), the way weights
travel.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import Module

from stable_opd_mcore.metrics import Mean, Metrics, Sum
from stable_opd_mcore.parallel.world import World, broadcast_object, gather_objects
from stable_opd_mcore.records import Prompt, Rollout
from stable_opd_mcore.rollout.engine import EngineLost, Sampling, check_prompts
from stable_opd_mcore.rollout.sglang.events import EventLog
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.rollout.sglang.records import Decode, request_for, rollouts_of
from stable_opd_mcore.rollout.sglang.sync import publish_weights
from stable_opd_mcore.rollout.sglang.transports import GROUP_LOST, Target, Transport
from stable_opd_mcore.serving.client import Completion, Generation, SglangClient

_MOST_ROUNDS = 5
_MOST_ATTEMPTS = 8  # at one publish; servers of others have no restarts that could run out
_LOOK = "sglang/events.jsonl and the servers' logs in the run directory tell why"


@dataclass(frozen=True)
class EngineSettings:
    """What the engine needs to know of the model and of the run."""

    vocab_size: int  # of the tokenizer
    padded_vocab_size: int  # rows of the model's embedding
    window: int  # most tokens of prompt and response together
    dtype: torch.dtype  # of the servers' weights
    bucket_bytes: int
    max_staleness: int  # oldest version a rollout may come from
    async_steps: int
    release_memory: bool  # colocated: servers give their GPU memory back after each generate


@dataclass(frozen=True)
class _Address:
    """How rank 0 reaches a server, and which life of it: a restarted one is in no process group."""

    url: str
    api_key: str | None
    life: int


@dataclass(frozen=True)
class _Status:
    """What a leader tells the others of one member."""

    name: str
    address: _Address
    tensor: int
    state: str


@dataclass
class _Draw:
    """Responses being drawn ahead."""

    step: int
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    thread: threading.Thread
    answers: list[list[Completion] | None]
    error: BaseException | None = None


class SglangEngine:
    """See the file's head. `fleet` is None on ranks that are not leaders, `transport` on all but
    rank 0.
    """

    def __init__(
        self,
        settings: EngineSettings,
        world: World,
        chunks: Sequence[Module],
        fleet: Fleet | None,
        transport: Transport | None,
        events: EventLog,
        decode: Decode,
    ) -> None:
        self.weight_version = -1  # nothing is published yet
        self._settings = settings
        self._world = world
        self._chunks = chunks
        self._fleet = fleet
        self._transport = transport
        self._events = events
        self._decode = decode
        self._clients: dict[_Address, SglangClient] = {}
        self._ahead: _Draw | None = None
        self._held: dict[int, dict[tuple[str, int], Rollout]] = {}  # restored rollouts, by step
        self._num_publishes = 0
        self._lost: str | None = None
        self._metrics = Metrics()

    def close(self) -> None:
        """End the owned servers."""
        if self._fleet is not None:
            self._fleet.stop()

    # ---- drawing

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int
    ) -> list[Rollout]:
        """`sampling.num_samples` rollouts per prompt, all of the first prompt first.

        Raises:
            UserError: a prompt that the model cannot take; nothing was sent.
            EngineLost: no server is left and no restart either.
        """
        settings = self._settings
        check_prompts(prompts, sampling, vocab_size=settings.vocab_size, window=settings.window)
        if self.weight_version < 0:
            self.publish(0)  # servers start with random weights, verified ones come first
        self._raise_if_lost()
        if settings.release_memory:
            if self._fleet is not None:
                self._fleet.resume_memory()
            self._send_weights(resent=False)
        held = self._held.pop(step, {})
        requests = [self._request(prompt, sampling) for prompt in prompts]
        answers = self._take_ahead(prompts, sampling, step)
        wanted = [i for i, prompt in enumerate(prompts) if (prompt.prompt_id, 0) not in held]
        for _ in range(_MOST_ROUNDS):
            missing = [i for i in wanted if answers[i] is None]
            if self._fleet is not None and missing:
                drawn = self._fleet.draw(
                    [requests[i] for i in missing], self._accept(settings.max_staleness)
                )
                for i, answer in zip(missing, drawn, strict=True):
                    answers[i] = answer
                missing = [i for i in missing if answers[i] is None]
            if not self._any_rank(bool(missing) and self._fleet is not None):
                break
            self._send_weights(resent=True)
            self._raise_if_lost()
        else:
            raise EngineLost(f"no usable rollouts after {_MOST_ROUNDS} rounds; {_LOOK}")
        rollouts: list[Rollout] = []  # on ranks that talk to no server
        if self._fleet is not None:
            rollouts = [
                rollout
                for prompt, answer in zip(prompts, answers, strict=True)
                for rollout in rollouts_of(prompt, answer, held, sampling.num_samples, self._decode)
            ]
            self._count(requests, answers)
        if settings.release_memory and self._fleet is not None:
            self._fleet.release_memory()
        return broadcast_object(rollouts, self._world.model_group)

    def prefetch(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> None:
        """Start drawing step `step`'s rollouts from the weights of now; `generate` collects them.

        Does nothing unless async_steps=1.
        """
        if not self._settings.async_steps:
            return
        assert self._ahead is None, "the rollouts drawn ahead have not been collected"
        settings = self._settings
        check_prompts(prompts, sampling, vocab_size=settings.vocab_size, window=settings.window)
        requests = [self._request(prompt, sampling) for prompt in prompts]
        accept = self._accept(settings.max_staleness - 1)  # they train one version later

        def work() -> None:
            try:
                if self._fleet is not None:
                    ahead.answers = self._fleet.draw(requests, accept)
            except BaseException as error:  # handed to the thread that collects
                ahead.error = error

        thread = threading.Thread(target=work, name="prefetch", daemon=True)
        ahead = _Draw(step, tuple(prompts), sampling, thread, [None] * len(prompts))
        self._ahead = ahead
        thread.start()

    def in_flight(self) -> tuple[int, list[Rollout]] | None:
        """The step drawn ahead and this data-parallel rank's rollouts of it, complete ones only:
        for the checkpoint. Waits for them.
        """
        ahead = self._ahead
        if ahead is None:
            return None
        self._join(ahead)
        rollouts: list[Rollout] = []  # on ranks that talk to no server
        if self._fleet is not None:
            rollouts = [
                rollout
                for prompt, answer in zip(ahead.prompts, ahead.answers, strict=True)
                if answer is not None
                for rollout in rollouts_of(prompt, answer, {}, len(answer), self._decode)
            ]
        return ahead.step, broadcast_object(rollouts, self._world.model_group)

    def restore(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Rollouts of `step` that a checkpoint held, of any prompts; `generate` draws only what
        is missing.
        """
        self._held[step] = {(r.prompt.prompt_id, r.sample_index): r for r in rollouts}

    # ---- weights

    def publish(self, weight_version: int) -> None:
        """Give every server the student's weights of now, verified. See the file's head for
        failures.
        """
        if self._ahead is not None:
            self._join(self._ahead)
        self.weight_version = weight_version
        if self._fleet is not None:
            for member in self._fleet.members:
                self._fleet.weights_outdated(member)
            self._fleet.resume_memory()
        self._send_weights(resent=False)

    def _count(
        self, requests: Sequence[Generation], answers: Sequence[list[Completion] | None]
    ) -> None:
        drawn = [(r, c) for r, a in zip(requests, answers, strict=True) for c in a or ()]
        prompt_tokens = sum(len(request.token_ids) for request, _ in drawn)
        cached_tokens = sum(completion.cached_tokens for _, completion in drawn)
        share = Metrics({"engine/prefix_cached_share": Mean(cached_tokens, prompt_tokens)})
        self._metrics = self._metrics | share

    def take_metrics(self) -> Metrics:
        """Events and engine figures since the last call, of this rank alone: reduce over ranks."""
        metrics, self._metrics = self._metrics, Metrics()
        return metrics | self._events.take_metrics() if self._fleet is not None else metrics

    def _send_weights(self, *, resent: bool) -> None:
        """Until every server has them or no restart is left."""
        for attempt in itertools.count():
            if self._fleet is not None:
                self._fleet.await_restarts()
            wanting = [s for s in self._statuses() if s.state == "needs_weights"]
            if self._lost is not None or not wanting:
                return
            self._num_publishes += 1
            outcome = self._send_to(wanting)
            failures = [reason for reason in outcome.values() if reason is not None]
            if self._fleet is not None and failures and attempt == _MOST_ATTEMPTS:
                self._fleet.lose(f"weights did not arrive {attempt + 1} times: {failures[0]}")
            elif self._fleet is not None:
                self._apply(self._fleet, outcome, resent or attempt > 0, attempt < _MOST_ROUNDS)

    def _send_to(self, wanting: Sequence[_Status]) -> dict[str, str | None]:
        """Why each server does not have the weights (None: it has); the same on every rank."""
        outcome: list[dict[str, str | None]] = [{}]
        if self._world.data_rank == 0:
            targets = [Target(s.name, self._client(s.address), s.tensor) for s in wanting]
            result = publish_weights(
                self._chunks,
                targets,
                self._transport,
                version=self.weight_version,
                label=f"{self.weight_version}-{self._num_publishes}",
                dtype=self._settings.dtype,
                bucket_bytes=self._settings.bucket_bytes,
            )
            outcome = [dict.fromkeys(result.verified) | result.failed]
            if self._world.rank == 0:
                sent = Metrics({"engine/sync_bytes": Sum(float(result.num_bytes))})
                self._metrics = self._metrics | sent
        dist.broadcast_object_list(outcome, src=0)
        return outcome[0]

    def _apply(
        self, fleet: Fleet, outcome: dict[str, str | None], resent: bool, patient: bool
    ) -> None:
        """Tell the fleet what became of its members."""
        version = f"version {self.weight_version}"
        for member in fleet.members:
            if member.name not in outcome:
                continue
            reason = outcome[member.name]
            if reason is None:
                fleet.weights_arrived(member)
                self._events.add("published", member.name, version)
                if resent:
                    self._events.add("resent", member.name, version)
            elif patient and GROUP_LOST in reason and member.client.is_healthy(15.0):
                # it was another member that broke the group: this one is sent the weights again
                self._events.add("failure", member.name, f"weights did not arrive: {reason}")
            else:
                fleet.fail(member, f"weights did not arrive: {reason}")

    def _accept(self, most_versions_old: int) -> Callable[[Member, Sequence[Completion]], bool]:
        """Refuse answers from other weights than those of now, give or take what the config
        allows.
        """
        current = self.weight_version

        def accept(member: Member, answer: Sequence[Completion]) -> bool:
            stated = {version for completion in answer for version in completion.weight_versions}
            if all(v.isdecimal() and 0 <= current - int(v) <= most_versions_old for v in stated):
                return True
            assert self._fleet is not None
            self._fleet.weights_outdated(member)
            detail = f"weights {sorted(stated)}, expected {current}"
            self._events.add("stale", member.name, detail, count=len(answer))
            return False

        return accept

    def _take_ahead(
        self, prompts: Sequence[Prompt], sampling: Sampling, step: int
    ) -> list[list[Completion] | None]:
        """What was drawn ahead, where it is this step's; nothing otherwise (an evaluation in
        between).
        """
        ahead = self._ahead
        if ahead is None or (ahead.step, ahead.sampling) != (step, sampling):
            return [None] * len(prompts)
        if ahead.prompts != tuple(prompts):
            return [None] * len(prompts)
        self._ahead = None
        self._join(ahead)
        return ahead.answers

    @staticmethod
    def _join(ahead: _Draw) -> None:
        ahead.thread.join()
        if ahead.error is not None:
            raise ahead.error

    def _request(self, prompt: Prompt, sampling: Sampling) -> Generation:
        settings = self._settings
        return request_for(prompt, sampling, settings.vocab_size, settings.padded_vocab_size)

    # ---- between ranks

    def _client(self, address: _Address) -> SglangClient:
        """Rank 0's own connections to a server."""
        if address not in self._clients:
            self._clients[address] = SglangClient(address.url, api_key=address.api_key)
        return self._clients[address]

    def _statuses(self) -> list[_Status]:
        """Of every member of every leader; also learns whether some leader is lost. Collective."""
        mine: list[_Status] = []
        lost = None
        if self._fleet is not None:
            lost = self._fleet.lost
            mine = [
                _Status(m.name, _Address(m.client.url, m.client.api_key, m.life), m.tensor, m.state)
                for m in self._fleet.members
            ]
        gathered = gather_objects((mine, lost))
        self._lost = next((lost for _, lost in gathered if lost is not None), None)
        return [status for statuses, _ in gathered for status in statuses]

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise EngineLost(f"{self._lost}; {_LOOK}")

    def _any_rank(self, value: bool) -> bool:
        return any(gather_objects(value))


def is_leader(world: World) -> bool:
    """Whether this rank talks to servers for its replica."""
    return world.tensor_rank == 0 and world.pipeline_rank == 0
