"""Seconds a step with other values of rollout.max_staleness, and with other numbers of servers.

    for line in lag_advice(job): print(line)

Only of jobs whose servers have GPUs of their own. Not here: one prediction (seconds.py, lag.py).
"""

from __future__ import annotations

from dataclasses import replace

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.planning.job import Job
from stable_opd_mcore.planning.memory import memory_plan
from stable_opd_mcore.planning.seconds import step_seconds

SHOWN = ((0, False), (1, False), (1, True), (2, True), (4, False), (4, True))  # K, partial


def with_lag(job: Job, max_staleness: int, partial: bool) -> Job:
    """The job with these values of rollout.max_staleness and rollout.partial."""
    changes = {"max_staleness": max_staleness, "partial": partial}
    rollout = job.config.rollout.model_copy(update=changes)
    return replace(job, config=job.config.model_copy(update={"rollout": rollout}))


def tokens_per_second(job: Job) -> float:
    """Prompt and response tokens that the job trains on."""
    return job.trained_tokens / step_seconds(job).total


def best_split(job: Job) -> Job:
    """The job with its nodes divided between trainer and servers so that it is fastest.

    Only divisions that the layout allows and whose memory fits; else the job itself.
    """
    cluster, found = job.cluster, [job]
    total = cluster.nodes + cluster.server_nodes
    for nodes in range(1, total if cluster.server_nodes else 1):
        other = replace(job, cluster=replace(cluster, nodes=nodes, server_nodes=total - nodes))
        try:
            if other.topology.servers and memory_plan(other).fits:
                found.append(other)
        except UserError:
            continue
    return max(found, key=tokens_per_second)


def lag_advice(job: Job) -> list[str]:
    """Lines about how far rollouts may lag and how many nodes the servers should have."""
    if not job.drawn or job.topology.placement in (None, "colocated"):
        return []
    rates = []
    for ahead, partial in SHOWN:
        rate = tokens_per_second(with_lag(job, ahead, partial))
        rates.append(f"{ahead}{' partial' if partial else ''}: {rate:,.0f}")
    lines = [f"tokens/s by rollout.max_staleness and partial: {'; '.join(rates)}"]
    best = best_split(job)
    if best is not job:
        lines.append(
            f"fastest division of these nodes: {best.cluster.nodes} of the trainer and "
            f"{best.cluster.server_nodes} of servers ({tokens_per_second(best):,.0f} instead of "
            f"{tokens_per_second(job):,.0f} tokens/s)"
        )
    return lines
