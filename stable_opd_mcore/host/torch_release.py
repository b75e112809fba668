"""A torch that is too old for this code is refused before it is imported.

pip and uv install one that fits. A container's, or one that another package has pinned since, may
be older, and then fails somewhere in the middle of a run.
"""

import sys
from importlib.metadata import PackageNotFoundError, version

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.releases import release_numbers

OLDEST_TORCH = (2, 11)  # pyproject.toml's


def refuse_old_torch() -> None:
    """Read the release of torch from its metadata, which takes milliseconds.

    Raises:
        UserError: torch is missing or too old.
    """
    needed = ".".join(map(str, OLDEST_TORCH))
    try:
        found = version("torch")
    except PackageNotFoundError:
        found = "none"
    if release_numbers(found, 2) < OLDEST_TORCH:
        raise UserError(
            f"torch {found} in {sys.prefix}, but {needed} or later is needed: "
            f"{sys.executable} -m pip install 'torch>={needed}'"
        )
