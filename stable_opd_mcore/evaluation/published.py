"""Published results on the six benchmarks, to print beside ours. Numbers are per cent.

Not here: how the recipes of these rows are run (configs/README.md).
"""

from dataclasses import dataclass

# In the papers' order of columns; a name of BENCHMARKS -> its heading.
COLUMNS = {
    "math500": "MATH500",
    "minerva": "Minerva",
    "olympiadbench": "Olympiad",
    "amc": "AMC",
    "aime24": "AIME24",
    "aime25": "AIME25",
}


@dataclass(frozen=True)
class PublishedRow:
    """One row of a paper's table."""

    student: str
    method: str
    source: str
    average: float
    scores: tuple[float, ...] | None = None  # in the order of COLUMNS; None: only the average


_SO = "arXiv 2604.08527"
_LUFFY = "arXiv 2504.14945"
_7B, _SMALL = "Qwen2.5-Math-7B", "Qwen2.5-Math-1.5B"

PUBLISHED = (
    PublishedRow(_7B, "base", _LUFFY, 19.1, (43.6, 7.4, 15.6, 31.3, 11.5, 4.9)),
    PublishedRow(_7B, "Instruct", _LUFFY, 37.6, (80.4, 32.7, 41.0, 48.5, 12.5, 10.2)),
    PublishedRow(_7B, "SimpleRL-Zero", _LUFFY, 37.4, (76.0, 25.0, 34.7, 54.9, 27.0, 6.8)),
    PublishedRow(_7B, "Open-Reasoner-Zero", _LUFFY, 41.0, (82.4, 33.1, 47.1, 52.1, 16.5, 15.0)),
    PublishedRow(_7B, "PRIME-Zero", _LUFFY, 40.7, (81.4, 39.0, 40.3, 54.0, 17.0, 12.8)),
    PublishedRow(_7B, "Oat-Zero", _LUFFY, 43.7, (78.0, 34.6, 43.4, 61.2, 33.4, 11.9)),
    PublishedRow(_7B, "SFT", _LUFFY, 44.1, (82.6, 40.8, 43.7, 52.8, 22.2, 22.3)),
    PublishedRow(_7B, "GRPO", _SO, 45.5),
    PublishedRow(_7B, "OPD, OpenThinker3-7B", _SO, 43.8),
    PublishedRow(
        _7B, "Stable-OPD, OpenThinker3-7B", _SO, 47.6, (84.6, 43.4, 49.3, 58.1, 24.7, 25.2)
    ),
    PublishedRow(_SMALL, "base", _LUFFY, 16.0, (28.0, 9.6, 21.2, 26.4, 7.2, 3.6)),
    PublishedRow(_SMALL, "Instruct", _LUFFY, 35.7, (77.4, 28.7, 39.1, 48.1, 12.1, 8.9)),
    PublishedRow(_SMALL, "SFT", _SO, 31.9),
    PublishedRow(_SMALL, "GRPO", _SO, 30.1),
    PublishedRow(_SMALL, "OPD, OpenThinker3-7B", _SO, 28.9, (56.7, 23.4, 31.0, 35.9, 11.1, 15.0)),
    PublishedRow(
        _SMALL, "Stable-OPD, OpenThinker3-7B", _SO, 36.1, (73.9, 32.6, 37.4, 43.0, 13.8, 16.0)
    ),
    PublishedRow(_SMALL, "OPD, R1-Distill-7B", _SO, 28.0),
    PublishedRow(_SMALL, "OPD + KL, R1-Distill-7B", _SO, 29.7),
    PublishedRow(
        _SMALL, "Stable-OPD, R1-Distill-7B", _SO, 35.7, (72.0, 32.7, 34.9, 43.0, 14.6, 17.2)
    ),
)
