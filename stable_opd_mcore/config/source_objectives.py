"""Rules for sources with objectives of their own: `data.train[].objective`."""

from typing import Any, cast


def with_whole_objectives(values: Any) -> Any:
    """A config's values, in which each source's objective has the run's value of every key that it
    leaves out. Values of a wrong form come back as they are, and are refused with a sentence later.
    """
    try:
        run, data = values.get("objective", {}), values["data"]
        sources = data["train"] if isinstance(data["train"], list | tuple) else ()
        whole = [{**each, "objective": _over(run, each.get("objective"))} for each in sources]
    except (AttributeError, KeyError, TypeError):
        return values
    return {**values, "data": {**data, "train": whole}} if whole else values


def _over(below: object, own: object) -> object:
    """The keys of `own`, and those of `below` that it leaves out, in each section."""
    if not isinstance(below, dict) or not isinstance(own, dict):
        return own
    run, given = cast("dict[str, Any]", below), cast("dict[str, Any]", own)
    return run | {key: _over(run.get(key), value) for key, value in given.items()}


def objectives_refusal(config: Any) -> str | None:
    """Why sources of different objectives cannot train together; None: they can.

    Args:
        config: schema.Config, which calls this.
    """
    if config.has_one_objective:
        return None
    names = " and ".join(dict.fromkeys(each.name for each in config.objectives))
    if config.normaliser != "per_source":
        return (
            f"normaliser={config.normaliser} with sources of different objectives ({names}): one "
            "mean over the tokens of several objectives would let the longest responses decide; "
            "set normaliser=per_source, and weigh the sources by `weight`"
        )
    for source in config.data.sources:
        objective = config.objective_of(source)
        if objective.on_policy_fraction < 1:
            return (
                f"objective.on_policy_fraction={objective.on_policy_fraction:g} of {source.path} "
                f"with sources of different objectives ({names}): it is a share of all prompts of "
                "the run; set it to 1, and give golden solutions a source of their own with "
                "objective.name=sft"
            )
        if objective.name == "sft" and not source.may_have_golden:
            return (
                f"data.train: {source.path} has objective.name=sft and no column of golden "
                "solutions to train on; set its columns.solution, or another objective"
            )
    return None


def objective_names(run: object, sources: object) -> str:
    """The names of a run's objectives, from its stored `objective.name` and `data.train`."""
    none: list[Any] = [{}]
    listed = cast("list[Any]", sources) if isinstance(sources, list) else none
    own = [cast("dict[str, Any]", each) for each in listed if isinstance(each, dict)]
    settings = [cast("dict[str, Any]", each.get("objective") or {}) for each in own]
    names: list[Any] = [each.get("name", run) for each in settings]
    return " and ".join(dict.fromkeys(map(str, names or [run])))
