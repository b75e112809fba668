"""Describes a prepared data set: the manifest for programs, the datasheet for people.

Both depend on inputs and settings alone: no date, no number of processes, no directory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_PROBLEM_BINS = (32, 64, 128, 256, 512, 1024)
_SOLUTION_BINS = (256, 512, 1024, 2048, 4096, 6144, 8192, 16384)
_BAR = 40  # characters


def length_statistics(lengths: Sequence[int], bins: Sequence[int]) -> dict[str, Any]:
    """Mean, quantiles and histogram of lengths in tokens; a bin ends with its number, inclusive."""
    names = [*map(str, bins), "more"]
    counts = np.bincount(np.searchsorted(bins, lengths), minlength=len(names)).tolist()
    statistics = dict.fromkeys(("mean", "p50", "p95", "max"))
    if lengths:
        p50, p95, most = np.percentile(lengths, (50, 95, 100), method="lower").tolist()
        mean = round(sum(lengths) / len(lengths), 1)
        statistics = {"mean": mean, "p50": p50, "p95": p95, "max": most}
    return statistics | {"histogram": dict(zip(names, counts, strict=True))}


def lengths_entry(problem_tokens: Sequence[int], solution_tokens: Sequence[int]) -> dict[str, Any]:
    """What the manifest says of the rows of one output; 0: the row has no solution."""
    with_solution = [length for length in solution_tokens if length]
    return {
        "rows": len(problem_tokens),
        "problem_tokens": length_statistics(problem_tokens, _PROBLEM_BINS),
        "solution_tokens": length_statistics(with_solution, _SOLUTION_BINS),
    }


def datasheet(manifest: Mapping[str, Any]) -> str:
    """The manifest as a page in Markdown."""
    counts = manifest["counts"]
    rows = {
        "read": counts["read"],
        **{f"dropped: {reason}": number for reason, number in counts["dropped"].items()},
        "kept": counts["kept"],
        "kept with the problem of an earlier row": counts["repeated_problems"],
    }
    lines = [
        f"# {manifest['name']}",
        "",
        f"Made by `stable-opd prepare --recipe {manifest['settings']['recipe']}` from "
        f"`{manifest['origin']}`. `{manifest['name']}.manifest.json` holds the same facts, with "
        "hashes, versions and settings.",
        "",
        "| rows |  |",
        "| --- | --- |",
        *(f"| {what} | {number} |" for what, number in rows.items()),
        "",
        f"`{manifest['name']}_dropped.jsonl` names every dropped row.",
    ]
    for name, entry in manifest["outputs"].items():
        if "problem_tokens" not in entry:
            continue
        lines += ["", f"## {name}", "", f"{entry['rows']:,} rows. Lengths in the student's tokens:"]
        for what in ("problem", "solution"):
            statistics = entry[f"{what}_tokens"]
            shown = ", ".join(f"{k} {statistics[k]}" for k in ("mean", "p50", "p95", "max"))
            lines += ["", f"{what}: {shown}", "", "```", *_bars(statistics["histogram"]), "```"]
    return "\n".join(lines) + "\n"


def _bars(histogram: Mapping[str, int]) -> list[str]:
    most = max(1, *histogram.values())
    return [
        f"{('<= ' + end) if end != 'more' else 'more':>9} {count:>8} "
        f"{'#' * round(_BAR * count / most)}".rstrip()
        for end, count in histogram.items()
    ]
