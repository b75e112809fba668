"""What follows a turn of the student: its environment is asked, and the answer becomes token ids.

    interaction.observe(episode, sampling, step)    # -> Future[WhatFollows]

Engines own the loop over turns; they call `observe` wherever an episode awaits an observation, and
on one rank of a replica only. A prompt without an environment has one turn: its end is the
episode's. All samples of a prompt have the same seed, so they begin in the same world; an
evaluation's are the same every time.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.data.bridge import Bridge, Observed
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.messages import Message, with_system
from stable_opd_mcore.data.tool_calls import ToolCalls
from stable_opd_mcore.data.tool_schemas import Tool, parse_tools, refuse_unnamed
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.metrics import Metrics, Sum
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from stable_opd_mcore.rollout.agent_account import COUNTS as AGENT_COUNTS
from stable_opd_mcore.rollout.agent_account import shares
from stable_opd_mcore.rollout.agents import AgentPool, Notes
from stable_opd_mcore.rollout.environment_answers import Answer
from stable_opd_mcore.rollout.environments import EnvironmentPool
from stable_opd_mcore.rollout.episodes import End, Episode, WhatFollows
from stable_opd_mcore.rollout.histories import Histories
from stable_opd_mcore.rollout.noise import row_key
from stable_opd_mcore.rollout.played_turns import (
    PlayedTurn,
    TeacherTurns,
    golden_turn,
    joined,
    with_turn,
)
from stable_opd_mcore.rollout.sessions import Asked as AskedAgent
from stable_opd_mcore.rollout.sessions import Student

# Metrics environment/...; failed episodes are counted as failures of grading, rollout/grading_*
COUNTS = ("answers", "replays", "not_repeatable", "neutralised_tokens", "cut_tokens")
_LARGEST_SEED = 2**31 - 1


class _Asked(NamedTuple):
    """An episode whose environment is asked what follows."""

    environment: str
    key: Hashable
    episode: Episode
    sampling: Sampling
    step: int
    is_playing: bool = False  # turns of others, which begin it, are still played


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
    logs: Path | None = None  # begins the paths of the workers' files; see EnvironmentPool
    progress: Callable[[], None] = lambda: None  # called whenever an environment has answered
    teacher_turns: TeacherTurns | None = None  # play Prompt.num_played turns; None: golden ones do

    def __post_init__(self) -> None:
        self._pools: dict[str, EnvironmentPool | AgentPool] = {}  # made for a first episode
        self._path = self.tokenizer.path if self.tokenizer else ""
        self._are_agents = {k: each.is_agent for k, each in self.environments.items()}
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

    def observe(self, episode: Episode, sampling: Sampling, step: int) -> Future[WhatFollows]:
        """What follows the last turn of an episode, or comes before its first one.

        Messages that a chat template cannot put there end the episode; `refusal` says why.
        """
        prompt, seen = episode.prompt, Future[WhatFollows]()
        if prompt.environment is None:
            seen.set_result(End(episode.turns[-1].finish_reason))
            return seen
        pool, is_training = self._pool(prompt.environment), sampling.training_step is not None
        key, plays = _key(episode, sampling, step), not episode.turns and prompt.num_played > 0
        seed = world_seed(prompt, sampling, step)
        if isinstance(pool, AgentPool):
            most = self._max_turns(prompt.environment, sampling)
            return pool.observe(AskedAgent(key, episode, is_training, most, seed))
        asked = _Asked(prompt.environment, key, episode, sampling, step, plays)
        if episode.turns:
            last = episode.turns[-1]
            answer = pool.say(asked.key, last.text, truncated=last.finish_reason == Ending.LENGTH)
        else:
            answer = pool.open(asked.key, dict(prompt.columns or {}), seed, is_training)
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
        names = (*COUNTS, *(AGENT_COUNTS if self.has_agents else ()))
        found = {name: Sum(counts[name]) for name in names}
        found |= shares(counts) if self.has_agents else {}
        return Metrics({f"environment/{name}": value for name, value in found.items()})

    def first_rewritten(self) -> str:
        """What is wrong with the first request of an agent whose history was rewritten."""
        pools = [pool for pool in self._pools.values() if isinstance(pool, AgentPool)]
        return next((pool.first_rewritten for pool in pools if pool.first_rewritten), "")

    @property
    def has_agents(self) -> bool:
        """Whether some of the environments are agents."""
        return any(self._are_agents.values())

    def close(self) -> None:
        """End the environments' processes."""
        for pool in self._pools.values():
            pool.shutdown()

    def _pool(self, name: str) -> EnvironmentPool | AgentPool:
        if name not in self._pools:
            settings = self.environments[name]
            limits = settings.workers, settings.timeout_seconds, settings.memory_gib
            logs = self.logs and self.logs.with_name(f"{self.logs.name}{_in_a_path(name)}")
            if self._are_agents[name]:
                students = self._student(settings, True), self._student(settings, False)
                notes = Notes(self._note_failure, self._note_refusal)
                kwargs = self.tokenizer.template_kwargs if self.tokenizer else {}
                pool = AgentPool(settings, students, notes, kwargs, self.progress, logs)
            else:
                pool = EnvironmentPool(settings.read(), *limits, progress=self.progress, logs=logs)
            self._pools[name] = pool
        return self._pools[name]

    def _student(self, settings: EnvironmentConfig, is_training: bool) -> Student:
        """What an agent's requests are for the student, with the template's arguments of training
        or of evaluations."""
        tokenizer = self.tokenizer if is_training else self.held_out_tokenizer
        bridge = self._bridges[not is_training]
        assert tokenizer is not None

        def histories(prompt_ids: Sequence[int]) -> Histories:
            return Histories(
                bridge,
                self._decoded,
                self._path,
                tuple(prompt_ids),
                self.system_prompt,
                settings.history == "append",
            )

        note = partial(self._note, is_training=is_training)
        return Student(histories, ToolCalls(tokenizer), self.window, note)

    def _max_turns(self, name: str, sampling: Sampling) -> int:
        settings, finished = self.environments[name], sampling.training_step
        return settings.max_turns if finished is None else settings.turns_at(finished)

    def _close(self, name: str, key: Hashable) -> None:
        if name in self._pools:
            self._pools[name].close(key)

    # ---- in the thread that an environment's answer comes in

    def _answered(
        self, asked: _Asked, seen: Future[WhatFollows], answered: Future[Answer | None]
    ) -> None:
        try:
            answer = answered.result()
            what = None if answer is None else self._what_follows(asked, answer)
            if isinstance(what, Observed) and asked.is_playing:
                if len(asked.episode.turns) < asked.episode.prompt.num_played:
                    return self._play(asked, what, seen)
                what = joined(asked.episode, what, self._decoded)
            if isinstance(what, End) and answer is not None and not answer.is_last:
                self._close(asked.environment, asked.key)
            seen.set_result(what)
        except BaseException as error:  # raised again where the observation is waited for
            seen.set_exception(error)

    def _play(self, asked: _Asked, what: Observed, seen: Future[WhatFollows]) -> None:
        """Have the teacher, or the golden solution, play the next turn."""
        turn, number = Future[PlayedTurn](), len(asked.episode.turns)
        opened = asked._replace(episode=asked.episode.after(what))
        if self.teacher_turns is None:
            turn.set_result(golden_turn(asked.episode.prompt, number))
        else:
            turn = self.teacher_turns.ask(opened.episode, asked.sampling, asked.step)
        turn.add_done_callback(partial(self._say_played, opened, seen))

    def _say_played(
        self, asked: _Asked, seen: Future[WhatFollows], turn: Future[PlayedTurn]
    ) -> None:
        """Say a turn that was played to the environment."""
        try:
            played = with_turn(asked.episode, turn.result(), self._decoded)
            last = played.turns[-1]
            pool, truncated = self._pool(asked.environment), last.finish_reason == Ending.LENGTH
            assert isinstance(pool, EnvironmentPool)  # refused with agents
            answer = pool.say(asked.key, last.text, truncated=truncated)
            asked = asked._replace(episode=played)
            answer.add_done_callback(partial(self._answered, asked, seen))
        except UserError as error:  # the teacher is lost, which ends the step on all ranks
            self._note_failure(asked.episode.prompt, f"the teacher played no turn: {error}")
            self._close(asked.environment, asked.key)
            seen.set_result(End(Ending.FAILED, 0.0, "crash"))
        except BaseException as error:  # raised again where the observation is waited for
            seen.set_exception(error)

    def _what_follows(self, asked: _Asked, answer: Answer) -> Observed | End:
        if answer.failure is not None:
            self._note_failure(asked.episode.prompt, answer.reason)
            return End(Ending.FAILED, answer.reward, answer.failure)
        if answer.is_last:
            told = {"metrics": answer.metrics, "feedback": answer.feedback}
            return End(Ending.STOP, answer.reward, **told)
        settings = self.environments[asked.environment]
        most = self._max_turns(asked.environment, asked.sampling)
        if len(asked.episode.turns) >= most and not asked.is_playing:
            return End(Ending.TURNS, 0.0)
        try:
            observed = self._encoded(asked, answer, settings)
        except DataError as error:  # the run ends later, on all ranks together
            self._note_refusal(f"prompt {asked.episode.prompt.prompt_id}: {error}")
            return End(Ending.REFUSED, 0.0)
        length = len(observed.token_ids)
        if not observed.restarts:
            length += len(asked.episode.context)
        if length < self.window:
            return observed
        is_new = answer.observed is not None and not asked.episode.turns
        if answer.restarts or is_new:  # no turn of the student is the cause
            self._note_failure(
                asked.episode.prompt,
                f"what it yielded as a new context has {length} tokens, and the student reads "
                f"{self.window}",
            )
            return End(Ending.FAILED, 0.0, "invalid")
        return End(Ending.WINDOW, 0.0)

    def _note_failure(self, prompt: Prompt, reason: str) -> None:
        self.first_failure = self.first_failure or f"row {prompt.prompt_id}: {reason}"

    def _note_refusal(self, reason: str) -> None:
        self.refusal = self.refusal or reason

    def _encoded(self, asked: _Asked, answer: Answer, settings: EnvironmentConfig) -> Observed:
        """An answer's messages as token ids. Before the first turn, None stands for the prompt.

        With history=template the whole conversation is rendered anew, from the student's texts.
        """
        episode, bridge = asked.episode, self._bridges[asked.sampling.training_step is None]
        is_first = not episode.turns
        tools = self._tools_of(episode, answer)
        messages, num_neutralised = bridge.neutralised(answer.observed or ())
        num_cut = 0
        if settings.max_observation_tokens is not None and not is_first and not answer.restarts:
            messages, num_cut = bridge.shortened(messages, settings.max_observation_tokens)
        conversation: Sequence[Message] = messages
        if is_first and answer.observed is None:
            conversation = with_system(episode.prompt.messages, self.system_prompt)
            seen = Observed()
            if tools:
                text = self._decoded(episode.prompt.token_ids)
                refuse_unnamed(tools, text, episode.prompt.prompt_id, self._path)
        elif is_first or answer.restarts:
            conversation = with_system(messages, self.system_prompt)
            seen = replace(bridge.render(conversation, (), tools), restarts=True)
            refuse_unnamed(tools, seen.text, episode.prompt.prompt_id, self._path)
        elif settings.history == "append":
            context = episode.context.tolist()
            seen = bridge.append(messages, context[-1], tools).after(context)
        else:
            said: Message = {"role": "assistant", "content": episode.turns[-1].text}
            conversation = [*episode.conversation, said, *messages]
            seen = bridge.render(conversation, episode.context.tolist(), tools)
        if not (is_first or answer.restarts):
            roles = frozenset(message["role"] for message in messages)
            self._note(roles, asked.sampling.training_step is not None)
        with self._lock:
            if asked.sampling.training_step is not None:
                self._counts["neutralised_tokens"] += num_neutralised
                self._counts["cut_tokens"] += num_cut
        rendered = tuple(conversation) if settings.history == "template" else ()
        text = self._decoded(seen.token_ids)
        read = tuple(messages)
        return replace(seen, text=text, messages=read, conversation=rendered, tools=tools)

    @staticmethod
    def _tools_of(episode: Episode, answer: Answer) -> tuple[Tool, ...]:
        """The tools that the student knows from this answer on."""
        if answer.tools is None:
            return episode.tools if episode.turns else tuple(episode.prompt.tools)
        tools = parse_tools(answer.tools, keeps_nulls=True)
        if len(tools) != len(answer.tools):
            raise DataError(
                f"the environment yielded the tools {answer.tools!s:.200}; expected a list of "
                "functions in OpenAI's form"
            )
        return tools

    def _note(self, roles: frozenset[str], is_training: bool) -> None:
        """Note the roles of messages that continue a context.

        Raises:
            DataError: the teacher scores them, but its template writes them in another form.
        """
        with self._lock:
            self.roles |= roles
        teacher = self.teacher_tokenizer
        if teacher is None or not teacher.has_template or not is_training:
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


def world_seed(prompt: Prompt, sampling: Sampling, step: int) -> int:
    """The seed of a prompt's episodes in a step. Generators of random numbers take one from 0 up to
    `_LARGEST_SEED`."""
    return row_key(sampling.seed, step, prompt.prompt_id, 0) & _LARGEST_SEED


def with_seeds(rollouts: Sequence[Rollout], sampling: Sampling, step: int) -> list[Rollout]:
    """The rollouts, those of an environment with the seed of their world."""
    return [
        each
        if each.prompt.environment is None
        else replace(each, seed=world_seed(each.prompt, sampling, step))
        for each in rollouts
    ]


def _in_a_path(name: str) -> str:
    """A source's name as the part of a file's name; "" for the run's own environment."""
    return name and f"_{re.sub(r'[^A-Za-z0-9.-]+', '_', name)}"


def _key(episode: Episode, sampling: Sampling, step: int) -> Hashable:
    """Of all episodes that are sampled at once, this one."""
    prompt = episode.prompt
    return sampling, step, prompt.slot, prompt.prompt_id, episode.sample_index
