"""A user's function: found in its file, imported once, and run as it was read."""

import pickle
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
"""


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("own.py", "'own.py': expected path/to/file.py:function"),
        ("own.txt:f", "expected path/to/file.py:function"),
        ("own.py:f()", "expected path/to/file.py:function"),
        ("absent.py:f", "absent.py: No such file.*relative to the working directory, /"),
        ("broken.py:f", "broken.py: importing it fails: SyntaxError: .*line 1"),
        ("ends.py:f", "ends.py: importing it fails: SystemExit: 0"),
        ("own.py:g", r"no function g at its top level; expected def g\(a, b\)"),
        ("own.py:annotations", "no function annotations"),
        ("own.py:narrow", r"narrow\(a\) cannot be called: too many .*; expected def narrow\(a, b"),
        ("own.py:wide", r"wide\(a, b, c\) cannot be called: missing a required argument: 'c'"),
        ("own.py:keyword", "keyword.* cannot be called: missing a required"),
    ],
)
def test_what_is_no_fitting_function_is_refused(tmp_path, monkeypatch, named, message):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(GOOD)
    Path("broken.py").write_text("def f(:")
    Path("ends.py").write_text("def f(a, b): ...\nraise SystemExit(0)")
    with pytest.raises(ConfigError, match=message):
        read_user_function(named, ("a", "b"))


def test_what_was_read_runs_in_any_process_after_the_file_has_changed(tmp_path):
    path, named = tmp_path / "own.py", f"{tmp_path}/own.py:f"
    path.write_text(GOOD)
    read_user_function(f"{path}:rest", ("a", "b"))
    read = read_user_function(named, ("a", "b"))
    assert read_user_function(named, ("a", "b")).module() is read.module()
    path.write_text("def f(a, b): return a * b")
    assert pickle.loads(pickle.dumps(read)).load()(1, 2) == 8
    assert read_user_function(named, ("a", "b")).load()(1, 2) == 2
    path.write_text("1 / 0")
    with pytest.raises(ConfigError, match="importing it fails: ZeroDivisionError"):
        read_user_function(named, ("a", "b"))
