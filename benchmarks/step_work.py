"""The work that benchmarks/step.py gives to both systems, and how both are measured.

Imported by this project's process and by TRL's, each in its own environment, so it uses only the
standard library and torch. Not here: models, data and tables (step.py), TRL (trl_step.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

EOS = 1  # the only stop token of tokenizer and models


@dataclass(frozen=True)
class Work:
    """One process to measure."""

    directory: str  # holds student/, teacher/ and prompts.jsonl ("problem")
    lengths: tuple[int, ...]  # response tokens, stop token included; one response per prompt
    budget: int  # max new tokens; a longer length never stops
    warmup_steps: int
    measured_steps: int
    threads: int
    objective: str  # gkd or opd; TRL has only the first

    @property
    def steps(self) -> int:
        return self.warmup_steps + self.measured_steps

    @property
    def response_tokens(self) -> int:
        """Response tokens of a step."""
        return sum(min(length, self.budget) for length in self.lengths)


@dataclass
class Steps:
    """Measurements of a process: seconds of every measured step, by phase."""

    rollout: list[float] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)  # all the rest of the step
    total: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # the process's, on all its cores
    response_tokens: list[int] = field(default_factory=list)  # seen by the loss
    loss: list[float] = field(default_factory=list)
    started_mib: float = 0.0  # resident before the first step
    peak_mib: float = 0.0  # resident at most, libraries included

    def add(
        self,
        rollout: float,
        score: float,
        total: float,
        cpu: float,
        response_tokens: int,
        loss: float,
    ) -> None:
        self.rollout.append(rollout)
        self.score.append(score)
        self.update.append(total - rollout - score)
        self.total.append(total)
        self.cpu.append(cpu)
        self.response_tokens.append(response_tokens)
        self.loss.append(loss)


def force_stops(logits_BV: Tensor, due_B: Sequence[bool]) -> Tensor:
    """Logits after which a row stops if it is due, and does not otherwise; written in place.

    Neither system sees more of the script than these logits: a row is known to end when its stop
    token has been sampled.
    """
    logits_BV[:, EOS] = -torch.inf
    rows = [row for row, due in enumerate(due_B) if due]
    if rows:
        logits_BV[rows] = -torch.inf
        logits_BV[rows, EOS] = 0.0
    return logits_BV


def resident_mib(peak: bool) -> float:
    """This process's memory, now or at most. (A child's getrusage begins at its parent's peak.)"""
    field_name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field_name)) / 1024
