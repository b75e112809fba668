"""A user's function: found in its file, imported once, and run as it was read."""

import pickle
import sys
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


UNFIT = [
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
]  # named, message


def test_what_is_no_fitting_function_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for named, message in UNFIT:
        Path("own.py").write_text(GOOD)
        Path("broken.py").write_text("def f(:")
        Path("ends.py").write_text("def f(a, b): ...\nraise SystemExit(0)")
        with pytest.raises(ConfigError, match=message):
            read_user_function(named, ("a", "b"))
        Path(named.partition(":")[0]).with_suffix(".py").write_text("def f(a, b): ...")
        read_user_function(f"{named.partition('.')[0]}.py:f", ("a", "b"))


FILES = {
    "rules.py": "from dataclasses import dataclass\n@dataclass\nclass Rules:\n    most: int = 3",
    "game/__init__.py": "from .core import play",
    "game/core.py": "from . import words\nimport game.deep.down\ndef play(): return words.N",
    "game/words.py": "N = 5",
    "game/deep/down.py": "DEEP = 1",
    "plain/folder.py": "import rules\nN = rules.Rules().most",
    "late.py": "N = 7",
    "unused.py": "1 / 0",
}


@pytest.mark.parametrize(
    ("source", "result", "names"),
    [
        ("from rules import Rules\ndef f(a, b): return Rules().most", 3, ["rules.py"]),
        (
            "import game\ndef f(a, b): return game.play()",
            5,
            ["game/__init__.py", "game/core.py", "game/deep/down.py", "game/words.py"],
        ),
        (
            "from plain.folder import N\ndef f(a, b): return N",
            3,
            ["plain/folder.py", "rules.py"],
        ),
        ("def f(a, b):\n    from late import N\n    return N", 7, ["late.py"]),
        ("import json, os.path\ndef f(a, b): return 1", 1, []),
    ],
)
def test_a_file_imports_the_files_of_its_folder_as_they_were_read(tmp_path, source, result, names):
    for folder, change in (("one", ""), ("two", "N = 11\n")):  # of the same names
        for name, content in FILES.items():
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(content)
        (tmp_path / folder / "own.py").write_text(source)
        (tmp_path / folder / "late.py").write_text(FILES["late.py"] + "\n" + change)
    read = read_user_function(f"{tmp_path}/one/own.py:f", ("a", "b"))
    read_user_function(f"{tmp_path}/two/own.py:f", ("a", "b"))
    assert [name for name, _ in read.neighbours] == names
    for name in names:
        (tmp_path / "one" / name).write_text("raise OSError")
    modules, path = {*sys.modules}, [*sys.path]
    if "late.py" not in names:  # an import in a function needs a process of its own
        assert pickle.loads(pickle.dumps(read)).load()(1, 2) == result
    assert ({*sys.modules} - modules, sys.path) == (
        {name for name in sys.modules if name.startswith("own_code_")} - modules,
        path,
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import absent_one", "No module named 'absent_one'; a file can import .* of its folder"),
        ("from envs.rules import Rules", "No module named 'envs'; a file can import installed"),
        ("from . import rules", "attempted relative import.*; a file can .*as in `import name`"),
        ("import rules.more", "'rules' is not a package; a file can import"),
        ("import yaml", "yaml: a package that is installed has the same name.*; rename yours"),
    ],
)
def test_what_a_file_cannot_import_says_the_rule(tmp_path, monkeypatch, source, message):
    """From the directory above, as `python -m` puts it on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    Path("envs").mkdir()
    Path("envs/rules.py").write_text(FILES["rules.py"])
    Path("envs/yaml.py").touch()
    Path("envs/own.py").write_text(f"{source}\ndef f(a, b): ...")
    with pytest.raises(ConfigError, match=message):
        read_user_function("envs/own.py:f", ("a", "b"))


def test_what_an_own_search_path_finds_is_named(tmp_path, caplog):
    for name in ("lib/far.py", "lib/far_too.py", "one/near.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import json\nN = 3")
    source = f"import sys\nsys.path.append({str(tmp_path / 'lib')!r})\nimport far, near\n"
    source += "def f(a, b):\n    from far_too import N\n    return N"
    (tmp_path / "one/own.py").write_text(source)
    read = read_user_function(f"{tmp_path}/one/own.py:f", ("a", "b"))
    assert [name for name, _ in read.neighbours] == ["near.py"]
    assert "it imports far, far_too through its own sys.path" in caplog.text
    assert len(caplog.records) == 1


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


@pytest.mark.parametrize(
    ("source", "is_async"),
    [
        ("async def f(row, seed):\n    yield 1", True),
        ("import functools\nasync def g(row, seed):\n    yield 1\n"
         "f = functools.wraps(g)(lambda *both: g(*both))", True),
        ("class G:\n    async def __call__(self, row, seed):\n        yield 1\nf = G()", True),
        ("def f(row, seed):\n    yield 1", False),
    ],
)  # fmt: skip
def test_an_asynchronous_function_is_known_also_inside_another(tmp_path, source, is_async):
    (tmp_path / "own.py").write_text(source)
    assert read_user_function(f"{tmp_path}/own.py:f", ("row", "seed")).is_async == is_async
