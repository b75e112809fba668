"""Write tensors as safetensors, readable by whoever may read the folder.

safetensors makes its files 0600, and other users' servers and evaluations read weights, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """The file gets the read and write permissions of its folder, which the umask has decided."""
    from safetensors.torch import save_file

    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)
