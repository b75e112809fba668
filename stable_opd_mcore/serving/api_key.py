"""The servers' API key: the content of a file that only its owner can read.

It is neither a setting (a run stores its settings with its metrics) nor an argument (every user of
a machine can list the arguments of its processes).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from stable_opd_mcore.errors import UserError


def read_api_key(path: str | Path | None) -> str | None:
    """The key in the file `path`; None without a path.

    Raises:
        UserError: the file has no key, or other users may read it. The message does not show the
            file's text.
    """
    if path is None:
        return None
    remedy = "give the file that `stable-opd serve` was given, or write the servers' key into it"
    try:
        with Path(path).open(encoding="utf-8") as file:
            mode, key = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read().strip()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text"
        raise UserError(f"api_key_file={path}: {reason}; {remedy}") from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        raise UserError(
            f"api_key_file={path}: mode {mode:04o} lets other users read it: chmod 600 {path}; if "
            "others may have read it, restart the servers with a new key"
        )
    if not key:
        raise UserError(f"api_key_file={path}: the file is empty; {remedy}")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise UserError(f"api_key_file={path}: not one word of ASCII characters; {remedy}")
    return key


def make_api_key(path: Path) -> None:
    """Write a random key with mode 0600, unless `path` exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)  # mode 0600
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(secrets.token_urlsafe(24) + "\n")
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)  # atomic, and the first of several writers wins
    os.unlink(temporary)
