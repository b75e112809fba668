"""Upload of a model directory to the Hugging Face hub, in one commit.

Only `convert --push-to-hub` uploads. The token is that of the variable HF_TOKEN; a login that is
stored on this machine is not used. A new repository is private. Not here: the card
(commands/convert/model_card.py).
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import require_new_directory
from stable_opd_mcore.host.hub import HUB_ID, MODEL_FILES, download, is_hub_id

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_UPLOADED = (*MODEL_FILES, *ADAPTER_FILES)


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
        if not Path(source).exists():
            raise UserError(
                f"{Path(source)}: no such file or directory; give a model's or a checkpoint's "
                "directory, or a hub id (owner/name)"
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


def upload(directory: Path, name: str, card: str, message: str) -> str:
    """Upload the model's files and its card to the repository; the address of the commit.

    Raises:
        UserError: the hub refuses the token, the repository or a file, or no network.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    files = sorted({path for glob in _UPLOADED for path in directory.glob(glob)})
    operations = [CommitOperationAdd(path.name, path) for path in files]
    operations.append(CommitOperationAdd("README.md", card.encode()))
    api = HfApi(token=os.environ["HF_TOKEN"])
    try:
        api.create_repo(name, private=True, exist_ok=True)
        commit = api.create_commit(name, operations, commit_message=message)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UserError(
            f"{name}: the upload failed ({reason}). Check HF_TOKEN's rights and the network; "
            f"{directory} is complete, and can be uploaded again without TARGET"
        ) from error
    return commit.commit_url
