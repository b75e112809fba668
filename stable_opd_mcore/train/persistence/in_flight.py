"""Rollouts drawn ahead, stored for each checkpoint (rollout.max_staleness).

`in_flight/step_000100/` belongs to checkpoint step_000100 and holds one file of rollouts for each
step that they were drawn for, such as step_000101.jsonl, with the tokens that unfinished responses
have, and with the experts that were chosen for them (rollout.routing_replay). A resumed run goes on
from them, so it trains on the rollouts that the interrupted one would have had. They are written
before the checkpoint; without that checkpoint they are not read. Not here: drawing ahead
(rollout/).
"""

import shutil
from pathlib import Path

from stable_opd_mcore.data.rollout_files import read_rollouts
from stable_opd_mcore.host.atomic_files import tolerating_leftovers
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.train.persistence.rollout_writer import write_together

FOLDER = "in_flight"


def save_in_flight(directory: Path, step: int, engine: RolloutEngine, world: World) -> None:
    """Store what is drawn ahead after `step`; delete what belongs to deleted checkpoints.

    What is stored for `step` already, by a run that was killed or that resumed from there, is
    replaced file by file. Collective.
    """
    home, drawn = _folder(directory, step), engine.in_flight()
    if world.rank == 0:
        kept = {path.name for path in (directory / "checkpoints").glob("step_*")} | {home.name}
        for path in (directory / FOLDER).glob("step_*"):
            if path.name not in kept:
                with tolerating_leftovers(path):
                    shutil.rmtree(path)
    files = [home / f"step_{later:06d}.jsonl" for later in drawn]
    for rollouts, path in zip(drawn.values(), files, strict=True):
        write_together(path, rollouts, world, with_experts=True)
    if world.rank == 0:
        for path in set(home.glob("*")) - set(files):
            with tolerating_leftovers(path):
                path.unlink()


def restore_in_flight(directory: Path, step: int, engine: RolloutEngine) -> None:
    """Give the engine what was stored with the checkpoint of `step`."""
    paths = sorted(_folder(directory, step).glob("step_*.jsonl"))
    held = {_step_of(path): read_rollouts(path, routing=engine.routing) for path in paths}
    engine.restore(held)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def _folder(directory: Path, step: int) -> Path:
    return directory / FOLDER / f"step_{step:06d}"
