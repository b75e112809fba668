"""A user's function: found without running its file, run as it was read."""

import hashlib
from pathlib import Path

import pytest

from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.host.user_code import read_user_function

GOOD = """
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Point:
    x: int = 3
def f(a, b, c=2): return a + b + c + Point().x
def narrow(a): ...
def wide(a, b, c): ...
def keyword(a, b, *, c): ...
def rest(*all): ...
async def later(a, b): ...
"""


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("own.py", "'own.py': expected path/to/file.py:function"),
        ("own.txt:f", "expected path/to/file.py:function"),
        ("own.py:f()", "expected path/to/file.py:function"),
        ("absent.py:f", "absent.py: No such file.*relative to the working directory, /"),
        ("broken.py:f", "broken.py: no valid Python: .*line 1"),
        ("own.py:g", r"no function g at its top level \(there: f, narrow, wide.*def g\(a, b\)"),
        ("own.py:later", "no function later"),
        ("own.py:narrow", r"line 8: narrow\(a\) cannot be called with 2 values; expected def n"),
        ("own.py:wide", "cannot be called with 2 values"),
        ("own.py:keyword", "cannot be called with 2 values"),
    ],
)
def test_what_is_no_fitting_function_is_refused(tmp_path, monkeypatch, named, message):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(GOOD)
    Path("broken.py").write_text("def f(:")
    with pytest.raises(ConfigError, match=message):
        read_user_function(named, ("a", "b"))


def test_what_was_read_runs_and_nothing_before(tmp_path):
    path, named = tmp_path / "own.py", f"{tmp_path}/own.py:f"
    path.write_text(GOOD)
    read_user_function(f"{path}:rest", ("a", "b"))
    read = read_user_function(named, ("a", "b"))
    assert read.sha256 == hashlib.sha256(GOOD.encode()).hexdigest()
    path.write_text("def f(a, b): return 1 / 0\n1 / 0")
    assert read.load()(1, 2) == 8
    changed = read_user_function(named, ("a", "b"))
    with pytest.raises(ZeroDivisionError):
        changed.load()
    with pytest.raises(ConfigError, match=f"SHA-256 is {changed.sha256}.*ask for {read.sha256}"):
        read_user_function(named, ("a", "b"), read.sha256)
