"""The environment of `stable-opd demo --agents`: a lift in a ring of five floors.

The prompt "_14" says the floor, 1, and the goal, 4. The student says how far away the goal is,
"4-1=3;[3]", a fact of the arithmetic task. The lift moves up by this distance, but by two floors at
most, and in one turn of five by one more. It answers only with its new floor, "_3", so the student
has to remember the goal. "[0]" opens the doors and ends the episode. After a turn without a
distance at its end the lift stays where it is.
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
        slip = rng.random() < SLIP  # one number a turn, used or not: turn n has the n-th
        if found := DISTANCE.search(said):
            distance = int(found[1])
            if distance == 0:
                return float(floor == row["goal"])
            floor = (floor + min(distance, FASTEST) + slip) % FLOORS
        said = yield f"_{floor}"
