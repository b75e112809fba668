"""The environment of `stable-opd demo --agents`: a lift in a ring of five floors.

The prompt "_14" has the floor and the goal. The student says how far the goal is, "4-1=3;[3]", a
fact of the arithmetic task. The lift moves at most two floors at once, one time in five one more,
and answers with its new floor, "_3": the goal has to be remembered. "[0]" opens the doors and ends
the episode. A turn without a distance at its end moves nothing.
"""

import random
import re
from collections.abc import Generator, Mapping
from typing import Any

FLOORS, FASTEST, SLIP = 5, 2, 0.2
DISTANCE = re.compile(r"\[([0-4])\]$")


def episode(row: Mapping[str, Any], seed: float) -> Generator[str | None, str, float]:
    rng = random.Random(seed)
    floor = row["floor"]
    said = yield None
    while True:
        slip = rng.random() < SLIP  # drawn in every turn, so that each has its own
        if found := DISTANCE.search(said):
            distance = int(found[1])
            if distance == 0:
                return float(floor == row["goal"])
            floor = (floor + min(distance, FASTEST) + slip) % FLOORS
        said = yield f"_{floor}"
