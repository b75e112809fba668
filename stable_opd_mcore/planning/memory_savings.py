"""The values of `train.recompute` and `memory.offload` with which a run fits and is fastest.

    choice = choose(run)
    print(choice.line())

All combinations are predicted, at most 48. Layout and micro-batch stay the config's. Host memory is
not counted.
"""

import shlex
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import Literal, get_args

from stable_opd_mcore.config.training import Offloadable
from stable_opd_mcore.planning.hardware import GIB
from stable_opd_mcore.planning.memory import MemoryPlan, memory_plan
from stable_opd_mcore.planning.planned_run import PlannedRun
from stable_opd_mcore.planning.seconds import StepSeconds, step_seconds

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Prediction:
    """What a run needs and takes."""

    run: PlannedRun

    @cached_property
    def memory(self) -> MemoryPlan:
        return memory_plan(self.run)

    @cached_property
    def seconds(self) -> StepSeconds:
        return step_seconds(self.run)

    @property
    def recompute(self) -> Recompute:
        return self.run.config.train.recompute

    @property
    def offload(self) -> tuple[Offloadable, ...]:
        """The offloaded parts that the run has, in the schema's order."""
        parts = offloadable(self.run)
        return tuple(part for part in parts if part in self.run.config.offloaded)


@dataclass(frozen=True)
class Choice:
    """The chosen combination and the config's own."""

    own: Prediction
    best: Prediction  # the fastest that fits; the one that needs least if none fits

    @property
    def remedy(self) -> str:
        """Settings to add to the command line, quoted for a shell; "" for none."""
        changes = []
        if self.best.recompute != self.own.recompute:
            changes.append(f"train.recompute={self.best.recompute}")
        if self.best.offload != self.own.offload:
            changes.append(f"memory.offload=[{','.join(self.best.offload)}]")
        return shlex.join(changes)

    def line(self) -> str:
        """The choice in one line."""
        best, own = self.best, self.own
        needed = f"{best.memory.peak_bytes / GIB:.1f} GiB"
        if not best.memory.fits:
            what = self.remedy or "this config"
            return f"no train.recompute and memory.offload fit: {what} needs least, {needed}"
        what = self.remedy or "this config's train.recompute and memory.offload"
        took = f" instead of {own.seconds.total:.0f}" if own.memory.fits and self.remedy else ""
        return f"fastest that fits: {what} (about {best.seconds.total:.0f}{took} s, {needed})"


def choose(run: PlannedRun) -> Choice:
    """The fastest combination that fits.

    Among equally fast ones it is the config's own, then the one that keeps the trainer least busy:
    rollouts of the next step may hide the difference (rollout.max_staleness).
    """
    own, parts = Prediction(run), offloadable(run)
    subsets = [subset for n in range(len(parts) + 1) for subset in combinations(parts, n)]
    others = (
        run.changed(train={"recompute": recompute}, memory={"offload": offload})
        for recompute, offload in product(get_args(Recompute), subsets)
    )
    every = [own, *map(Prediction, others)]
    fitting = [each for each in every if each.memory.fits]
    if not fitting:
        return Choice(own, min(every, key=lambda it: (it.memory.peak_bytes, it.seconds.total)))

    def order(each: Prediction) -> tuple[float, bool, float]:
        return round(each.seconds.total, 6), each is not own, -each.seconds.rollout

    return Choice(own, min(fitting, key=order))


def offloadable(run: PlannedRun) -> tuple[Offloadable, ...]:
    """The parts that `memory.offload` may name in this run."""
    absent: set[Offloadable] = set()
    if not run.config.is_colocated:
        absent.add("student")
    if not run.frozen:
        absent.add("frozen")
    return tuple(part for part in get_args(Offloadable) if part not in absent)
