"""What follows a turn of the student: another turn, or the episode's end.

    interaction.observe(episode, sampling, step)    # -> Future[Observation]

Engines own the loop over turns; they call `observe` wherever an episode awaits an observation, and
on one rank of a replica only. A prompt without an environment has one turn: its end is the
episode's.
"""

from __future__ import annotations

from concurrent.futures import Future

from stable_opd_mcore.records import Sampling
from stable_opd_mcore.rollout.episodes import Episode, Observation


class Interaction:
    """Says what follows a turn."""

    def observe(self, episode: Episode, sampling: Sampling, step: int) -> Future[Observation]:  # noqa: ARG002
        """What follows the last turn of an episode, or comes before its first one."""
        seen = Future[Observation]()
        seen.set_result(Observation(finish_reason=episode.turns[-1].finish_reason))
        return seen
