"""A horizon that grows linearly with the steps: of tokens in a response, of turns in an episode."""


def horizon_at(step: int, start: int | None, steps: int | None, largest: int) -> int:
    """The horizon of the step that follows `step` finished ones; `largest` if it does not grow."""
    if start is None or steps is None or start >= largest:
        return largest
    return start + (largest - start) * min(step, steps) // steps


def require_growth(
    section: str, start: int | None, steps: int | None, largest_key: str, largest: int
) -> None:
    """Raise a ValueError where only one of start and steps is set, or the horizon cannot grow."""
    if (start is None) != (steps is None):
        raise ValueError(
            f"{section}.horizon_start={start} with {section}.horizon_steps={steps}: a growing "
            "horizon needs both; set both or neither"
        )
    if start is not None and start >= largest:
        raise ValueError(
            f"{section}.horizon_start={start} is not below {section}.{largest_key}={largest}, to "
            "which it grows; lower it"
        )
