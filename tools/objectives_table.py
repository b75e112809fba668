"""The table of objectives in docs/objectives.md, written from their entries.

python -m tools.objectives_table    # writes it into the page
"""

from __future__ import annotations

import re
from pathlib import Path

from stable_opd_mcore.losses.objectives import OBJECTIVES

PAGE = Path("docs/objectives.md")
_TEACHER = {
    "none": "-",
    "sampled": "log-probability of the sampled token",
    "topk": "top-K log-probabilities",
    "hidden": "hidden states",
}


def objectives_table() -> str:
    """A row for each entry of OBJECTIVES, Markdown."""
    rows = ["| `objective.name` | loss of a token | teacher gives | options | source |"]
    rows.append("|---|---|---|---|---|")
    for name, spec in OBJECTIVES.items():
        options = ", ".join(f"`{key}`" for key in spec.settings) or "-"
        cells = (f"`{name}`", spec.summary, _TEACHER[spec.teacher], options, spec.source or "-")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    old = re.compile(r"^\| `objective\.name` .*\n(\|.*\n)*", re.MULTILINE)
    PAGE.write_text(old.sub(lambda _: objectives_table(), PAGE.read_text(), count=1))
