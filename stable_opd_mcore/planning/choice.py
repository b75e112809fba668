"""Other settings and divisions of the nodes that would make a run faster.

    choice = choose(job)
    print(choice.line(), *lag_advice(job))

Of `train.recompute` and `memory.offload` all combinations are predicted; there are at most 48.
Layout and micro-batch stay the config's. Host memory is not counted. Not here: what a job needs
(memory.py) and takes (seconds.py, lag.py).
"""

import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from typing import Literal, get_args

from stable_opd_mcore.config.training import Offloadable
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.planning.hardware import GIB
from stable_opd_mcore.planning.job import Job
from stable_opd_mcore.planning.memory import MemoryPlan, memory_plan
from stable_opd_mcore.planning.seconds import StepSeconds, step_seconds

Recompute = Literal["none", "selective", "full"]
# rollout.max_staleness and rollout.partial
SHOWN_LAGS = ((0, False), (1, False), (1, True), (2, True), (4, False), (4, True))


@dataclass(frozen=True)
class Prediction:
    """What a job needs and takes."""

    job: Job

    @cached_property
    def memory(self) -> MemoryPlan:
        return memory_plan(self.job)

    @cached_property
    def seconds(self) -> StepSeconds:
        return step_seconds(self.job)

    @property
    def recompute(self) -> Recompute:
        return self.job.config.train.recompute

    @property
    def offload(self) -> tuple[Offloadable, ...]:
        """The offloaded parts that the run has, in the schema's order."""
        parts = offloadable(self.job)
        return tuple(part for part in parts if part in self.job.config.offloaded)

    @property
    def tokens_per_second(self) -> float:
        """Prompt and response tokens that the job trains on."""
        return self.job.trained_tokens / self.seconds.total


@dataclass(frozen=True)
class Choice:
    """The chosen combination beside the config's own."""

    own: Prediction
    best: Prediction  # the fastest that fits; where none fits, that which needs least

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


def choose(job: Job) -> Choice:
    """The fastest combination that fits.

    Among equally fast ones it is the config's own, then the one that keeps the trainer least busy:
    rollouts of the next step may hide the difference (rollout.max_staleness).
    """
    own, parts = Prediction(job), offloadable(job)
    subsets = [subset for n in range(len(parts) + 1) for subset in combinations(parts, n)]
    others = (
        job.changed(train={"recompute": recompute}, memory={"offload": offload})
        for recompute, offload in product(get_args(Recompute), subsets)
    )
    every = [own, *map(Prediction, others)]
    fitting = [each for each in every if each.memory.fits]
    if not fitting:
        return Choice(own, min(every, key=lambda it: (it.memory.peak_bytes, it.seconds.total)))

    def order(each: Prediction) -> tuple[float, bool, float]:
        seconds = each.seconds
        busy = seconds.score + seconds.update + seconds.offload
        return round(seconds.total, 6), each is not own, busy

    return Choice(own, min(fitting, key=order))


def offloadable(job: Job) -> tuple[Offloadable, ...]:
    """The parts that `memory.offload` may name in this run."""
    absent: set[Offloadable] = set()
    if not job.config.is_colocated:
        absent.add("student")
    if not job.frozen:
        absent.add("frozen")
    return tuple(part for part in get_args(Offloadable) if part not in absent)


def best_split(job: Job) -> Prediction:
    """The job with its nodes divided between trainer and servers so that it is fastest.

    Only divisions that the layout allows and whose memory fits; else the job itself.
    """
    cluster, found = job.cluster, [Prediction(job)]
    total = cluster.nodes + cluster.server_nodes
    for nodes in range(1, total if cluster.server_nodes else 1):
        divided = replace(cluster, nodes=nodes, server_nodes=total - nodes)
        other = Prediction(replace(job, cluster=divided))
        with suppress(UserError):
            if other.job.topology.servers and other.memory.fits:
                found.append(other)
    return max(found, key=lambda each: each.tokens_per_second)


def lag_advice(job: Job) -> list[str]:
    """Lines about how far rollouts may lag and how many nodes the servers should have.

    None for a job without servers that have GPUs of their own.
    """
    if not job.drawn or job.topology.placement in (None, "colocated"):
        return []
    rates = []
    for ahead, partial in SHOWN_LAGS:
        lag = {"max_staleness": ahead, "partial": partial}
        other = Prediction(job.changed(rollout=lag))
        rates.append(f"{ahead}{' partial' if partial else ''}: {other.tokens_per_second:,.0f}")
    lines = [f"tokens/s by rollout.max_staleness and partial: {'; '.join(rates)}"]
    best, own = best_split(job), Prediction(job).tokens_per_second
    if best.job is not job:
        lines.append(
            f"fastest division of these nodes: {best.job.cluster.nodes} of the trainer and "
            f"{best.job.cluster.server_nodes} of servers ({best.tokens_per_second:,.0f} instead of "
            f"{own:,.0f} tokens/s)"
        )
    return lines
