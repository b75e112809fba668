"""One file of rollouts from all ranks: each rank encodes its own, and rank 0 writes them.

A round takes the rollouts of one prompt of each data-parallel rank, so rank 0 never holds more than
the texts of a round, and the file is in the order of the prompts.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import torch.distributed as dist

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.rollout_files import encode_rollout
from stable_opd_mcore.host.atomic_files import atomic_file
from stable_opd_mcore.parallel.world import World, gather_objects, gather_on_first_rank
from stable_opd_mcore.records import Rollout

NUM_SAMPLES = 16  # rollouts of each step that rollout.save=samples keeps


def write_step(config: Config, world: World, step: int, rollouts: Sequence[Rollout]) -> None:
    """Write all rollouts of a step, the first NUM_SAMPLES, or none (`rollout.save`). Collective."""
    if config.rollout.save != "none":
        limit = None if config.rollout.save == "all" else NUM_SAMPLES
        write_together(config.run.files.rollouts(step), rollouts, world, limit)


def write_together(
    path: Path,
    rollouts: Sequence[Rollout],
    world: World,
    limit: int | None = None,
) -> None:
    """Write the rollouts of all data-parallel ranks, the prompts of the ranks in turn. Collective.

    Args:
        rollouts: this data-parallel rank's, those of a prompt one after the other.
        limit: write only this many, the first ones.
    """
    if dist.get_rank(world.model_group):
        return  # the first rank of the replica holds the same
    group = world.data_group
    prompts = [list(own) for _, own in groupby(rollouts, key=lambda rollout: rollout.prompt)]
    sizes = gather_objects([len(own) for own in prompts], group)  # rollouts of each prompt
    left = sum(map(sum, sizes)) if limit is None else limit
    with ExitStack() as stack:
        file = stack.enter_context(atomic_file(path)) if world.rank == 0 else None
        for turn in range(max(map(len, sizes))):
            if left <= 0:
                break
            own = prompts[turn][:left] if turn < len(prompts) else []
            lines = [encode_rollout(rollout) for rollout in own]
            gathered = gather_on_first_rank(lines, group)
            if file is not None:
                file.writelines([line for of_rank in gathered for line in of_rank][:left])
            left -= sum(of_rank[turn] for of_rank in sizes if turn < len(of_rank))
