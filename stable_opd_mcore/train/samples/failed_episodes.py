"""End a run on all ranks if most episodes failed in their environment, or if one has a problem."""

from __future__ import annotations

from collections.abc import Sequence

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.inputs.restarts import restart_problem
from stable_opd_mcore.parallel.world import gather_objects
from stable_opd_mcore.records import Rollout
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.train.run import Run


def refuse_episodes(run: Run, rollouts: Sequence[Rollout]) -> None:
    """End a run on all ranks if more than half of a step's episodes failed in their environment, a
    chat template cannot write a message, or an episode has several contexts where a setting assumes
    one. Collective.
    """
    if not run.config.has_environment:
        return
    refuse_failed(run.engine, rollouts, restart_problem(run.config, rollouts))


def refuse_failed(
    engine: RolloutEngine,
    rollouts: Sequence[Rollout],
    problem: str | None = None,
    held_out: bool = False,
) -> None:
    """Raise a UserError on all ranks if more than half of the episodes failed in their environment,
    or one of them has a problem. Collective."""
    played = [each for each in rollouts if each.prompt.environment is not None]
    rows = [each.prompt.prompt_id for each in played if each.grading_failure is not None]
    own = len(played), rows, engine.first_failure, engine.refusal or problem
    counts, failed, reasons, problems = zip(*gather_objects(own), strict=True)
    rows = [row for each in failed for row in each]
    if len(rows) > sum(counts) / 2:
        reason = next((each for each in reasons if each), "see the log")
        which = " of held-out rows, which the environment plays too," if held_out else ""
        remedy = ", give these rows the columns that it reads, or set data.eval=null"
        raise UserError(
            f"{len(rows)} of {sum(counts)} episodes{which} failed in their environment, that of "
            f"row {rows[0]} among them; the first one: {reason}; correct it"
            f"{remedy if held_out else ''}, and start the command again"
        )
    for found in filter(None, problems):
        raise UserError(found)
