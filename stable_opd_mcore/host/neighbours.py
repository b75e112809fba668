"""The files of a user's folder that a file there imports, read once and imported from memory.

A file of the user's own may import installed packages and, by their names, the files and packages
of its folder, as in `import rules`. Which ones is read from the import statements, those
inside functions too, so that a run keeps and compares exactly these. Modules of two folders may
have the same name: each file gets its own.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

from stable_opd_mcore.errors import ConfigError

Neighbours = tuple[tuple[str, bytes], ...]  # path in the folder, contents
_IMPORTING = threading.RLock()


def neighbours_of(folder: Path, source: bytes) -> Neighbours:
    """The files of the folder that a file there imports, and those that they import.

    Raises:
        ConfigError: one of them has the name of an installed package.
    """
    found: dict[str, bytes] = {}
    waiting = [("", source)]
    while waiting:
        package, text = waiting.pop()
        for name in _imported_names(text, package):
            for place in _places(folder, name):
                if place not in found:
                    found[place] = (folder / place).read_bytes()
                    own = Path(place).parent.as_posix().replace("/", ".")
                    waiting.append((own.strip("."), found[place]))
    for top in sorted({place.partition("/")[0].removesuffix(".py") for place in found}):
        if top in sys.stdlib_module_names or _is_installed(top, folder):
            raise ConfigError(
                f"{folder / top}: a package that is installed has the same name, so `import {top}` "
                "may mean either; rename yours"
            )
    return tuple(sorted(found.items()))


def imported_from(folders: Sequence[str], sources: Sequence[bytes]) -> list[str]:
    """What these files import that is in one of the folders."""
    imported = {name.partition(".")[0] for text in sources for name in _imported_names(text, "")}
    return [name for name in sorted(filter(None, imported)) if PathFinder.find_spec(name, folders)]


@contextmanager
def importable(folder: Path, files: Neighbours, stays: bool = False) -> Iterator[None]:
    """Let imports find these files of the folder, and nothing else that is not installed.

    stays: afterwards too, for imports in functions; only in a process with one function of the
        user's.
    """
    tops = {place.partition("/")[0].removesuffix(".py") for place, _ in files}
    finder, path = _Finder(folder, files), [*sys.path]

    def own() -> dict[str, ModuleType]:
        return {k: v for k, v in sys.modules.items() if k.partition(".")[0] in tops}

    with _IMPORTING:
        before = own()
        for name in before:
            del sys.modules[name]
        sys.path[:] = _without_working_directory(path)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            if not stays:
                sys.meta_path.remove(finder)
                sys.path[:] = path
                for name in own():
                    del sys.modules[name]
                sys.modules.update(before)


class _Finder(MetaPathFinder, Loader):
    """Imports files of a folder from their contents."""

    def __init__(self, folder: Path, files: Neighbours) -> None:
        self._folder, self._files = folder, dict(files)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        place = fullname.replace(".", "/")
        for name, is_package in ((f"{place}/__init__.py", True), (f"{place}.py", False)):
            if name in self._files:
                origin = str(self._folder / name)
                spec = spec_from_loader(fullname, self, origin=origin, is_package=is_package)
                assert spec is not None
                spec.has_location = True
                return spec
        if any(each.startswith(f"{place}/") for each in self._files):  # without __init__.py
            return spec_from_loader(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        del spec

    def exec_module(self, module: ModuleType) -> None:
        file = getattr(module, "__file__", None)
        if file is not None:
            place = Path(file).relative_to(self._folder).as_posix()
            exec(compile(self._files[place], file, "exec"), vars(module))


def _imported_names(source: bytes, package: str) -> Iterator[str]:
    """The dotted names that a module of this package may import; none of a file with an error,
    which its import reports."""
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                yield from (each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) + 1 - node.level]
                base = [*(above if node.level else ()), *(node.module or "").split(".")]
                name = ".".join(filter(None, base))
                yield name
                yield from (f"{name}.{each.name}" for each in node.names)


def _places(folder: Path, name: str) -> Iterator[str]:
    """The files of the folder that an import of this name runs."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        place = "/".join(parts[:length])
        for file in (f"{place}/__init__.py", f"{place}.py"):
            if parts[0] and (folder / file).is_file():
                yield file
                break


def _is_installed(name: str, folder: Path) -> bool:
    others = [each for each in _without_working_directory(sys.path) if Path(each) != folder]
    spec = PathFinder.find_spec(name, others)
    return spec is not None and spec.loader is not None


def _without_working_directory(path: Sequence[str]) -> list[str]:
    """What Python searches, without the directory that `python -m` puts first and a command does
    not."""
    here, given = os.getcwd(), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if path and path[0] in ("", here) and here not in given:
        return [*path[1:]]
    return [*path]
