"""Other values for names of modules and classes, for a while.

    with replaced(setup, build_engine=fake_engine), replaced(dist, new_group=fake_group): ...

A rehearsal runs the trainer and Megatron as they are; only what a world of one process without GPU,
models and servers lacks is replaced, and only so where no argument leads there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give names of a module or class these values; afterwards they are as before.

    Raises:
        AttributeError: the owner has no such name, so nothing would read the value.
    """
    for name in values:
        getattr(owner, name)
    before = {name: vars(owner).get(name, _ABSENT) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:  # a class had it from a base
                delattr(owner, name)
            else:
                setattr(owner, name, value)
