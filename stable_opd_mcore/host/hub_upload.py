"""Upload of a model directory to the Hugging Face hub, in one commit.

Only `convert --push-to-hub` uploads. The token is that of the variable HF_TOKEN; a login that is
stored on this machine is not used. A new repository is private. Not here: the card
(commands/convert/model_card.py), and what is refused before it (commands/convert/source.py).
"""

import os
from collections.abc import Mapping
from pathlib import Path

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.hub import MODEL_FILES, MORE_TEMPLATES

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors")
_UPLOADED = (
    *MODEL_FILES,
    f"{MORE_TEMPLATES}/*",
    "tokenization*.py",  # what auto_map names
    "trained.json",
    *_ADAPTER_FILES,
    *(f"causal_lm/{name}" for name in _ADAPTER_FILES),
)


def upload(directory: Path, name: str, written: Mapping[str, str], message: str) -> str:
    """Upload the model's files to the repository; the address of the commit.

    written: files that the directory lacks, or has with another text.

    Raises:
        UserError: the hub refuses the token, the repository or a file, or no network.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    files = sorted({path for glob in _UPLOADED for path in directory.glob(glob)})
    sent = {path.relative_to(directory).as_posix(): path for path in files}
    sent |= {file: text.encode() for file, text in written.items()}
    operations = [CommitOperationAdd(file, content) for file, content in sent.items()]
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
