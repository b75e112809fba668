"""Prefetched rollouts, stored for each checkpoint (rollout.async_steps=1).

`in_flight/step_000100.jsonl` holds the rollouts of the step after checkpoint step_000100, so a
resumed run trains on the same rollouts as the interrupted one would have. It is written before the
checkpoint; without that checkpoint it is not read. Not here: prefetching itself (rollout/).
"""

from __future__ import annotations

from pathlib import Path

from stable_opd_mcore.data.rollout_files import read_rollouts
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.train.persistence.rollout_writer import write_together

FOLDER = "in_flight"


def save_in_flight(directory: Path, step: int, engine: RolloutEngine, world: World) -> None:
    """Store the rollouts prefetched after `step`; delete those of deleted checkpoints.

    Collective.
    """
    prefetched = engine.in_flight()
    if prefetched is None:
        return
    write_together(_path(directory, step), prefetched[1], world)
    if world.rank != 0:
        return
    kept = {path.name for path in (directory / "checkpoints").glob("step_*")}
    for path in (directory / FOLDER).glob("step_*.jsonl"):
        if path.stem not in kept and path != _path(directory, step):
            path.unlink()


def restore_in_flight(directory: Path, step: int, engine: RolloutEngine) -> None:
    """Give the engine the rollouts stored for the checkpoint of `step`, if there are any."""
    path = _path(directory, step)
    if path.is_file():
        engine.restore(step, read_rollouts(path))


def _path(directory: Path, step: int) -> Path:
    return directory / FOLDER / f"step_{step:06d}.jsonl"
