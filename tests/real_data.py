"""The directory of real data; tests that need it are skipped without it."""

import os
from pathlib import Path

import pytest

_DEFAULT = Path(__file__).parents[2] / "shared" / "data"


def real_data(relative: str) -> Path:
    """A file or folder of STABLE_OPD_TEST_DATA (../shared/data next to the repository); or skip."""
    path = Path(os.environ.get("STABLE_OPD_TEST_DATA", _DEFAULT)) / relative
    if not path.exists():
        pytest.skip(f"no {path}; set STABLE_OPD_TEST_DATA")
    return path
