"""Which `train.recompute` and `memory.offload` of a run is fastest among those that fit its GPUs.

    choice = choose(config, models, layout, device, work, servers, gpus_per_node)
    print(choice.line())

All combinations are planned; there are at most 48. Layout and micro-batch stay the config's. Host
memory is not counted. Not here: what a combination needs (memory.py) and takes (seconds.py).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Literal, get_args

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.config.training import Offloadable
from stable_opd_mcore.planning.hardware import GIB, Device
from stable_opd_mcore.planning.layout import Layout
from stable_opd_mcore.planning.memory import MemoryPlan, Models, memory_plan
from stable_opd_mcore.planning.seconds import Servers, StepSeconds, step_seconds
from stable_opd_mcore.planning.work import Work

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Combination:
    """A value of both settings, and what it needs and takes."""

    recompute: Recompute
    offload: tuple[Offloadable, ...]
    memory: MemoryPlan
    seconds: StepSeconds


@dataclass(frozen=True)
class Choice:
    """The chosen combination beside the config's own."""

    own: Combination
    best: Combination  # the fastest that fits; where none fits, that which needs least

    @property
    def overrides(self) -> tuple[str, ...]:
        """Settings to add to the command line of `train` or of a Slurm script; () for none."""
        changes = []
        if self.best.recompute != self.own.recompute:
            changes.append(f"train.recompute={self.best.recompute}")
        if self.best.offload != self.own.offload:
            changes.append(f"memory.offload=[{','.join(self.best.offload)}]")
        return tuple(changes)

    @property
    def remedy(self) -> str:
        """The overrides, quoted for a shell."""
        return shlex.join(self.overrides)

    def line(self) -> str:
        """The choice in one line."""
        best, own = self.best, self.own
        needed = f"{best.memory.peak_bytes / GIB:.1f} GiB"
        if not best.memory.fits:
            what = self.remedy or "this config"
            return f"no train.recompute and memory.offload fit: {what} needs least, {needed}"
        what = self.remedy or "this config's train.recompute and memory.offload"
        took = f" instead of {own.seconds.total:.1f}" if own.memory.fits and self.overrides else ""
        return f"fastest that fits: {what} ({best.seconds.total:.1f}{took} s a step, {needed})"

    def as_values(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "fits": self.best.memory.fits,
            "overrides": self.overrides,
            "recompute": self.best.recompute,
            "offload": self.best.offload,
            "peak_gib": round(self.best.memory.peak_bytes / GIB, 3),
            "seconds": self.best.seconds.total,
        }


def choose(
    config: Config,
    models: Models,
    layout: Layout,
    device: Device,
    work: Work,
    servers: Servers,
    gpus_per_node: int,
) -> Choice:
    """The fastest combination that fits.

    Among equally fast ones it is the config's own, then the one that keeps the trainer least busy:
    rollouts of the next step may hide the difference (rollout.async_steps).
    """

    def plan(recompute: Recompute, offload: tuple[Offloadable, ...]) -> Combination:
        changed = with_settings(config, recompute, offload)
        memory = memory_plan(changed, models, layout, device, work)
        seconds = step_seconds(changed, models, layout, device, work, servers, gpus_per_node)
        return Combination(recompute, offload, memory, seconds)

    parts = offloadable(config, models)
    own = plan(config.train.recompute, tuple(part for part in parts if part in config.offloaded))
    subsets = [subset for n in range(len(parts) + 1) for subset in combinations(parts, n)]
    plans = [own, *(plan(*both) for both in product(get_args(Recompute), subsets))]
    fitting = [each for each in plans if each.memory.fits]
    if not fitting:
        return Choice(
            own, min(plans, key=lambda each: (each.memory.peak_bytes, each.seconds.total))
        )

    def order(each: Combination) -> tuple[float, bool, float]:
        seconds = each.seconds
        busy = seconds.score + seconds.update + seconds.offload
        return round(seconds.total, 6), each is not own, busy

    return Choice(own, min(fitting, key=order))


def with_settings(config: Config, recompute: Recompute, offload: tuple[Offloadable, ...]) -> Config:
    """The config with these values of both settings."""
    train = config.train.model_copy(update={"recompute": recompute})
    memory = config.memory.model_copy(update={"offload": offload})
    return config.model_copy(update={"train": train, "memory": memory})


def offloadable(config: Config, models: Models) -> tuple[Offloadable, ...]:
    """The parts that `memory.offload` may name in this run."""
    absent: set[Offloadable] = set()
    if not config.is_colocated:
        absent.add("student")
    if models.teacher is None and not models.reference:
        absent.add("frozen")
    return tuple(part for part in get_args(Offloadable) if part not in absent)
