"""Unpack the bundle that holds this file, and run the suite from it.

    python3 start.py [arguments of the suite, such as --parts kernels loss]

Needs Python's standard library only; `make gpu-bundle` copies it into the bundle. The bundle's
packages come before the machine's. Results go to runs/gpu of the current folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

BUNDLE = Path(__file__).resolve().parent


def main() -> int:
    contents = json.loads((BUNDLE / "contents.json").read_text())
    found = f"{sys.version_info.major}.{sys.version_info.minor}"
    if found != contents["python"]:
        print(
            f"this bundle holds compiled packages for Python {contents['python']}, and this is "
            f"Python {found}: start it with python{contents['python']}",
            file=sys.stderr,
        )
        return 2
    home = unpacked_bundle(contents["commit"])
    path = [str(home / "project"), str(home / "site"), os.environ.get("PYTHONPATH")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    # -P: a checkout in the current folder must not be imported in place of the bundle's project
    command = [sys.executable, "-P", "-m", "benchmarks.gpu", *sys.argv[1:]]
    return subprocess.run(command, env=environment, check=False).returncode


def unpacked_bundle(commit: str) -> Path:
    """The folder with `project` and `site`, unpacked by the first call."""
    beside = BUNDLE if os.access(BUNDLE, os.W_OK) else Path(tempfile.gettempdir())
    home = beside / f"unpacked-{commit[:12]}"
    if (home / "complete").is_file():
        return home
    for file in sorted(BUNDLE.glob("*.tar*")):
        target = home / ("project" if file.name.startswith("project.") else "site")
        with tarfile.open(file) as archive:
            archive.extractall(target, filter="data")
    (home / "complete").touch()
    return home


if __name__ == "__main__":
    sys.exit(main())
