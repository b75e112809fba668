"""The results of evaluations as Markdown.

The papers' table has one row per model and one column per benchmark, with the published rows below
ours; published.yaml holds them.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from stable_opd_mcore.evaluation.results import BenchmarkResult, average

_NOTE = """
Per cent. Published: avg@32 on AIME and AMC, pass@1 on the others. Brackets hold the
95 % bootstrap interval over problems. Over-long problems count as wrong.
"""

Results = Mapping[str, BenchmarkResult]
COLUMNS = {  # a name of BENCHMARKS -> its heading, in the papers' order
    "math500": "MATH500",
    "minerva": "Minerva",
    "olympiadbench": "Olympiad",
    "amc": "AMC",
    "aime24": "AIME24",
    "aime25": "AIME25",
}


@cache
def published() -> list[dict[str, Any]]:
    """Rows of the papers' tables; their scores are in the order of COLUMNS."""
    return yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))


def results_table(results: Results) -> str:
    """One line per benchmark, in per cent. The last of several is their unweighted average."""
    rows = [_numbers(name, result) for name, result in results.items()]
    if len(results) > 1:
        rows.append({"benchmark": "average", "avg@k": _with_interval(*average(results))})
    heading = list(rows[0])
    return markdown_table([heading, *([row.get(key, "") for key in heading] for row in rows)])


def _numbers(name: str, result: BenchmarkResult) -> dict[str, str]:
    def rate(key: str, scale: float = 100, digits: int = 1) -> str:
        value = result.rates.get(key)
        return "-" if value is None else f"{scale * value:.{digits}f}"

    k = result.num_samples
    return {
        "benchmark": name,
        "problems": str(len(result.num_correct)),
        "over-long": str(result.num_over_long),
        "k": str(k),
        "avg@k": _with_interval(result.accuracy, result.accuracy_interval),
        "pass@k": _with_interval(*result.pass_at(k)) if result.has_verdicts else "-",
        "truncated": rate("truncation_rate"),
        "repetitive": rate("repetition_rate"),
        "tokens": rate("response_length_mean", scale=1, digits=0),
    }


def markdown(title: str, about: Sequence[str], results: Results) -> str:
    """A page: the model's name, lines about it, the papers' table, and each benchmark's numbers."""
    heading = ["", *COLUMNS.values(), "Avg", "source"]
    ours = [f"**{title}**", *_cells(results), "this evaluation"]
    lines = [f"# {title}", "", *[f"- {line}" for line in about], ""]
    lines += [markdown_table([heading, ours, *_published()]), _NOTE, results_table(results)]
    return "\n".join(lines) + "\n"


def _cells(results: Results) -> list[str]:
    """Our row: one cell per column, the average only where all columns were evaluated."""
    shown: list[tuple[float, tuple[float, float]] | None] = [
        (results[name].accuracy, results[name].accuracy_interval) if name in results else None
        for name in COLUMNS
    ]
    whole = results.keys() >= COLUMNS.keys()
    shown.append(average({name: results[name] for name in COLUMNS}) if whole else None)
    return ["--" if one is None else _with_interval(*one) for one in shown]


def _published() -> list[list[str]]:
    """The published rows: name, a cell per column, average, source."""
    return [
        [
            f"{row['student']}, {row['method']}",
            *(f"{s:.1f}" if s else "--" for s in row.get("scores", [None] * len(COLUMNS))),
            f"{row['average']:.1f}",
            row["source"],
        ]
        for row in published()
    ]


def _with_interval(value: float, around: tuple[float, float]) -> str:
    return f"{100 * value:.1f} [{100 * around[0]:.1f}, {100 * around[1]:.1f}]"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """The rows below the first one, its heading, in columns of one width."""
    cells = [[cell.replace("|", "/") for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = (" | ".join(map(str.ljust, row, widths)) for row in cells)
    return "\n".join(f"| {line} |" for line in lines)
