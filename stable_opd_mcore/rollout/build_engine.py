"""Builds the rollout engine that a config names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.nn import Module

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.environment_names import environments_of
from stable_opd_mcore.models.weights import architecture_of
from stable_opd_mcore.parallel.device_memory import DeviceMemory
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import Sampling
from stable_opd_mcore.rollout.embedded import EmbeddedEngine
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.rollout.interaction import Interaction
from stable_opd_mcore.rollout.played_turns import TeacherTurns
from stable_opd_mcore.rollout.replay import replay_engine
from stable_opd_mcore.rollout.sglang.build import build_sglang_engine
from stable_opd_mcore.serving.teacher import ServedTeacher

_log = logging.getLogger(__name__)


def build_engine(
    config: Config,
    world: World,
    chunks: Sequence[Module],
    tokenizer: Tokenizer,
    stop_requested: Callable[[], bool] = lambda: False,
    progress: Callable[[], None] = lambda: None,
    memory: DeviceMemory | None = None,
    teacher: ServedTeacher | None = None,
    teacher_tokenizer: Tokenizer | None = None,
) -> RolloutEngine:
    """The engine of `rollout.engine`, over the student's model chunks of this rank.

    Args:
        stop_requested: whether the run is about to end; then no server is waited for.
        progress: called from any thread whenever a server or an environment has answered, or a
            token is decoded.
        teacher_tokenizer: that of a teacher with a chat template of its own.

    Raises:
        UserError: the run to replay has no stored rollouts, or there are too few servers.
    """
    if config.rollout.engine == "replay":
        return replay_engine(config)
    interaction = build_interaction(config, chunks, tokenizer, teacher_tokenizer, progress)
    if config.rollout.prefix.by == "teacher" and teacher is not None:
        interaction.teacher_turns = TeacherTurns(teacher, tokenizer.stop_token_ids)
    if config.rollout.engine == "sglang":
        return build_sglang_engine(
            config,
            world,
            chunks,
            tokenizer=tokenizer.json_text,
            vocab_size=tokenizer.vocab_size,
            stop_requested=stop_requested,
            progress=progress,
            memory=memory,
            teacher=teacher,
            interaction=interaction,
        )
    if world.device.type == "cuda" and world.rank == 0:
        _log.warning(
            "rollout.engine=embedded decodes in Python, which takes minutes a step for a large "
            "student; set rollout.engine=sglang and rollout.sglang.placement=colocated"
        )
    return embedded_engine(
        *(config, world, chunks, tokenizer, progress),
        max_staleness=config.rollout.max_staleness,
        partial=config.rollout.partial,
        interaction=interaction,
    )


def evaluation_engine(
    config: Config, world: World, chunks: Sequence[Module], tokenizer: Tokenizer
) -> RolloutEngine:
    """The run's own engine; the embedded one where it replays stored rollouts."""
    if config.rollout.engine == "replay":
        return embedded_engine(config, world, chunks, tokenizer)
    return build_engine(config, world, chunks, tokenizer)


def embedded_engine(
    config: Config,
    world: World,
    chunks: Sequence[Module],
    tokenizer: Tokenizer,
    progress: Callable[[], None] = lambda: None,
    interaction: Interaction | None = None,
    **ahead: Any,
) -> EmbeddedEngine:
    """An engine that can sample responses to any prompt; evaluations use it too. `ahead` is
    `max_staleness` and `partial` of an engine that samples ahead."""
    return EmbeddedEngine(
        chunks,
        world,
        tokenizer.decode,
        vocab_size=tokenizer.vocab_size,
        progress=progress,
        interaction=interaction or build_interaction(config, chunks, tokenizer, progress=progress),
        **ahead,
    )


def build_interaction(
    config: Config,
    chunks: Sequence[Module],
    tokenizer: Tokenizer,
    teacher_tokenizer: Tokenizer | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Interaction:
    """The environments of the run; without any, every response is an episode."""
    environments = environments_of(config)
    if not environments:
        return Interaction()
    return Interaction(
        environments,
        tokenizer,
        tokenizer.with_template_kwargs(config.evaluation.chat_template_kwargs),
        config.data.system_prompt,
        architecture_of(chunks).max_positions,
        teacher_tokenizer,
        config.run.files.environments / f"rank_{dist.get_rank()}",
        progress,
    )


def training_sampling(
    config: Config, stop_token_ids: Sequence[int], *, scored: bool = False
) -> Sampling:
    """The sampling settings of a training step's rollouts; `scored`: a served teacher scores."""
    start, steps = config.sampling.horizon_start, config.sampling.horizon_steps
    return Sampling(
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        max_new_tokens=config.sampling.max_new_tokens,
        num_samples=config.rollout.samples_per_prompt,
        stop_token_ids=tuple(stop_token_ids),
        seed=config.train.seed,
        scored=scored,
        horizon=None if start is None or steps is None else (start, steps),
    )
