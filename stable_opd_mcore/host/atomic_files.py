"""Write a file or a directory completely or not at all, even if the writer is killed."""

import errno
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from stable_opd_mcore.errors import UserError

logger = logging.getLogger(__name__)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}


def write_atomically(path: Path, data: bytes) -> None:
    """Write `path`, and its parent directory if needed; replace an older file of that name."""
    with atomic_file(path) as file:
        file.write(data)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing; it replaces `path` when the block ends without an error.

    The parent directory is made if needed. After an error `path` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextmanager
def tolerating_leftovers(path: Path) -> Iterator[None]:
    """Log that `path`, which is no longer needed, cannot be deleted, and continue.

    On NFS a file that somebody reads keeps its directory from being deleted.
    """
    try:
        yield
    except OSError as error:
        logger.warning("%s: not deleted, the next save tries again: %s", path, error)


def require_new_directory(path: Path) -> None:
    """Refuse a directory that exists or that cannot be created. Creates its parents.

    Raises:
        UserError: the message names the directory and the reason.
    """
    if path.exists() or path.is_symlink():
        raise UserError(f"{path} exists; give a directory that does not")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}."):
            pass  # `path` itself may be another rank's
    except OSError as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "a part of its path is a file" if is_file else error.strerror
        raise UserError(
            f"{path}: cannot be created: {reason}; give a directory where you may write"
        ) from error


@contextmanager
def naming_disk_errors(directory: Path, setting: str = "run.directory") -> Iterator[None]:
    """Turn errors of a full, read-only or forbidden disk into a UserError that names `setting`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            remedy = (
                f"{describe_space(directory)}. What was finished before is intact: "
                f"make room, or change {setting}, and start again"
            )
        elif error.errno in _NOT_WRITABLE:
            remedy = f"set {setting} to a directory that this user may write"
        else:
            raise
        raise UserError(f"{directory}: cannot be written: {error}; {remedy}") from error


def describe_space(path: Path, needed_bytes: int = 0) -> str:
    """The free space at `path`, the space needed there and the space missing, for an error."""
    while not path.exists():
        path = path.parent
    free_bytes = shutil.disk_usage(path).free
    if not needed_bytes:
        return f"free {free_bytes / 2**20:.1f} MiB"
    missing_bytes = max(0, needed_bytes - free_bytes)
    needed, free, missing = (
        f"{n / 2**20:.1f} MiB" for n in (needed_bytes, free_bytes, missing_bytes)
    )
    return f"needed {needed}, free {free}, missing {missing}"


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory next to `path`; rename it to `path` when the block ends well.

    An older directory is replaced. One process at a time may write a `path`.
    """
    new = path.with_name(f".{path.name}.new")
    restore_directory(path)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        replace_directory(path, new)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def replace_directory(path: Path, new: Path) -> None:
    """Rename `new` to `path`, then delete the older `path`.

    That takes two renames. A process killed between them leaves the older directory as `.NAME.old`,
    and `restore_directory` renames it back. After an error `path` is as it was. What cannot be
    deleted is left to the next `restore_directory`.
    """
    old = _aside(path)
    if path.exists():
        path.rename(old)
    try:
        new.rename(path)
    except OSError:
        restore_directory(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def restore_directory(path: Path) -> None:
    """Rename an older `path` back, if nothing has replaced it; else delete what is left of it."""
    old = _aside(path)
    if old.exists() and not path.exists():
        old.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")
