"""The mutation runner replaces the code of every kind of function that it has mutants of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from tests.mutants import Mutant, installer


@dataclass
class Kinds:
    side: int

    @cached_property
    def cached(self) -> int:
        return self.side + 1

    @property
    def plain(self) -> int:
        return self.side + 1

    @classmethod
    def of(cls, side: int = 2 - 1) -> Kinds:
        return cls(side + 1)


def mutant(function: str, old: str, new: str, in_parameters: bool = False) -> Mutant:
    """One of this file, in which `old` becomes `new`."""
    path = Path(__file__)
    source = path.read_text().replace(old, new)
    return Mutant("", path, ("Kinds", function), range(0), in_parameters, lambda: source)


@pytest.fixture(autouse=True)
def restored():
    functions = [vars(Kinds)["cached"].func, vars(Kinds)["plain"].fget, vars(Kinds)["of"].__func__]
    before = [(f, f.__code__, f.__defaults__) for f in functions]
    yield
    for function, code, defaults in before:
        function.__code__, function.__defaults__ = code, defaults


@pytest.mark.parametrize("name", ["cached", "plain"])
def test_properties_are_mutated(name):
    install = installer(mutant(name, "self.side + 1", "self.side - 1"))
    assert getattr(Kinds(5), name) == 6
    install()
    assert getattr(Kinds(5), name) == 4


def test_defaults_of_a_classmethod_are_mutated():
    installer(mutant("of", "2 - 1", "2 + 1", in_parameters=True))()
    assert Kinds.of().side == 4


def test_a_name_that_is_no_function_ends_the_run():
    """In a fork the error would count as a failed test, and the mutant as killed."""
    with pytest.raises(AssertionError, match="no way to mutate"):
        installer(mutant("__doc__", "", ""))
