"""The results of evaluations as plain values, text, Markdown and LaTeX.

Markdown and LaTeX have the papers' layout: one row per model, one column per benchmark, with the
published rows below ours. Not here: the published numbers (published.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stable_opd_mcore.evaluation.estimates import bootstrap_interval
from stable_opd_mcore.evaluation.published import COLUMNS, PUBLISHED
from stable_opd_mcore.evaluation.results import BenchmarkResult

Health = Mapping[str, Mapping[str, float | None]]  # benchmark -> name -> value


def plain_values(result: BenchmarkResult) -> dict[str, Any]:
    """The numbers of one benchmark: rates as shares, intervals as [low, high]."""
    low, high = result.accuracy_interval
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k < result.num_samples] + [result.num_samples]
    return {
        "accuracy": result.accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "num_problems": len(result.num_correct),
        "num_samples": result.num_samples,
        "num_over_long": result.num_over_long,
        "pass_at": {str(k): result.pass_at(k) for k in ks},
        "pass_at_interval": {str(k): list(result.pass_interval(k)) for k in ks},
        "num_correct": list(result.num_correct),
    }


def average(results: Mapping[str, BenchmarkResult]) -> tuple[float, tuple[float, float]]:
    """The unweighted mean accuracy of several benchmarks, and its 95 % bootstrap interval."""
    shares = [result.shares for result in results.values()]
    mean = sum(result.accuracy for result in results.values()) / len(results)
    return mean, bootstrap_interval(shares)


def results_table(results: Mapping[str, BenchmarkResult], health: Health) -> str:
    """One line per benchmark. The last of several is their average, each with the same weight."""
    width = max(len("average"), *map(len, results))
    head = "problems    k  accuracy  95 % interval    pass@k  truncated  repetitive  tokens"
    lines = [f"{'':{width}}  {head}"]
    for name, result in results.items():
        low, high = result.accuracy_interval
        rates = [health[name].get(key) for key in _HEALTH]
        lines.append(
            f"{name:{width}}  {len(result.num_correct):8}  {result.num_samples:3}"
            f"  {result.accuracy:8.3f}  {low:.3f} to {high:.3f}"
            f"  {result.pass_at(result.num_samples):6.3f}"
            f"  {_number(rates[0], 9, 3)}  {_number(rates[1], 10, 3)}  {_number(rates[2], 6, 0)}"
        )
    if len(results) > 1:
        mean, (low, high) = average(results)
        lines.append(f"{'average':{width}}  {'':8}  {'':3}  {mean:8.3f}  {low:.3f} to {high:.3f}")
    return "\n".join(lines)


_HEALTH = ("truncation_rate", "repetition_rate", "response_length_mean")


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"


def markdown(
    title: str, about: list[str], results: Mapping[str, BenchmarkResult], health: Health
) -> str:
    """A page: what was evaluated, the papers' table, and the numbers of each benchmark.

    Args:
        title: the model's name.
        about: lines that say which weights and which settings.
    """
    ours = [f"**{title}**", *_cells(results), "this evaluation"]
    published = [
        [f"{row.student}, {row.method}", *_published_cells(row.scores, row.average), row.source]
        for row in PUBLISHED
    ]
    heading = ["", *COLUMNS.values(), "Avg", "source"]
    lines = [f"# {title}", "", *[f"- {line}" for line in about], ""]
    lines += _markdown_table(heading, [ours, *published])
    lines += [
        "",
        "Per cent. Published: avg@32 on AIME and AMC, pass@1 on the others. Brackets hold the",
        "95 % bootstrap interval over problems. Over-long problems count as wrong.",
        "",
    ]
    rows = []
    for name, result in results.items():
        pass_at = result.pass_at(result.num_samples)
        rates = [health[name].get(key) for key in _HEALTH]
        rows.append(
            [
                name,
                str(len(result.num_correct)),
                str(result.num_over_long),
                str(result.num_samples),
                _with_interval(result.accuracy, result.accuracy_interval),
                _with_interval(pass_at, result.pass_interval(result.num_samples)),
                *(("-" if rate is None else f"{100 * rate:.1f}") for rate in rates[:2]),
                "-" if rates[2] is None else f"{rates[2]:.0f}",
            ]
        )
    detail = ["benchmark", "problems", "over-long", "k", "avg@k", "pass@k", "truncated"]
    lines += _markdown_table([*detail, "repetitive", "tokens"], rows)
    return "\n".join(lines) + "\n"


def latex(title: str, results: Mapping[str, BenchmarkResult]) -> str:
    """The papers' table for a document with the package booktabs."""
    heading = " & ".join(["Model", *COLUMNS.values(), "Avg."])
    ours = " & ".join([_escape(title), *_cells(results, interval=False)])
    published = [
        " & ".join(
            [_escape(f"{row.student}, {row.method}"), *_published_cells(row.scores, row.average)]
        )
        for row in PUBLISHED
    ]
    body = [heading + r" \\", r"\midrule", ours + r" \\", r"\midrule"]
    body += [row + r" \\" for row in published]
    columns = "l" + "r" * (len(COLUMNS) + 1)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *body, r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}"]) + "\n"


def _cells(results: Mapping[str, BenchmarkResult], interval: bool = True) -> list[str]:
    """Our row: one cell per column, the average only where all columns were evaluated."""
    cells = []
    for name in COLUMNS:
        result = results.get(name)
        if result is None:
            cells.append("--")
        elif interval:
            cells.append(_with_interval(result.accuracy, result.accuracy_interval))
        else:
            cells.append(f"{100 * result.accuracy:.1f}")
    if not results.keys() >= COLUMNS.keys():
        return [*cells, "--"]
    mean, around = average({name: results[name] for name in COLUMNS})
    return [*cells, _with_interval(mean, around) if interval else f"{100 * mean:.1f}"]


def _published_cells(scores: tuple[float, ...] | None, average: float) -> list[str]:
    return [*(f"{s:.1f}" for s in scores or ()), *["--"] * (0 if scores else 6), f"{average:.1f}"]


def _with_interval(value: float, around: tuple[float, float]) -> str:
    return f"{100 * value:.1f} [{100 * around[0]:.1f}, {100 * around[1]:.1f}]"


def _markdown_table(heading: list[str], rows: list[list[str]]) -> list[str]:
    lines = [heading, ["---"] * len(heading), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def _escape(text: str) -> str:
    return text.translate({ord(character): f"\\{character}" for character in "&%$#_{}"})
