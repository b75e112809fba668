"""Print a part of cluster.toml for pip or for a shell. Standard library only.

python3 requirements/cluster_stack.py constraints > constraints.txt    # pip install -c
python3 requirements/cluster_stack.py build-flags > build_flags.sh     # `source` it
"""

import sys
import tomllib
from pathlib import Path

STACK = tomllib.loads(Path(__file__).with_name("cluster.toml").read_text())
PARTS = {
    "constraints": [f"{name}=={version}" for name, version in STACK["packages"].items()],
    "build-flags": [f"export {name}={value}" for name, value in STACK["build"].items()],
}

if __name__ == "__main__":
    if sys.argv[1:2] not in [[part] for part in PARTS]:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(PARTS)}")
    print("\n".join(PARTS[sys.argv[1]]))
