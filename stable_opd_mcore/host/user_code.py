"""A function of the user's own, which the settings name as `path/to/file.py:function`.

The file is read once: its SHA-256 in the settings is that of the bytes that run. Reading it runs
nothing, because function and parameters are looked up in its syntax tree. Only settings name such a
file, never data or a checkpoint. It may import installed packages; files beside it are not found,
for their contents would not be in the hash.
"""

import ast
import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from stable_opd_mcore.errors import ConfigError


@dataclass(frozen=True)
class UserFunction:
    """A plain function in a file, read and not yet run."""

    path: str
    name: str
    source: bytes  # of the whole file

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source).hexdigest()

    def words(self, name: str, known: Sequence[str]) -> frozenset[str]:
        """The strings of a list or tuple at the file's top level; none without it.

        Raises:
            ConfigError: it is anything else, or holds a word that is not among the `known` ones.
        """
        values = [
            node.value
            for node in ast.parse(self.source).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        ]
        try:
            found = frozenset(ast.literal_eval(values[-1]) if values else ())
        except (ValueError, TypeError):
            found = frozenset({ast.unparse(values[-1])})
        if not found <= set(known):
            raise ConfigError(
                f"{self.path}: {name} = {ast.unparse(values[-1])}: expected a tuple of strings, of "
                f"{', '.join(known)}"
            )
        return found

    def load(self) -> Callable[..., Any]:
        """Run the file; its function. Whatever the file raises rises."""
        module = ModuleType(f"own_code_{self.sha256[:16]}")
        module.__file__ = self.path
        sys.modules[module.__name__] = module  # dataclasses look their module up there
        exec(compile(self.source, self.path, "exec"), vars(module))
        return vars(module)[self.name]


def is_user_function(name: str) -> bool:
    """Whether a setting's value is meant as `path/to/file.py:function`."""
    return ".py" in name


def read_user_function(
    named: str, parameters: Sequence[str], sha256: str | None = None
) -> UserFunction:
    """The function that a setting names, its file unchanged.

    Args:
        named: `path/to/file.py:function`, relative to the working directory.
        parameters: what it is called with, in order.
        sha256: of the file, where it is known already.

    Raises:
        ConfigError: no such file or function, other parameters, or another SHA-256.
    """
    path, _, name = named.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"{named!r}: expected path/to/file.py:function")
    try:
        source = Path(path).read_bytes()
        tree = ast.parse(source, path)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; the path is relative to the working directory, {Path.cwd()}"
        ) from error
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no valid Python: {error}") from error
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    wanted = f"def {name}({', '.join(parameters)})"
    if name not in functions:
        found = ", ".join(functions) or "none"
        raise ConfigError(
            f"{path}: no function {name} at its top level (there: {found}); expected {wanted}"
        )
    given = functions[name].args
    positional = [*given.posonlyargs, *given.args]
    least = len(positional) - len(given.defaults)
    most = float("inf") if given.vararg else len(positional)
    if not least <= len(parameters) <= most or None in given.kw_defaults:
        raise ConfigError(
            f"{path}, line {functions[name].lineno}: {name}({ast.unparse(given)}) cannot be called "
            f"with {len(parameters)} values; expected {wanted}"
        )
    found = UserFunction(path, name, source)
    if sha256 not in (None, found.sha256):
        raise ConfigError(
            f"{path}: its SHA-256 is {found.sha256}, and the settings ask for {sha256}: the file "
            "has changed; restore it, or set sha256 to null to take it as it is"
        )
    return found
