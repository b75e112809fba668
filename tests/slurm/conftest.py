"""The scripts in slurm/ import one another by name, as a script finds the files of its folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "slurm"))
