"""Rollouts drawn ahead, kept beside the checkpoint they belong to (rollout.async_steps=1).

`in_flight/step_000100.jsonl` holds what was drawn for the step after checkpoint step_000100, so a
resumed run trains on the very rollouts the interrupted one would have. Written before the
checkpoint, which is what makes it count. Not here: how rollouts are drawn ahead (rollout/).
"""

from __future__ import annotations

from pathlib import Path

from stable_opd_mcore.data.rollout_files import read_rollouts, write_rollouts
from stable_opd_mcore.parallel.world import World, gather_objects
from stable_opd_mcore.rollout.engine import RolloutEngine

FOLDER = "in_flight"


def save_in_flight(directory: Path, step: int, engine: RolloutEngine, world: World) -> None:
    """Keep what was drawn ahead when `step` was done; drop what belongs to checkpoints that are
    gone.

    Every rank makes the call; the first one writes.
    """
    ahead = engine.in_flight()
    shares = gather_objects(ahead[1] if ahead else [], world.data_group)
    if world.rank != 0 or ahead is None:
        return
    write_rollouts(_path(directory, step), [rollout for share in shares for rollout in share])
    kept = {path.name for path in (directory / "checkpoints").glob("step_*")}
    for path in (directory / FOLDER).glob("step_*.jsonl"):
        if path.stem not in kept and path != _path(directory, step):
            path.unlink()


def restore_in_flight(directory: Path, step: int, engine: RolloutEngine) -> None:
    """Give the engine what was drawn ahead when the checkpoint of `step` was saved, if anything
    was.
    """
    path = _path(directory, step)
    if path.is_file():
        engine.restore(step, read_rollouts(path))


def _path(directory: Path, step: int) -> Path:
    return directory / FOLDER / f"step_{step:06d}.jsonl"
