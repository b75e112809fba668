"""A function of the user's own, which the settings name as `path/to/file.py:function`.

Only settings name such a file, never data or a checkpoint. It is imported when the settings are
read. It may import installed packages and the files of its folder (neighbours.py); a run keeps a
copy of all of them.
"""

import functools
import inspect
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import xxhash

from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.host.neighbours import (
    Neighbours,
    importable,
    imported_from,
    neighbours_of,
)

_LOG = logging.getLogger(__name__)
MAX_CHARACTERS = 1_000_000  # of a text; its middle is cut out of a longer one
_CUT = "\n[...]\n"


class InvalidValueError(Exception):
    """The user's code returned or yielded an unexpected value; the text says which."""


@dataclass(frozen=True)
class UserFunction:
    """A function and the source of its file, so that every process runs the same code."""

    path: str
    name: str
    source: bytes  # the whole file
    neighbours: Neighbours = ()  # the files of its folder that it imports
    takes_optional: bool = False  # it has the parameter that not all such functions have
    is_async: bool = False  # it returns an asynchronous generator

    @property
    def files(self) -> dict[str, bytes]:
        """The contents of each file, by its path from the working directory."""
        folder = Path(self.path).parent
        return {self.path: self.source} | {str(folder / k): v for k, v in self.neighbours}

    def module(self) -> ModuleType:
        """The imported file; raises whatever the file raises."""
        return _imported(self.path, self.source, self.neighbours)

    def load(self, stays: bool = False) -> Callable[..., Any]:
        """The function. See `importable` for `stays`."""
        module = _imported(self.path, self.source, self.neighbours, stays)
        return vars(module)[self.name]


@functools.cache
def _imported(path: str, source: bytes, neighbours: Neighbours, stays: bool = False) -> ModuleType:
    module = ModuleType(f"own_code_{xxhash.xxh3_64_hexdigest(source)}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    with importable(Path(path).parent, neighbours, stays):
        known = {*sys.path}
        exec(compile(source, path, "exec"), vars(module))
        added = [folder for folder in sys.path if folder not in known]
        if names := imported_from(added, [source, *(text for _, text in neighbours)]):
            _LOG.warning(
                "%s: it imports %s through its own sys.path; a run keeps no copy of that, and a "
                "resume does not notice a change: move it next to the file, or install it",
                path,
                ", ".join(names),
            )
    return module


def is_user_function(name: str) -> bool:
    """Whether a setting's value is meant as `path/to/file.py:function`."""
    return ".py" in name


def read_user_function(
    named: str, parameters: Sequence[str], optional: str | None = None
) -> UserFunction:
    """The function that a setting names, imported once; `parameters` are its arguments, in order.

    optional: the name of one more, the last, which a function may have.

    Raises:
        ConfigError: no such file or function, a file that fails, or other parameters.
    """
    path, _, name = named.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"{named!r}: expected path/to/file.py:function")
    wanted = f"expected def {name}({', '.join(parameters)})"
    if optional is not None:
        wanted += f" or def {name}({', '.join((*parameters, optional))})"
    try:
        source = Path(path).read_bytes()
        found = UserFunction(path, name, source, neighbours_of(Path(path).parent, source))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; give a path relative to the working directory, {Path.cwd()}"
        ) from error
    try:
        function = vars(found.module()).get(name)
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and exit
        failure = f"{type(error).__name__}: {error}"
        rule = ""
        if isinstance(error, ImportError):
            rule = (
                "; a file can import installed packages and, by their names, the files of its "
                f"folder ({Path(path).resolve().parent}), as in `import name` for name.py"
            )
        raise ConfigError(f"{path}: importing it fails: {failure}{rule}; correct it") from error
    if not callable(function):
        raise ConfigError(f"{path}: no function {name} at its top level; {wanted}")
    try:
        signature = inspect.signature(function)
        if optional is not None and optional in signature.parameters:
            found, parameters = replace(found, takes_optional=True), (*parameters, optional)
        signature.bind(*parameters)
        both = inspect.unwrap(function), type(function).__call__  # decorated, or an object
        found = replace(found, is_async=any(map(inspect.isasyncgenfunction, both)))
    except TypeError as error:
        given = f"{name}{inspect.signature(function)}"
        raise ConfigError(f"{path}: {given} cannot be called: {error}; {wanted}") from error
    return found


def as_number(value: object) -> float | None:
    """A finite number, also of numpy; None for anything else."""
    if not isinstance(value, Real):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class Reward:
    """What a response is worth, by the user's code."""

    value: float  # finite
    feedback: str | None = None  # what the user's code says of the response; None: nothing


def as_reward(value: object) -> Reward | None:
    """A reward that the user's code returned, or a tuple of a reward and a text on the response;
    None for anything else."""
    number, feedback = value, None
    if isinstance(value, tuple) and len(cast("tuple[object, ...]", value)) == 2:
        number, feedback = cast("tuple[object, object]", value)
    reward = as_number(number)
    if reward is None or not isinstance(feedback, str | None):
        return None
    return Reward(reward, None if feedback is None else plain_text(feedback))


def plain_text(text: str) -> str:
    """A text that tokenizers take, without its middle where it is very long."""
    if len(text) > MAX_CHARACTERS:
        half = (MAX_CHARACTERS - len(_CUT)) // 2
        text = text[:half] + _CUT + text[-half:]
    return str.encode(text, "utf-8", "replace").decode()
