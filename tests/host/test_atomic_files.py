"""Files and directories that are whole however their writing ends: killed at every point of it."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import (
    atomic_directory,
    require_new_directory,
    write_atomically,
)

# Ends itself before the operation of this number on the file system, counted below the directory.
KILLED = """
import os, sys
from pathlib import Path
from stable_opd_mcore.host.atomic_files import atomic_directory, write_atomically

directory, left = sys.argv[1], int(sys.argv[2])

def count(event, args):
    global left
    below = str(args and args[0]).startswith(directory) and event != "os.scandir"
    if below or event in ("os.remove", "os.rmdir"):  # rmtree's own are relative
        left -= 1
        if left < 0:
            os._exit(9)

def write_directory(text):
    with atomic_directory(Path(directory, "model")) as new:
        for name in "ab":
            (new / name).write_text(text)

sys.addaudithook(count)
"""
DIRECTORY = KILLED + "write_directory('new')"
FILE = KILLED + "write_atomically(Path(directory, 'file'), b'new')"


def killed_at_every_point(script: str, directory: Path) -> Iterator[int]:
    """Run the script killed before its first operation, its second, and so on to its end."""
    for point in range(100):
        command = [sys.executable, "-c", script, str(directory), str(point)]
        code = subprocess.run(command, check=False, timeout=120).returncode
        assert code in (0, 9)
        yield point
        if code == 0:
            return
    raise AssertionError("it never got to its end")


def write(directory: Path, text: str) -> None:
    with atomic_directory(directory) as new:
        for name in "ab":
            (new / name).write_text(text)


def content(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(directory.iterdir())}


def test_a_directory_that_exists_or_cannot_be_made_is_refused(tmp_path):
    require_new_directory(tmp_path / "a" / "new")
    assert list((tmp_path / "a").iterdir()) == []
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for path, reason in (
        (tmp_path, "exists; give"),
        (tmp_path / "link", "exists; give"),
        (tmp_path / "file" / "new", "cannot be created: a part of its path is a file"),
        (tmp_path / "file" / "a" / "new", "cannot be created: a part of its path is a file"),
        (Path("/proc/x"), "cannot be created: .*may"),
    ):
        with pytest.raises(UserError, match=f"{path}:? {reason}"):
            require_new_directory(path)


def test_a_file_has_the_permissions_of_the_users_umask(tmp_path):
    before = os.umask(0o077)
    try:
        write_atomically(tmp_path / "private", b"x")
        os.umask(0o002)
        write_atomically(tmp_path / "shared", b"x")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("private", "shared")]
    assert modes == [0o600, 0o664]


def test_a_killed_file_is_the_old_or_the_new(tmp_path):
    found = []
    write_atomically(tmp_path / "file", b"old")
    for _ in killed_at_every_point(FILE, tmp_path):
        found.append((tmp_path / "file").read_bytes())
    assert set(found) == {b"old", b"new"}
    assert found == sorted(found, reverse=True)  # new once, at the end


def test_a_killed_directory_is_the_old_or_the_new_and_the_next_writer_finds_it(tmp_path):
    """Between the two renames nothing is there, but the next writer puts the old one back first."""
    model, texts, absent = tmp_path / "model", set(), 0
    write(model, "old")
    for _ in killed_at_every_point(DIRECTORY, tmp_path):
        absent += not model.exists()
        with pytest.raises(KeyboardInterrupt), atomic_directory(model):
            raise KeyboardInterrupt
        found = content(model)
        texts.add(found["a"])
        assert found == dict.fromkeys("ab", found["a"])
        write(model, "old")
        assert os.listdir(tmp_path) == ["model"]
        assert content(model) == dict.fromkeys("ab", "old")
    assert texts == {"old", "new"}
    assert absent == 1
