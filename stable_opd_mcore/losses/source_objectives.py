"""The objective of a run: that of each source of `data.train`, or one for all.

No micro-batch has samples of two objectives (data/packing.py), so its loss is that of one. Sources
of different objectives are normalised each on its own and then weighed: the loss of a step is the
weighted mean of what each source's objective would give for its samples alone (docs/method.md §6).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.losses import token_weights
from stable_opd_mcore.losses.objectives import Objective, ScoresNeeded, build_objective
from stable_opd_mcore.sample_facts import SampleFacts, SampleWeights

_NONE: Mapping[str, Sequence[int]] = {}
_NEEDS: tuple[ScoresNeeded, ...] = ("none", "sampled", "topk", "hidden")  # the most come last


@dataclass(frozen=True)
class SourceObjectives:
    """The objectives of `Config.objectives_and_teachers`, and which of them each source has."""

    each: tuple[Objective, ...]  # MicroBatch.objective is a place here
    of_source: tuple[int, ...]  # for each source of data.train the place of its objective
    config: Config

    def with_loss_weights(self, beta: float, lambda_: float) -> SourceObjectives:
        """See `Objective.with_loss_weights`."""
        each = tuple(one.with_loss_weights(beta, lambda_) for one in self.each)
        return replace(self, each=each)

    @property
    def name(self) -> str:
        """The names of all."""
        return " and ".join(dict.fromkeys(one.name for one in self.each))

    @property
    def teacher_needs(self) -> ScoresNeeded:
        """The most that some objective needs from the teacher."""
        return _NEEDS[max(_NEEDS.index(one.teacher_needs) for one in self.each)]

    @property
    def reference_needs(self) -> ScoresNeeded:
        """What those with rollouts need from the reference."""
        return _NEEDS[max(_NEEDS.index(one.reference_needs) for one in self.each)]

    @property
    def needs_rollouts(self) -> bool:
        return any(one.needs_rollouts for one in self.each)

    @property
    def needs_golden(self) -> bool:
        return any(one.needs_golden for one in self.each)

    @property
    def needs_rewards(self) -> bool:
        return any(one.needs_rewards for one in self.each)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The stop ids that are one outcome where the teacher is compared; empty for none."""
        return next((one.stop_ids for one in self.each if one.stop_ids), ())

    @property
    def temperature(self) -> float:
        """See `Objective.temperature`."""
        return self.each[0].temperature

    @property
    def beta(self) -> float:
        """Weight of the KL to the reference."""
        return max(one.beta for one in self.each)

    @property
    def golden_weight(self) -> float:
        """Lambda; 1 in a run without rollouts."""
        return next((one for one in self.each if one.needs_rollouts), self.each[0]).golden_weight

    def sample_weights(self, facts: SampleFacts) -> SampleWeights:
        """See `Objective.sample_weights`."""
        if self.config.has_one_objective:
            return self.each[0].sample_weights(facts)
        weights = [source.weight for source in self.config.data.sources]
        return token_weights.per_source(
            facts, lambda source, own: self.each[self.of_source[source]].weights_of(own), weights
        )


def build_source_objectives(
    config: Config,
    student_stop_ids: Sequence[int],
    teacher_stop_ids: Sequence[int] | None,
    named_stop_ids: Mapping[str, Sequence[int]] = _NONE,
) -> SourceObjectives:
    """The objectives of a run's sources; teacher_stop_ids is None without a teacher.

    Args:
        named_stop_ids: those of each of `teacher.models`.

    Raises:
        ConfigError: see `build_objective`; or a source names a teacher that its objective does not
            ask.
    """
    pairs, sources = config.objectives_and_teachers, config.data.sources
    stops_of = {None: teacher_stop_ids, **named_stop_ids}
    each = tuple(
        replace(build_objective(config, student_stop_ids, stops_of[name], settings), teacher=name)
        for settings, name in pairs
    )
    of_source = tuple(
        pairs.index((config.objective_of(source), config.teacher_of(source))) for source in sources
    )
    for source, place in zip(sources, of_source, strict=True):
        needs = {one.teacher_needs for one in each}
        if source.teacher and each[place].teacher_needs == "none" and needs != {"none"}:
            raise ConfigError(
                f"data.train: teacher={source.teacher} of {source.path}, whose objective.name="
                f"{each[place].name} asks no teacher: drop it, or set another objective there"
            )
    return SourceObjectives(each, of_source, config)
