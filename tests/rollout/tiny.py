"""The tiny model of the rollout tests, and prompts for it."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from stable_opd_mcore.data.bridge import Observed
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.files.huggingface import load_hf
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from stable_opd_mcore.rollout.embedded import EmbeddedEngine
from stable_opd_mcore.rollout.episodes import End, Episode, WhatFollows
from stable_opd_mcore.rollout.interaction import Interaction
from tests.models import tiny

VOCAB = 37  # odd: tensor parallelism pads it
WINDOW = 96


def save_tiny(directory: Path, family: str = "qwen2") -> Path:
    """Four layers, grouped queries, weights large enough that distributions are uneven."""
    fields = {"vocab_size": VOCAB, "max_position_embeddings": WINDOW, "initializer_range": 0.25}
    model = tiny.transformer(tiny.config(family, **fields), seed=5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    model.save_pretrained(directory)
    return directory


class Talk(Interaction):
    """Observations of one to four tokens follow the first two turns; in odd samples the second one
    restarts."""

    def observe(self, episode: Episode, sampling: Sampling, step: int) -> Future[WhatFollows]:
        seen = Future[WhatFollows]()
        seen.set_result(self.answer(episode))
        return seen

    def answer(self, episode: Episode) -> WhatFollows:
        number = len(episode.turns)
        if number in (0, 3):
            return End(Ending.STOP, 1.0) if number else Observed()
        restarts = number == 2 and episode.sample_index % 2 == 1
        return Observed((5, *range(int(episode.token_ids[-1]) % 4)), restarts=restarts)


def build_engine(path: Path, world: World, **options) -> EmbeddedEngine:
    chunks = build_model(read_architecture(path), world, trainable=True)
    load_hf(chunks, path)
    options: dict[str, Any] = {"vocab_size": VOCAB} | options
    return EmbeddedEngine(chunks, world, decode, **options)


def sample_in_pieces(engine: EmbeddedEngine, prompts, sampling, step: int) -> list[Rollout]:
    """The step's rollouts in three pieces, of weight versions 3, 4 and 5, all of equal weights."""
    for version in (3, 4):
        engine.publish(version)
        for _ in range(2):  # the second time it changes nothing
            engine.prefetch(prompts, sampling, step=step, weight_version=5)
    engine.publish(5)
    return engine.generate(prompts, sampling, step=step)


def decode(ids) -> str:
    return " ".join(map(str, ids))


def make_prompts(count: int, longest: int = 9, environment: str | None = None) -> list[Prompt]:
    """Prompts of different lengths."""
    generator = torch.Generator().manual_seed(3)
    prompts = []
    for i in range(count):
        ids = torch.randint(0, VOCAB, (1 + (5 * i + 2) % longest,), generator=generator)
        prompt = Prompt(f"set:{i}", f"problem {i}", tuple(ids.tolist()), environment=environment)
        prompts.append(prompt)
    return prompts
