"""The rollout engine whose responses are sampled by SGLang servers.

    engine.publish(0)
    for step in ...:                        # K is rollout.max_staleness
        engine.prefetch(step ... step + K)  # in flight from here on, over several publishes
        rollouts = engine.generate(step)    # waits for the responses of this step only
        ...                                 # score, update
        engine.publish(step + 1)            # waits for what is in flight; partial: aborts it

So no token is older than K versions when its step updates: older responses are dropped. A publish
has four verbs: engine.publish decides whether servers get new weights now, Publisher.deliver tries
until every server has them or is lost, send_weights or send_factors sends and verifies once, and
transport.send moves one bucket.

Each data-parallel rank's first rank (its leader) talks to its share of the servers, which it may
share with other leaders. Ordering:

- `publish` never raises for a server, because the step is finished and its weights are good. The
  next `generate` raises EngineLost instead, when the training state is complete and can be saved.
- Without rollout.partial servers take new weights only every K - 1 updates, so that publishes wait
  for few responses. Any other `publish` only records the version; what is not sampled ahead, an
  evaluation for example, needs the current weights, which are then sent first.
- `generate` samples what was not sampled ahead. What no server could sample is sampled after a
  restart and another delivery of the same weights. All ranks loop together, so that their
  collectives match.
- Colocated, `publish` only records the version. `generate` takes the GPU: all the trainer's parts
  except the student move to the host, servers resume, they receive the weights, the student moves
  too, and only then they sample. They keep the GPU, for another evaluation batch for example, until
  the trainer holds a part again (parallel/device_memory.py); then they release it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from torch.nn import Module

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.samples import context_samples
from stable_opd_mcore.metrics import Max, Metrics, Sum
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.device_memory import DeviceMemory
from stable_opd_mcore.parallel.world import World, broadcast_object, gather_objects
from stable_opd_mcore.records import Prompt, Rollout, Sampling, SequenceScores
from stable_opd_mcore.rollout.engine import EngineLost, RolloutEngine, check_prompts
from stable_opd_mcore.rollout.episodes import Episode
from stable_opd_mcore.rollout.interaction import Interaction
from stable_opd_mcore.rollout.sglang.dispatch import Dispatcher
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member, is_leader
from stable_opd_mcore.rollout.sglang.prompt_requests import PromptRequests, routing_of
from stable_opd_mcore.rollout.sglang.publisher import Publisher
from stable_opd_mcore.rollout.sglang.transports import Transport
from stable_opd_mcore.serving.requests import Completion, Generation
from stable_opd_mcore.serving.teacher import ServedTeacher

_MAX_ROUNDS = 5  # without a usable response although no server is being restarted
_SEE_LOGS = "see sglang/events.jsonl and the servers' logs in the run directory"


@dataclass(eq=False)
class SglangEngine(RolloutEngine):
    """A `RolloutEngine` over running servers."""

    config: Config
    world: World
    chunks: Sequence[Module]  # this rank's model chunks of the student
    fleet: Fleet  # this rank's servers; on ranks that are not leaders it has no members
    transport: Transport | None  # how weights travel; None on ranks that send nothing
    vocab_size: int  # the tokenizer's; larger ids are never sampled
    memory: DeviceMemory  # the trainer's parts on this rank's device, for colocated servers
    teacher: ServedTeacher | None = None  # scores the responses where the sampling says so
    interaction: Interaction = field(default_factory=Interaction)  # answers the student's turns

    def __post_init__(self) -> None:
        self.weight_version = -1  # nothing is published yet
        self.idle = self.fleet.idle
        self._sent_version = -1  # the newest version that was sent to all servers
        self._architecture = architecture_of(self.chunks)
        replays = self.config.rollout.routing_replay
        self._routing = routing_of(self._architecture) if replays else None
        self._is_leader = is_leader(self.world)
        # requests that are sampled ahead, by step; an evaluation has another sampling or step
        self._ahead: dict[tuple[int, Sampling], list[PromptRequests]] = {}
        self._dispatcher = Dispatcher(self.fleet, self.world.device.type)
        self._publisher = Publisher(
            self.config, self.world, self.chunks, self.fleet, self.transport, self.memory
        )
        self._lost: str | None = None  # why some rank's fleet cannot continue
        self._metrics = Metrics()

    def close(self) -> None:
        """End the servers that this run started."""
        self._dispatcher.close()
        self.interaction.close()
        self.fleet.stop()

    # ---- sampling

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int
    ) -> list[Rollout]:
        """See `RolloutEngine.generate`. Raises EngineLost without a server or restart left."""
        self._check(prompts, sampling)
        self._raise_if_lost()
        if self.config.is_colocated:
            self._take_gpu()
        requests = self._ahead.pop((step, sampling), None)
        if self._sent_version != self.weight_version:  # the same on every rank
            needs_current = any(gather_objects(requests is None))
            if needs_current:
                self._send_now()
        if requests is None:
            requests = self._start(prompts, sampling, step, self.weight_version)
        self._finish(requests)
        rollouts = [rollout for each in requests for rollout in each.rollouts]  # leaders' only
        if sampling.scored and rollouts:
            rollouts = self._with_scores(requests, rollouts)
        return broadcast_object(rollouts, self.world.model_group)

    def _take_gpu(self) -> None:
        """Colocated: give the servers the GPU and the weights that they lack. Collective."""
        if not self.memory.is_lent:
            self.memory.lend(self.fleet.release_memory, keep=("student",))
            self.fleet.resume_memory()
        self._deliver(resent=False)
        self._raise_if_lost()
        left = Metrics({"memory/left_gib": Max(self.memory.bytes_left() / 2**30)})
        self._metrics = self._metrics | left

    def _start(
        self, prompts: Sequence[Prompt], sampling: Sampling, step: int, oldest: int
    ) -> list[PromptRequests]:
        """Queue the requests, on leaders. Tokens of weights before version `oldest` are refused."""
        if not self._is_leader:
            return []
        accept, rows = self._accept(oldest), self._architecture.vocab_size
        samples, version = range(sampling.num_samples), self.weight_version
        requests = [
            PromptRequests(
                Generation(prompt.token_ids, sampling, self.vocab_size, rows, self._routing),
                accept,
                [Episode.begin(prompt, sample, version) for sample in samples],
                step,
                self._architecture.max_positions,
                partial(self.interaction.observe, sampling=sampling, step=step),
                ask=partial(self._ask_teacher, step) if _asks(prompt, sampling) else None,
            )
            for prompt in prompts
        ]
        self._dispatcher.submit(requests)
        return requests

    def _ask_teacher(self, step: int, rollout: Rollout) -> list[Future[SequenceScores]]:
        assert self.teacher is not None, "sampling.scored without a served teacher"
        return [self.teacher.ask(sample, step) for sample in context_samples(rollout)]

    def _with_scores(
        self, requests: Sequence[PromptRequests], rollouts: Sequence[Rollout]
    ) -> list[Rollout]:
        """The rollouts with their scores; some lack them if the teacher is lost."""
        assert self.teacher is not None
        asked = [each.scores.get(i, ()) for each in requests for i in range(len(each.episodes))]
        found = iter(self.teacher.wait([reply for replies in asked for reply in replies]))
        parts = [[next(found) for _ in replies] for replies in asked]
        pairs = zip(rollouts, map(_joined, parts), strict=True)
        return [replace(rollout, teacher_scores=scores) for rollout, scores in pairs]

    def _finish(self, requests: Sequence[PromptRequests]) -> None:
        """Wait for the responses; give servers that came back the weights. Collective."""
        rounds = 0
        while True:
            self._dispatcher.wait(requests)
            is_missing = not all(each.is_done for each in requests)
            is_missing_somewhere = any(gather_objects(is_missing))
            if not is_missing_somewhere:
                return
            if is_missing and not self.fleet.is_restarting:
                rounds += 1
                if rounds == _MAX_ROUNDS:
                    self.fleet.lose(f"no usable rollouts after {rounds} rounds")
            with self._paused():
                self._deliver(resent=True)
            self._raise_if_lost()

    def prefetch(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int, weight_version: int
    ) -> None:
        """See `RolloutEngine.prefetch`. Does nothing while the servers' weights are too old."""
        self._check(prompts, sampling)
        oldest = weight_version - self.config.rollout.max_staleness
        if (step, sampling) not in self._ahead and self._sent_version >= oldest:
            self._ahead[step, sampling] = self._start(prompts, sampling, step, oldest)

    def drop_ahead(self) -> None:
        """See `RolloutEngine.drop_ahead`. The next publish sends the weights at once."""
        with self._paused(abort=True):
            self._dispatcher.drop([each for ahead in self._ahead.values() for each in ahead])
            for (step, sampling), ahead in self._ahead.items():
                for prompt in ahead:
                    self.interaction.forget(prompt.episodes, sampling, step)
        self._ahead.clear()
        self._sent_version = -1

    @contextmanager
    def _paused(self, *, abort: bool | None = None) -> Iterator[None]:
        """No request of any rank is in flight within. Collective. `abort` ends requests at once;
        None: as rollout.partial says."""
        self._dispatcher.hold()
        gather_objects(None)  # an abort also ends requests of other ranks that share the server
        self._dispatcher.pause(abort=self.config.rollout.partial if abort is None else abort)
        gather_objects(None)  # so nothing is sent that another rank would still abort
        yield
        self._dispatcher.resume()

    def take_metrics(self) -> Metrics:
        metrics, self._metrics = self._metrics, Metrics()
        if not self._is_leader:
            return metrics
        metrics = metrics | self.interaction.take_metrics()
        return metrics | self.fleet.events.take_metrics() | self._dispatcher.take_metrics()

    def _check(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        window = self._architecture.max_positions
        check_prompts(prompts, sampling, vocab_size=self.vocab_size, window=window)
        if self.weight_version < 0:
            self.publish(0)  # servers start with random weights

    def _accept(self, oldest: int) -> Callable[[Member, Completion], bool]:
        """A function that refuses responses from weights before version `oldest`."""

        def accept(member: Member, piece: Completion) -> bool:
            versions = piece.weight_versions
            if all(v.isdecimal() and oldest <= int(v) <= self.weight_version for v in versions):
                return True
            self.fleet.weights_outdated(member)
            detail = f"weights {', '.join(versions)}, expected {self.weight_version}"
            self.fleet.events.add("stale", member.name, detail)
            return False

        return accept

    # ---- weights

    def publish(self, weight_version: int) -> None:
        """See the file's head. Does nothing for a version that is published already."""
        if weight_version == self.weight_version:
            return
        self.weight_version = weight_version
        due = self._sent_version + self.config.rollout.publish_every
        if self._sent_version < 0 or weight_version >= due:
            self._send_now()

    def _send_now(self) -> None:
        """Send the current weights; colocated servers get them when they next sample."""
        with self._paused():
            self._sent_version = self.weight_version
            for member in self.fleet.members:
                self.fleet.weights_outdated(member)
            if not self.config.is_colocated:
                self._deliver(resent=False)

    def _deliver(self, *, resent: bool) -> None:
        """Have every server receive the weights, or some fleet be lost. Collective."""
        self._lost, num_bytes = self._publisher.deliver(self.weight_version, resent=resent)
        if num_bytes:
            sent = Metrics({"engine/sync_bytes": Sum(float(num_bytes))})
            self._metrics = self._metrics | sent

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise EngineLost(f"{self._lost}; {_SEE_LOGS}")


def _asks(prompt: Prompt, sampling: Sampling) -> bool:
    """Whether a served teacher scores the responses to this prompt as they end."""
    return sampling.scored and prompt.use.is_taught


def _joined(parts: Sequence[SequenceScores | None]) -> SequenceScores | None:
    """The scores of all contexts of an episode; None if one is missing, or if nobody was asked."""
    given = [part for part in parts if part is not None]
    return SequenceScores.join(given) if given and len(given) == len(parts) else None
