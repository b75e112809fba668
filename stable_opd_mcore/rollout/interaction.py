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
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from stable_opd_mcore.config.environments import EnvironmentConfig
from stable_opd_mcore.data.bridge import Bridge, Observed
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.messages import Message
from stable_opd_mcore.metrics import Metrics, Sum
from stable_opd_mcore.records import Sampling
from stable_opd_mcore.rollout.environments import EnvironmentPool, Step
from stable_opd_mcore.rollout.episodes import Episode, Observation
from stable_opd_mcore.rollout.noise import row_key

# Metrics environment/...; failures are those of grading
COUNTS = ("steps", "replays", "not_repeatable", "neutralised_tokens", "cut_tokens")
_NO_ROOM = Observation(finish_reason="length", reward=0.0)  # ends an episode that did not succeed


@dataclass(eq=False)
class Interaction:
    """The environments of a run, by the name that `Prompt.environment` has."""

    environments: Mapping[str, EnvironmentConfig] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None  # of training; None: no environment
    held_out_tokenizer: Tokenizer | None = None  # with the template's arguments of evaluations
    system_prompt: str | None = None  # data.system_prompt
    window: int = 0  # the most tokens that the student reads

    def __post_init__(self) -> None:
        self._pools: dict[str, EnvironmentPool] = {}  # each starts with its first episode
        self._conversations: dict[Hashable, list[Message]] = {}  # of history=template
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.first_failure: str | None = None  # of an environment, in this process
        used = (self.tokenizer, self.held_out_tokenizer)
        self._bridges = [Bridge(each) for each in used if each is not None]

    def observe(self, episode: Episode, sampling: Sampling, step: int) -> Future[Observation]:
        """What follows the last turn of an episode, or comes before its first one.

        The future raises a DataError for messages that the chat template cannot put there.
        """
        prompt, seen = episode.prompt, Future[Observation]()
        if prompt.environment is None:
            seen.set_result(Observation(finish_reason=episode.turns[-1].finish_reason))
            return seen
        pool = self._pool(prompt.environment)
        key = _key(episode, sampling, step)
        if episode.turns:
            is_cut = episode.turns[-1].finish_reason == "length"
            answer = pool.say(key, episode.turns[-1].text, truncated=is_cut)
        else:
            world = row_key(sampling.seed, step, prompt.prompt_id, 0)
            answer = pool.open(key, dict(prompt.columns or {}), world)
        answer.add_done_callback(partial(self._answered, seen, key, episode, sampling))
        return seen

    def forget(self, episodes: Iterable[Episode], sampling: Sampling, step: int) -> None:
        """Close the environments of episodes that are not continued."""
        for episode in episodes:
            name = episode.prompt.environment
            if name is not None and not episode.is_ended:
                self._close(name, _key(episode, sampling, step))

    def take_metrics(self) -> Metrics:
        """`environment/*` since the last call, of this process; nothing without environments."""
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
            self._pools[name] = EnvironmentPool(settings.read(), *limits)
        return self._pools[name]

    def _close(self, name: str, key: Hashable) -> None:
        self._conversations.pop(key, None)
        if name in self._pools:
            self._pools[name].close(key)

    # ---- in the thread that an environment's answer comes in

    def _answered(
        self,
        seen: Future[Observation],
        key: Hashable,
        episode: Episode,
        sampling: Sampling,
        answer: Future[Step],
    ) -> None:
        try:
            observation = self._observation(key, episode, sampling, answer.result())
            if observation is _NO_ROOM:
                self._close(str(episode.prompt.environment), key)
            elif observation.finish_reason != "abort":
                self._conversations.pop(key, None)
            seen.set_result(observation)
        except BaseException as error:  # raised again where the observation is waited for
            seen.set_exception(error)

    def _observation(
        self, key: Hashable, episode: Episode, sampling: Sampling, step: Step
    ) -> Observation:
        if step.failure is not None:
            self.first_failure = self.first_failure or step.reason
            return replace(_NO_ROOM, failure=step.failure)
        if step.not_repeatable:
            return Observation(begins_anew=True)
        if step.done:
            return Observation(finish_reason="stop", reward=step.reward)
        settings = self.environments[str(episode.prompt.environment)]
        step_now = sampling.training_step  # evaluations have all turns
        most = settings.max_turns if step_now is None else settings.turns_at(step_now)
        if len(episode.turns) >= most:
            return _NO_ROOM
        observation = self._encoded(key, episode, sampling, step)
        length = len(observation.token_ids)
        if not observation.restarts:
            length += len(episode.context)
        return _NO_ROOM if length >= self.window else observation

    def _encoded(
        self, key: Hashable, episode: Episode, sampling: Sampling, step: Step
    ) -> Observation:
        """The messages of a step as token ids; before the first turn, none stand for the prompt's.

        With history=template the whole conversation is rendered anew, from the student's texts.
        """
        settings = self.environments[str(episode.prompt.environment)]
        bridge = self._bridges[sampling.training_step is None]
        is_first = not episode.turns
        messages, num_neutralised = bridge.neutralised(step.observed or ())
        num_cut = 0
        if settings.max_observation_tokens is not None and not is_first and not step.restarts:
            messages, num_cut = bridge.shortened(messages, settings.max_observation_tokens)
        conversation = messages
        if is_first and step.observed is None:
            conversation = self._with_system(episode.prompt.messages)
            seen = Observed((), "")
        elif is_first or step.restarts:
            conversation = self._with_system(messages)
            seen = replace(bridge.render(conversation, ()), restarts=True)
        elif settings.history == "append":
            seen = bridge.append(messages, int(episode.context[-1]))
        else:
            said: Message = {"role": "assistant", "content": episode.turns[-1].text}
            conversation = [*self._conversations[key], said, *messages]
            seen = bridge.render(conversation, episode.context.tolist())
        if settings.history == "template":
            self._conversations[key] = conversation
        with self._lock:
            self._counts["neutralised_tokens"] += num_neutralised
            self._counts["cut_tokens"] += num_cut
        return Observation(seen.token_ids, seen.restarts, self._decoded(seen.token_ids))

    def _decoded(self, token_ids: Sequence[int]) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(token_ids)

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        """Messages of a new context, with the system message of the run where they have none."""
        if self.system_prompt is None or messages[0]["role"] == "system":
            return [*messages]
        return [{"role": "system", "content": self.system_prompt}, *messages]


def _key(episode: Episode, sampling: Sampling, step: int) -> Hashable:
    """Of all episodes that are sampled at once, this one."""
    prompt = episode.prompt
    return sampling, step, prompt.slot, prompt.prompt_id, episode.sample_index
