"""Where `convert` reads, and what it refuses before a model is read."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from stable_opd_mcore.commands.options import require_path
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import require_new_directory
from stable_opd_mcore.host.hub import HUB_ID, MODEL_FILES, download, is_hub_id


def model_directory(
    source: str,
    revision: str | None,
    target: Path | None,
    push_to_hub: str | None,
    print_line: Callable[[str], object],
) -> Path:
    """The directory of `convert`'s source, downloaded if it is a hub id. Everything that can be
    refused without reading a model is refused first.

    Raises:
        UserError: no such path, a revision of a path, a target that exists, nothing to do, or an
            upload without an OWNER/NAME or a token.
    """
    if not is_hub_id(source):
        require_path(
            Path(source), "a model's or a checkpoint's directory, or a hub id (owner/name)"
        )
        if revision is not None:
            raise UserError(
                f"--revision {revision}: {source} is a path, and only a hub id has revisions; "
                "leave it out"
            )
    if push_to_hub is not None:
        _require_upload(push_to_hub)
    if target is not None:
        require_new_directory(target)
    elif push_to_hub is None:
        raise UserError("no TARGET: name the directory to write, or use --push-to-hub OWNER/NAME")
    if not is_hub_id(source):
        return Path(source)
    directory, commit = download(source, "model", MODEL_FILES, revision)
    print_line(f"downloaded commit {commit}")
    return directory


def _require_upload(name: str) -> None:
    if not re.fullmatch(HUB_ID, name):
        raise UserError(f"--push-to-hub {name}: not OWNER/NAME, the form of a repository's name")
    if not os.environ.get("HF_TOKEN"):
        raise UserError(
            f"--push-to-hub {name}: the variable HF_TOKEN is not set; give it a token with write "
            "access"
        )
