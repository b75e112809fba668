"""Rules for sources with teachers of their own: `data.train[].teacher`. Loads without torch."""

from typing import Any


def teachers_refusal(config: Any) -> str | None:
    """Why a source has no teacher of the name that it gives, or a teacher no source; None: all fit.
    Routes without a source depend on the sources' own names (inputs/source_uses.py).

    Args:
        config: schema.Config, which calls this.
    """
    if config.teacher is None:
        return None
    models, routes = config.teacher.models, config.teacher.routes
    key, names = ("teacher.models", models) if models else ("teacher.routes", routes)
    for source in config.data.sources:
        if source.teacher is not None and source.teacher not in names:
            remedy = "drop it, or add it to teacher.models, or to teacher.routes in place of urls"
            if names:
                remedy = f"name one of these: {', '.join(names)}"
            return (
                f"data.train: teacher {source.teacher!r} of {source.path} is not a key of {key}; "
                f"{remedy}"
            )
    used = {config.teacher_of(each) for each in config.data.sources if config.asks_teacher(each)}
    if not models or not used:  # no objective asks a teacher: the section has no effect
        return None
    if idle := [name for name in models if name not in used]:
        return (
            f"teacher.models.{idle[0]} scores no rows: no source whose objective asks a teacher "
            "names it; drop it, or set data.train[].teacher"
        )
    if None not in used and not config.teacher.adapters:
        return (
            "every source names one of teacher.models, so the model of teacher.path scores no "
            "rows; set teacher.path to one of them, and drop it from teacher.models and from its "
            "sources"
        )
    return None
