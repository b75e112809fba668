"""Downloads of models and data sets from the Hugging Face hub, of one commit.

Only data are downloaded: weights in safetensors, JSON, text, parquet. No code from the hub is
downloaded or run.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from stable_opd_mcore.errors import UserError

TOKENIZER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
IMAGE_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
MORE_TEMPLATES = "additional_chat_templates"  # a folder next to them
MODEL_FILES = (*TOKENIZER_FILES, *IMAGE_FILES, "model.safetensors.index.json", "*.safetensors")
COMMIT = "[0-9a-f]{40}"  # the pattern of a commit
HUB_ID = r"[\w.-]+/[\w.-]+"  # the pattern of owner/name


def is_hub_id(path: str) -> bool:
    """Whether a text has the form owner/name and is not a path on this machine."""
    return bool(re.fullmatch(HUB_ID, path)) and path[0] not in "./~" and not Path(path).exists()


def id_in_cache(path: str) -> tuple[str, str] | None:
    """The hub id and commit of a folder of the hub's cache; None for another folder."""
    found = re.search(rf"/models--([\w.-]+?)--([\w.-]+)/snapshots/({COMMIT})/?\Z", path)
    return (f"{found[1]}/{found[2]}", found[3]) if found else None


def download(
    hub_id: str, kind: Literal["model", "dataset"], files: Sequence[str], revision: str | None
) -> tuple[Path, str]:
    """Download the files of one commit into the hub's cache; the folder and the commit.

    `files` are globs. A revision is a commit, branch or tag; None is the newest commit.

    Raises:
        UserError: no such repository, revision or file, or no network.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            hub_id,
            repo_type=kind,
            revision=revision,
            allow_patterns=list(files),
            # A model's files are at the top; below are copies in other forms.
            ignore_patterns=["*/*"] if kind == "model" else None,
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UserError(
            f"{hub_id}: cannot be downloaded at revision {revision or 'main'} ({reason}). Without "
            "internet, download it elsewhere and name the folder instead"
        ) from error
    path = Path(folder)
    if not any(next(path.glob(glob), None) for glob in files):
        raise UserError(
            f"{hub_id}: no file that matches {', '.join(files)} at {path.name}; check the id"
        )
    return path, path.name
