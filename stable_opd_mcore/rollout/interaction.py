"""What follows a turn of the student: its environment is asked, and the answer becomes token ids.

    interaction.observe(episode, sampling, step)    # -> Future[Observation]

Engines own the loop over turns; they call `observe` wherever an episode awaits an observation, and
on one rank of a replica only. A prompt without an environment has one turn: its end is the
episode's. All samples of a prompt have the same seed, so they begin in the same world; an
evaluation's are the same every time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from stable_opd_mcore.config.environments import EnvironmentConfig
from stable_opd_mcore.data.bridge import Bridge, Observed
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.messages import Message, with_system
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.metrics import Metrics, Sum
from stable_opd_mcore.records import Sampling
from stable_opd_mcore.rollout.environments import EnvironmentPool, Step
from stable_opd_mcore.rollout.episodes import Episode, Observation
from stable_opd_mcore.rollout.noise import row_key

# Metrics environment/...; failed episodes are counted as failures of grading, rollout/grading_*
COUNTS = ("steps", "replays", "not_repeatable", "neutralised_tokens", "cut_tokens")
_LARGEST_SEED = 2**31 - 1
_NO_ROOM = Observation(finish_reason="length", reward=0.0)  # ends an episode that did not succeed


class _Asked(NamedTuple):
    """An episode whose environment is asked what follows."""

    environment: str
    key: Hashable
    episode: Episode
    sampling: Sampling


@dataclass(eq=False)
class Interaction:
    """The environments of a run, by the name that `Prompt.environment` has.

    Raises:
        DataError: the chat template cannot put a message of the user after a turn.
    """

    environments: Mapping[str, EnvironmentConfig] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None  # of training; None: no environment
    held_out_tokenizer: Tokenizer | None = None  # with the template's arguments of evaluations
    system_prompt: str | None = None  # data.system_prompt
    window: int = 0  # the most tokens that the student reads
    teacher_tokenizer: Tokenizer | None = None  # of a teacher with a chat template of its own
    progress: Callable[[], None] = lambda: None  # called whenever an environment has played a step

    def __post_init__(self) -> None:
        self._pools: dict[str, EnvironmentPool] = {}  # one is made for its first episode
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.first_failure: str | None = None  # of an environment, in this process
        self.refusal: str | None = None  # why a chat template cannot write what one has yielded
        self.roles: set[str] = set()  # of the messages that continued a context
        used = (self.tokenizer, self.held_out_tokenizer)
        self._bridges = [Bridge(each) for each in used if each is not None]
        self._compared: set[str] = set()  # roles that both templates write in the same form
        for name, settings in self.environments.items():
            reason = self._bridges[0].refusal("user")
            if settings.history == "append" and reason is not None:
                raise DataError(f"environment{f' of {name}' if name else ''}: {reason}")

    def observe(self, episode: Episode, sampling: Sampling, step: int) -> Future[Observation]:
        """What follows the last turn of an episode, or comes before its first one.

        Messages that a chat template cannot put there end the episode; `refusal` says why.
        """
        prompt, seen = episode.prompt, Future[Observation]()
        if prompt.environment is None:
            seen.set_result(Observation(finish_reason=episode.turns[-1].finish_reason))
            return seen
        pool = self._pool(prompt.environment)
        asked = _Asked(prompt.environment, _key(episode, sampling, step), episode, sampling)
        if episode.turns:
            last = episode.turns[-1]
            answer = pool.say(asked.key, last.text, truncated=last.finish_reason == "length")
        else:
            # Generators of random numbers take seeds from 0 up to this.
            world = row_key(sampling.seed, step, prompt.prompt_id, 0) & _LARGEST_SEED
            is_training = sampling.training_step is not None
            answer = pool.open(asked.key, dict(prompt.columns or {}), world, is_training)
        answer.add_done_callback(partial(self._answered, asked, seen))
        return seen

    def forget(self, episodes: Iterable[Episode], sampling: Sampling, step: int) -> None:
        """Close the environments of episodes that are not continued."""
        for episode in episodes:
            name = episode.prompt.environment
            if name is not None and not episode.is_ended:
                self._close(name, _key(episode, sampling, step))

    def take_metrics(self) -> Metrics:
        """`environment/*` of training since the last call, of this process; nothing without
        environments."""
        if not self.environments:
            return Metrics()
        with self._lock:
            counts, self._counts = self._counts, Counter[str]()
        for pool in self._pools.values():
            counts.update(pool.take_counts())
        return Metrics({f"environment/{name}": Sum(counts[name]) for name in COUNTS})

    def close(self) -> None:
        """End the environments' processes."""
        for pool in self._pools.values():
            pool.shutdown()

    def _pool(self, name: str) -> EnvironmentPool:
        if name not in self._pools:
            settings = self.environments[name]
            limits = settings.workers, settings.timeout_seconds, settings.memory_gib
            self._pools[name] = EnvironmentPool(settings.read(), *limits, progress=self.progress)
        return self._pools[name]

    def _close(self, name: str, key: Hashable) -> None:
        if name in self._pools:
            self._pools[name].close(key)

    # ---- in the thread that an environment's answer comes in

    def _answered(self, asked: _Asked, seen: Future[Observation], answer: Future[Step]) -> None:
        try:
            step = answer.result()
            observation = self._observation(asked, step)
            if observation.finish_reason != "abort" and not step.done:
                self._close(asked.environment, asked.key)
            seen.set_result(observation)
        except BaseException as error:  # raised again where the observation is waited for
            seen.set_exception(error)

    def _observation(self, asked: _Asked, step: Step) -> Observation:
        if step.failure is not None:
            self.first_failure = self.first_failure or step.reason
            return replace(_NO_ROOM, failure=step.failure)
        if step.not_repeatable:
            return Observation(begins_anew=True)
        if step.done:
            return Observation(finish_reason="stop", reward=step.reward)
        settings, finished = self.environments[asked.environment], asked.sampling.training_step
        most = settings.max_turns if finished is None else settings.turns_at(finished)
        if len(asked.episode.turns) >= most:
            return _NO_ROOM
        try:
            observation = self._encoded(asked, step, settings)
        except DataError as error:  # the run ends later, on all ranks together
            self.refusal = self.refusal or f"prompt {asked.episode.prompt.prompt_id}: {error}"
            return _NO_ROOM
        length = len(observation.token_ids)
        if not observation.restarts:
            length += len(asked.episode.context)
        if length < self.window:
            return observation
        is_new = step.observed is not None and not asked.episode.turns
        if step.restarts or is_new:  # no turn of the student is the cause
            self.first_failure = self.first_failure or (
                f"what it yielded as a new context has {length} tokens, and the student reads "
                f"{self.window}"
            )
            return replace(_NO_ROOM, failure="invalid")
        return _NO_ROOM

    def _encoded(self, asked: _Asked, step: Step, settings: EnvironmentConfig) -> Observation:
        """A step's messages as token ids. Before the first turn, None stands for the prompt.

        With history=template the whole conversation is rendered anew, from the student's texts.
        """
        episode, bridge = asked.episode, self._bridges[asked.sampling.training_step is None]
        is_first = not episode.turns
        messages, num_neutralised = bridge.neutralised(step.observed or ())
        num_cut = 0
        if settings.max_observation_tokens is not None and not is_first and not step.restarts:
            messages, num_cut = bridge.shortened(messages, settings.max_observation_tokens)
        conversation: Sequence[Message] = messages
        if is_first and step.observed is None:
            conversation = with_system(episode.prompt.messages, self.system_prompt)
            seen = Observed((), "")
        elif is_first or step.restarts:
            conversation = with_system(messages, self.system_prompt)
            seen = replace(bridge.render(conversation, ()), restarts=True)
        elif settings.history == "append":
            context = episode.context.tolist()
            seen = bridge.append(messages, context[-1]).after(context)
        else:
            said: Message = {"role": "assistant", "content": episode.turns[-1].text}
            conversation = [*episode.conversation, said, *messages]
            seen = bridge.render(conversation, episode.context.tolist())
        if not (is_first or step.restarts):
            self._note({message["role"] for message in messages}, asked.sampling)
        with self._lock:
            if asked.sampling.training_step is not None:
                self._counts["neutralised_tokens"] += num_neutralised
                self._counts["cut_tokens"] += num_cut
        return Observation(
            seen.token_ids,
            seen.restarts,
            self._decoded(seen.token_ids),
            conversation=tuple(conversation) if settings.history == "template" else (),
        )

    def _note(self, roles: set[str], sampling: Sampling) -> None:
        """Note the roles of messages that continue a context.

        Raises:
            DataError: the teacher scores them, but its template writes them in another form.
        """
        with self._lock:
            self.roles |= roles
        teacher = self.teacher_tokenizer
        if teacher is None or not teacher.has_template or sampling.training_step is None:
            return
        for role in sorted(roles - self._compared):
            if found := self._bridges[0].difference(Bridge(teacher), role):
                own, others = found
                raise DataError(
                    f"{teacher.path}: its chat template writes {others} for a {role} message "
                    f"between two turns, the student's {own}, so the teacher would score turns "
                    "after a text whose form it was not trained on; set tokenizer.path to the "
                    "teacher's directory, yield messages of another role, or yield restarts"
                )
            self._compared.add(role)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(token_ids)


def _key(episode: Episode, sampling: Sampling, step: int) -> Hashable:
    """Of all episodes that are sampled at once, this one."""
    prompt = episode.prompt
    return sampling, step, prompt.slot, prompt.prompt_id, episode.sample_index
