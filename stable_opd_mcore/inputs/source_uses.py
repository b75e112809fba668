"""What a run does with the rows of each source, which follows from the source's objective."""

from stable_opd_mcore.data.golden_turns import Golden
from stable_opd_mcore.data.sources import source_name
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.losses.source_objectives import SourceObjectives
from stable_opd_mcore.records import Use


def uses_of(objective: SourceObjectives) -> dict[str, Use]:
    """What the run does with the prompts of each source, by its name."""
    return {
        source_name(source): Use(
            objective=place,
            is_sampled=objective.each[place].needs_rollouts,
            is_taught=objective.each[place].teacher_needs != "none",
        )
        for source, place in zip(objective.config.data.sources, objective.of_source, strict=True)
    }


def routes_of(objective: SourceObjectives) -> dict[str, str]:
    """The key in `teacher.routes` of each source whose objective asks a teacher, by its name; none
    without routes.

    Raises:
        ConfigError: a key that `teacher.routes` lacks, or that no source has.
    """
    teacher, uses = objective.config.teacher, uses_of(objective)
    if teacher is None or not teacher.routes:
        return {}
    found = {
        source_name(source): source.teacher or source_name(source)
        for source in objective.config.data.sources
        if uses[source_name(source)].is_taught
    }
    names = ", ".join(sorted(teacher.routes))
    for source, route in found.items():
        if route not in teacher.routes:
            raise ConfigError(
                f"no teacher is routed for the source {source!r} of data.train: teacher.routes "
                f"has {names}, not {route!r}; add {route} to it, or set data.train[].teacher"
            )
    if found and (idle := sorted({*teacher.routes} - {*found.values()})):
        raise ConfigError(
            f"teacher.routes.{idle[0]} scores no rows: the sources of data.train that ask a "
            f"teacher have {', '.join(sorted({*found.values()}))}; drop it, or name it in "
            "data.train[].teacher"
        )
    return found


def golden_of(objective: SourceObjectives) -> dict[str, Golden]:
    """Which rows of each source need golden solutions, now or once the guard raises lambda."""
    config, found = objective.config, dict[str, Golden]()
    widest = objective.with_loss_weights(0, config.largest_lambda)
    for source, place in zip(config.data.sources, objective.of_source, strict=True):
        own = widest.each[place]
        of_all = not own.needs_rollouts or own.terms.settings.on_policy_fraction < 1
        golden: Golden = "required" if of_all else "by_source"
        # Golden turns that begin rollouts are needed of no row.
        begins = config.rollout.prefix.by == "golden" and source.columns.golden == "all"
        of_others: Golden = "optional" if begins else "none"
        found[source_name(source)] = golden if own.needs_golden else of_others
    return found
